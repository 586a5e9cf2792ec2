package replicate

import (
	"context"
	"errors"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// Key is a way to open a remote's repository.
type Key struct {
	ID        string    `json:"id"`
	Label     string    `json:"label"`
	Kind      string    `json:"kind"` // recipient, passphrase
	Recipient string    `json:"recipient,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	ThisPool  bool      `json:"this_pool"` // it is the key of the pool that asks
}

// NewKey asks for one more way to open a repository: exactly one of Recipient
// (age1...) and Passphrase is set.
type NewKey struct {
	Label      string
	Recipient  string
	Passphrase string
}

const opKey = "remote key"

// PassphraseLabel is what the key of a passphrase is called if nobody says otherwise.
const PassphraseLabel = "passphrase"

// RecipientLabel is what the key of an age recipient is called if nobody says
// otherwise.
func RecipientLabel(recipient string) string { return recipient[:min(len(recipient), 16)] }

// Keys lists what opens a remote's repository, the oldest first.
func Keys(ctx context.Context, r *Remote) (out []Key, err error) {
	err = r.withRepo(ctx, func(rp *repo.Repo) error {
		out, err = listKeys(ctx, r, rp)
		return err
	})
	return out, err
}

func listKeys(ctx context.Context, r *Remote, rp *repo.Repo) ([]Key, error) {
	slots, err := rp.Slots(ctx)
	if err != nil {
		return nil, err
	}
	out := []Key{}
	for _, s := range slots {
		out = append(out, keyOf(s, r.Recipient))
	}
	return out, nil
}

func keyOf(s repo.SlotInfo, own string) Key {
	return Key{
		ID: s.ID.String(), Label: s.Label, Kind: string(s.Kind), Recipient: s.Recipient, CreatedAt: s.CreatedAt,
		ThisPool: s.Recipient != "" && s.Recipient == own,
	}
}

// AddKey lets one more open the repository; durable on return. Invalid, Exists.
func AddKey(ctx context.Context, r *Remote, n NewKey) (out Key, err error) {
	err = r.withRepo(ctx, func(rp *repo.Repo) error {
		var known *errs.Error
		err := rp.AddSlot(ctx, repo.NewSlot(n))
		if errs.Is(err, errs.Exists) && errors.As(err, &known) && known.Hint == "" {
			return known.WithHint("list the keys with %s, or choose another label with %s", errs.Run("remote key ls", r.Name),
				errs.Param("label"))
		}

		if err != nil {
			return err
		}

		all, err := listKeys(ctx, r, rp)
		if err != nil {
			return err
		}

		out, err = findKey(all, r.Name, n.Label) // labels are there once
		return err
	})

	return out, err
}

// RemoveKey takes a way to open the repository away: which is its ID, its label or
// its recipient. Who had it may have kept what it opens, see [RotateKeys]. NotFound;
// Invalid if several have that label; Conflict if it is the last, or, without force,
// that of this pool, which could not use the remote any more.
func RemoveKey(ctx context.Context, r *Remote, which string, force bool) (out Key, err error) {
	err = r.withRepo(ctx, func(rp *repo.Repo) error {
		all, err := listKeys(ctx, r, rp)
		if err != nil {
			return err
		}

		if out, err = findKey(all, r.Name, which); err != nil {
			return err
		}

		if out.ThisPool && !force {
			return errs.New(errs.Conflict, opKey, which, "it is this pool's own key: without it the pool cannot use the remote").
				WithHint("remove the remote from this pool with %s, or remove the key anyway with %s",
					errs.Run("remote rm", r.Name), errs.Param("force"))
		}

		id, err := repo.ParseID(out.ID)
		if err != nil {
			return err
		}

		return rp.RemoveSlot(ctx, id)
	})

	return out, err
}

func findKey(all []Key, remote, which string) (Key, error) {
	var found []Key
	for _, k := range all {
		if k.ID == which || k.Label == which || k.Recipient == which && which != "" {
			found = append(found, k)
		}
	}

	switch len(found) {
	case 0:
		return Key{}, errs.New(errs.NotFound, opKey, which, "remote %q has no key with this ID, label or recipient", remote).
			WithHint("list the keys with %s", errs.Run("remote key ls", remote))
	case 1:
		return found[0], nil
	}

	return Key{}, errs.New(errs.Invalid, opKey, which, "%d keys match", len(found)).
		WithHint("name the key by its ID, which %s prints", errs.Run("remote key ls", remote))
}

// RotateKeys makes a new master key for all that is written from now on, which those
// that open the repository now get; what is stored stays readable for them. The
// passphrase of each key that has one is asked for. It happens in one step or not at
// all. Invalid (no passphrase), Permission (a wrong one).
func RotateKeys(ctx context.Context, r *Remote, passphrase func(Key) (string, error)) (out []Key, err error) {
	err = r.withRepo(ctx, func(rp *repo.Repo) error {
		slots, err := rp.Slots(ctx)
		if err != nil {
			return err
		}

		given := map[repo.ID]string{}
		for _, s := range slots {
			if s.Kind == repo.SlotPassphrase {
				if given[s.ID], err = passphrase(keyOf(s, "")); err != nil {
					return err
				}
			}
		}

		if err := rp.Rotate(ctx, given); err != nil {
			return err
		}

		out, err = listKeys(ctx, r, rp)
		return err
	})

	return out, err
}

// dropOwnKey removes this pool's key from the repository, if another opens it too.
// It reports whether it did.
func (r *Remote) dropOwnKey(ctx context.Context, rp *repo.Repo) (bool, error) {
	slots, err := rp.Slots(ctx)
	if err != nil {
		return false, err
	}
	i := slices.IndexFunc(slots, func(s repo.SlotInfo) bool { return s.Recipient != "" && s.Recipient == r.Recipient })
	if i < 0 || len(slots) < 2 {
		return false, nil
	}
	return true, rp.RemoveSlot(ctx, slots[i].ID)
}

// withRepo opens the repository for fn.
func (r *Remote) withRepo(ctx context.Context, fn func(*repo.Repo) error) error {
	rp, err := r.Open(ctx)
	if err != nil {
		return err
	}
	defer rp.Close()
	if err := fn(rp); err != nil {
		return err
	}
	r.recordSeen(rp) // the keys may have changed
	return nil
}

// Forgotten is what Forget did.
type Forgotten struct {
	Name       string `json:"name"`
	URL        string `json:"url"`
	KeyRemoved bool   `json:"key_removed"` // of this pool, from the repository

	// KeyError is why the pool's key may still be in the repository: it is of no use
	// to anybody, as its secret part is gone.
	KeyError error `json:"-"`
}

// Forget is Remove, and takes this pool's key out of the repository, if that can be
// reached and has another. The remote is forgotten first: who is interrupted leaves
// at most a key that nobody has.
func Forget(ctx context.Context, e *engine.Engine, q RemoveRequest) (Forgotten, error) {
	out := Forgotten{Name: q.Name}
	r, err := Load(e.Dir(), q.Name, q.Access)
	if err != nil && !q.Force {
		return out, err
	}

	var rp *repo.Repo
	if err == nil {
		out.URL = r.URL
		if rp, out.KeyError = r.Open(ctx); rp != nil {
			defer rp.Close()
		}
	}

	if err := Remove(ctx, e, q); err != nil {
		return out, err
	}

	if rp != nil {
		out.KeyRemoved, out.KeyError = r.dropOwnKey(ctx, rp)
	}

	return out, nil
}
