package repo

import (
	"bytes"
	"context"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"io"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// Repo is an open repository. All methods may be called concurrently. Errors of the
// store keep their kind; objects that fail authentication are Damaged; after Close
// every method that needs a key fails with Internal.
type Repo struct {
	store objstore.Store
	owned bool // Close closes the store as well
	env   env
	id    ID

	segments keyCache
	moves    moves

	refreshing sync.Mutex // held while reading config, so that one goroutine at a time does

	mu      sync.RWMutex // for all fields below; held while keys are used, so that none is wiped in use
	secrets []Secret
	ring    *keyring // nil after Close
	raw     []byte   // config as it was read or written
	version objstore.Version
	nameKey []byte
	sums    *sumKeys
	asked   bool // config was read and no session has begun since
}

// env holds the sources of variation that tests replace to get reproducible bytes.
type env struct {
	random io.Reader
	now    func() time.Time
	pack   compressor
	scrypt int // cost of a passphrase, as a power of two
}

var realEnv = env{random: rand.Reader, now: time.Now, pack: Compress, scrypt: scryptCost}

// fillRandom fills b with random bytes.
func (e env) fillRandom(b []byte) {
	if _, err := io.ReadFull(e.random, b); err != nil {
		panic(err) // crypto/rand never fails; tests provide enough bytes
	}
}

func (e env) randomBytes(n int) []byte {
	b := make([]byte, n)
	e.fillRandom(b)
	return b
}

func (e env) newID() (id ID) {
	e.fillRandom(id[:])
	return id
}

// utcNow returns the current time as it is stored: UTC, without the monotonic clock reading.
func (e env) utcNow() time.Time { return e.now().UTC().Round(0) }

// Create creates a repository in an empty store and opens it. The repository is one
// object, written only if it does not exist: of several concurrent calls one succeeds,
// and a killed process leaves either a repository or nothing. Exists: the store holds
// a repository, or anything else. Invalid: the slot cannot be created.
func Create(ctx context.Context, s objstore.Store, first NewSlot) (*Repo, error) {
	return createRepo(ctx, s, first, realEnv)
}

// createRepo is Create with another source of random bytes and of the time.
func createRepo(ctx context.Context, s objstore.Store, first NewSlot, e env) (*Repo, error) {
	const op = "create repository"
	if err := first.check(op); err != nil {
		return nil, err
	}

	// Require an empty store; a probe may have left objects.
	for o, err := range s.List(ctx, "") {
		switch {
		case err != nil:
			return nil, errs.Wrap(op, s.String(), err)
		case strings.HasPrefix(o.Key, probePrefix):
		case o.Key == configKey:
			return nil, alreadyThere(op, s)
		default:
			return nil, errs.New(errs.Exists, op, s.String(), "the store is not empty: it contains %q", o.Key).
				WithHint("use an empty bucket, or another prefix or directory in it")
		}
	}

	// Generate the keys.
	k := &keyring{
		serial:  1,
		ringKey: e.randomBytes(keySize),
		keys:    []masterKey{newMasterKey(e.randomBytes(keySize), e.utcNow())},
	}

	k.id = derivedID(k.keys[0].secret, infoRepoID)
	added, err := k.newSlot(e.newID(), first, e)
	if err != nil {
		return nil, errs.Wrap(op, first.Label, err)
	}

	k.slots = []slot{added}
	raw, err := k.encode(e.randomBytes(saltSize))
	if err != nil {
		return nil, errs.Wrap(op, s.String(), err)
	}

	// Write config, unless another process was faster.
	version, err := s.Put(ctx, configKey, raw, objstore.IfAbsent)
	if errs.Is(err, errs.Conflict) {
		return nil, alreadyThere(op, s)
	}
	if err != nil {
		return nil, errs.Wrap(op, s.String(), err)
	}

	// Open the repository.
	r := &Repo{store: s, env: e, id: k.id}
	if first.Passphrase != "" {
		r.secrets = []Secret{Passphrase(first.Passphrase)}
	}

	r.mu.Lock()
	defer r.mu.Unlock()

	r.useKeyring(k, raw, version)
	return r, nil
}

func alreadyThere(op string, s objstore.Store) error {
	return errs.New(errs.Exists, op, s.String(), "a repository already exists").
		WithHint("open it with one of its keys, or use another prefix or directory")
}

// newSlot returns a slot with the ring key wrapped for it.
func (k *keyring) newSlot(id ID, n NewSlot, e env) (slot, error) {
	wrapped, err := wrap(k.ringKey, n, e.scrypt)
	if err != nil {
		return slot{}, err
	}
	return slot{
		SlotInfo: SlotInfo{ID: id, Label: n.Label, Kind: n.kind(), Recipient: n.Recipient, CreatedAt: e.utcNow()},
		wrapped:  wrapped,
	}, nil
}

// Open opens the repository in a store with the first of its slots that one of the
// secrets fits. NotFound: the store has no repository. Permission: no secret fits.
// TooNew. Damaged. It takes one request.
//
// A caller that has opened the repository before should verify that it is still the
// same one: see [Repo.Check].
func Open(ctx context.Context, s objstore.Store, secrets ...Secret) (*Repo, error) {
	return openRepo(ctx, s, realEnv, secrets...)
}

// openRepo is Open with another source of random bytes and of the time.
func openRepo(ctx context.Context, s objstore.Store, e env, secrets ...Secret) (*Repo, error) {
	const op = "open repository"
	raw, version, err := readConfig(ctx, s)
	if errs.Is(err, errs.NotFound) {
		return nil, errs.New(errs.NotFound, op, s.String(), "no repository found").
			WithHint("check the URL, or run %s to create a repository", errs.Run("remote add"))
	}

	if err != nil {
		return nil, errs.Wrap(op, s.String(), err)
	}

	k, err := unlock(ctx, raw, secrets)
	if err != nil {
		return nil, errs.Wrap(op, s.String(), err)
	}

	r := &Repo{store: s, env: e, id: k.id, secrets: secrets}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.useKeyring(k, raw, version)
	return r, nil
}

func readConfig(ctx context.Context, s objstore.Store) ([]byte, objstore.Version, error) {
	raw, info, err := s.Get(ctx, configKey, 0, maxConfigBytes+1)
	return raw, info.Version, err
}

func unlock(ctx context.Context, raw []byte, secrets []Secret) (*keyring, error) {
	c, err := decodeConfigFor(raw, func(c publicConfig) bool { return c.opensWith(ctx, nil, secrets) })
	if err != nil {
		return nil, err
	}
	return c.unlock(secrets, ctx.Err)
}

// useKeyring replaces the keys and config of r, and wipes the old keys. r.mu must be locked.
func (r *Repo) useKeyring(k *keyring, raw []byte, version objstore.Version) {
	if r.ring != nil {
		r.ring.wipe()
	}
	r.ring, r.raw, r.version, r.asked = k, raw, version, true
	r.nameKey = derive(k.keys[0].secret, nil, infoNames, keySize)
	r.sums = newSumKeys(k.keys[0].secret)
}

// ID returns the ID of the repository. It is derived from the first master key: without
// that key nobody can create a repository with the same ID.
func (r *Repo) ID() ID { return r.id }

// Store returns the store that contains the repository.
func (r *Repo) Store() objstore.Store { return r.store }

// Config returns the object with the wrapped keys, as it was last read or written. A
// copy of it can restore a repository whose config was lost. It is useless without a
// secret that opens one of its slots.
func (r *Repo) Config() []byte {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return bytes.Clone(r.raw)
}

// KeepReserve makes sure that the store has room for what frees space: see [objstore.Reserver].
func (r *Repo) KeepReserve(ctx context.Context) error { return objstore.KeepReserve(ctx, r.store) }

// OwnStore makes Close close the store as well. It must be called before anything else uses the Repo.
func (r *Repo) OwnStore() { r.owned = true }

// Close wipes the keys. It may be called more than once.
func (r *Repo) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ring == nil {
		return
	}
	if r.owned {
		_ = objstore.Close(r.store) // completed writes are durable already
	}

	r.ring.wipe()
	clear(r.nameKey)
	r.sums.wipe()
	r.ring, r.secrets = nil, nil
	r.segments.forgetAll()
	r.moves.forgetAll()
}

// Mark records the state of a repository, to detect later that it was replaced by
// another one or put back to an older state. It contains no secrets.
type Mark struct {
	ID     ID     `json:"id"`
	Serial uint64 `json:"serial"` // of config: grows with every change of keys
	Key    ID     `json:"key"`    // the current master key
}

// Mark returns the current mark of the repository; the zero Mark after Close.
func (r *Repo) Mark() Mark {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil {
		return Mark{}
	}
	return r.ring.mark()
}

func (k *keyring) mark() Mark { return Mark{ID: k.id, Serial: k.serial, Key: k.current().id} }

// Check compares the repository with a Mark of an earlier time. Conflict: it is a
// different repository. Damaged: its keys are older than they were then, because someone
// has restored an old config or has made one without knowing the newest key.
func (r *Repo) Check(earlier Mark) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil {
		return errClosed()
	}
	return errs.Wrap("check repository", r.store.String(), r.ring.checkFollows(earlier))
}

func (k *keyring) checkFollows(m Mark) error {
	switch {
	case k.id != m.ID:
		return errs.New(errs.Conflict, "", "", "found repository %s, expected %s", k.id, m.ID).
			WithHint("check the URL; if the repository was recreated on purpose, remove the remote and add it again")
	case k.findKey(m.Key) == nil || k.serial < m.Serial:
		return errs.New(errs.Damaged, "", "", "its keys went back to an older state (serial %d, was %d)", k.serial,
			m.Serial).
			WithHint("someone with access to the store restored an old config; pando writes nothing until you remove the " +
				"remote and add it again")
	}
	return nil
}

func errClosed() error {
	return errs.New(errs.Internal, "use repository", "", "the repository is closed")
}

// Refresh reads config again, because another host may have rotated the keys. It takes
// one request. Damaged: config went back to an older state. Permission: no secret opens
// it any more.
func (r *Repo) Refresh(ctx context.Context) error {
	r.refreshing.Lock()
	defer r.refreshing.Unlock()
	return errs.Wrap("read the keys of", r.store.String(), r.refreshConfig(ctx))
}

// refreshConfig implements Refresh. r.refreshing must be locked.
func (r *Repo) refreshConfig(ctx context.Context) error {
	r.mu.RLock()
	known, secrets, closed := r.raw, r.secrets, r.ring == nil
	r.mu.RUnlock()
	if closed {
		return errClosed()
	}

	raw, version, err := readConfig(ctx, r.store)
	if err != nil {
		return err
	}

	// Decrypt a config that has changed, without holding r.mu.
	var k *keyring
	if !bytes.Equal(raw, known) {
		if k, err = r.reopenConfig(ctx, raw, secrets); err != nil {
			return err
		}
	}

	// Replace the keys, if the new config follows the known one.
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.ring == nil {
		if k != nil {
			k.wipe()
		}
		return errClosed()
	}

	if k == nil {
		r.version, r.asked = version, true
		return nil
	}

	if err := k.checkFollows(r.ring.mark()); err != nil {
		k.wipe()
		return err
	}

	if k.serial == r.ring.serial { // different bytes with the same serial
		k.wipe()
		return damaged("the config differs from the one read before with the same serial %d", r.ring.serial)
	}

	r.useKeyring(k, raw, version)
	return nil
}

// reopenConfig decrypts a config that has changed: with the known ring key, which only a
// rotation replaces, or else with the secrets.
func (r *Repo) reopenConfig(ctx context.Context, raw []byte, secrets []Secret) (*keyring, error) {
	r.mu.RLock()
	if r.ring == nil {
		r.mu.RUnlock()
		return nil, errClosed()
	}

	ringKey := bytes.Clone(r.ring.ringKey)
	r.mu.RUnlock()
	c, err := decodeConfigFor(raw, func(c publicConfig) bool { return c.opensWith(ctx, ringKey, secrets) })
	if err != nil {
		clear(ringKey)
		return nil, err
	}

	if k, err := c.openSealed(ringKey); err == nil {
		return k, nil
	}

	clear(ringKey)
	return c.unlock(secrets, ctx.Err)
}

// headKey returns the object key of a head. Keys never reveal names.
func (r *Repo) headKey(name string) (string, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil {
		return "", errClosed()
	}
	h := hmac.New(sha256.New, r.nameKey)
	h.Write([]byte(name))
	return headPrefix + ID(h.Sum(nil)[:len(ID{})]).String(), nil
}

// newSealingCipher returns a header with a fresh salt for a new object, and its cipher.
func (r *Repo) newSealingCipher(info string) (header, cipher.AEAD, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var h header
	if r.ring == nil {
		return h, nil, errClosed()
	}
	k := r.ring.current()
	h.key = k.id
	r.env.fillRandom(h.salt[:])
	return h, newAEAD(derive(k.secret, h.salt[:], info, keySize)), nil
}

// cipherFor returns the cipher that decrypts an object with header h. If the key is
// unknown it reads config again, because the keys may have been rotated.
func (r *Repo) cipherFor(ctx context.Context, h header, info string) (cipher.AEAD, error) {
	if a, err := r.knownCipher(h, info); a != nil || err != nil {
		return a, err
	}

	r.refreshing.Lock()
	defer r.refreshing.Unlock()
	if a, err := r.knownCipher(h, info); a != nil || err != nil { // another goroutine has refreshed it
		return a, err
	}

	if err := r.refreshConfig(ctx); err != nil {
		return nil, errs.Wrap("read the keys of", r.store.String(), err)
	}

	a, err := r.knownCipher(h, info)
	if a == nil && err == nil {
		err = damaged("encrypted with key %s, which the repository does not have", h.key)
	}

	return a, err
}

// knownCipher returns the cipher for an object with header h; nil if the key is unknown.
func (r *Repo) knownCipher(h header, info string) (cipher.AEAD, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil {
		return nil, errClosed()
	}
	k := r.ring.findKey(h.key)
	if k == nil {
		return nil, nil
	}
	return newAEAD(derive(k.secret, h.salt[:], info, keySize)), nil
}
