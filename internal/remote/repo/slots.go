package repo

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// Slots lists who can open the repository, in the order in which they were added.
func (r *Repo) Slots(ctx context.Context) ([]SlotInfo, error) {
	if err := r.Refresh(ctx); err != nil {
		return nil, err
	}

	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil {
		return nil, errClosed()
	}

	var infos []SlotInfo
	for _, s := range r.ring.slots {
		infos = append(infos, s.SlotInfo)
	}

	return infos, nil
}

// AddSlot lets one more open the repository. Exists if the label or the recipient is
// there already. It is one compare-and-swap: it has happened, or not.
func (r *Repo) AddSlot(ctx context.Context, n NewSlot) error {
	const op = "add key"
	if err := n.check(op); err != nil {
		return err
	}

	id := r.env.newID()
	return errs.Wrap(op, n.Label, r.changeConfig(ctx, func(k *keyring) error {
		for _, s := range k.slots {
			if s.ID == id {
				return errDone // an earlier try of ours, whose answer was lost
			}
			if s.Label == n.Label {
				return errs.New(errs.Exists, "", "", "a key with this label already exists")
			}
			if n.Recipient != "" && s.Recipient == n.Recipient {
				return errs.New(errs.Exists, "", "", "the recipient already has a key, %q", s.Label)
			}
		}

		added, err := k.newSlot(id, n, r.env)
		if err != nil {
			return err
		}

		k.slots = append(k.slots, added)
		return nil
	}))
}

// RemoveSlot takes a way to open the repository away: NotFound if it is not there,
// Conflict if it is the last. Who could open it may have kept the keys: [Repo.Rotate]
// keeps new data from them, and only the store can keep old data from them.
func (r *Repo) RemoveSlot(ctx context.Context, id ID) error {
	tried := false
	return errs.Wrap("remove key", id.String(), r.changeConfig(ctx, func(k *keyring) error {
		i := slices.IndexFunc(k.slots, func(s slot) bool { return s.ID == id })
		switch {
		case i < 0 && tried:
			return errDone
		case i < 0:
			return errs.New(errs.NotFound, "", "", "the repository has no such key")
		case len(k.slots) == 1:
			return errs.New(errs.Conflict, "", "", "this is the last key; without it nobody can read the repository").
				WithHint("add another key first: %s", errs.Run("remote key add"))
		}

		k.slots = slices.Delete(k.slots, i, i+1)
		tried = true
		return nil
	}))
}

// Rotate makes a new master key, for all that is written from now on; what is stored
// stays under its key, which stays in the ring. Every slot is wrapped anew: those of
// recipients by what is known of them, those of passphrases need their passphrase.
// Invalid if one is missing, Permission if one is wrong. It is one compare-and-swap:
// it has happened, or not. Other hosts that have the repository open notice when they
// begin a session, or read what was written under the new key.
func (r *Repo) Rotate(ctx context.Context, passphrases map[ID]string) error {
	const op = "rotate the keys of"
	secret, at := r.env.randomBytes(keySize), r.env.utcNow()
	defer clear(secret)

	added := newMasterKey(secret, at).id
	return errs.Wrap(op, r.store.String(), r.changeConfig(ctx, func(k *keyring) error {
		if k.findKey(added) != nil {
			return errDone // an earlier try of ours, whose answer was lost
		}

		old := k.ringKey
		k.ringKey = r.env.randomBytes(keySize)
		defer clear(old)

		for i := range k.slots {
			s := &k.slots[i]
			n := NewSlot{Label: s.Label, Recipient: s.Recipient}
			if s.Kind == SlotPassphrase {
				n.Passphrase = passphrases[s.ID]
				if n.Passphrase == "" {
					return errs.New(errs.Invalid, "", "", "the passphrase of key %q is required", s.Label).
						WithHint("enter the passphrase, or remove the key first")
				}

				// A mistyped one would become the new passphrase.
				opened, err := unwrap(s.wrapped, s.Kind, []Secret{Passphrase(n.Passphrase)}, keySize)
				same := err == nil && bytes.Equal(opened, old)
				clear(opened)
				if !same {
					return errs.New(errs.Permission, "", "", "wrong passphrase for key %q", s.Label)
				}
			}

			if err := ctx.Err(); err != nil {
				return err
			}

			wrapped, err := wrap(k.ringKey, n, r.env.scrypt)
			if err != nil {
				return err
			}

			s.wrapped = wrapped
		}

		k.keys = append(k.keys, newMasterKey(bytes.Clone(secret), at))
		return nil
	}))
}

// Upgrade makes the repository one of the newest version, if it is not: objects of newer formats may be written from
// then on, and programs that do not know them refuse the whole repository (TooNew) instead of a part of it. Every
// writer calls it before it writes the first such object. It is one compare-and-swap, and costs nothing once it is
// done. What is in the repository stays as it is.
func (r *Repo) Upgrade(ctx context.Context) error {
	version, err := r.Version()
	if err != nil || version >= configVersion {
		return err
	}
	return errs.Wrap("upgrade repository", r.store.String(), r.changeConfig(ctx, func(k *keyring) error {
		if k.version >= configVersion {
			return errDone
		}
		k.version = configVersion
		return nil
	}))
}

// Version is the version of the repository as its config was last read or written.
func (r *Repo) Version() (int, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil {
		return 0, errClosed()
	}
	return int(r.ring.version), nil
}

// errDone is of an edit that has nothing to do any more.
var errDone = errors.New("done already")

// changeTries: each of so many had to lose against another change of the keys.
const changeTries = 8

// changeConfig rewrites config by compare-and-swap with what edit makes of it. If somebody
// else was faster, edit is called again with what they left. edit gets a copy.
func (r *Repo) changeConfig(ctx context.Context, edit func(*keyring) error) error {
	r.refreshing.Lock()
	defer r.refreshing.Unlock()
	for try := 0; ; try++ {
		if err := r.refreshConfig(ctx); err != nil {
			return err
		}
		done, err := r.tryChangeConfig(ctx, edit)
		if done || (err != nil && !errs.Is(err, errs.Conflict)) || (err != nil && try == changeTries) {
			return err
		}

		// So that two that started together do not stay in step.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(1+int(r.env.randomBytes(1)[0])) * time.Millisecond << min(try, 4) / 4):
		}
	}
}

// tryChangeConfig reports done if there is no use in another try.
func (r *Repo) tryChangeConfig(ctx context.Context, edit func(*keyring) error) (done bool, err error) {
	r.mu.RLock()
	if r.ring == nil {
		r.mu.RUnlock()
		return true, errClosed()
	}

	k, version := r.ring.clone(), r.version
	r.mu.RUnlock()
	defer func() {
		if err != nil {
			k.wipe()
		}
	}()

	k.serial++
	if err := edit(k); errors.Is(err, errDone) {
		k.wipe()
		return true, nil
	} else if err != nil {
		return true, err
	}

	raw, err := k.encode(r.env.randomBytes(saltSize))
	if err != nil {
		return true, err
	}

	next, err := r.store.Put(ctx, configKey, raw, objstore.IfVersion(version))
	if err != nil {
		return false, err
	}

	r.mu.Lock()
	defer r.mu.Unlock()

	if r.ring == nil {
		k.wipe()
		return true, nil // closed meanwhile; config is written
	}

	r.useKeyring(k, raw, next)
	return true, nil
}

// clone copies all that wipe clears and edits change.
func (k *keyring) clone() *keyring {
	c := *k
	c.ringKey = bytes.Clone(k.ringKey)
	c.keys = slices.Clone(k.keys)
	for i := range c.keys {
		c.keys[i].secret = bytes.Clone(c.keys[i].secret)
	}
	c.slots = slices.Clone(k.slots)
	return &c
}
