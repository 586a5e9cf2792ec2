package repo

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"pando/internal/base/errs"
)

// Limits of config. They bound the resources that a hostile one can consume.
const (
	maxConfigBytes = 4 << 20
	maxSlots       = 256
	maxSlotBytes   = 8 << 10
	maxKeys        = 1024
)

// keyring is the decrypted content of config. The object has a public part and a part
// sealed under the ring key, which each slot wraps for one recipient or passphrase.
type keyring struct {
	id      ID // of the repository: derived from its first key
	serial  uint64
	ringKey []byte      // keySize; replaced at every rotation
	keys    []masterKey // at least one; the last is current
	slots   []slot
}

type masterKey struct {
	id     ID
	secret []byte // keySize
	at     time.Time
}

type slot struct {
	SlotInfo
	wrapped []byte // age file with the ring key
}

func newMasterKey(secret []byte, at time.Time) masterKey {
	return masterKey{id: derivedID(secret, infoKeyID), secret: secret, at: at}
}

func (k *keyring) current() *masterKey { return &k.keys[len(k.keys)-1] }

func (k *keyring) findKey(id ID) *masterKey {
	for i := range k.keys {
		if k.keys[i].id == id {
			return &k.keys[i]
		}
	}
	return nil
}

// wipe clears the keys, as far as Go permits.
func (k *keyring) wipe() {
	clear(k.ringKey)
	for _, m := range k.keys {
		clear(m.secret)
	}
}

// publicSlot is the unencrypted part of a slot.
type publicSlot struct {
	id      ID
	kind    SlotKind
	wrapped []byte
}

// publicConfig is the unencrypted part of config.
type publicConfig struct {
	id     ID
	serial uint64
	slots  []publicSlot
	salt   []byte
	aad    []byte // everything before the sealed part, which is bound to it
	sealed []byte
}

var slotKinds = map[byte]SlotKind{1: SlotRecipient, 2: SlotPassphrase}

func slotCode(k SlotKind) byte {
	if k == SlotRecipient {
		return 1
	}
	return 2
}

const (
	configFixed = preambleSize + 16 + 8 + 4 // before the slots
	slotFixed   = 16 + 1 + 1 + 2            // before a slot's age file
)

// decodeConfig decodes the public part. It checks the form only: the values can be
// trusted once the sealed part has been decrypted.
func decodeConfig(b []byte) (publicConfig, error) {
	var c publicConfig
	if err := checkPreamble(b, typeConfig); err != nil {
		return c, err
	}

	if len(b) < configFixed || len(b) > maxConfigBytes {
		return c, damaged("size of %d bytes is out of range", len(b))
	}

	// Decode the fixed fields.
	copy(c.id[:], b[preambleSize:])
	c.serial = binary.LittleEndian.Uint64(b[preambleSize+16:])
	count := int(binary.LittleEndian.Uint16(b[preambleSize+24:]))
	if b[configFixed-2] != 0 || b[configFixed-1] != 0 {
		return c, damaged("reserved bytes are not zero")
	}
	if count == 0 || count > maxSlots {
		return c, damaged("it declares %d keys", count)
	}

	// Decode the slots.
	rest := b[configFixed:]
	for range count {
		if len(rest) < slotFixed {
			return c, damaged("truncated in a key slot")
		}

		s := publicSlot{id: ID(rest[:16])}
		kind, known := slotKinds[rest[16]]
		size := int(binary.LittleEndian.Uint16(rest[18:]))
		switch {
		case !known:
			return c, damaged("a key slot is of unknown kind %d", rest[16])
		case rest[17] != 0:
			return c, damaged("reserved bytes are not zero")
		case size > maxSlotBytes || size > len(rest)-slotFixed:
			return c, damaged("a key slot declares %d bytes", size)
		}

		s.kind = kind
		s.wrapped = rest[slotFixed : slotFixed+size]
		rest = rest[slotFixed+size:]
		c.slots = append(c.slots, s)
	}

	// The rest is the salt and the sealed part.
	if len(rest) < saltSize+tagSize {
		return c, damaged("truncated before the sealed part")
	}

	c.salt = rest[:saltSize]
	c.sealed = rest[saltSize:]
	c.aad = b[:len(b)-len(c.sealed)]
	return c, nil
}

// decodeConfigFor is decodeConfig, but reports a config whose version number was changed after it was written as
// Damaged instead of TooNew. opens reports whether a config can be decrypted.
func decodeConfigFor(raw []byte, opens func(publicConfig) bool) (publicConfig, error) {
	c, err := decodeConfig(raw)
	if !errs.Is(err, errs.TooNew) {
		return c, err
	}
	if known, derr := decodeConfig(withKnownVersion(raw)); derr == nil && opens(known) {
		return c, changedVersion(raw)
	}
	return c, err
}

// sealedConfig is the JSON in the sealed part.
type sealedConfig struct {
	Keys  []sealedKey  `json:"keys"`
	Slots []sealedSlot `json:"slots"`
}

type sealedKey struct {
	Secret []byte    `json:"key"`
	At     time.Time `json:"at"`
}

type sealedSlot struct {
	ID        ID        `json:"id"`
	Label     string    `json:"label"`
	Recipient string    `json:"recipient,omitempty"`
	At        time.Time `json:"at"`
}

// encode returns the object. salt must not have been used before.
func (k *keyring) encode(salt []byte) ([]byte, error) {
	if len(k.slots) == 0 || len(k.slots) > maxSlots {
		return nil, errs.New(errs.Invalid, "", "", "a repository must have between 1 and %d keys", maxSlots)
	}

	if len(k.keys) > maxKeys {
		return nil, errs.New(errs.Invalid, "", "", "the master key cannot be rotated more than %d times", maxKeys-1).
			WithHint("push to a new remote: %s", errs.Run("remote add", "NAME", "URL"))
	}

	// Write the public part, and collect the descriptions of the slots.
	b := putPreamble(nil, typeConfig)
	b = append(b, k.id[:]...)
	b = binary.LittleEndian.AppendUint64(b, k.serial)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(k.slots)))
	b = append(b, 0, 0)
	var private sealedConfig
	for _, s := range k.slots {
		if len(s.wrapped) > maxSlotBytes {
			return nil, errs.New(errs.Internal, "", "", "key %q takes %d bytes", s.Label, len(s.wrapped))
		}
		b = append(b, s.ID[:]...)
		b = append(b, slotCode(s.Kind), 0)
		b = binary.LittleEndian.AppendUint16(b, uint16(len(s.wrapped)))
		b = append(b, s.wrapped...)
		private.Slots = append(private.Slots, sealedSlot{ID: s.ID, Label: s.Label, Recipient: s.Recipient, At: s.CreatedAt})
	}

	// Seal the keys and the descriptions.
	for _, m := range k.keys {
		private.Keys = append(private.Keys, sealedKey{Secret: m.secret, At: m.at})
	}

	plain, err := json.Marshal(private)
	if err != nil {
		return nil, errs.New(errs.Internal, "", "", "%v", err)
	}

	b = append(b, salt...)
	b = newAEAD(derive(k.ringKey, salt, infoConfig, keySize)).Seal(b, zeroNonce, plain, b)
	clear(plain)
	if len(b) > maxConfigBytes {
		return nil, badInput("", "", "the config would take %d bytes, over the limit of %d", len(b), maxConfigBytes)
	}

	return b, nil
}

// openSealed decrypts the sealed part. The keyring keeps ringKey.
func (c publicConfig) openSealed(ringKey []byte) (*keyring, error) {
	plain, err := newAEAD(derive(ringKey, c.salt, infoConfig, keySize)).Open(nil, zeroNonce, c.sealed, c.aad)
	if err != nil {
		return nil, damaged("authentication failed: the content is not what was written")
	}

	defer clear(plain)
	var private sealedConfig
	if err := json.Unmarshal(plain, &private); err != nil {
		return nil, damaged("cannot parse the sealed part: %v", err)
	}

	k := &keyring{id: c.id, serial: c.serial, ringKey: ringKey}
	if err := k.loadSealed(c, private); err != nil {
		for _, key := range private.Keys {
			clear(key.Secret)
		}
		return nil, err
	}

	return k, nil
}

// loadSealed adds the decrypted keys and slots to k, after checking that they are consistent with the public part.
func (k *keyring) loadSealed(c publicConfig, private sealedConfig) error {
	// Load the master keys.
	if len(private.Keys) == 0 || len(private.Keys) > maxKeys {
		return damaged("%d master keys are out of range", len(private.Keys))
	}

	for _, key := range private.Keys {
		if len(key.Secret) != keySize {
			return damaged("a master key is %d bytes long", len(key.Secret))
		}
		m := newMasterKey(key.Secret, key.At)
		if k.findKey(m.id) != nil {
			return damaged("a master key is listed twice")
		}
		k.keys = append(k.keys, m)
	}

	// Nobody can make a config with this ID without the first key, so an ID that was
	// recorded when the remote was added can be trusted to mean these keys.
	if derivedID(k.keys[0].secret, infoRepoID) != k.id {
		return damaged("the keys do not belong to repository %s", k.id)
	}
	if len(private.Slots) != len(c.slots) {
		return damaged("it has %d key slots but describes %d", len(c.slots), len(private.Slots))
	}

	// Load the slots.
	seen := map[ID]bool{}
	for i, s := range private.Slots {
		public := c.slots[i]
		if s.ID != public.id || seen[s.ID] || (s.Recipient != "") != (public.kind == SlotRecipient) {
			return damaged("key slot %d does not match its description", i)
		}
		seen[s.ID] = true
		k.slots = append(k.slots, slot{
			SlotInfo: SlotInfo{ID: s.ID, Label: s.Label, Kind: public.kind, Recipient: s.Recipient, CreatedAt: s.At},
			wrapped:  append([]byte(nil), public.wrapped...),
		})
	}

	return nil
}

// unlock decrypts the config through the first slot that one of the secrets fits. Permission: no secret fits.
func (c publicConfig) unlock(secrets []Secret, canceled func() error) (*keyring, error) {
	// Skip the kinds of slots that no secret is for.
	kinds := map[SlotKind]bool{}
	for _, s := range secrets {
		if len(s.identities) > 0 {
			kinds[SlotRecipient] = true
		}
		if s.passphrase != "" {
			kinds[SlotPassphrase] = true
		}
	}

	// Try identities first: each takes a fraction of a millisecond, a passphrase about a second.
	for _, kind := range []SlotKind{SlotRecipient, SlotPassphrase} {
		if !kinds[kind] {
			continue
		}

		for _, s := range c.slots {
			if s.kind != kind {
				continue
			}

			if err := canceled(); err != nil {
				return nil, err
			}

			ringKey, err := unwrap(s.wrapped, s.kind, secrets, keySize)
			if err != nil {
				return nil, err
			}
			if ringKey == nil {
				continue
			}

			k, err := c.openSealed(ringKey)
			if err != nil {
				clear(ringKey)
			}

			return k, err
		}
	}

	return nil, errs.New(errs.Permission, "", "", "%w", &lockedError{whyLocked(c, kinds)}).
		WithHint("on a host that can open it, run %s for this host's recipient, or use the right passphrase",
			errs.Run("remote key add"))
}

// opensWith reports whether ringKey, if it is not nil, or one of the secrets decrypts the config.
func (c publicConfig) opensWith(ctx context.Context, ringKey []byte, secrets []Secret) bool {
	k, err := (*keyring)(nil), error(nil)
	if ringKey != nil {
		k, err = c.openSealed(bytes.Clone(ringKey))
	}
	if k == nil {
		k, err = c.unlock(secrets, ctx.Err)
	}
	if err != nil {
		return false
	}

	k.wipe()
	return true
}

// lockedError is the cause of the error about a repository that no secret opens.
type lockedError struct{ why string }

func (l *lockedError) Error() string { return l.why }

// Locked reports whether err means that the repository exists but none of the secrets
// opens it. A store that denies access also returns Permission, but is not Locked.
func Locked(err error) bool {
	var l *lockedError
	return errors.As(err, &l)
}

func whyLocked(c publicConfig, tried map[SlotKind]bool) string {
	has := map[SlotKind]int{}
	for _, s := range c.slots {
		has[s.kind]++
	}

	keys := fmt.Sprintf("the repository accepts %s and %s",
		errs.Plural(has[SlotRecipient], "recipient"), errs.Plural(has[SlotPassphrase], "passphrase"))

	switch {
	case len(tried) == 0:
		return "no identity or passphrase was given; " + keys
	case len(tried) == 1 && tried[SlotRecipient]:
		return "none of its keys is for this identity; " + keys
	case len(tried) == 1:
		return "wrong passphrase; " + keys
	}

	return "neither the identity nor the passphrase opens it; " + keys
}
