package replicate

import (
	"context"
	"slices"

	"pando/internal/base/ref"
	"pando/internal/remote/repo"
)

const opForget = "remove from remote"

// Removed is the result of RemoveVolume.
type Removed struct {
	Volume string   `json:"volume"`
	Points []string `json:"points"` // that were removed, the oldest first
	Whole  bool     `json:"whole"`  // the volume was removed with them
}

// RemoveVolume removes a point of a volume, or the volume with all its points, from a remote. The order of removals
// does not matter: points that were cloned from it, or sent as the difference from it, stay readable, because a prune
// keeps what they need. The next [Prune] frees the space. The name can be used again; its epoch keeps counting, so that
// an old writer stays refused.
//
// Errors: NotFound, Conflict.
func RemoveVolume(ctx context.Context, r *Remote, q ref.Ref) (Removed, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return Removed{}, err
	}
	defer rp.Close()
	return removeVolume(ctx, rp, q)
}

// removeVolume is RemoveVolume in a repository that is open.
func removeVolume(ctx context.Context, r *repo.Repo, q ref.Ref) (Removed, error) {
	if err := ref.CheckName(opForget, q.Name); err != nil {
		return Removed{}, err
	}

	out := Removed{Volume: q.Name}
	_, err := changePoints(ctx, r, opForget, q.Name, func(h *repo.Head, pages repo.PagePutter) (bool, error) {
		out.Points, out.Whole = []string{}, q.At == ""

		// Remove one point. Of a volume that is already removed, pointOf returns the error.
		if h.Gone || q.At != "" {
			p, err := resolvePoint(ctx, r, *h, opForget, q)
			if err != nil {
				return false, err
			}
			out.Points = append(out.Points, p.Name)
			wasNewest := p.Seq == h.NewestSeq()
			err = pages.Edit(ctx, h, pageHolding(p.Seq), func(all []repo.Point) []repo.Point {
				return slices.DeleteFunc(all, func(x repo.Point) bool { return x.Seq == p.Seq })
			})
			if err == nil && wasNewest {
				err = findLatest(ctx, r, h)
			}
			return true, err
		}

		// Remove the volume with all its points.
		for p, err := range allPoints(ctx, r, *h, nil) {
			if err != nil {
				return false, err
			}
			out.Points = append(out.Points, p.Name)
		}

		h.Recent, h.Pages, h.Gone = nil, nil, true
		return true, nil
	})
	if err != nil {
		return Removed{}, err
	}

	return out, nil
}

// findLatest finds the newest state of a head whose newest point was removed. It reads all pages, except those that
// cannot be read.
func findLatest(ctx context.Context, r *repo.Repo, h *repo.Head) error {
	var newest repo.Point
	for p, err := range allPoints(ctx, r, *h, nil) {
		if err != nil {
			return err
		}
		if newest.Seq == 0 || p.StateOrder.Compare(newest.StateOrder) >= 0 {
			newest = p
		}
	}
	h.Latest = newest.Seq
	return nil
}
