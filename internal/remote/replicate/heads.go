package replicate

import (
	"context"
	"errors"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/repo"
)

// headTries is the number of attempts to change a head that others write at the same time.
const headTries = 20

// changeHead changes a head by compare-and-swap: it reads, changes and writes, and
// begins again if another writer was faster. change returns false if there is
// nothing to do; it may be called several times. changeHead returns the head as it
// is then. Errors: NotFound, Conflict (others keep writing), and those of change.
func changeHead(
	ctx context.Context, r *repo.Repo, op, name string, change func(*repo.Head) (bool, error),
) (repo.Head, error) {
	return changePoints(ctx, r, op, name, func(h *repo.Head, _ repo.PagePutter) (bool, error) { return change(h) })
}

// changePoints is changeHead for changes that may rewrite pages of points.
func changePoints(
	ctx context.Context, r *repo.Repo, op, name string, change func(*repo.Head, repo.PagePutter) (bool, error),
) (repo.Head, error) {
	pages := newPageWriter(r, name)
	defer pages.endSession(ctx)

	for range headTries {
		h, v, err := r.Head(ctx, name)
		if err != nil {
			return repo.Head{}, noVolumeError(err, r, op, name)
		}

		// Change the head in memory.
		read := h
		do, err := change(&h, pages.pagePutter())
		var fault *pageFault
		if errs.Is(err, errs.NotFound) && errors.As(err, &fault) {
			if now, _, herr := r.Head(ctx, name); herr == nil && now.WriteID != read.WriteID {
				continue // another writer has replaced the page
			}
		}
		if err != nil || !do {
			return h, damagedPageError(op, name, err)
		}

		// Write it over the state that was read.
		if err := pages.checkNotFenced(read); err != nil {
			return repo.Head{}, err
		}

		_, err = r.PutHead(ctx, h, v)
		pages.noteOutcome(err)
		if err == nil {
			return h, nil
		}
		if !errs.Is(err, errs.Conflict) {
			return repo.Head{}, errs.Wrap(op, name, err)
		}
	}

	return repo.Head{}, errs.New(errs.Conflict, op, name, "other pushes and prunes keep changing it at the same time").
		WithHint("retry when they have finished")
}

// damagedPageError adds context and a hint to the error of reading a page of points, and returns other errors
// unchanged.
func damagedPageError(op, name string, err error) error {
	var fault *pageFault
	if !errors.As(err, &fault) || !isUnreadable(err) {
		return err
	}
	kind := errs.KindOf(err)
	if kind == errs.NotFound {
		kind = errs.Damaged
	}
	return errs.New(kind, op, name, "cannot read a part of its list of points on the remote: %w", err).
		WithHint("rebuild the list from the points with %s", errs.Run("remote repair", "REMOTE"))
}

// noVolumeError adds context and a hint to the error of reading a head.
func noVolumeError(err error, r *repo.Repo, op, name string) error {
	if errs.Is(err, errs.NotFound) {
		return errs.New(errs.NotFound, op, name, "no volume with this name in %s", r.Store()).
			WithHint("run %s to list the volumes on the remote", errs.Run("remote ls"))
	}
	if errs.Is(err, errs.Damaged) {
		return damagedVolumeError(op, name, err)
	}
	return errs.Wrap(op, name, err)
}

// newestOf returns the newest point of a head, and false if it has none. If the page of that point cannot be read, the
// point that was pushed last counts as the newest.
func newestOf(ctx context.Context, r *repo.Repo, h repo.Head) (repo.Point, bool, error) {
	pt, ok, err := r.Newest(ctx, h)
	var fault *pageFault
	if errors.As(err, &fault) && isUnreadable(err) {
		// The last pushed point is the best guess.
		if n := len(h.Recent); n > 0 {
			return h.Recent[n-1], true, nil
		}
	}
	return pt, ok, err
}

// resolvePoint finds the point of a head that a reference names: the newest point, or the
// newest with that name. Errors: NotFound, Damaged.
func resolvePoint(ctx context.Context, r *repo.Repo, h repo.Head, op string, q ref.Ref) (repo.Point, error) {
	if h.Gone {
		return repo.Point{}, errs.New(errs.NotFound, op, q.String(), "%s has been removed from the remote", h.Name).
			WithHint("run %s to list the volumes on the remote", errs.Run("remote ls"))
	}

	newest, any, err := newestOf(ctx, r, h)
	switch {
	case err != nil:
		return repo.Point{}, damagedPageError(op, q.Name, err)
	case !any:
		return repo.Point{}, errs.New(errs.NotFound, op, q.String(), "the remote has no points of %s", h.Name).
			WithHint("push %s again", h.Name)
	case q.At == "":
		return newest, nil
	}

	// Find the name.
	var bad []*pageFault
	for x, err := range newestFirst(ctx, r, h, nil, &bad) {
		if err != nil {
			return repo.Point{}, err
		}
		if x.Name == q.At {
			return x, nil
		}
	}

	if len(bad) > 0 { // the name may be in there
		return repo.Point{}, damagedPageError(op, q.String(), bad[0])
	}

	return repo.Point{}, errs.New(errs.NotFound, op, q.String(), "%s has no point %q on the remote", h.Name, q.At).
		WithHint("use the newest, %s, or run %s to list all points", newest.Name, errs.Run("remote ls"))
}
