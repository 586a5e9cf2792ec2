package replicate

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// Key opens a remote's repository.
type Key struct {
	ID        string    `json:"id"`                  // ID of the key
	Label     string    `json:"label"`               // label of the key
	Kind      string    `json:"type"`                // what the key is: recipient, passphrase
	Recipient string    `json:"recipient,omitempty"` // age recipient of the key
	CreatedAt time.Time `json:"created_at"`          // time when the key was added
	ThisPool  bool      `json:"this_pool"`           // the key is this pool's own
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

// checkOtherKeys returns an error unless a key other than this host's opens the repository. The arguments are those of
// hasOtherKey.
func (r *Remote) checkOtherKeys(ctx context.Context, offline bool) error {
	other, err := r.hasOtherKey(ctx, map[string]bool{r.Recipient: true}, offline)
	switch {
	case err != nil && offline:
		return unknownKeys(opRemove, r.Name, err)
	case err != nil || other:
		return err
	}
	return errs.New(errs.Conflict, opRemove, r.Name,
		"this host's key is the only one that opens the repository: without it, nobody can read the repository").
		WithHint("add another key with %s, or give the data on the remote up with %s and %s",
			errs.Run("remote key add", r.Name), errs.Param("force"), errs.Param("lose-keys"))
}

// hasOtherKey reports whether a key opens the repository that is not among own, the recipients of some remotes. If the
// repository cannot be opened, that is an error, unless offline is set and the pool's copy of the config has such a
// key.
func (r *Remote) hasOtherKey(ctx context.Context, own map[string]bool, offline bool) (bool, error) {
	if r.Recipient == "" {
		return true, nil // the key was not made for this remote, so it exists elsewhere
	}

	slots, err := r.slots(ctx)
	other := func(s repo.SlotInfo) bool { return !own[s.Recipient] }
	if err == nil || !offline || ctx.Err() != nil {
		return slices.ContainsFunc(slots, other), err
	}

	// If the store has lost the config, a key is worth nothing without a copy of it, and only kits have one.
	lost := false
	if configLost(err) {
		if store, serr := r.openStore(ctx, 0, false); serr == nil {
			_ = objstore.Close(store) // nothing was written
			lost = true
		}
	}

	if slices.ContainsFunc(r.copiedSlots(ctx), func(s repo.SlotInfo) bool {
		return other(s) && (!lost || strings.HasPrefix(s.Label, KitLabel))
	}) {
		return true, nil
	}

	return false, err
}

// slots lists the slots of the repository.
func (r *Remote) slots(ctx context.Context) ([]repo.SlotInfo, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer rp.Close()
	return rp.Slots(ctx)
}

// copiedSlots lists the slots in the pool's copy of the config: none if there is no copy, or it is damaged.
func (r *Remote) copiedSlots(ctx context.Context) []repo.SlotInfo {
	raw, err := os.ReadFile(r.configFile())
	if err != nil {
		return nil
	}
	id, err := repo.Identity(r.identity)
	if err != nil {
		return nil
	}
	slots, _ := repo.ConfigSlots(ctx, raw, id)
	return slots
}

// CheckOtherKeys returns an error unless each repository that the remotes of a pool use can be opened without the keys
// that are in the pool. It asks the pool's copies of their configs about those that cannot be reached. Errors:
// Conflict, and that as well if an interrupted Add has left a key; those of Remote.Open and Load if it cannot find out.
func CheckOtherKeys(ctx context.Context, pool string, access Access) error {
	const op = "deinit"
	names, err := List(pool)
	if err != nil {
		return err
	}

	left, err := interruptedAdds(pool)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return errs.New(errs.Conflict, op, pool, "an interrupted remote add has left a key that may be the only one: %s",
			strings.Join(left, ", ")).
			WithHint("finish it with %s, or give up what only keys in this pool can read with %s",
				errs.Run("remote add", left[0], "URL"), errs.Param("lose-keys"))
	}

	// Two remotes may have the same repository: all keys in the pool go together.
	var all []*Remote
	own := map[string]bool{}
	for _, name := range names {
		r, err := Load(pool, name, access)
		if err != nil {
			return unknownKeys(op, name, err)
		}
		all = append(all, r)
		if r.Recipient != "" {
			own[r.Recipient] = true
		}
	}

	var lost []string
	for _, r := range all {
		other, err := r.hasOtherKey(ctx, own, true)
		if err != nil {
			return unknownKeys(op, r.Name, err)
		}
		if !other {
			lost = append(lost, r.Name)
		}
	}

	if len(lost) == 0 {
		return nil
	}
	return errs.New(errs.Conflict, op, pool, "only keys in this pool open what is stored on %s: nobody could read it",
		strings.Join(lost, ", ")).
		WithHint("write a recovery kit first with %s, or give the data on the remote up with %s",
			errs.Run("remote key export", lost[0], "FILE", errs.Param("passphrase")), errs.Param("lose-keys"))
}

// interruptedAdds lists the names of remotes whose Add was interrupted and has left a key.
func interruptedAdds(pool string) (names []string, err error) {
	entries, err := os.ReadDir(remotesDir(pool))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errs.Wrap("list remotes", pool, err)
	}

	for _, e := range entries {
		name, adding := strings.CutPrefix(e.Name(), addingPrefix)
		key, err := os.Stat(filepath.Join(remotesDir(pool), e.Name(), identityName))
		if adding && (err != nil || key.Size() > 0) && !errors.Is(err, fs.ErrNotExist) {
			names = append(names, name)
		}
	}

	return names, nil
}

// unknownKeys says that it cannot be found out whether another key opens a remote.
func unknownKeys(op, name string, err error) error {
	return errs.New(errs.KindOf(err), op, name, "cannot find out whether another key opens the remote: %v", err).
		WithHint("try again when the remote can be reached, or give up what only keys in this pool can read with %s",
			errs.Param("lose-keys"))
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
	Name       string `json:"name"`        // name that the remote had
	URL        string `json:"url"`         // address of the remote
	KeyRemoved bool   `json:"key_removed"` // this pool's key was removed from the repository

	// KeyError is why the pool's key may still be in the repository. The key is useless: its secret part was deleted.
	KeyError error `json:"-"`
}

// Forget is Remove, and also removes this pool's key from the repository if the repository can be reached and has
// another key. It removes the remote first, so that an interruption leaves at most a key in the repository that nobody
// holds.
func Forget(ctx context.Context, e *engine.Engine, q RemoveRequest, access Access) (Forgotten, error) {
	out := Forgotten{Name: q.Name}
	r, err := Load(e.Dir(), q.Name, access)
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

	if err := Remove(ctx, e, q, access); err != nil {
		return out, err
	}

	if rp != nil {
		out.KeyRemoved, out.KeyError = r.dropOwnKey(ctx, rp)
	}

	return out, nil
}
