package replicate

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// prunedVolume is a volume whose points are being selected.
type prunedVolume struct {
	head   repo.Head // without pages and recent points
	write  repo.ID   // the state of the head that points were read from
	points []policyPoint
	newest uint64
	keep   []bool
	parent map[repo.ID]repo.ID // parents of chained points, by manifest

	fragmented bool // its pages are to be merged
}

// readVolume reads the points of a volume, and selects those that the policy keeps. If a page cannot be read, the error
// is a *pageFault.
func (p *pruner) readVolume(ctx context.Context, h repo.Head) (*prunedVolume, error) {
	v := &prunedVolume{head: h, write: h.WriteID, points: make([]policyPoint, 0, h.Count()), fragmented: h.Fragmented()}
	v.head.Pages, v.head.Recent, v.parent = nil, nil, map[repo.ID]repo.ID{}
	var bad []*pageFault
	for pt, err := range allPoints(ctx, p.repo, h, &bad) {
		if err != nil {
			return nil, err
		}
		v.points = append(v.points, policyPointOf(pt))
		if pt.Content.Chained() && !pt.Parent.IsZero() {
			v.parent[pt.Manifest] = pt.Parent
		}
	}

	if len(bad) > 0 {
		return nil, bad[0]
	}

	// Apply the policy. Volumes that the prune is not for keep everything.
	newest, _, err := p.repo.Newest(ctx, h)
	if err != nil {
		return nil, err
	}

	v.newest = newest.Seq
	v.keep = p.Policy.selectKept(v.points, v.newest, time.Now())
	if len(p.Names) > 0 && !slices.Contains(p.Names, h.Name) {
		for i := range v.keep {
			v.keep[i] = true
		}
	}

	return v, nil
}

// takeRemoved returns the points that are not kept, in order, and the number of the others. It reuses the memory of
// v.points, because there may be millions.
func (v *prunedVolume) takeRemoved() (gone []policyPoint, kept int) {
	gone = v.points[:0]
	for i, pt := range v.points {
		if !v.keep[i] {
			gone = append(gone, pt)
		}
	}
	kept = len(v.points) - len(gone)
	v.points, v.keep = nil, nil
	return gone, kept
}

// retirePoints removes points from the heads. A dry run only records them.
func (p *pruner) retirePoints(ctx context.Context) error {
	all, err := readHeads(ctx, p.repo)
	if err != nil {
		return err
	}

	// Heads must not be older than the pool has seen.
	if p.AcceptRollback {
		err = p.acceptRollback(ctx, all)
	} else {
		err = p.refuseRollback(ctx, all)
	}
	if err != nil {
		return err
	}

	if err := p.witness.rememberHeads(ctx, all); err != nil {
		return err
	}

	// Volumes that were named must exist.
	for _, n := range p.Names {
		if all.isBad(p.repo, n) {
			return damagedVolumeError(opRemotePrune, n, errs.New(errs.Damaged, "", "", "the list is damaged"))
		}
		if !slices.ContainsFunc(all.good, func(h repo.HeadState) bool { return h.Head.Name == n && !h.Head.Gone }) {
			return noVolumeError(errs.New(errs.NotFound, "", "", ""), p.repo, opRemotePrune, n)
		}
	}

	// Select the points of all volumes, then remove them volume by volume.
	p.retired = map[repo.ID]bool{}
	var volumes []*prunedVolume
	for _, s := range all.good {
		if s.Head.Gone {
			continue
		}
		v, err := p.readVolume(ctx, s.Head)
		var fault *pageFault
		switch {
		case errors.As(err, &fault) && isUnreadable(err) && !slices.Contains(p.Names, s.Head.Name):
			p.out.Kept += s.Head.Count() // all of its points stay: see readScene
			continue
		case err != nil:
			return damagedPageError(opRemotePrune, s.Head.Name, err)
		}
		volumes = append(volumes, v)
	}

	keepParents(volumes)
	for _, v := range volumes {
		if err := p.retireVolume(ctx, v); err != nil {
			return err
		}
	}

	return nil
}

// keepParents keeps the points without which others that stay cannot be read.
func keepParents(volumes []*prunedVolume) {
	parent := map[repo.ID]repo.ID{}
	for _, v := range volumes {
		maps.Copy(parent, v.parent)
	}

	if len(parent) == 0 {
		return
	}

	needed := map[repo.ID]bool{}
	for _, v := range volumes {
		for i, pt := range v.points {
			if !v.keep[i] {
				continue
			}
			for id := parent[pt.manifest]; !id.IsZero() && !needed[id]; id = parent[id] {
				needed[id] = true
			}
		}
	}

	for _, v := range volumes {
		for i, pt := range v.points {
			v.keep[i] = v.keep[i] || needed[pt.manifest]
		}
	}
}

// retireVolume removes the points of a volume that are not kept from its head. Points that a push adds in the meantime
// are kept, and do not change the selection: the newest point is never removed.
func (p *pruner) retireVolume(ctx context.Context, v *prunedVolume) error {
	gone, kept := v.takeRemoved()
	if len(gone) == 0 && !v.fragmented || p.DryRun {
		p.out.Kept += kept
		p.noteRetired(v.head.Name, gone)
		return nil
	}

	// If the answer to a write is lost, and another writer is faster than the next attempt, then this prune has removed
	// the points, and finds them gone.
	var removed []policyPoint
	planned, tried := v.write, false
	name := v.head.Name
	left, err := changePoints(ctx, p.repo, opRemotePrune, name, func(h *repo.Head, pages repo.PagePutter) (bool, error) {
		if h.WriteID != planned {
			// Others may have removed points: select again, so that the point that is newest now stays.
			still, missing, err := p.stillRemovable(ctx, *h, gone)
			if err != nil {
				return false, err
			}
			if tried {
				removed = append(removed, missing...)
			}
			gone, planned = still, h.WriteID
		}

		if len(gone) == 0 && !h.Fragmented() {
			return false, nil
		}

		tried = true
		return true, withoutPoints(ctx, h, pages, gone)
	})
	if err != nil {
		return err
	}

	removed = append(removed, gone...)
	slices.SortFunc(removed, func(a, b policyPoint) int { return cmp.Compare(a.seq, b.seq) })
	p.noteRetired(name, removed)
	p.out.Kept += left.Count()
	return nil
}

// stillRemovable returns those of the points in gone that may still be removed from the head as it is now, and those
// that it does not list any more.
func (p *pruner) stillRemovable(
	ctx context.Context, h repo.Head, gone []policyPoint,
) (still, missing []policyPoint, err error) {
	if h.Gone {
		return nil, gone, nil
	}

	now, err := p.readVolume(ctx, h)
	if err != nil {
		return nil, nil, err
	}

	planned := map[repo.ID]bool{}
	for _, pt := range gone {
		planned[pt.manifest] = true
	}

	listed := map[repo.ID]bool{}
	for i, pt := range now.points {
		if !planned[pt.manifest] {
			continue
		}
		listed[pt.manifest] = true
		if !now.keep[i] {
			still = append(still, pt)
		}
	}

	missing = slices.DeleteFunc(gone, func(pt policyPoint) bool { return listed[pt.manifest] })
	return still, missing, nil
}

// withoutPoints removes points from a head. The points are in order.
func withoutPoints(ctx context.Context, h *repo.Head, pages repo.PagePutter, gone []policyPoint) error {
	from := func(seq uint64) int { // place of the first point that is not before seq
		i, _ := slices.BinarySearchFunc(gone, seq, func(x policyPoint, seq uint64) int {
			switch {
			case x.seq < seq:
				return -1
			case x.seq > seq:
				return 1
			}
			return 0
		})
		return i
	}

	has := func(seq uint64) bool { i := from(seq); return i < len(gone) && gone[i].seq == seq }
	touched := func(x repo.PointPage) bool { i := from(x.First); return i < len(gone) && gone[i].seq <= x.Last }
	return pages.Edit(ctx, h, touched, func(points []repo.Point) []repo.Point {
		return slices.DeleteFunc(points, func(x repo.Point) bool { return has(x.Seq) })
	})
}

// noteRetired records points that were removed.
func (p *pruner) noteRetired(volume string, gone []policyPoint) {
	p.out.Points = slices.Grow(p.out.Points, len(gone))
	for _, pt := range gone {
		p.out.Points = append(p.out.Points, PrunedPoint{volume, pt.name, pt.at})
		p.retired[pt.manifest] = true
	}
}
