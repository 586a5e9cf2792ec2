package replicate

import (
	"context"
	"slices"

	"pando/internal/errs"
	"pando/internal/repo"
)

// retire takes points out of the heads. A dry run only notes them.
func (p *pruner) retire(ctx context.Context) error {
	all, err := readHeads(ctx, p.repo)
	if err != nil {
		return err
	}
	if p.AcceptRollback {
		err = p.acceptRollback(ctx, all)
	} else {
		err = p.refuseRollback(all)
	}
	if err != nil {
		return err
	}
	if err := p.memory.see(ctx, p.Pool, p.repo, all); err != nil {
		return err
	}
	heads := all.good
	for _, n := range p.Names {
		if all.isBad(p.repo, n) {
			return damagedVolume(opRemotePrune, n, errs.New(errs.Damaged, "", "", "it is damaged"))
		}
		if !slices.ContainsFunc(heads, func(h repo.HeadState) bool { return h.Head.Name == n && !h.Head.Gone }) {
			return noVolume(errs.New(errs.NotFound, "", "", ""), p.repo, opRemotePrune, n)
		}
	}
	p.retired = map[repo.ID]bool{}
	going := p.plan(heads)
	for _, s := range heads {
		h := s.Head
		if h.Gone {
			continue
		}
		gone := going[h.Name]
		if len(gone) == 0 {
			p.out.Kept += len(h.Recent)
			continue
		}
		left := h
		if !p.DryRun {
			left, err = changeHead(ctx, p.repo, opRemotePrune, h.Name, func(h *repo.Head) (bool, error) {
				// Others may have removed points meanwhile: what is the newest now stays.
				var left []repo.Point
				for i, keep := range p.Policy.keeps(*h) {
					if keep || !gone[h.Recent[i].Manifest] {
						left = append(left, h.Recent[i])
					}
				}
				less := len(left) < len(h.Recent)
				h.Recent = left
				return less, nil
			})
			if err != nil {
				return err
			}
		}
		for _, pt := range h.Recent {
			if gone[pt.Manifest] && (p.DryRun || !lists(left, pt.Manifest)) {
				p.out.Points = append(p.out.Points, PrunedPoint{h.Name, pt.Name, pt.CreatedAt})
				p.retired[pt.Manifest] = true
			}
		}
		p.out.Kept += len(left.Recent)
		if p.DryRun {
			p.out.Kept -= len(gone)
		}
	}
	return nil
}

// plan says which points go, by volume. The newest never does, so what a push adds
// meanwhile makes no difference but to be kept.
func (p *pruner) plan(heads []repo.HeadState) map[string]map[repo.ID]bool {
	going := map[string]map[repo.ID]bool{}
	parent := map[repo.ID]repo.ID{}
	needed := map[repo.ID]bool{} // by a point that stays
	for _, h := range heads {
		for _, pt := range h.Head.Recent {
			if pt.Content.Chained() && !pt.Parent.IsZero() {
				parent[pt.Manifest] = pt.Parent
			}
		}
	}
	for _, s := range heads {
		h := s.Head
		keep := p.Policy.keeps(h)
		for i, pt := range h.Recent {
			if !keep[i] && (len(p.Names) == 0 || slices.Contains(p.Names, h.Name)) {
				if going[h.Name] == nil {
					going[h.Name] = map[repo.ID]bool{}
				}
				going[h.Name][pt.Manifest] = true
				continue
			}
			for id := parent[pt.Manifest]; !id.IsZero() && !needed[id]; id = parent[id] {
				needed[id] = true
			}
		}
	}
	for _, ids := range going {
		for id := range ids {
			if needed[id] {
				delete(ids, id)
			}
		}
	}
	return going
}
