package replicate

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/remote/repo"
)

// Of the objects that a prune leaves, only a small part may be needed: segments are never changed, and a point that
// overwrites scattered blocks of a volume leaves a little of every segment in use. Prune then moves the needed frames
// into packs, and deletes the rest.

// Limits of repacking.
const (
	mostStored = 1.5  // a remote may store this many times the needed bytes; above that it is repacked
	goalStored = 1.25 // and repacked until it stores at most this many times the needed bytes
	smallBytes = repo.SegmentBytes / 4
	mostSmall  = 16 // a remote may have this many objects of less than smallBytes; above that they are merged
)

// unit is an object that may be repacked: a segment, or a pack.
type unit struct {
	segment repo.Segment // zero: the unit is a pack
	pack    repo.Pack
	gen     uint64         // generation of a pack; 0: the unit is a segment
	size    int64          // bytes stored
	live    int64          // bytes needed
	parts   []repo.Segment // needed segments in it, in order
}

// isPack reports whether the unit is a pack.
func (u *unit) isPack() bool { return u.gen > 0 }

// repackableUnits returns the objects that may be repacked: those that are needed, and that no session is writing.
func (p *pruner) repackableUnits(o objects, now scene, n need) (out []unit) {
	for s, size := range o.segments {
		if _, moved := o.places[s]; moved || !n.marks.hasSegment(s) || now.hasSession(s.Session) {
			continue
		}
		out = append(out, unit{segment: s, size: size, live: n.marks.neededBytes(s, size), parts: []repo.Segment{s}})
	}

	packs := map[repo.Pack]*unit{}
	for s, at := range o.places {
		if !n.marks.hasSegment(s) {
			continue
		}
		u := packs[at.Pack]
		if u == nil {
			u = &unit{pack: at.Pack, gen: at.Generation, size: at.PackBytes}
			packs[at.Pack] = u
		}
		u.live += n.marks.neededBytes(s, at.Bytes)
		u.parts = append(u.parts, s)
	}

	for _, u := range packs {
		u.live = min(u.live, u.size)
		slices.SortFunc(u.parts, compareSegment)
		out = append(out, *u)
	}

	return out
}

// wasteful reports whether the units store so many unneeded bytes that they should be repacked.
func wasteful(all []unit) bool {
	stored, live := int64(0), int64(0)
	for _, u := range all {
		stored, live = stored+u.size, live+u.live
	}
	return float64(stored) > mostStored*float64(live)
}

// weighPacks computes the exact number of needed bytes in packs that seem wasteful. Until then the number is estimated
// from the size of the frames in their segments. But a part of a frame may not compress as well as the whole frame did,
// and such a pack would be rewritten by every prune.
func (p *pruner) weighPacks(ctx context.Context, all []unit, n need) error {
	var mu sync.Mutex
	var packs []*unit
	for i := range all {
		if u := &all[i]; u.isPack() && float64(u.live)*goalStored < float64(u.size) {
			packs = append(packs, u)
		}
	}

	// Read their indexes, several at once.
	return eachOf(ctx, packs, func(ctx context.Context, u *unit) error {
		parts := map[repo.Segment]bool{}
		for _, s := range u.parts {
			parts[s] = true
		}

		live, err := p.repo.PackShare(ctx, repo.PackState{Pack: u.pack, Bytes: u.size}, func(f repo.Frame) repo.BlockSet {
			if !parts[f.Segment] {
				return repo.BlockSet{}
			}
			return n.marks.neededBlocks(f)
		})
		if err != nil && !isUnreadable(err) {
			return err
		}

		mu.Lock()
		defer mu.Unlock()
		if err == nil && live > u.live {
			p.out.NeededBytes += live - u.live
			p.out.PartlyUsedBytes = max(0, p.out.PartlyUsedBytes-(live-u.live))
			u.live = live
		}

		return nil
	})
}

// chooseUnits returns the units to repack. If the units together store more than mostStored times the needed bytes,
// these are the ones with the smallest needed part, until the rest stores at most goalStored times the needed bytes. If
// there are many small units, these are chosen, too. At most most bytes are chosen; a negative value sets no limit.
func chooseUnits(all []unit, most int64) []unit {
	stored, live, small, much := int64(0), int64(0), 0, wasteful(all)
	for _, u := range all {
		stored, live = stored+u.size, live+u.live
		if u.size < smallBytes {
			small++
		}
	}

	// The most wasteful ones come first.
	slices.SortFunc(all, func(a, b unit) int {
		return cmp.Or(
			cmp.Compare(float64(a.live)/float64(a.size), float64(b.live)/float64(b.size)),
			compareSegment(a.segment, b.segment), a.pack.Compare(b.pack))
	})

	var out []unit
	for _, u := range all {
		waste := much && u.live < u.size && float64(stored) > goalStored*float64(live)
		merge := small > mostSmall && u.size < smallBytes
		if !waste && !merge {
			continue
		}
		if most >= 0 && u.size > most {
			continue
		}
		if most >= 0 {
			most -= u.size
		}
		stored -= u.size - u.live
		out = append(out, u)
	}

	if len(out) == 1 && out[0].live == out[0].size { // repacking would only copy it
		return nil
	}

	// Segments that are next to each other stay together.
	slices.SortFunc(out, func(a, b unit) int { return compareSegment(a.parts[0], b.parts[0]) })
	return out
}

// repack moves needed frames out of mostly unneeded objects, and deletes these.
func (p *pruner) repack(ctx context.Context, o objects, now scene, n need) error {
	// Choose the objects. Without exact marks and all tables, nothing can be moved.
	units := p.repackableUnits(o, now, n)
	if p.MaxRepack != 0 && wasteful(units) {
		if err := p.weighPacks(ctx, units, n); err != nil {
			return err
		}
	}

	if p.MaxRepack == 0 || n.marks.checkComplete() != nil || len(o.moved.Damaged) > 0 {
		return nil
	}

	chosen := chooseUnits(units, p.MaxRepack)
	if len(chosen) == 0 {
		return nil
	}

	if p.DryRun {
		for _, u := range chosen {
			p.out.countRepacked(u.size, u.live)
			p.out.RepackedObjects++
		}
		return nil
	}

	// Begin a session, only so that other prunes do not delete packs that no table names yet: see Prune.
	host, _ := os.Hostname()
	sctx, l, err := beginSession(ctx, p.repo, repo.Repack, nil, repo.Writer{Host: host})
	if err != nil {
		return err
	}

	// Move the frames.
	x := &repacker{pruner: p, marks: n.marks, session: l.id, places: o.places}
	err = x.repackUnits(sctx, chosen)
	if cause := context.Cause(sctx); errors.Is(cause, errEnded) {
		err = errs.New(errs.Conflict, opRemotePrune, "", "the session of this prune is no longer on the remote: "+
			"another prune found it expired, or someone deleted it from the store").
			WithHint("run the prune again")
	}

	if eerr := l.endSession(ctx); err == nil {
		err = eerr
	}

	return err
}

// countRepacked counts objects of was bytes that were replaced by is bytes in packs.
func (out *Pruned) countRepacked(was, is int64) {
	out.RepackedBytes += was
	out.PackedBytes += is
	out.FreedBytes += was - is
	out.UsedBytes -= was - is
	out.PartlyUsedBytes = max(0, out.PartlyUsedBytes-(was-is))
}

// repacker moves frames into packs.
type repacker struct {
	*pruner
	marks   *marker
	session repo.ID
	places  map[repo.Segment]repo.Place

	n       uint32           // number of the next pack
	pack    *repo.PackWriter // being filled; nil: none
	gen     uint64           // the highest generation of its contents
	written []repo.MovedPack // since the last table
	sources []source         // moved into packs, or skipped, since the last table
}

// source is a unit that was read.
type source struct {
	unit
	whole bool // all needed frames were moved
}

// repackUnits moves the needed frames of units, and deletes the units.
func (x *repacker) repackUnits(ctx context.Context, units []unit) error {
	total := int64(0)
	for _, u := range units {
		total += u.size
	}

	progress.From(ctx).Start(progress.Repacking, int64(len(units)), total)
	for _, u := range units {
		if err := x.moveUnit(ctx, u); err != nil {
			return err
		}
		progress.From(ctx).Add(1, u.size)
	}

	return x.finishPacks(ctx)
}

// moveUnit moves the needed frames of one unit. It leaves a damaged unit as it is.
func (x *repacker) moveUnit(ctx context.Context, u unit) error {
	var src *repo.Source
	var err error
	if u.isPack() {
		src, err = x.repo.OpenPack(ctx, u.pack)
	} else {
		src, err = x.repo.OpenSegment(ctx, u.segment)
	}
	if isUnreadable(err) { // or another prune was faster
		return nil
	}
	if err != nil {
		return err
	}

	// Move its segments one by one.
	has := map[repo.Segment][]repo.Frame{}
	for _, s := range src.Segments() {
		has[s.Segment] = s.Frames
	}

	whole := true
	for _, s := range u.parts {
		if !x.marks.coveredBy(s, has[s]) {
			whole = false // needed frames are missing from it: a verify reports them
			continue
		}
		err := x.addSegment(ctx, src, s, u.gen)
		if isUnreadable(err) {
			whole = false
			continue
		}
		if err != nil {
			return err
		}
	}

	x.sources = append(x.sources, source{u, whole})
	return nil
}

// addSegment moves the needed frames of one segment into the current pack, or into a new one if they do not fit.
func (x *repacker) addSegment(ctx context.Context, src *repo.Source, s repo.Segment, gen uint64) error {
	keep := func(f repo.Frame) repo.BlockSet { return x.marks.neededBlocks(f) }
	for range 2 { // the second time with an empty pack
		if x.pack == nil {
			var err error
			if x.pack, err = x.repo.NewPack(x.session, x.n); err != nil {
				return err
			}
			x.n++
		}

		ok, err := x.pack.Add(src, s, keep)
		if err != nil {
			return err
		}

		if ok {
			x.gen = max(x.gen, gen)
			if x.pack.Bytes() >= repo.SegmentBytes {
				return x.closePack(ctx)
			}
			return nil
		}

		if err := x.closePack(ctx); err != nil {
			return err
		}
	}

	return errs.New(errs.Damaged, "repack", s.String(), "its needed frames do not fit into one pack")
}

// closePack uploads the current pack, and its table if that is full.
func (x *repacker) closePack(ctx context.Context) error {
	w := x.pack
	if w == nil {
		return nil
	}

	x.pack = nil
	object, err := w.Finish(x.gen + 1)
	if err != nil || object == nil {
		return err
	}

	if err := x.repo.PutPack(ctx, w.Pack(), object); err != nil {
		return err
	}

	x.written = append(x.written, repo.MovedPack{
		Pack: w.Pack(), Generation: x.gen + 1, Bytes: int64(len(object)), Segments: w.Segments(),
	})
	x.gen = 0
	if w.Pack().N%repo.PacksPerTable == repo.PacksPerTable-1 {
		return x.commitTable(ctx)
	}

	return nil
}

// finishPacks uploads the last pack and table, and deletes the sources that were moved.
func (x *repacker) finishPacks(ctx context.Context) error {
	if err := x.closePack(ctx); err != nil {
		return err
	}
	if err := x.commitTable(ctx); err != nil {
		return err
	}
	return x.deleteSources(ctx)
}

// commitTable writes the table of the packs that were uploaded since the last table. From then on readers use these
// packs, and no prune deletes them while they are needed. It then deletes their sources. errEnded: another prune fenced
// the packs.
func (x *repacker) commitTable(ctx context.Context) error {
	if len(x.written) == 0 {
		return nil
	}

	// Write the table.
	packs := x.written
	x.written = nil
	table := packs[0].Table()
	x.n = (table.N + 1) * repo.PacksPerTable
	if err := x.repo.PutTable(ctx, table, packs); err != nil {
		if errs.Is(err, errs.Exists) {
			return errEnded
		}
		return err
	}

	// A prune that considered this session dead may have deleted packs before: check that they exist.
	err := eachOf(ctx, packs, func(ctx context.Context, m repo.MovedPack) error { return x.repo.CheckPack(ctx, m) })
	if err != nil {
		return err
	}

	for _, m := range packs {
		x.out.Packs++
		x.out.countRepacked(0, m.Bytes)
		for _, s := range m.Segments {
			x.places[s.Segment] = repo.Place{Pack: m.Pack, Generation: m.Generation, PackBytes: m.Bytes, Bytes: s.Bytes}
		}
	}

	return x.deleteSources(ctx)
}

// deleteSources deletes the sources whose needed frames are all in packs that a table names.
func (x *repacker) deleteSources(ctx context.Context) error {
	var left, gone []source
	for _, s := range x.sources {
		switch {
		case !s.whole:
		case slices.ContainsFunc(s.parts, func(part repo.Segment) bool { return x.places[part].Generation <= s.gen }):
			left = append(left, s)
		default:
			gone = append(gone, s)
		}
	}

	x.sources = left
	for _, s := range gone {
		x.out.countRepacked(s.size, 0)
		x.out.RepackedObjects++
	}

	return eachOf(ctx, gone, func(ctx context.Context, s source) error {
		if s.isPack() {
			return x.repo.DeletePack(ctx, s.pack)
		}
		return x.repo.DeleteSegment(ctx, s.segment)
	})
}

// deleteStaleTables deletes the tables that are no longer of use.
func (p *pruner) deleteStaleTables(ctx context.Context, o objects, n need) error {
	m, err := p.repo.MovedAndPacks(ctx)
	if err != nil {
		return err
	}
	return eachOf(ctx, staleTables(m, o, n), p.repo.DeleteTable)
}

// coveredBy reports whether these frames include all that is needed of a segment.
func (k *marker) coveredBy(s repo.Segment, frames []repo.Frame) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.segments[s]
	if m == nil {
		return false
	}

	at := maps.Collect(func(yield func(uint32, repo.Frame) bool) {
		for _, f := range frames {
			if !yield(f.Index, f) {
				return
			}
		}
	})

	for _, f := range m.frames {
		has, there := at[f.index]
		if !there || has.Stored != f.stored || uint32(has.Blocks()) != f.total {
			return false
		}
	}

	return true
}

// neededBlocks returns the needed blocks of a frame.
func (k *marker) neededBlocks(f repo.Frame) repo.BlockSet {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.segments[f.Segment]
	if m == nil {
		return repo.BlockSet{}
	}
	if i, found := m.findFrame(f.Index); found {
		return m.frames[i].blocks
	}
	return repo.BlockSet{}
}
