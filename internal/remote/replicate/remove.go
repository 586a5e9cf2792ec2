package replicate

import (
	"context"
	"slices"

	"pando/internal/base/ref"
	"pando/internal/remote/repo"
)

const opForget = "remove from remote"

// Removed is what RemoveVolume did.
type Removed struct {
	Volume string   `json:"volume"`
	Points []string `json:"points"` // that are gone, the oldest first
	Whole  bool     `json:"whole"`  // the volume is gone with them
}

// RemoveVolume removes a point of a volume from a remote, or the volume with all
// its points, in any order: what was cloned from it, and what was sent as the
// difference from it, can be read as before, as a prune leaves what they need. The
// space returns with the next [Prune]. The name can be used again; the epoch goes
// on, so that an old writer stays refused. NotFound, Conflict.
func RemoveVolume(ctx context.Context, r *Remote, q ref.Ref) (Removed, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return Removed{}, err
	}
	defer rp.Close()
	return removeVolume(ctx, rp, q)
}

func removeVolume(ctx context.Context, r *repo.Repo, q ref.Ref) (Removed, error) {
	if err := ref.CheckName(opForget, q.Name); err != nil {
		return Removed{}, err
	}

	out := Removed{Volume: q.Name}
	_, err := changePoints(ctx, r, opForget, q.Name, func(h *repo.Head, pages repo.PagePutter) (bool, error) {
		out.Points, out.Whole = []string{}, q.At == ""
		if h.Gone || q.At != "" {
			p, err := resolvePoint(ctx, r, *h, opForget, q)
			if err != nil {
				return false, err
			}
			out.Points = append(out.Points, p.Name)
			err = pages.Edit(ctx, h, pageHolding(p.Seq), func(all []repo.Point) []repo.Point {
				return slices.DeleteFunc(all, func(x repo.Point) bool { return x.Seq == p.Seq })
			})
			return true, err
		}

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
