package replicate

import (
	"context"
	"maps"
	"slices"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// findPackGarbage returns the listed packs that are to be deleted, and counts all of them in p.out. Those that no table
// names may be deleted only after fencePack.
func (p *pruner) findPackGarbage(o objects, now scene, n need) (named, unnamed []repo.Pack) {
	in, lost := packsOf(o), p.mayLackTable(o, n)
	for _, pk := range slices.SortedFunc(maps.Keys(o.moved.Packs), repo.Pack.Compare) {
		// How much of the pack is needed?
		size := o.moved.Packs[pk]
		live, needed, known := int64(0), false, false
		for _, m := range in[pk] {
			known = true
			for _, s := range m.Segments {
				at, placed := o.places[s.Segment]
				if !n.marks.hasSegment(s.Segment) || placed && at.Pack != pk && !o.unsound[s.Segment] {
					continue
				}
				needed = true // even if the pack is damaged: some data in it may still be readable
				live += n.marks.neededBytes(s.Segment, s.Bytes)
			}
		}

		switch {
		case needed:
			p.out.UsedBytes += size
			p.out.PartlyUsedBytes += max(0, size-live)
		case !known && (now.hasSession(pk.Session) || lost):
			p.out.HeldBytes += size
		case known:
			named = append(named, pk)
			p.out.FreedBytes += size
		default:
			unnamed = append(unnamed, pk)
			p.out.FreedBytes += size
		}
	}

	return named, unnamed
}

// checkCopies reads the needed segments that were moved but still have an older copy, as a killed prune leaves them: if
// the newer copy is damaged, the older one stays.
func (p *pruner) checkCopies(ctx context.Context, o *objects, n need) error {
	// Find the segments with an older copy.
	older := map[repo.Segment]bool{}
	for s := range o.segments {
		older[s] = true
	}

	for pk, named := range packsOf(*o) {
		if _, there := o.moved.Packs[pk]; !there {
			continue
		}
		for _, m := range named {
			for _, s := range m.Segments {
				older[s.Segment] = older[s.Segment] || o.places[s.Segment].Pack != pk
			}
		}
	}

	var todo []repo.Segment
	for s := range o.places {
		if older[s] && n.marks.hasSegment(s) {
			todo = append(todo, s)
		}
	}

	// Read the newer copies.
	slices.SortFunc(todo, compareSegment)
	o.unsound = map[repo.Segment]bool{}
	var mu sync.Mutex
	return eachOf(ctx, todo, func(ctx context.Context, s repo.Segment) error {
		err := p.repo.CheckPlace(ctx, s, o.places[s])
		if !isUnreadable(err) {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		o.unsound[s] = true
		return nil
	})
}

// mayLackTable reports whether a table may be damaged or lost. If so, a pack that no table names may be needed, until a
// repair.
func (p *pruner) mayLackTable(o objects, n need) bool {
	if len(o.moved.Damaged) > 0 {
		return true
	}

	missing := func(s repo.Segment) bool {
		_, there := o.segments[s]
		_, moved := o.places[s]
		return !there && !moved
	}

	for s := range n.marks.segments {
		if missing(s) {
			return true
		}
	}

	return false
}

// packsOf returns what tables say about each pack. Several tables may name the same pack.
func packsOf(o objects) map[repo.Pack][]repo.MovedPack {
	out := map[repo.Pack][]repo.MovedPack{}
	for _, packs := range o.moved.Tables {
		for _, m := range packs {
			out[m.Pack] = append(out[m.Pack], m)
		}
	}
	return out
}

// removePacks deletes packs. It first fences those that no table names.
func (p *pruner) removePacks(ctx context.Context, named, unnamed []repo.Pack) error {
	err := eachOf(ctx, unnamed, func(ctx context.Context, pk repo.Pack) error {
		fenced, err := p.fencePack(ctx, pk)
		if err != nil {
			return err
		}
		if !fenced { // a table has just named it: the next prune counts it
			return nil
		}
		return p.repo.DeletePack(ctx, pk)
	})
	if err != nil {
		return err
	}

	return eachOf(ctx, named, func(ctx context.Context, pk repo.Pack) error { return p.repo.DeletePack(ctx, pk) })
}

// fencePack makes sure that no table will ever name a pack. It returns false if a table already does.
func (p *pruner) fencePack(ctx context.Context, pk repo.Pack) (bool, error) {
	err := p.repo.PutTable(ctx, pk.Table(), nil)
	if !errs.Is(err, errs.Exists) {
		return err == nil, err
	}
	packs, err := p.repo.ReadTable(ctx, pk.Table())
	if isUnreadable(err) {
		return false, nil // the table may name it; the next prune tries again
	}
	return err == nil && !slices.ContainsFunc(packs, func(m repo.MovedPack) bool { return m.Pack == pk }), err
}

// staleTables returns the tables that are no longer of use: none of their packs exist (packs are listed after tables
// are read), and no needed segment was only in these packs. The table of a lost pack tells what is lost, and is needed
// if the pack comes back.
//
// An empty table is never stale. It keeps the prune that wrote its packs from naming them; that prune may still be
// about to do so, however long ago it wrote them, while others may be about to delete these packs, because it cannot.
// Only a prune that died leaves an empty table.
func staleTables(m repo.Moved, o objects, n need) (out []repo.Table) {
	live := map[repo.Table]bool{}
	for pk := range m.Packs {
		live[pk.Table()] = true
	}

	places := m.Places()
	only := func(s repo.SegmentState) bool {
		_, there := o.segments[s.Segment]
		_, moved := places[s.Segment]
		return n.marks.hasSegment(s.Segment) && !there && !moved
	}

	for t, packs := range m.Tables {
		tells := slices.ContainsFunc(packs, func(p repo.MovedPack) bool { return slices.ContainsFunc(p.Segments, only) })
		if len(packs) > 0 && !live[t] && !tells {
			out = append(out, t)
		}
	}

	return out
}
