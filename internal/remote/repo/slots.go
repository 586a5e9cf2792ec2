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

// Slots lists the slots that can open the repository, in the order in which they were added.
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

// AddSlot adds a slot that can open the repository. Exists: a slot with this label or
// recipient exists. The change is one compare-and-swap, so it is atomic.
func (r *Repo) AddSlot(ctx context.Context, n NewSlot) error {
	const op = "add key"
	if err := n.check(op); err != nil {
		return err
	}

	id := r.env.newID()
	return errs.Wrap(op, n.Label, r.changeConfig(ctx, func(k *keyring) error {
		for _, s := range k.slots {
			if s.ID == id {
				return errDone // an earlier attempt succeeded, but its response was lost
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

// RemoveSlot removes a slot. NotFound: the slot does not exist. Conflict: it is the
// last. Its owner may have kept the keys: [Repo.Rotate] keeps new data from them, and
// only the store can keep old data from them.
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

// Rotate creates a new master key for everything written from now on. Existing data
// stays under its old key, which stays in the ring. Every slot is wrapped again: slots
// of recipients need nothing else, slots of passphrases need their passphrase. Invalid:
// a passphrase is missing. Permission: one is wrong. The change is one compare-and-swap,
// so it is atomic. Other hosts that have the repository open notice it when they begin a
// session, or read data that was written under the new key.
func (r *Repo) Rotate(ctx context.Context, passphrases map[ID]string) error {
	const op = "rotate the keys of"
	secret, at := r.env.randomBytes(keySize), r.env.utcNow()
	defer clear(secret)

	added := newMasterKey(secret, at).id
	return errs.Wrap(op, r.store.String(), r.changeConfig(ctx, func(k *keyring) error {
		if k.findKey(added) != nil {
			return errDone // an earlier attempt succeeded, but its response was lost
		}

		// Wrap a new ring key for every slot.
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

				// Check the passphrase: a mistyped one would become the new passphrase.
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

		// Add the new master key.
		k.keys = append(k.keys, newMasterKey(bytes.Clone(secret), at))
		return nil
	}))
}

// errDone is returned by an edit that has nothing left to do.
var errDone = errors.New("done already")

// changeTries is how many attempts at changing config may lose against other changes.
const changeTries = 8

// changeConfig applies edit to a copy of the keyring and writes it by compare-and-swap. If
// another process was faster, it calls edit again with the new state.
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

		// Wait for a random time, so that two processes that started together do not stay in step.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(1+int(r.env.randomBytes(1)[0])) * time.Millisecond << min(try, 4) / 4):
		}
	}
}

// tryChangeConfig makes one attempt at changeConfig. done means that another attempt is useless.
func (r *Repo) tryChangeConfig(ctx context.Context, edit func(*keyring) error) (done bool, err error) {
	r.mu.RLock()
	if r.ring == nil {
		r.mu.RUnlock()
		return true, errClosed()
	}

	// Edit a copy.
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

	// Write it, and use it from now on.
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
		return true, nil // closed in the meantime; config is written
	}

	r.useKeyring(k, raw, next)
	return true, nil
}

// clone returns a copy that shares nothing that wipe clears or edits change.
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
