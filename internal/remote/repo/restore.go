package repo

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// ConfigRestore is a plan to restore a lost config from a copy.
type ConfigRestore struct {
	Mark    Mark   // of the copy
	Damaged []byte // config in the store, which is damaged or older than the one seen before; nil: missing

	store   objstore.Store
	raw     []byte
	version objstore.Version // of the config in the store
}

// PlanRestore checks whether the config of the repository in a store is missing or certainly damaged, and whether raw,
// an earlier [Repo.Config], can replace it: one of the secrets must open raw, and it must not be older than known (if
// that is set). raw can also replace a config that is older than known and has no key that raw lacks, as after the
// storage was restored from a backup or config from a recovery kit. Nil without an error: config exists, and is not
// known to be damaged or older. PlanRestore changes nothing.
//
// Damaged: raw is damaged, or older than known. Conflict: raw and known are of different repositories. Permission: no
// secret opens raw. NotFound: the store holds no data of a repository, for example because a disk is not mounted.
func PlanRestore(
	ctx context.Context,
	s objstore.Store,
	raw []byte,
	known Mark,
	secrets ...Secret,
) (*ConfigRestore, error) {
	const op = "restore the config of repository"

	// Check the copy.
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

	// Check the config in the store.
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

	// Make the copy follow a config that is only out of date, so that all hosts accept it as newer.
	if stale != nil {
		defer stale.wipe()
		if out.raw, err = k.encodeAfter(stale); err != nil {
			return nil, errs.Wrap(op, s.String(), err)
		}
	}

	// Read config again: it may have been damaged in transit.
	again, version, err := readConfig(ctx, s)
	if err != nil || !bytes.Equal(again, there) {
		return nil, errs.Wrap(op, s.String(), err)
	}

	out.Damaged, out.version = there, version
	return out, nil
}

// holdsSomething returns NotFound if the store holds no data of a repository.
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

// judgeConfig reports whether the config there is certainly damaged. One that neither the secrets nor the ring key of
// the copy k opens may be good, with other keys. stale is its keyring if it is good, but older than known and k.
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

	// Decrypt it with the ring key of the copy, or with the secrets.
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
		return true, nil, nil // the key is right, but the content is not
	}

	// No key opens it. It is damaged if the ring key of the copy should open it: because it has the same serial, which
	// only one state has, or a slot with the same wrapped key, because every new ring key is wrapped again.
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

// supersedes reports whether other is older than known, and k has all its master keys: then k can replace it without
// making anything unreadable.
func (k *keyring) supersedes(other *keyring, known Mark) bool {
	if known == (Mark{}) || other.id != known.ID || other.checkFollows(known) == nil {
		return false
	}
	return !slices.ContainsFunc(other.keys, func(m masterKey) bool { return k.findKey(m.id) == nil })
}

// encodeAfter encodes k with a serial higher than that of other, so that hosts that have seen other accept it as newer.
func (k *keyring) encodeAfter(other *keyring) ([]byte, error) {
	next := *k
	next.serial = max(k.serial, other.serial) + 1
	return next.encode(realEnv.randomBytes(saltSize))
}

// Do writes the copy, if config is still missing or in the damaged state that was read. Conflict: another process has
// written it since.
func (c *ConfigRestore) Do(ctx context.Context) error {
	condition := objstore.IfAbsent
	if c.Damaged != nil {
		condition = objstore.IfVersion(c.version)
	}
	_, err := c.store.Put(ctx, configKey, c.raw, condition)
	return errs.Wrap("restore the config of repository", c.store.String(), err)
}

// ConfigSerial returns the serial in the public part of a copy of config, which is not authenticated: use it only for
// copies that are trusted. Damaged, TooNew.
func ConfigSerial(raw []byte) (uint64, error) {
	c, err := decodeConfig(raw)
	return c.serial, errs.Wrap("read the copy of the config", "", err)
}

// maxSealedText is the longest text that OpenText reads.
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

// OpenText decrypts the output of SealText with the first secret that fits. Permission: no secret fits.
func OpenText(file []byte, secrets ...Secret) (string, error) {
	const op = "decrypt"
	for _, s := range secrets {
		kind := SlotRecipient
		if s.passphrase != "" {
			kind = SlotPassphrase
		}

		r := s.decrypt(file, kind)
		if r == nil {
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
