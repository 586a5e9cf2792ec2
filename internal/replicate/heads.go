package replicate

import (
	"context"

	"pando/internal/errs"
	"pando/internal/ref"
	"pando/internal/repo"
)

// headTries is how often a change of a head is tried that others write, too.
const headTries = 20

// changeHead changes a head by compare-and-swap: it reads, changes and writes, and
// begins again if somebody else was faster. change returns false if there is
// nothing to do; it may be called several times. The head is returned as it is
// then. NotFound, Conflict (others do not stop writing), and change's errors.
func changeHead(ctx context.Context, r *repo.Repo, op, name string, change func(*repo.Head) (bool, error)) (repo.Head, error) {
	for range headTries {
		h, v, err := r.Head(ctx, name)
		if err != nil {
			return repo.Head{}, noVolume(err, r, op, name)
		}
		do, err := change(&h)
		if err != nil || !do {
			return h, err
		}
		_, err = r.PutHead(ctx, h, v)
		if err == nil {
			return h, nil
		}
		if !errs.Is(err, errs.Conflict) {
			return repo.Head{}, errs.Wrap(op, name, err)
		}
	}
	return repo.Head{}, errs.New(errs.Conflict, op, name, "others keep writing it at the same time").
		WithHint("try again")
}

// noVolume words the error of reading a head.
func noVolume(err error, r *repo.Repo, op, name string) error {
	if errs.Is(err, errs.NotFound) {
		return errs.New(errs.NotFound, op, name, "no volume of this name is in %s", r.Store()).
			WithHint("see %s", errs.Run("remote ls"))
	}
	if errs.Is(err, errs.Damaged) {
		return damagedVolume(op, name, err)
	}
	return errs.Wrap(op, name, err)
}

// pointOf finds what a reference names in a head: the newest point, or the newest
// of that name. NotFound.
func pointOf(h repo.Head, op string, q ref.Ref) (repo.Point, error) {
	if i := h.Newest(); q.At == "" && i >= 0 && !h.Gone {
		return h.Recent[i], nil
	}
	for i := len(h.Recent) - 1; i >= 0 && !h.Gone; i-- {
		if h.Recent[i].Name == q.At {
			return h.Recent[i], nil
		}
	}
	switch {
	case h.Gone:
		return repo.Point{}, errs.New(errs.NotFound, op, q.String(), "%s has been removed from the remote", h.Name).
			WithHint("see %s", errs.Run("remote ls"))
	case len(h.Recent) == 0:
		return repo.Point{}, errs.New(errs.NotFound, op, q.String(), "the remote has no point of %s", h.Name).
			WithHint("push it again")
	}
	return repo.Point{}, errs.New(errs.NotFound, op, q.String(), "%s has no point %s in the remote", h.Name, q.At).
		WithHint("the newest is %s; see %s", h.Recent[h.Newest()].Name, errs.Run("remote ls"))
}

// lists reports whether a head lists a manifest.
func lists(h repo.Head, id repo.ID) bool {
	for _, p := range h.Recent {
		if p.Manifest == id {
			return !h.Gone
		}
	}
	return false
}
