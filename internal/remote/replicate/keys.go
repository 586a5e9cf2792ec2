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

// Key opens a remote's repository.
type Key struct {
	ID        string    `json:"id"`
	Label     string    `json:"label"`
	Kind      string    `json:"kind"` // recipient, passphrase
	Recipient string    `json:"recipient,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	ThisPool  bool      `json:"this_pool"` // it is this pool's own key
}

// NewKey describes a key to add to a repository: exactly one of Recipient (age1...) and Passphrase is set.
type NewKey struct {
	Label      string
	Recipient  string
	Passphrase string
}

const opKey = "remote key"

// PassphraseLabel is the default label of a passphrase's key.
const PassphraseLabel = "passphrase"

// RecipientLabel returns the default label of an age recipient's key.
func RecipientLabel(recipient string) string { return recipient[:min(len(recipient), 16)] }

// Keys lists the keys of a remote's repository, the oldest first.
func Keys(ctx context.Context, r *Remote) (out []Key, err error) {
	err = r.withRepo(ctx, func(rp *repo.Repo) error {
		out, err = listKeys(ctx, r, rp)
		return err
	})
	return out, err
}

// listKeys is Keys in a repository that is open.
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

// keyOf describes a slot of a repository. own is the recipient of this pool's key.
func keyOf(s repo.SlotInfo, own string) Key {
	return Key{
		ID: s.ID.String(), Label: s.Label, Kind: string(s.Kind), Recipient: s.Recipient, CreatedAt: s.CreatedAt,
		ThisPool: s.Recipient != "" && s.Recipient == own,
	}
}

// AddKey adds a key to the repository, durably. Errors: Invalid, Exists.
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

		out, err = findKey(all, r.Name, n.Label) // labels are unique
		return err
	})

	return out, err
}

// RemoveKey removes a key from the repository: which is its ID, its label or its recipient. The holder of a removed key
// may have kept the master keys that it opens; see [RotateKeys].
//
// Errors: NotFound; Invalid if several keys match; Conflict if it is the last key, or, without force, this pool's own
// key, without which the pool cannot use the remote.
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
				WithHint("list the keys with %s; %s says how to make this pool forget the remote, with its key",
					errs.Run("remote key ls", r.Name), errs.Run("remote rm", errs.Param("help")))
		}

		id, err := repo.ParseID(out.ID)
		if err != nil {
			return err
		}

		return rp.RemoveSlot(ctx, id)
	})

	return out, err
}

// findKey finds the only key with an ID, label or recipient. remote is the remote's name, for errors.
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

// RotateKeys makes a new master key for everything that is written from now on, and gives it to all current keys.
// Objects that are already stored stay readable for them. RotateKeys calls passphrase for each key that has one. The
// rotation happens completely or not at all.
//
// Errors: Invalid (no passphrase), Permission (a wrong passphrase).
func RotateKeys(ctx context.Context, r *Remote, passphrase func(Key) (string, error)) (out []Key, err error) {
	err = r.withRepo(ctx, func(rp *repo.Repo) error {
		slots, err := rp.Slots(ctx)
		if err != nil {
			return err
		}

		// Collect the passphrases.
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

// dropOwnKey removes this pool's key from the repository if there is another key. It reports whether it did.
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

// withRepo opens the repository, calls fn, and records what was seen of the repository if fn succeeds.
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

// Forgotten is the result of Forget.
type Forgotten struct {
	Name       string `json:"name"`
	URL        string `json:"url"`
	KeyRemoved bool   `json:"key_removed"` // this pool's key was removed from the repository

	// KeyError is why the pool's key may still be in the repository. The key is useless: its secret part was deleted.
	KeyError error `json:"-"`
}

// Forget is Remove, and also removes this pool's key from the repository if the repository can be reached and has
// another key. It removes the remote first, so that an interruption leaves at most a key in the repository that nobody
// holds.
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
