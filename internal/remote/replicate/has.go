package replicate

import (
	"context"

	"pando/internal/base/errs"
)

// FirstOf returns the position of the first of the names that the remote has a volume or golden of; -1 if it has none.
// It opens the repository, and asks for one name after the other. The kinds of the store.
func FirstOf(ctx context.Context, r *Remote, names []string) (int, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return -1, err
	}
	defer rp.Close()

	for i, name := range names {
		h, _, err := rp.Head(ctx, name)
		switch {
		case err == nil && !h.Gone:
			return i, nil
		case err != nil && !errs.Is(err, errs.NotFound):
			return -1, err
		}
	}
	return -1, nil
}

// RepoID returns the ID of the repository of a remote, as it was when it was last opened.
func (r *Remote) RepoID() string { return r.Mark.ID.String() }
