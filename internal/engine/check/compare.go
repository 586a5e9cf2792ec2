package check

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
	"pando/internal/linux/loopdev"

	"golang.org/x/sys/unix"
)

// poolView is everything that pool and catalogue say. The pool is read first.
type poolView struct {
	objects      map[driver.ObjectID]driver.Object
	rows         map[driver.ObjectID]catalog.Row
	wants        map[driver.ObjectID]driver.Identity // what identities should say
	refs         map[driver.ObjectID]string
	goldens      map[string]catalog.Golden
	mountRecords map[driver.ObjectID]catalog.MountRecord
	unreclaimed  []catalog.Tombstone
	tombstones   map[driver.ObjectID]bool
	marks        []catalog.Mark
	dead         []catalog.Mark           // of dead processes
	busy         map[driver.ObjectID]bool // marked, even by a dead process, unless only by a run that has its clone
	read         map[driver.ObjectID]bool // read by operations, or the lower layer of what they read or make
}

// readView reads the pool, then the catalogue: an object made in between has its mark or row when the catalogue is
// read.
func (c *fsck) readView(ctx context.Context) (*poolView, error) {
	v := &poolView{
		objects: map[driver.ObjectID]driver.Object{}, rows: map[driver.ObjectID]catalog.Row{},
		wants: map[driver.ObjectID]driver.Identity{},
		refs:  map[driver.ObjectID]string{}, goldens: map[string]catalog.Golden{}, busy: map[driver.ObjectID]bool{},
		read: map[driver.ObjectID]bool{},
	}

	for o, err := range c.Driver.List(ctx) {
		if err != nil {
			return nil, err
		}
		v.objects[o.ID] = o
	}

	if err := c.Catalog.View(ctx, func(tx *catalog.Tx) (err error) {
		if v.marks, err = tx.Marks(); err != nil {
			return err
		}

		if v.tombstones, err = tx.TombstoneIDs(); err != nil {
			return err
		}

		if v.unreclaimed, err = tx.Unreclaimed(0); err != nil {
			return err
		}

		if v.mountRecords, err = tx.MountRecords(); err != nil {
			return err
		}

		goldens, err := tx.Goldens()
		if err != nil {
			return err
		}

		for _, g := range goldens {
			v.goldens[g.Name] = g
		}

		return tx.Rows("", func(r catalog.Row) error { v.rows[r.ID] = r; return nil })
	}); err != nil {
		return nil, err
	}

	v.deriveWants()
	return v, c.findBusy(v)
}

// deriveWants derives from the rows the references of objects, and what their identities should say.
func (v *poolView) deriveWants() {
	names := map[driver.ObjectID]string{}
	for _, r := range v.rows {
		if r.Kind == driver.Volume {
			names[r.Lineage()] = r.Name
		}
	}

	for id, r := range v.rows {
		want := r.Identity
		switch r.Kind {
		case driver.Generation:
			v.refs[id] = ref.Generation(r.Golden, r.Generation)
			g := v.goldens[r.Golden]
			if g.Current == r.Generation {
				want.GoldenProperties = g.GoldenProperties
			}
			if !g.CreatedAt.IsZero() && !g.CreatedAt.Equal(r.CreatedAt) {
				want.Since = g.CreatedAt
			}
		case driver.Snapshot:
			v.refs[id] = cmp.Or(names[r.Volume], string(r.Volume)) + "@" + r.Name
		case driver.Layer:
			v.refs[id] = cmp.Or(r.Name, "layer "+string(id)) // a removed golden's name may be in use again
		default:
			v.refs[id] = r.Name
		}

		v.wants[id] = want
	}
}

// findBusy finds the marks of dead processes, and the objects that operations work on.
func (c *fsck) findBusy(v *poolView) error {
	living := map[string]bool{}
	for _, m := range v.marks {
		alive, known := living[m.Owner]
		if !known {
			var err error
			if alive, err = c.Catalog.IsLive(m.Owner); err != nil {
				return err
			}
			living[m.Owner] = alive
		}

		if !alive {
			v.dead = append(v.dead, m)
		}
		if alive {
			v.read[m.Reads], v.read[v.rows[m.ID].Lower], v.read[v.rows[m.Reads].Lower] = true, true, true
		}

		// A run that has made its clone lets others read it.
		_, made := v.rows[m.ID]
		if !alive || m.Op != ledger.OpRun || !made {
			v.busy[m.ID] = true
		}
	}

	return nil
}

// compareAll compares everything in the pool with the catalogue. It changes nothing.
func (c *fsck) compareAll(ctx context.Context) ([]Finding, error) {
	out, err := c.checkDirs()
	if err != nil {
		return nil, err
	}

	v, err := c.readView(ctx)
	if err != nil {
		return nil, err
	}

	// Report dead operations.
	n := &c.report.Checked
	n.Objects, n.Rows, n.Attachments = len(v.objects), len(v.rows), len(v.mountRecords)
	n.Busy = len(v.busy) - len(v.dead)

	for _, m := range v.dead {
		f := Finding{Ref: cmp.Or(m.Name, v.refs[m.ID], string(m.ID)), ID: string(m.ID)}
		f.describe(sevNote, "mark", errs.Messagef("a %s was interrupted", m.Op),
			"undo or finish it, as the next command would")
		f.fix = func(ctx context.Context) (string, error) { return c.fixMark(ctx, m) }
		out = append(out, f)
	}

	// Compare objects with rows, and rows with objects.
	for _, id := range sortedIDs(v.objects) {
		if v.busy[id] {
			continue
		}
		fs, err := c.compareObject(ctx, v, v.objects[id])
		if err != nil {
			return nil, err
		}
		out = append(out, fs...)
	}

	for _, id := range sortedIDs(v.rows) {
		if _, there := v.objects[id]; there || v.busy[id] {
			continue
		}
		if _, err := c.Driver.Attachment(ctx, id); errs.Is(err, errs.NotFound) {
			out = append(out, c.missingFinding(v, v.rows[id]))
		}
	}

	// Compare the rest of the catalogue.
	out = append(out, c.compareNames(v)...)
	out = append(out, c.compareTombstones(v)...)
	fs, err := c.compareMountRecords(ctx, v)
	if err != nil {
		return nil, err
	}

	out = append(out, fs...)

	// Report what dead processes have left in live/.
	stale, err := c.Catalog.StaleOwners(v.marks)
	if err != nil && !errs.Is(err, errs.NotFound) { // checkDirs reports a missing directory
		return nil, err
	}

	for _, s := range stale {
		f := Finding{Ref: "live/" + s}
		f.describe(sevNote, "live", "its process has died and left nothing else", "remove it")
		f.fix = func(context.Context) (string, error) { return "removed", c.Catalog.RemoveStaleOwners(v.marks) }
		out = append(out, f)
	}

	return out, nil
}

func sortedIDs[T any](m map[driver.ObjectID]T) []driver.ObjectID {
	out := make([]driver.ObjectID, 0, len(m))
	for id := range m {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

// missingFinding returns the finding for a row whose data is missing.
func (c *fsck) missingFinding(v *poolView, r catalog.Row) Finding {
	name := v.refs[r.ID]
	lost := "its data is missing"
	if r.MeasuredAt.IsZero() || r.Usage.LogicalBytes == 0 {
		lost += " from the pool"
	} else {
		lost += " from the pool: " + errs.FormatBytes(r.Usage.LogicalBytes) + " when last measured"
	}

	return Finding{
		Severity: sevError, Code: "object-missing", Ref: name, ID: string(r.ID), Message: errs.Messagef("%s", lost),
		Repair: "forget it: its data CANNOT be restored",
		fix:    func(ctx context.Context) (string, error) { return c.fixMissing(ctx, r, name) },
	}
}

// compareObject compares an object with its row.
func (c *fsck) compareObject(ctx context.Context, v *poolView, o driver.Object) ([]Finding, error) {
	row, known := v.rows[o.ID]
	if !known {
		return c.compareUnknown(v, o), nil
	}

	ins, ok := c.Driver.(driver.Inspector)
	if !ok {
		return nil, nil
	}

	cond, err := ins.Inspect(ctx, row.Identity)
	if err != nil {
		return nil, err
	}
	if !cond.Data {
		return []Finding{c.missingFinding(v, row)}, nil
	}

	var out []Finding
	add := func(severity, code string, message, repair errs.Message, fix fix) {
		f := Finding{ID: string(o.ID), Ref: cmp.Or(v.refs[o.ID], string(o.ID)), fix: fix}
		f.describe(severity, code, message, repair)
		out = append(out, f)
	}

	const rewrite = "rewrite it from the catalogue"
	restore := func(ctx context.Context) (string, error) { return c.fixIdentity(ctx, row.ID) }
	diff := v.differences(o.Identity, v.wants[o.ID])
	switch {
	case errs.Is(o.Err, errs.TooNew):
		add(sevWarning, "identity-too-new", errs.Messagef("%v", o.Err), "by hand: upgrade pando", nil)
	case o.Err != nil:
		add(sevError, "identity-unreadable", errs.Messagef("%v", o.Err), rewrite, restore)
	case !o.Whole:
		add(sevError, "identity-missing", "its data exists, but its identity is missing", rewrite, restore)
	case o.Identity.Kind == driver.Volume && row.Kind == driver.Snapshot:
		add(sevWarning, "predecessor", "a rewind made it a snapshot, but the pool still calls it a volume",
			rewrite, restore)
	case len(diff) > 0:
		add(sevWarning, "identity-differs", errs.Messagef("pool and catalogue disagree: %s", strings.Join(diff, ", ")),
			rewrite, restore)
	}

	if cond.Leftover {
		add(sevNote, "identity-leftover", "an interrupted change of its identity left a file", "remove the file", restore)
	}
	if cond.Mode != "" {
		add(sevWarning, "object-mode", errs.Messagef("%s", cond.Mode), "set it", restore)
	}
	if cond.Err != nil {
		add(sevError, "object-unreadable", errs.Messagef("%v", cond.Err), "by hand", nil)
	}
	if row.FS.IsImage() && cond.Err == nil {
		c.compareSize(row, cond.SizeBytes, add)
	}

	return out, nil
}

// compareUnknown describes an object without a row.
func (c *fsck) compareUnknown(v *poolView, o driver.Object) []Finding {
	f := Finding{ID: string(o.ID), Ref: cmp.Or(v.refs[o.ID], string(o.ID))}
	whole := o.Err == nil && o.Whole && o.Identity.Kind != driver.Scratch
	switch {
	case v.tombstones[o.ID]:
		return nil // compareTombstones
	case c.before != "" && o.Err == nil && c.Ledger.IsGarbage(o, false):
		// The mark that named it was lost with the power: see engine/sweep.go.
		f.describe(sevNote, "object-half", "it was ephemeral, or still being made, when the host went down",
			"remove it, as the next command will")
	case whole && c.Catalog.Lost() == 0 && ledger.IsUnfinished(o):
		f.Ref = cmp.Or(ledger.Describe(o.Identity), string(o.ID))
		f.describe(sevNote, "object-unfinished", c.Ledger.StrayText(o), "none needed")
	case errs.Is(o.Err, errs.TooNew):
		f.describe(sevWarning, "identity-too-new", errs.Messagef("%v", o.Err), "by hand: upgrade pando")
	case o.Err != nil:
		f.describe(sevError, "identity-unreadable", errs.Messagef("not in the catalogue, and %v", o.Err),
			"by hand: nothing records what it was")
	case !whole:
		f.describe(sevWarning, "object-half", "incomplete: half made or half destroyed by an unknown process",
			errs.Messagef("remove it, as %s would", errs.Run("gc")))
		f.fix = func(ctx context.Context) (string, error) { return c.fixHalf(ctx, o.ID) }
	default:
		f.Ref = cmp.Or(ledger.Describe(o.Identity), string(o.ID))
		f.describe(sevError, "object-unknown",
			errs.Messagef("a complete %s is in the pool but not in the catalogue", string(o.Identity.Kind)),
			"add it to the catalogue")
		f.fix = func(ctx context.Context) (string, error) { return c.fixUnknown(ctx, o.Identity) }
	}

	return []Finding{f}
}

// compareSize compares the size of an image with that in its row.
func (c *fsck) compareSize(row catalog.Row, size int64, add func(_, _ string, _, _ errs.Message, _ fix)) {
	short := shortMessage(size, row.SizeBytes)
	switch {
	case size < row.SizeBytes && row.Kind == driver.Volume:
		add(sevError, "image-short", short, "keep it as a snapshot, and continue with a checked copy of the right size; "+
			"what was cut off is LOST",
			func(ctx context.Context) (string, error) { return c.fixInside(ctx, row) })
	case size < row.SizeBytes && isBeforeFsck(row):
		add(sevNote, "image-short", short, "none: it is what it was before a repair", nil)
	case size < row.SizeBytes:
		add(sevError, "image-short", short, adviceImmutable(row), nil)
	case size > row.SizeBytes:
		add(sevWarning, "image-long",
			errs.Messagef("its image has %d bytes, the catalogue says %d", size, row.SizeBytes),
			"record the actual size",
			func(ctx context.Context) (string, error) { return c.fixSize(ctx, row, size) })
	}
}

func shortMessage(has, wants int64) errs.Message {
	return errs.Messagef("its image ends after %d of %d bytes: the rest is missing", has, wants)
}

// adviceImmutable tells the user what to do about damage in an immutable object.
func adviceImmutable(r catalog.Row) errs.Message {
	if r.Kind == driver.Generation {
		return "by hand: it never changes. Clone it, repair the clone with fsck, and publish that"
	}
	return "by hand: it never changes. Clone it, and repair the clone with fsck"
}

// isBeforeFsck reports whether a snapshot keeps the state before a repair.
func isBeforeFsck(r catalog.Row) bool {
	return r.Kind == driver.Snapshot && strings.HasPrefix(r.Name, "before-"+opFsck+"-")
}

// differences compares an identity with what it should be, in the fields that both have.
func (v *poolView) differences(got, want driver.Identity) []string {
	var out []string
	add := func(field string, same bool, is, should any) {
		if !same {
			out = append(out, fmt.Sprintf("%s is %q, not %q", field, fmt.Sprint(is), fmt.Sprint(should)))
		}
	}

	add("kind", got.Kind == want.Kind, got.Kind, want.Kind)
	add("name", got.Name == want.Name, got.Name, want.Name)
	add("golden", v.baseIsSame(got, want),
		ref.Generation(got.Golden, got.Generation), ref.Generation(want.Golden, want.Generation))
	add("vol", got.Volume == want.Volume, got.Volume, want.Volume)
	add("fs", got.FS == want.FS, got.FS, want.FS)
	add("lower", got.Lower == want.Lower, got.Lower, want.Lower)
	add("mirror", got.Mirror == want.Mirror, got.Mirror, want.Mirror)
	add("size", got.SizeBytes == want.SizeBytes, got.SizeBytes, want.SizeBytes)
	add("sector", got.Sector == want.Sector, got.Sector, want.Sector)
	add("origin", got.Origin == want.Origin, got.Origin, want.Origin)
	add("origin_id", got.OriginID == want.OriginID, got.OriginID, want.OriginID)
	add("at", got.CreatedAt.Equal(want.CreatedAt), got.CreatedAt, want.CreatedAt)
	add("owner", got.Owner == want.Owner, got.Owner, want.Owner)
	add("order", got.Order == want.Order, got.Order, want.Order)
	add("expires", got.ExpiresAt.Equal(want.ExpiresAt), got.ExpiresAt, want.ExpiresAt)
	add("eph", got.Ephemeral == want.Ephemeral, got.Ephemeral, want.Ephemeral)
	add("boot", got.BootID == want.BootID, got.BootID, want.BootID)
	add("cons", got.Consistency == want.Consistency, got.Consistency, want.Consistency)
	add("pinned", got.Pinned.Equal(want.Pinned), got.Pinned, want.Pinned)
	if g := v.goldens[want.Golden]; want.Kind == driver.Generation && g.Current == want.Generation {
		// Older ones keep the values of when they were current.
		add("keep", got.Keep == want.Keep, got.Keep, want.Keep)
		add("overlay", got.Overlay == want.Overlay, got.Overlay, want.Overlay)
		add("source", got.Source == want.Source, got.Source, want.Source)
	}
	if g := v.goldens[want.Golden]; want.Kind != driver.Generation || g.Current == want.Generation {
		add("labels", got.Labels == want.Labels, got.Labels, want.Labels)
	}

	since := got.Since.Equal(want.Since) || got.Since.Equal(want.CreatedAt)
	add("since", since, got.Since, want.Since)
	return out
}

// baseIsSame compares bases. The catalogue may have a newer base for a volume, if a generation proves it: a publish
// that was killed had not written it to the identity, which has an older one of that golden, or none.
func (v *poolView) baseIsSame(got, want driver.Identity) bool {
	if got.Golden == want.Golden && got.Generation == want.Generation {
		return true
	}
	if want.Kind == driver.Generation {
		return false
	}
	if want.Kind != driver.Volume || got.Golden != "" && got.Golden != want.Golden || got.Generation > want.Generation {
		return false
	}

	for _, r := range v.rows {
		if r.Kind == driver.Generation && r.Golden == want.Golden && r.Generation == want.Generation {
			return r.OriginID == want.ID
		}
	}

	return false
}

// compareNames finds contradictions within the catalogue.
func (c *fsck) compareNames(v *poolView) []Finding {
	var out []Finding
	lineages := map[driver.ObjectID]bool{}
	highest := map[string]int{}      // of a golden's generations, including those that an operation works on
	generations := map[string]bool{} // as references
	for _, r := range v.rows {
		switch r.Kind {
		case driver.Volume:
			lineages[r.Lineage()] = true
		case driver.Generation:
			highest[r.Golden] = max(highest[r.Golden], r.Generation)
			generations[ref.Generation(r.Golden, r.Generation)] = true
		}
	}

	names := map[string]driver.ObjectID{}
	for _, id := range sortedIDs(v.rows) {
		r := v.rows[id]
		if v.busy[id] {
			continue
		}

		f := Finding{ID: string(id), Ref: v.refs[id]}
		switch {
		case r.Kind == driver.Snapshot && !lineages[r.Volume]:
			f.describe(sevError, "snapshot-orphan", "its volume no longer exists, so nothing can reach it",
				"turn it into a volume")
			f.fix = func(ctx context.Context) (string, error) { return c.fixOrphan(ctx, r) }
			out = append(out, f)
		case r.IsOverlay() && v.rows[r.Lower].ID == "":
			f.describe(sevError, "lower-missing", errs.Messagef("the golden that it is an overlay on, object %s, is missing",
				string(r.Lower)), byHandRebuild)
			out = append(out, f)
		case r.Kind != driver.Snapshot && r.Kind != driver.Volume && r.Kind != driver.Generation && r.Kind != driver.Layer,
			!driver.ValidID(string(id)):
			f.describe(sevError, "catalogue", errs.Messagef("a row of kind %q and ID %q", string(r.Kind), string(id)),
				byHandRebuild)
			out = append(out, f)
		}

		name := v.refs[id]
		if _, twice := names[name]; twice || r.Kind == driver.Volume && v.goldens[name].Name != "" {
			f.describe(sevError, "catalogue", "two objects have this name", byHandRebuild+" renames one of them")
			f.fix = nil
			out = append(out, f)
		}

		names[name] = id
	}

	out = append(out, c.compareGoldens(v, highest, generations)...)
	slices.SortFunc(out, func(a, b Finding) int { return cmp.Or(cmp.Compare(a.Code, b.Code), cmp.Compare(a.Ref, b.Ref)) })
	return out
}

// compareGoldens compares goldens with their generations: highest has the highest generation of each golden, and
// generations has the references of all of them.
func (c *fsck) compareGoldens(v *poolView, highest map[string]int, generations map[string]bool) []Finding {
	var out []Finding
	for name, top := range highest {
		g, ok := v.goldens[name]
		f := Finding{Ref: name}
		f.fix = func(ctx context.Context) (string, error) { return c.fixGolden(ctx, v, name) }
		switch {
		case !ok:
			f.describe(sevError, "golden-missing", "it has generations but is not in the catalogue", "add it")
		case !generations[ref.Generation(name, g.Current)]:
			f.describe(sevError, "golden-current", errs.Messagef("its current generation %d does not exist", g.Current),
				errs.Messagef("make generation %d the current one", top))
		case g.Next <= top:
			f.describe(sevWarning, "golden-next",
				errs.Messagef("the next generation would get number %d, but generation %d exists", g.Next, top),
				errs.Messagef("set the next number to %d", top+1))
		default:
			continue
		}

		out = append(out, f)
	}

	for name := range v.goldens {
		if _, has := highest[name]; !has {
			f := Finding{Ref: name}
			f.describe(sevError, "golden-empty", "it has no generation", "forget it")
			f.fix = func(ctx context.Context) (string, error) { return c.fixGolden(ctx, v, name) }
			out = append(out, f)
		}
	}

	return out
}

// compareTombstones finds destroyed objects that still exist.
func (c *fsck) compareTombstones(v *poolView) []Finding {
	var out []Finding
	refs := map[driver.ObjectID]string{}
	for _, g := range v.unreclaimed {
		refs[g.ID] = g.Ref
	}

	for _, id := range sortedIDs(v.tombstones) {
		_, there := v.objects[id]
		name, waiting := refs[id]
		if !there && !waiting || v.busy[id] {
			continue
		}
		f := Finding{Ref: cmp.Or(name, string(id)), ID: string(id)}
		f.describe(sevNote, "tombstone", "it is destroyed, but its space has not been reclaimed yet", "remove it")
		f.fix = func(ctx context.Context) (string, error) { return c.fixTombstone(ctx, id) }
		out = append(out, f)
	}

	return out
}

// compareMountRecords compares mount records with mounts, and loop devices with mount records.
func (c *fsck) compareMountRecords(ctx context.Context, v *poolView) ([]Finding, error) {
	var out []Finding
	for _, id := range sortedIDs(v.mountRecords) {
		a := v.mountRecords[id]
		row, known := v.rows[id]
		f := Finding{Ref: cmp.Or(v.refs[id], string(id)), ID: string(id)}
		f.fix = func(ctx context.Context) (string, error) { return c.fixMountRecord(ctx, id, row.Name) }
		switch {
		case v.busy[id]:
		case !known:
			f.describe(sevWarning, "attachment-orphan",
				errs.Messagef("an object that is not in the catalogue is recorded as mounted at %s", a.Mountpoint),
				"forget that")
			out = append(out, f)
		case c.Content.MountState(row, a) == content.NotMounted:
			f.describe(sevNote, "attachment-gone",
				errs.Messagef("recorded as mounted at %s, but no longer mounted", a.Mountpoint), "forget that")
			out = append(out, f)
		case c.Content.MountState(row, a) == content.HeldElsewhere:
			f.fix = nil
			f.describe(sevNote, "attachment-elsewhere", errs.Messagef(
				"recorded as mounted at %s, but mounted elsewhere, or in another mount namespace", a.Mountpoint),
				errs.Messagef("none: run %s to see what holds it", errs.Run("show")))
			out = append(out, f)
		}
	}

	if a, ok := c.Driver.(driver.Activator); ok {
		more, err := c.activeDevices(ctx, a, v)
		return append(out, more...), err
	}

	more, err := c.compareLoopDevices(ctx, v)
	if err != nil {
		return nil, err
	}

	return append(out, more...), nil
}

// compareLoopDevices finds loop devices on images that no mount record accounts for.
func (c *fsck) compareLoopDevices(ctx context.Context, v *poolView) ([]Finding, error) {
	loops, err := loopdev.List()
	if errs.Is(err, errs.Permission) {
		return nil, nil // not root: then this pool has no loop devices
	}
	if err != nil {
		return nil, err
	}

	type inode struct{ dev, ino uint64 }
	images := map[inode]driver.ObjectID{}
	for id, r := range v.rows {
		if len(loops) == 0 || !r.FS.IsImage() {
			continue
		}
		if w, err := c.Driver.Attachment(ctx, id); err == nil && w.Image != "" {
			var st unix.Stat_t
			if unix.Stat(w.Image, &st) == nil {
				images[inode{st.Dev, st.Ino}] = id
			}
		}
	}

	var out []Finding
	lowers := content.MountedLowers(v.rows, v.mountRecords)
	for _, b := range loops {
		id, ours := images[inode{b.Dev, b.Ino}]
		if a, ok := v.mountRecords[id]; !ours || v.busy[id] || v.read[id] || ok && a.Loop == b.Index || lowers[id] {
			continue
		}
		f := Finding{Ref: v.refs[id], ID: string(id), attachment: b.Attachment()}
		f.describe(sevWarning, "loop",
			errs.Messagef("%s is attached to its image, but no mount record accounts for it", b.Path), "detach it")
		f.fix = func(ctx context.Context) (string, error) { return c.fixLoop(ctx, id, b) }
		if b.Auto {
			f.Message += ": a mount that Pando did not make, or lost track of, holds it"
			f.Repair, f.fix = "by hand: unmount it", nil
		}
		out = append(out, f)
	}

	return out, nil
}

// activeDevices finds block devices of the driver's own that no mount record accounts for.
func (c *fsck) activeDevices(ctx context.Context, a driver.Activator, v *poolView) ([]Finding, error) {
	active, err := a.Active(ctx)
	if err != nil {
		return nil, err
	}

	var out []Finding
	lowers := content.MountedLowers(v.rows, v.mountRecords)
	for _, id := range active {
		if _, has := v.mountRecords[id]; has || v.busy[id] || v.read[id] || lowers[id] {
			continue
		}
		f := Finding{Ref: v.refs[id], ID: string(id)}
		f.describe(sevWarning, "device", "its block device is active, but no mount record accounts for it", "deactivate it")
		f.fix = func(ctx context.Context) (string, error) { return c.fixActiveDevice(ctx, a, id) }
		out = append(out, f)
	}

	return out, nil
}
