package engine

import (
	"cmp"
	"context"
	"slices"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/linux/kernel"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	destroyBatch   = 64 // objects that share their commits
	destroyWorkers = 4  // objects that are unmounted or removed at the same time
)

// Destroyed describes one destroyed object.
type Destroyed struct {
	Ref            string   `json:"ref"`               // reference to the object
	ID             string   `json:"id"`                // ID of the object
	Kind           api.Kind `json:"kind"`              // kind of the object
	ExclusiveBytes int64    `json:"exclusive_bytes"`   // bytes that only this object used, when last measured
	Reclaimed      bool     `json:"reclaimed"`         // the driver has removed it; if not, the next command does
	HeldBy         string   `json:"held_by,omitempty"` // what keeps it, if known: processes, overlays
}

// DestroyReport is the result of Destroy.
type DestroyReport struct {
	Destroyed []Destroyed
	Failed    []error // one for each object that still exists

	budget time.Duration // time that may still be spent on removing
}

// destroyable are the kinds of objects that Destroy takes.
var destroyable = []api.Kind{api.KindVolume, api.KindSnapshot}

// DestroyRequest says what to destroy.
type DestroyRequest struct {
	What   []ref.Pattern        // volumes, with their snapshots, and snapshots to destroy; none with Labels: all volumes
	Labels driver.LabelSelector // selector that objects to destroy must match; the zero one matches all
}

// Destroy destroys volumes, with their snapshots, and snapshots. It resolves all names
// first: if one is unknown, nothing is destroyed. After that, an object that is in use
// does not keep the others from being destroyed. Volumes that are mounted but idle are
// unmounted. NotFound (an unknown name, or nothing has the labels), Invalid.
func (e *Engine) Destroy(ctx context.Context, q DestroyRequest) (_ *DestroyReport, err error) {
	ctx, end := e.ledger.Begin(ctx, "destroy")
	defer end(&err)

	if err := e.needRoot("destroy", ""); err != nil {
		return nil, err
	}
	rows, err := e.toDestroy(ctx, q)
	if err != nil {
		return nil, err
	}

	o := destroyOptions{tracker: progress.From(ctx)}
	o.still = func(_ *catalog.Tx, row catalog.Row, _ bool) (bool, error) { return q.Labels.Matches(row.Labels), nil }
	return e.destroyRows(ctx, rows, o), ctx.Err()
}

// reclaimBound limits how long a command removes the objects it has destroyed. The
// rest is hidden already, and later commands remove it.
const reclaimBound = 10 * time.Second

// firstFailure returns the first error that is not InUse.
func (r *DestroyReport) firstFailure() error {
	for _, err := range r.Failed {
		if !errs.Is(err, errs.InUse) {
			return err
		}
	}
	return nil
}

// destroyOptions are options of destroyRows.
type destroyOptions struct {
	// still, if not nil, decides in the transaction that claims an object whether to
	// destroy it: the reasons to do so may no longer hold.
	still   func(tx *catalog.Tx, row catalog.Row, attached bool) (bool, error)
	force   bool   // whether objects that are pinned are destroyed, too
	op      string // "": destroy; otherwise no user asked for it, and objects in use are skipped without waiting
	why     string // reason for the destruction, for gc --explain and events
	tracker *progress.Tracker
	now     time.Time // time by which pins have ended or not; zero: the time of each look
}

// destroyRows destroys objects in batches, and reports on each of them. It returns early if ctx ends.
func (e *Engine) destroyRows(ctx context.Context, rows []doomed, o destroyOptions) *DestroyReport {
	d := &destruction{e, o, &DestroyReport{budget: reclaimBound}}
	ctx = mayUseReserve(ctx)
	defer e.refillReserveIfSpent()
	o.tracker.Start(progress.Destroying, int64(len(rows)), 0)
	for len(rows) > 0 && ctx.Err() == nil {
		batch := rows[:min(destroyBatch, len(rows))]
		rows = rows[len(batch):]
		d.destroySome(ctx, batch)
		o.tracker.Add(int64(len(batch)), 0)
	}
	return d.report
}

// destruction is the destruction of some objects under way.
type destruction struct {
	e      *Engine
	o      destroyOptions
	report *DestroyReport
}

// doomed is an object to be destroyed; a volume includes its snapshots.
type doomed struct {
	row   catalog.Row
	ref   string
	whole bool // of a golden: all its generations are destroyed, and row is the current one
}

// toDestroy resolves references and globs, without repeats, and chooses those with the
// labels. It omits snapshots whose volume is destroyed as well, as these go with the volume.
func (e *Engine) toDestroy(ctx context.Context, q DestroyRequest) ([]doomed, error) {
	var out []doomed
	seen := map[driver.ObjectID]bool{}
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		add := func(r catalog.Row) error {
			if !seen[r.ID] && q.Labels.Matches(r.Labels) {
				seen[r.ID] = true
				out = append(out, doomed{row: r, ref: tx.RefOf(r)})
			}
			return nil
		}

		if len(q.What) == 0 && !q.Labels.IsZero() {
			return visibleVolumes(tx, "destroy", add)
		}

		return matchEach(tx, MatchRequest{Op: "destroy", What: q.What, Kinds: destroyable},
			func(_ ref.Ref, r catalog.Row) error { return add(r) })
	})

	if err == nil && len(out) == 0 && !q.Labels.IsZero() {
		return nil, errs.New(errs.NotFound, "destroy", "", "nothing that could be destroyed has the label %s", q.Labels).
			WithHint("list volumes with their labels: %s", errs.Run("ls", errs.Param("columns", "name,labels")))
	}

	// Omit the snapshots of these volumes.
	lineages := map[driver.ObjectID]bool{}
	for _, d := range out {
		if d.row.Kind == driver.Volume {
			lineages[d.row.Lineage()] = true
		}
	}

	return slices.DeleteFunc(out, func(d doomed) bool {
		return d.row.Kind == driver.Snapshot && lineages[d.row.Volume]
	}), err
}

// destroyItem is a unit of destruction: an object, a volume with its snapshots, or a
// whole golden.
type destroyItem struct {
	doomed
	with   []catalog.Row // a volume's snapshots, a whole golden's other generations
	att    catalog.MountRecord
	has    bool
	failed error
	skip   bool          // already destroyed, or no longer to be destroyed
	left   []catalog.Row // objects that the driver could not remove
	layers []layerKept   // generations that stay as layers, because overlays need them
	dev    uint64        // st_dev of the dataset that was mounted
	heldBy string
}

// rows returns all rows that are destroyed, the volume last.
func (it *destroyItem) rows() []catalog.Row {
	return append(slices.Clip(it.with), it.row)
}

// renamed reports whether what is to be destroyed has another name now than when that was decided.
func (it *destroyItem) renamed(tx *catalog.Tx, row catalog.Row) (now string, is bool) {
	if row.Kind != driver.Volume && row.Kind != driver.Snapshot {
		return row.Golden, row.Golden != it.row.Golden
	}
	now = tx.RefOf(row)
	return now, now != it.ref
}

// refOf returns the reference of one of its rows.
func (it *destroyItem) refOf(r catalog.Row) string {
	switch {
	case r.ID == it.row.ID:
		return it.ref
	case r.Kind == driver.Generation:
		return ref.Generation(r.Golden, r.Generation)
	}
	return it.row.Name + "@" + r.Name
}

// destroySome destroys a batch: claim, unmount, commit and remove, each step for all of it.
func (d *destruction) destroySome(ctx context.Context, batch []doomed) {
	e, o, report := d.e, d.o, d.report
	items := make([]*destroyItem, len(batch))
	for i, x := range batch {
		items[i] = &destroyItem{doomed: x}
	}

	// Claim them. One that cannot be claimed must not hold up the rest, so if
	// claiming all together fails, claim them one by one.
	if err := d.claimDestroy(ctx, items); err != nil {
		if len(items) == 1 {
			items[0].failed = err
		} else {
			for _, it := range items {
				it.failed = d.claimDestroy(ctx, []*destroyItem{it})
			}
		}
	}

	// Unmount those that are not in use.
	d.refuseUsed(ctx, items)
	destroyInParallel(items, func(it *destroyItem) {
		if it.has {
			it.dev = datasetOf(it.row, it.att)
			it.failed = e.content.Unmount(ctx, reasonFor(cmp.Or(o.op, "destroy")), it.row, it.att, false)
		}
	})

	// Report those that failed, and go on with the others.
	var going []*destroyItem
	for _, it := range items {
		switch {
		case it.skip:
		case it.failed != nil:
			for _, r := range it.rows() {
				e.ledger.UnmarkFailed(ctx, r.ID, it.failed)
			}
			report.Failed = append(report.Failed, errs.Wrap("destroy", it.ref, it.failed))
		default:
			going = append(going, it)
		}
	}

	if len(going) == 0 {
		return
	}

	// Replace their rows by tombstones. From then on they no longer exist, whatever happens.
	if err := d.commitDestroy(ctx, going); err != nil {
		for _, it := range going {
			for _, r := range it.rows() {
				e.ledger.UnmarkFailed(ctx, r.ID, err) // it is unmounted already, which recovery will note
			}
			report.Failed = append(report.Failed, errs.Wrap("destroy", it.ref, err))
		}
		return
	}

	d.reclaimNow(ctx, going)
	e.reclaimLayers(ctx, going)
}

// datasetOf returns the st_dev of the dataset that is mounted as recorded; 0 if it is none, or not mounted.
func datasetOf(row catalog.Row, a catalog.MountRecord) uint64 {
	if row.FS.IsImage() {
		return 0
	}
	if m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint); err == nil && m.Root && m.ID == a.MountID {
		return m.Dev
	}
	return 0
}

// commitDestroy replaces the rows of a batch by tombstones, in one commit. It is durable unless all of them are
// ephemeral: an ephemeral volume that a power loss brings back is destroyed again.
func (d *destruction) commitDestroy(ctx context.Context, going []*destroyItem) error {
	e := d.e
	durable := catalog.Soft
	for _, it := range going {
		durable = durable || catalog.Durability(!it.row.Ephemeral)
	}

	return e.cat.Update(ctx, durable, func(tx *catalog.Tx) error {
		for _, it := range going {
			if err := it.putTombstones(tx, d.o.why); err != nil {
				return err
			}
		}
		return nil
	})
}

// reclaimNow removes the destroyed objects for as long as report.budget allows, and leaves
// the rest to the next command.
func (d *destruction) reclaimNow(ctx context.Context, going []*destroyItem) {
	e, report := d.e, d.report
	ctx = context.WithoutCancel(ctx)
	bounded, cancel := ctx, func() {}
	if callOf(ctx).freed == nil { // a gc measures each removal, which has no limit
		bounded, cancel = context.WithTimeout(ctx, report.budget)
	}

	defer cancel()

	// Remove the objects until the time is used up.
	start := time.Now()
	destroyInParallel(going, func(it *destroyItem) {
		for _, r := range it.rows() {
			if l := it.layerOf(r); l != nil {
				it.left = append(it.left, r)
				l.written = e.matchIdentity(ctx, r.ID) == nil
			} else if bounded.Err() != nil {
				it.left = append(it.left, r)
			} else if err := e.removeObject(bounded, r.ID, it.refOf(r), d.o.why); err != nil {
				it.left = append(it.left, r)
				if errs.Is(err, errs.InUse) && r.ID == it.row.ID && it.dev != 0 {
					it.heldBy = content.HoldersOf(bounded, it.dev)
				}
			}
		}
	})

	// Note which of them were removed. If that fails, the next command removes them again.
	report.budget -= time.Since(start)
	_ = e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		for _, it := range going {
			for _, r := range it.rows() {
				if !it.isLeft(r) {
					if err := tx.SetReclaimed(r.ID); err != nil {
						return err
					}
				}
				if l := it.layerOf(r); l != nil && !l.written {
					continue // the next command that finds the mark writes the identity
				}
				if err := tx.Unmark(r.ID); err != nil {
					return err
				}
			}
		}

		return nil
	})

	// Report them.
	for _, it := range going {
		for _, r := range it.rows() {
			heldBy := it.heldBy
			if l := it.layerOf(r); l != nil {
				heldBy = countOf(int64(l.users), "overlay", "overlays")
			}
			report.Destroyed = append(report.Destroyed, Destroyed{
				Ref: it.refOf(r), ID: string(r.ID), Kind: api.Kind(r.Kind),
				ExclusiveBytes: r.Usage.ExclusiveBytes, Reclaimed: !it.isLeft(r), HeldBy: heldBy,
			})
		}
	}
}

// refuseUsed fails the items that are in use, before anything is unmounted.
func (d *destruction) refuseUsed(ctx context.Context, items []*destroyItem) {
	e, o := d.e, d.o
	var asked []*destroyItem
	var volumes []content.Volume
	for _, it := range items {
		if !it.skip && it.failed == nil {
			asked = append(asked, it)
			volumes = append(volumes, content.Volume{Row: it.row, Record: it.att, HasRecord: it.has})
		}
	}
	for i, err := range e.content.InUse(ctx, reasonFor(cmp.Or(o.op, "destroy")), volumes) {
		asked[i].failed = err
	}
}

// layerOf returns the layer that the object of a row has become; nil if it has not.
func (it *destroyItem) layerOf(r catalog.Row) *layerKept {
	for i := range it.layers {
		if it.layers[i].id == r.ID {
			return &it.layers[i]
		}
	}
	return nil
}

// isLeft reports whether the driver could not remove the object of a row yet.
func (it *destroyItem) isLeft(r catalog.Row) bool {
	return slices.ContainsFunc(it.left, func(x catalog.Row) bool { return x.ID == r.ID })
}

// claimDestroy marks the rows of all items, or none. It reads the rows again, and sets skip for items that another
// process has destroyed or that are no longer to be destroyed. It returns InUse.
func (d *destruction) claimDestroy(ctx context.Context, items []*destroyItem) error {
	e, o := d.e, d.o
	claim := e.ledger.Claim
	if o.op != "" {
		claim = e.ledger.ClaimNow
	}

	return claim(ctx, "destroy", true, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		var marks []catalog.Mark
		for _, it := range items {
			it.skip, it.failed, it.with = false, nil, nil
			row, ok, err := tx.Object(it.row.ID)
			if err != nil {
				return nil, err
			}

			// If a volume was rewound, its row is now the previous state.
			if ok && it.row.Kind == driver.Volume && row.Kind != driver.Volume {
				row, ok, err = tx.LineageHolder(it.row.Lineage())
				if err != nil {
					return nil, err
				}
			}

			if !ok {
				it.skip = true // another process has destroyed it
				continue
			}

			if now, is := it.renamed(tx, row); is {
				if o.op == "" { // a user has named it
					it.failed = errs.New(errs.Conflict, "destroy", it.ref, "it has just been renamed to %s", now).
						WithHint("try again, if you still want to destroy it")
					continue
				}
				it.ref = now
			}

			it.row = row
			if it.att, it.has, err = tx.MountRecord(row.ID); err != nil {
				return nil, err
			}

			if o.still != nil {
				if ok, err = o.still(tx, row, it.has); err != nil {
					return nil, err
				}
				if !ok {
					it.skip = true
					continue
				}
			}

			// Include the snapshots of a volume, or the other generations of a golden.
			if row.Kind == driver.Volume {
				if it.with, err = tx.Snapshots(row.Lineage()); err != nil {
					return nil, err
				}
			}

			if it.whole {
				if it.with, err = tx.Generations(row.Golden); err != nil {
					return nil, err
				}
				it.with = slices.DeleteFunc(it.with, func(r catalog.Row) bool { return r.ID == row.ID })
			}

			for _, r := range it.rows() {
				if err := checkPin(r, it.refOf(r), cmp.Or(o.now, time.Now())); err != nil && !o.force {
					return nil, err
				}
				marks = append(marks, catalog.Mark{ID: r.ID, Op: "destroy"})
			}
		}

		return marks, nil
	})
}

// opExpire is the operation that destroys expired volumes. No user asked for it, so it does not search for processes
// that use them.
const opExpire = "expire"

// reasonFor returns the reason an operation gives for unmounting a volume.
func reasonFor(op string) content.Reason {
	return content.Reason{Op: op, Gentle: op == opExpire || op == opPrune}
}

// checkPin refuses to destroy an object that is pinned by now.
func checkPin(r catalog.Row, ref string, now time.Time) error {
	if !r.Pinned.After(now) {
		return nil
	}
	return errs.New(errs.InUse, "destroy", ref, "it is pinned%s", pinnedUntil(r.Pinned)).
		WithHint("unpin it first with %s", errs.Run("unpin", ref))
}

// pinnedUntil returns the end of a pin as text: "" if it has none.
func pinnedUntil(t time.Time) string {
	if !t.Before(driver.Forever) {
		return ""
	}
	return " until " + t.Local().Format("2006-01-02 15:04:05 MST")
}

// destroyInParallel runs fn for the items that have neither failed nor been skipped.
func destroyInParallel(items []*destroyItem, fn func(*destroyItem)) {
	if len(items) == 1 {
		if it := items[0]; !it.skip && it.failed == nil {
			fn(it)
		}
		return
	}

	var g errgroup.Group
	g.SetLimit(destroyWorkers)
	for _, it := range items {
		if it.skip || it.failed != nil {
			continue
		}
		g.Go(func() error { fn(it); return nil })
	}

	_ = g.Wait()
}

// destroyRow destroys an object, a volume with its snapshots, ignoring pins. Either the
// object has a mark already, of this process or of an orphan that it has locked, or
// nobody else can be working on it.
func (e *Engine) destroyRow(ctx context.Context, row catalog.Row, att catalog.MountRecord, has bool, why string) error {
	if err := e.content.InUse(ctx, reasonFor("destroy"),
		[]content.Volume{{Row: row, Record: att, HasRecord: has}})[0]; err != nil {
		return err
	}
	return e.destroyUnused(ctx, row, att, has, why)
}

// destroyUnused is destroyRow for an object that is known not to be in use.
func (e *Engine) destroyUnused(
	ctx context.Context, row catalog.Row, att catalog.MountRecord, has bool, why string,
) error {
	if has {
		if err := e.content.Unmount(ctx, reasonFor("destroy"), row, att, false); err != nil {
			return err
		}
	}

	it := &destroyItem{doomed: doomed{row: row, ref: row.Name}}
	err := e.cat.Update(ctx, catalog.Durability(!row.Ephemeral), func(tx *catalog.Tx) (err error) {
		if row.Kind == driver.Volume {
			if it.with, err = tx.Snapshots(row.Lineage()); err != nil {
				return err
			}
		}
		return it.putTombstones(tx, why)
	})
	if err != nil {
		return err
	}

	d := &destruction{e, destroyOptions{why: why}, &DestroyReport{budget: reclaimBound}}
	d.reclaimNow(ctx, []*destroyItem{it})
	e.reclaimLayers(ctx, []*destroyItem{it})
	return nil
}

// putTombstones replaces the rows by tombstones, except those of generations that overlays need.
func (it *destroyItem) putTombstones(tx *catalog.Tx, why string) error {
	going, kept, err := keepLayers(tx, it.rows(), why)
	if err != nil {
		return err
	}

	it.layers = kept
	for _, r := range going {
		if err := tx.Bury(catalog.Tombstone{ID: r.ID, Ref: it.refOf(r), Bytes: r.Usage.ExclusiveBytes,
			At: time.Now()}, why); err != nil {
			return err
		}
	}

	if it.row.Kind == driver.Generation {
		return tx.DeleteEmptyGolden(it.row.Golden)
	}

	return nil
}
