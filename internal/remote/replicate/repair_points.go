package replicate

import (
	"cmp"
	"context"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// pointsFault is a head with pages of points that cannot be read.
type pointsFault struct {
	head repo.Head
	bad  []*pageFault
}

// notePageFaults records pages of a head that cannot be read.
func (x *repairer) notePageFaults(h repo.Head, bad []*pageFault) {
	if len(bad) > 0 {
		x.faults = append(x.faults, pointsFault{h, bad})
		x.out.Checked--
	}
}

// repairPages rebuilds unreadable pages of points of a head from the manifests of its volume that no head names. The
// rest of the head stays unchanged.
func (x *repairer) repairPages(ctx context.Context, f pointsFault, now scene) (RepairedVolume, error) {
	out := RepairedVolume{
		Volume: f.head.Name, Object: f.bad[0].Page.Object(), Part: true, Missing: errs.Is(f.bad[0], errs.NotFound),
		Points: []string{}, Broken: []string{}, Reason: f.bad[0].Error(), Writer: x.isWriter(f.head),
	}

	// Find the manifests.
	var found []*repo.Manifest
	for _, m := range x.manifests {
		if m.Volume == f.head.Name && !now.hasSession(m.Session) {
			found = append(found, m)
		}
	}

	found = x.inStateOrder(found)

	// Distribute them over the pages.
	again := map[repo.ID][]repo.Point{}
	for _, fault := range f.bad {
		if errs.Is(fault, errs.TooNew) {
			return out, nil // a newer pando can read it
		}
		var points []repo.Point
		points, found = x.fillPage(fault.Page, found)
		again[fault.Page.ID] = points
		for _, pt := range points {
			if x.whole[pt.Manifest] {
				out.Points = append(out.Points, pt.Name)
			} else {
				out.Broken = append(out.Broken, pt.Name)
			}
		}
	}

	if x.DryRun {
		out.Repaired = true
		return out, nil
	}

	// Write the pages, and replace the unreadable ones in the head.
	_, err := changePoints(ctx, x.repo, opRepair, f.head.Name, func(h *repo.Head, pages repo.PagePutter) (bool, error) {
		var left []repo.PointPage
		for _, p := range h.Pages {
			points, lost := again[p.ID]
			if !lost {
				left = append(left, p)
				continue
			}
			if len(points) == 0 {
				continue
			}
			made, err := pages.PutPages(ctx, h.Name, points)
			if err != nil {
				return false, err
			}
			left = append(left, made...)
		}

		lost := h.Latest != 0 && slices.ContainsFunc(h.Pages, func(p repo.PointPage) bool {
			_, is := again[p.ID]
			return is && pageHolding(h.Latest)(p)
		})
		h.Pages = left
		if lost { // points have got other numbers
			return true, findLatest(ctx, x.repo, h)
		}
		return true, nil
	})

	out.Repaired = err == nil
	return out, err
}

// isWriter reports whether this pool may push a volume.
func (x *repairer) isWriter(h repo.Head) bool { return x.e != nil && h.Writer.Pool == x.writer.Pool }

// fillPage takes those of the manifests, which are in order, that may have been in a page, and gives their points the
// numbers of the page. It returns the other manifests in left. Points that were removed but not yet pruned may be among
// those it takes; if there are too many, it prefers complete ones.
func (x *repairer) fillPage(page repo.PointPage, found []*repo.Manifest) (points []repo.Point, left []*repo.Manifest) {
	var fit []*repo.Manifest
	for _, m := range found {
		if page.Near(m.CreatedAt) {
			fit = append(fit, m)
		} else {
			left = append(left, m)
		}
	}

	if room := page.Last - page.First + 1; uint64(len(fit)) > room {
		place := map[repo.ID]int{}
		for i, m := range fit {
			place[m.ID] = i
		}
		slices.SortStableFunc(fit, func(a, b *repo.Manifest) int {
			return cmp.Compare(rankOf(x.whole[b.ID]), rankOf(x.whole[a.ID]))
		})
		left = append(left, fit[room:]...)
		fit = fit[:room]
		slices.SortFunc(fit, func(a, b *repo.Manifest) int { return cmp.Compare(place[a.ID], place[b.ID]) })
	}

	for i, m := range fit {
		points = append(points, pointFrom(m, page.First+uint64(i)))
	}

	return points, left
}

// rankOf orders complete points above others.
func rankOf(whole bool) int {
	if whole {
		return 1
	}
	return 0
}
