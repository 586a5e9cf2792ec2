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
// store come through as they are; Damaged is what does not authenticate; after
// Close every method that needs a key fails with Internal.
type Repo struct {
	store objstore.Store
	owned bool // Close closes the store, too
	env   env
	id    ID

	segments keyCache
	moves    moves

	refreshing sync.Mutex // one at a time asks the store for config

	mu      sync.RWMutex // for all below; held while keys are used, so that none is wiped meanwhile
	secrets []Secret
	ring    *keyring // nil after Close
	raw     []byte   // config as it was read or written
	version objstore.Version
	nameKey []byte
	sums    *sumKeys
	asked   bool // config was read and no session begun since
}

// env is what tests fix to get the same bytes each time.
type env struct {
	random io.Reader
	now    func() time.Time
	pack   compressor
	scrypt int // cost of a passphrase
}

var realEnv = env{random: rand.Reader, now: time.Now, pack: Compress, scrypt: scryptCost}

// fillRandom fills b with random bytes.
func (e env) fillRandom(b []byte) {
	if _, err := io.ReadFull(e.random, b); err != nil {
		panic(err) // crypto/rand never fails; tests give enough
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

// utcNow is now as it is stored: UTC, without what only this process knows.
func (e env) utcNow() time.Time { return e.now().UTC().Round(0) }

// Create makes a repository in an empty store and opens it. All of it is one object
// that is written if nothing is there, so of several that try one succeeds, and one
// that was killed leaves a repository or nothing. Exists if there is a repository,
// or anything else; Invalid for a slot that cannot be made.
func Create(ctx context.Context, s objstore.Store, first NewSlot) (*Repo, error) {
	return createRepo(ctx, s, first, realEnv)
}

func createRepo(ctx context.Context, s objstore.Store, first NewSlot, e env) (*Repo, error) {
	const op = "create repository"
	if err := first.check(op); err != nil {
		return nil, err
	}

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

	k := &keyring{
		version: configVersion,
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

	version, err := s.Put(ctx, configKey, raw, objstore.IfAbsent)
	if errs.Is(err, errs.Conflict) {
		return nil, alreadyThere(op, s)
	}
	if err != nil {
		return nil, errs.Wrap(op, s.String(), err)
	}

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

// newSlot wraps the ring key for one more.
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

// Open opens the repository in a store with the first of its keys that one of the
// secrets fits. NotFound: there is none. Permission: no secret fits. TooNew.
// Damaged. It costs one request.
//
// Who opens a repository again should know that it is the same: see [Repo.Check].
func Open(ctx context.Context, s objstore.Store, secrets ...Secret) (*Repo, error) {
	return openRepo(ctx, s, realEnv, secrets...)
}

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

// useKeyring makes k what the repository is opened with. r.mu must be locked.
func (r *Repo) useKeyring(k *keyring, raw []byte, version objstore.Version) {
	if r.ring != nil {
		r.ring.wipe()
	}
	r.ring, r.raw, r.version, r.asked = k, raw, version, true
	r.nameKey = derive(k.keys[0].secret, nil, infoNames, keySize)
	r.sums = newSumKeys(k.keys[0].secret)
}

// ID is the repository's ID. It is derived from its first master key: nobody who does
// not know that can make a repository of the same ID.
func (r *Repo) ID() ID { return r.id }

// Store is where the repository is.
func (r *Repo) Store() objstore.Store { return r.store }

// Config is the object with the wrapped keys, as it was last read or written. A copy
// of it, put back, saves a repository whose config was lost. It is of no use without
// a secret that it is for.
func (r *Repo) Config() []byte {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return bytes.Clone(r.raw)
}

// OwnStore makes Close close the store, too. It is called before anything else uses the Repo.
func (r *Repo) OwnStore() { r.owned = true }

// Close forgets the keys.
func (r *Repo) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ring == nil {
		return
	}
	if r.owned {
		_ = objstore.Close(r.store) // whatever was written is durable
	}

	r.ring.wipe()
	clear(r.nameKey)
	r.sums.wipe()
	r.ring, r.secrets = nil, nil
	r.segments.forgetAll()
	r.moves.forgetAll()
}

// Mark is what to remember of a repository, to see that it is still the same one and
// was not put back to what it was earlier. It holds nothing secret.
type Mark struct {
	ID     ID     `json:"id"`
	Serial uint64 `json:"serial"` // of config: grows with every change of keys
	Key    ID     `json:"key"`    // the current master key
}

// Mark is what to remember of the repository now.
func (r *Repo) Mark() Mark {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil {
		return Mark{}
	}
	return r.ring.mark()
}

func (k *keyring) mark() Mark { return Mark{ID: k.id, Serial: k.serial, Key: k.current().id} }

// Check compares with an earlier Mark of what should be the same repository.
// Conflict: it is another one. Damaged: its keys are older than they were then;
// somebody has put back an old config, or has made one without knowing the newest key.
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

// Refresh reads config again: another host may have rotated the keys. It costs one
// request. Damaged if config went back; Permission if no secret opens it any more.
func (r *Repo) Refresh(ctx context.Context) error {
	r.refreshing.Lock()
	defer r.refreshing.Unlock()
	return errs.Wrap("read the keys of", r.store.String(), r.refreshConfig(ctx))
}

// refreshConfig needs r.refreshing.
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

	var k *keyring
	if !bytes.Equal(raw, known) {
		if k, err = r.reopenConfig(ctx, raw, secrets); err != nil {
			return err
		}
	}

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

	if k.serial == r.ring.serial { // not the bytes that were known: two of one serial
		k.wipe()
		return damaged("the config differs from the one read before with the same serial %d", r.ring.serial)
	}

	r.useKeyring(k, raw, version)
	return nil
}

// reopenConfig opens a config that has changed: with the ring key that is known, since only
// a rotation makes a new one, or else with the secrets.
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

// headKey is the key of the object of a head. Names never show in keys.
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

// newSealingCipher makes a header with a fresh salt for what is to be written, and its cipher.
func (r *Repo) newSealingCipher(info string) (header, cipher.AEAD, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var h header
	if r.ring == nil {
		return h, nil, errClosed()
	}
	k := r.ring.current()
	h.version, h.key = objectVersion, k.id
	r.env.fillRandom(h.salt[:])
	return h, newAEAD(derive(k.secret, h.salt[:], info, keySize)), nil
}

// cipherFor is what opens an object that was read. A key that is not known may have
// come with a rotation since: config is read again.
func (r *Repo) cipherFor(ctx context.Context, h header, info string) (cipher.AEAD, error) {
	if a, err := r.knownCipher(h, info); a != nil || err != nil {
		return a, err
	}

	r.refreshing.Lock()
	defer r.refreshing.Unlock()
	if a, err := r.knownCipher(h, info); a != nil || err != nil { // somebody else has
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

// knownCipher is nil if the key is not known.
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
