package replicate

import (
	"context"
	"slices"

	"pando/internal/base/logs"
	"pando/internal/base/ref"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

const opForget = "remove from remote"

// Removed is the result of RemoveVolume.
type Removed struct {
	Volume string   `json:"volume"`  // name of the volume
	Points []string `json:"removed"` // names of the points that were removed, the oldest first
	Whole  bool     `json:"whole"`   // the volume was removed with them
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
	return removeVolume(objstore.WithReserve(ctx), rp, q)
}

// keepReserve makes sure that a remote which gets full has room for removals. A failure only means that it may not.
func keepReserve(ctx context.Context, rp *repo.Repo) {
	if err := rp.KeepReserve(ctx); err != nil {
		logs.From(ctx).WarnContext(ctx, "no reserve on the remote", "error", err)
	}
}

// removeVolume is RemoveVolume in a repository that is open.
func removeVolume(ctx context.Context, r *repo.Repo, q ref.Ref) (Removed, error) {
	if err := ref.CheckName(opForget, q.Name); err != nil {
		return Removed{}, err
	}

	names, err := []string(nil), error(nil)
	if q.At == "" {
		names, err = removeAllPoints(ctx, r, q)
	} else {
		names, err = removeOnePoint(ctx, r, q)
	}
	if err != nil {
		return Removed{}, err
	}
	return Removed{Volume: q.Name, Points: names, Whole: q.At == ""}, nil
}

// removeOnePoint removes the point that a reference names when it is read first. If a write conflicts with another, the
// write may have happened all the same (see objstore.Retry): a point that is gone then was removed, and another with
// its name stays.
func removeOnePoint(ctx context.Context, r *repo.Repo, q ref.Ref) (names []string, err error) {
	var p repo.Point
	_, err = changePoints(ctx, r, opForget, q.Name, func(h *repo.Head, pages repo.PagePutter) (bool, error) {
		if names == nil {
			var err error
			if p, err = resolvePoint(ctx, r, *h, opForget, q); err != nil {
				return false, err
			}
			names = []string{p.Name}
		}

		wasNewest, removed := p.Seq == h.NewestSeq(), false
		err := pages.Edit(ctx, h, pageHolding(p.Seq), func(all []repo.Point) []repo.Point {
			left := slices.DeleteFunc(slices.Clone(all), func(x repo.Point) bool { return x.Seq == p.Seq })
			removed = removed || len(left) < len(all)
			return left
		})
		if err == nil && wasNewest {
			err = findLatest(ctx, r, h)
		}
		return removed, err
	})
	return names, err
}

// removeAllPoints removes a volume with all its points, and with those that are pushed in the meantime. A write that
// conflicts with another may have happened all the same, as in removeOnePoint.
func removeAllPoints(ctx context.Context, r *repo.Repo, q ref.Ref) (names []string, err error) {
	names = []string{}
	var seen map[uint64]bool
	_, err = changePoints(ctx, r, opForget, q.Name, func(h *repo.Head, _ repo.PagePutter) (bool, error) {
		// It must exist, unless an earlier attempt has removed it.
		if h.Gone {
			if seen != nil {
				return false, nil
			}
			_, err := resolvePoint(ctx, r, *h, opForget, q)
			return false, err
		}

		// Note the names of points that no earlier attempt has noted.
		if seen == nil {
			seen = map[uint64]bool{}
		}
		for p, err := range allPoints(ctx, r, *h, nil) {
			if err != nil {
				return false, err
			}
			if !seen[p.Seq] {
				seen[p.Seq] = true
				names = append(names, p.Name)
			}
		}

		h.Recent, h.Pages, h.Gone = nil, nil, true
		return true, nil
	})
	return names, err
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
