package replicate

import (
	"context"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// Pages of points are deleted by the same rules as manifests: if they were listed, no head names them, and they were
// not written under an existing session. Pages are never pinned: a reader that finds one gone reads the head again.

// readPoints adds the manifests that the heads of a scene name. A head with a page that cannot be read counts as
// damaged from then on, because its points are not known. It returns false if a head was changed since it was read.
func (p *pruner) readPoints(ctx context.Context, now *scene) (bool, error) {
	var good []repo.HeadState
	count := 0
	for _, h := range now.heads {
		count += h.Head.Count()
	}

	now.manifests = make([]repo.ID, 0, count)
	for _, h := range now.heads {
		fault, err := p.addNamedManifests(ctx, h.Head, now)
		if err != nil {
			return false, err
		}

		if fault == nil {
			good = append(good, h)
			continue
		}

		// A page cannot be read. If the head has changed since, the scene is out of date.
		is, _, err := p.repo.Head(ctx, h.Head.Name)
		if err != nil && !isUnreadable(err) {
			return false, err
		}
		if err != nil || is.WriteID != h.Head.WriteID {
			return false, nil
		}

		id, err := p.repo.HeadID(h.Head.Name)
		if err != nil {
			return false, err
		}

		now.damaged = append(now.damaged, DamagedHead{
			Object: fault.Page.Object(), Volume: h.Head.Name, Reason: fault.Error(), id: id, err: fault,
		})
	}

	now.heads = good
	return true, nil
}

// addNamedManifests adds the manifests that a head names, exactly as it was read. It returns the first fault of a page.
func (p *pruner) addNamedManifests(ctx context.Context, h repo.Head, now *scene) (*pageFault, error) {
	var bad []*pageFault
	for read := range p.repo.ReadPages(ctx, h, h.Pages) {
		if read.Err != nil && !isUnreadable(read.Err) {
			return nil, read.Err
		}
		appendPageFault(&bad, read.Err)
		for _, pt := range read.Points {
			now.manifests = append(now.manifests, pt.Manifest)
		}
	}

	for _, pt := range h.Recent {
		now.manifests = append(now.manifests, pt.Manifest)
	}

	if len(bad) > 0 {
		return bad[0], nil
	}

	return nil, nil
}

// listPages lists all pages of points.
func listPages(ctx context.Context, r *repo.Repo) (out []repo.ID, err error) {
	for id, err := range r.PageIDs(ctx) {
		if err != nil {
			return nil, err
		}
		out = append(out, id)
	}
	return out, nil
}

// removePages deletes the listed pages that are garbage.
func (p *pruner) removePages(ctx context.Context, listed []repo.ID, now scene) error {
	if len(p.out.Damaged) > 0 {
		return nil // a damaged head may name them
	}

	named := map[repo.ID]bool{}
	for _, h := range now.heads {
		for _, page := range h.Head.Pages {
			named[page.ID] = true
		}
	}

	writing := slices.ContainsFunc(now.sessions, func(s repo.SessionState) bool { return s.Session.Kind == repo.Push })
	return eachOf(ctx, listed, func(ctx context.Context, id repo.ID) error {
		if named[id] {
			return nil
		}

		if writing { // a session may be about to commit a head that names it
			session, err := p.repo.PageSession(ctx, id)
			if isUnreadable(err) && !errs.Is(err, errs.NotFound) {
				return nil // its session is not known: it stays while any push is under way
			}
			if err != nil && !errs.Is(err, errs.NotFound) {
				return err
			}
			if now.hasSession(session) {
				return nil
			}
		}

		return p.repo.DeletePage(ctx, id)
	})
}
