package repo

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"

	"filippo.io/age"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// ConfigRestore is how a copy of config is put back into a repository that has lost it.
type ConfigRestore struct {
	Mark    Mark   // of the copy
	Damaged []byte // what is there in its place, damaged or older than what was seen; nil: nothing

	store   objstore.Store
	raw     []byte
	version objstore.Version // of what is there
}

// PlanRestore looks whether the config of the repository in a store is missing, or is certainly damaged, and whether
// raw, an earlier [Repo.Config], may take its place: one of the secrets opens it, and it is not older than known (if
// that is set). So may it if the config there is older than known, as after a copy of the storage or of a recovery kit
// was put back, and has no key that raw lacks. nil without an error: there is a config, and it is not known to be
// damaged or older. It changes nothing.
//
// Damaged: raw is, or is older than known. Conflict: raw is of another repository than known. Permission: no secret
// opens raw. NotFound: the store holds nothing of a repository, as a disk that is not mounted.
func PlanRestore(
	ctx context.Context,
	s objstore.Store,
	raw []byte,
	known Mark,
	secrets ...Secret,
) (*ConfigRestore, error) {
	const op = "restore the config of repository"
	k, err := unlock(ctx, raw, secrets)
	if err != nil {
		return nil, errs.Wrap(op, s.String(), err)
	}

	defer k.wipe()

	if known != (Mark{}) {
		if err := k.checkFollows(known); err != nil {
			return nil, errs.Wrap(op, s.String(), err)
		}
	}

	out := &ConfigRestore{Mark: k.mark(), store: s, raw: raw}
	there, _, err := readConfig(ctx, s)
	switch {
	case errs.Is(err, errs.NotFound):
		if err := holdsSomething(ctx, s); err != nil {
			return nil, errs.Wrap(op, s.String(), err)
		}
		return out, nil
	case err != nil:
		return nil, errs.Wrap(op, s.String(), err)
	}

	bad, stale, err := judgeConfig(ctx, there, raw, k, known, secrets)
	if !bad && stale == nil || err != nil {
		return nil, errs.Wrap(op, s.String(), err)
	}

	if stale != nil {
		defer stale.wipe()
		if out.raw, err = k.encodeAfter(stale); err != nil {
			return nil, errs.Wrap(op, s.String(), err)
		}
	}

	// What was read may have been damaged on its way.
	again, version, err := readConfig(ctx, s)
	if err != nil || !bytes.Equal(again, there) {
		return nil, errs.Wrap(op, s.String(), err)
	}

	out.Damaged, out.version = there, version
	return out, nil
}

// holdsSomething is NotFound if nothing of a repository is in a store.
func holdsSomething(ctx context.Context, s objstore.Store) error {
	for o, err := range s.List(ctx, "") {
		if err != nil {
			return err
		}
		if !strings.HasPrefix(o.Key, probePrefix) {
			return nil
		}
	}
	return errs.New(errs.NotFound, "", "", "the store holds no data of a repository").
		WithHint("check the URL, and that the disk is mounted")
}

// judgeConfig reports whether a config is certainly not as it was written. One that other keys open than the secrets and
// that of the copy k may be good. stale is the config if it is good, but older than known and than k.
func judgeConfig(
	ctx context.Context, there, raw []byte, k *keyring, known Mark, secrets []Secret,
) (bad bool, stale *keyring, err error) {
	c, err := decodeConfigFor(there, func(c publicConfig) bool { return c.opensWith(ctx, k.ringKey, secrets) })
	if err != nil {
		if errs.Is(err, errs.Damaged) {
			return true, nil, nil
		}
		return false, nil, err // of a newer pando
	}

	other, err := c.openSealed(bytes.Clone(k.ringKey))
	if err != nil {
		other, err = c.unlock(secrets, ctx.Err)
	}

	switch {
	case err == nil && k.supersedes(other, known):
		return false, other, nil
	case err == nil:
		other.wipe()
		return false, nil, nil
	case errs.Is(err, errs.Damaged):
		return true, nil, nil // its key is right, and what it opens is not
	}

	// Each state has one serial, and a ring key is wrapped anew when it changes: either says that the ring key of the copy
	// must open it.
	own, err := decodeConfig(raw)
	if err != nil {
		return false, nil, err
	}
	if c.id == own.id && c.serial == own.serial {
		return true, nil, nil
	}

	for _, a := range c.slots {
		for _, b := range own.slots {
			if a.id == b.id && bytes.Equal(a.wrapped, b.wrapped) {
				return true, nil, nil
			}
		}
	}

	return false, nil, nil
}

// supersedes reports whether a config is older than known, and k has all its master keys: then nothing becomes
// unreadable with k in its place.
func (k *keyring) supersedes(other *keyring, known Mark) bool {
	if known == (Mark{}) || other.id != known.ID || other.checkFollows(known) == nil {
		return false
	}
	return !slices.ContainsFunc(other.keys, func(m masterKey) bool { return k.findKey(m.id) == nil })
}

// encodeAfter is the config of k as one that follows another: whoever has seen that takes it for newer.
func (k *keyring) encodeAfter(other *keyring) ([]byte, error) {
	next := *k
	next.serial = max(k.serial, other.serial) + 1
	next.version = max(k.version, other.version)
	return next.encode(realEnv.randomBytes(saltSize))
}

// Do puts the copy back: where nothing is, or over just the state that was seen to be damaged. Conflict: somebody has
// written it since.
func (c *ConfigRestore) Do(ctx context.Context) error {
	condition := objstore.IfAbsent
	if c.Damaged != nil {
		condition = objstore.IfVersion(c.version)
	}
	_, err := c.store.Put(ctx, configKey, c.raw, condition)
	return errs.Wrap("restore the config of repository", c.store.String(), err)
}

// ConfigSerial is the serial that a copy of config says it has: whoever trusts it must trust the copy. Damaged, TooNew.
func ConfigSerial(raw []byte) (uint64, error) {
	c, err := decodeConfig(raw)
	return c.serial, errs.Wrap("read the copy of the config", "", err)
}

// maxSealedText bounds what OpenText reads.
const maxSealedText = 64 << 10

// SealText encrypts a text as an age file, for the recipient or the passphrase of to.
func SealText(text string, to NewSlot) ([]byte, error) {
	const op = "encrypt for"
	if err := to.check(op); err != nil {
		return nil, err
	}
	out, err := wrap([]byte(text), to, scryptCost)
	return out, errs.Wrap(op, to.Label, err)
}

// OpenText decrypts an age file that SealText made with the first of the secrets that fits. Permission: none does.
func OpenText(file []byte, secrets ...Secret) (string, error) {
	const op = "decrypt"
	for _, s := range secrets {
		with := s.identities
		if s.passphrase != "" {
			i, err := age.NewScryptIdentity(s.passphrase)
			if err != nil {
				continue
			}
			i.SetMaxWorkFactor(scryptCost)
			with = []age.Identity{i}
		}

		if len(with) == 0 {
			continue
		}

		r, err := age.Decrypt(bytes.NewReader(file), with...)
		if err != nil {
			continue
		}

		text, err := io.ReadAll(io.LimitReader(r, maxSealedText))
		if err != nil {
			return "", errs.Wrap(op, "", damaged("%v", err))
		}

		return string(text), nil
	}

	return "", errs.New(errs.Permission, op, "", "neither the passphrase nor the identity opens it")
}
