// Package replicate carries volumes to remotes and back: push, pull, verify, prune.
// A remote is an encrypted repository (package repo) in an object store. The pool keeps
// its address and this host's key to it.
//
// # Files
//
//	POOL/remotes/NAME/remote.json   description of the remote
//	POOL/remotes/NAME/identity      this host's key: an age X25519 identity
//	POOL/remotes/NAME/config        copy of the repository's config, which has its keys, sealed
//	POOL/remotes/NAME/push/HEAD     journal of an unfinished push
//
// Directories have mode 0700, files 0600.
package replicate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/linux/durable"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"

	"golang.org/x/sys/unix"
)

const (
	opAdd    = "remote add"
	opRemove = "remote rm"
	opOpen   = "open remote"

	remoteName   = "remote.json"
	identityName = "identity"
	journalDir   = "push"
	addingPrefix = ".adding-"   // a remote that is being added; no name begins with a dot
	removePrefix = ".removing-" // a remote that is being removed

	remoteFormat = 1
)

// Remote is a remote that a pool knows. The pool stores its JSON form.
type Remote struct {
	Format    int       `json:"format"`
	Name      string    `json:"name"`
	URL       string    `json:"url"`
	Mark      repo.Mark `json:"mark"`                // state of the repository when it was last opened
	Recipient string    `json:"recipient,omitempty"` // of this host's key, if the key was made for this remote
	AddedAt   time.Time `json:"added_at"`

	dir      string                              // its directory
	restored bool                                // its config was restored
	identity string                              // text of the age identity
	wrap     func(objstore.Store) objstore.Store // for tests: wraps the store below its retries
	retry    objstore.RetryOptions
	access   Access
	names    func(context.Context) ([]string, error) // see KnowNames
}

// AddRequest describes the remote to add, and how to open it.
type AddRequest struct {
	Name string
	URL  string

	// Identity is the text of an age identity (AGE-SECRET-KEY-1...), as age-keygen
	// writes it. It opens the existing repository, to give this host's new key access.
	// It is not stored.
	Identity string
	// Passphrase does the same; it also becomes a key of a new repository.
	Passphrase string
	// Config is a copy of the repository's config, to restore if that is missing or damaged. See Kit.
	Config []byte
	// Recipients are further age recipients (age1...) to give access to the repository.
	Recipients []string
	// MustExist refuses to create a repository, MustCreate to open an existing one.
	MustExist, MustCreate bool
}

// Describe describes the remote, without asking it.
func (r *Remote) Describe() api.Remote {
	return api.Remote{Name: r.Name, URL: errs.MaskURLs(r.URL), Repository: r.Mark.ID.String(), Recipient: r.Recipient,
		AddedAt: &r.AddedAt}
}

// Added is the result of Add.
type Added struct {
	api.Remote
	Created bool `json:"created"` // the repository was created

	ConfigRestored bool `json:"config_restored"` // its config was missing or damaged, and was restored

	Opened *Remote `json:"-"` // the remote, to be used
}

// Add adds a remote to the pool. It first checks that the store honours conditional requests, which everything relies
// on. If there is a repository at the URL, Add gives this host's new key access to it with the secret of the request.
// If there is none, Add creates one that this host's key and the other keys of the request open.
//
// Either the remote is added, durably, or it is not; an interrupted Add can be repeated. The host's key is durable
// before a repository depends on it.
//
// Errors: Exists, Invalid, Permission (no key opens the repository; the store refuses access), Unsupported (the store
// does not honour conditional requests), and the kinds of the store.
func Add(ctx context.Context, e *engine.Engine, q AddRequest, access Access) (Added, error) {
	// Check the request.
	if err := ref.CheckName(opAdd, q.Name); err != nil {
		return Added{}, err
	}

	if _, err := parseURL(q.URL); err != nil {
		return Added{}, err
	}

	for _, to := range q.Recipients {
		if err := repo.CheckRecipient(to); err != nil {
			return Added{}, err
		}
	}

	// Lock the directory of remotes, and refuse a name that is taken.
	top := remotesDir(e.Dir())
	unlock, err := lockRemotes(ctx, opAdd, top)
	if err != nil {
		return Added{}, err
	}

	defer unlock()

	if _, err := os.Lstat(filepath.Join(top, q.Name)); err == nil {
		return Added{}, errs.New(errs.Exists, opAdd, q.Name, "this pool already has a remote with this name").
			WithHint("choose another name")
	}

	// Make this host's key, then open or create the repository with it.
	adding := filepath.Join(top, addingPrefix+q.Name)
	r := Remote{Format: remoteFormat, Name: q.Name, URL: q.URL, AddedAt: time.Now().UTC().Truncate(time.Second),
		dir: adding, access: access}
	fresh, err := r.hostIdentity()
	if err != nil {
		return Added{}, errs.Wrap(opAdd, q.Name, err)
	}

	rp, created, needed, err := r.openOrCreate(ctx, q, hostLabel()+" "+e.PoolID()[:8], fresh)
	if err != nil {
		// Keep a key that a repository may depend on, and one left by an interrupted Add: the next Add uses it.
		if fresh && !needed {
			_ = os.RemoveAll(adding)
		}
		return Added{}, err
	}

	defer rp.Close()

	// Write the remote's files, then rename its directory: from here on the remote exists.
	r.Mark = rp.Mark()
	if err = r.keepConfig(rp); err == nil {
		err = r.saveMetadata()
	}
	if err == nil {
		err = os.Rename(adding, filepath.Join(top, q.Name))
	}
	if err == nil {
		err = durable.SyncDir(top)
	}

	r.dir = filepath.Join(top, q.Name)
	added := Added{Remote: r.Describe(), Created: created, ConfigRestored: r.restored, Opened: &r}
	return added, errs.Wrap(opAdd, q.Name, err)
}

// saveMetadata writes remote.json, durably.
func (r *Remote) saveMetadata() error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return durable.WriteFile(filepath.Join(r.dir, remoteName), append(b, '\n'))
}

// hostIdentity sets this host's key for a remote that is being added: the one that an interrupted Add left, or a new
// one, which it makes durable in the remote's directory. fresh reports whether the key is new.
func (r *Remote) hostIdentity() (fresh bool, err error) {
	// Use the key of an interrupted Add.
	path := filepath.Join(r.dir, identityName)
	left, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}

	if old := strings.TrimSpace(string(left)); old != "" {
		r.identity, r.Recipient = old, recipientOf(old)
		if _, err := repo.Identity(old); err != nil || r.Recipient == "" {
			return false, errs.New(errs.Damaged, opAdd, r.Name, "cannot read the key left by an interrupted add: %s", path).
				WithHint("remove %s and run the command again", path)
		}
		return false, nil
	}

	// Make a new key.
	text, recipient, err := repo.NewIdentity()
	if err != nil {
		return false, err
	}

	r.identity, r.Recipient = recipientComment+recipient+"\n"+text, recipient
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return false, err
	}

	if err := durable.WriteFile(path, []byte(r.identity+"\n")); err != nil {
		return false, err
	}

	return true, durable.SyncDir(filepath.Dir(r.dir))
}

// recipientComment precedes the recipient in an identity's file, as age-keygen writes it.
const recipientComment = "# public key: "

// recipientOf finds the recipient that the comment of an identity names.
func recipientOf(identity string) string {
	for line := range strings.Lines(identity) {
		if after, ok := strings.CutPrefix(line, recipientComment); ok {
			return strings.TrimSpace(after)
		}
	}
	return ""
}

var errNoKey = errors.New("this pool has no key for it")

// NoKey reports whether an Add failed because it had no key. A passphrase may help then.
func NoKey(err error) bool { return errors.Is(err, errNoKey) }

// openOrCreate opens the repository of a remote that is being added, or creates it, and adds this host's key to it
// under label. fresh says that the key is new. needed reports, even with an error, that a repository may have the key
// now.
func (r *Remote) openOrCreate(
	ctx context.Context, q AddRequest, label string, fresh bool,
) (rp *repo.Repo, created, needed bool, err error) {
	// Open the store.
	own, err := repo.Identity(r.identity)
	if err != nil {
		return nil, false, false, err
	}

	given, err := q.secrets()
	if err != nil {
		return nil, false, false, err
	}

	store, err := r.openStore(ctx, 0, !q.MustExist)
	if err != nil {
		return nil, false, false, q.hintKit(err)
	}

	defer func() {
		if err != nil {
			_ = objstore.Close(store) // the first error counts
		}
	}()

	// Try to open the repository, after restoring its config if necessary. Reading comes first, so that a refused Add
	// leaves nothing in the store.
	rp, err = repo.Open(ctx, store, own)
	if configLost(err) && len(q.Config) > 0 {
		keep := filepath.Join(r.dir, damagedDir)
		r.restored, err = putConfigBack(ctx, store, q.Config, repo.Mark{}, keep, false, given...)
		if err != nil {
			return nil, false, false, err
		}
		rp, err = repo.Open(ctx, store, own)
	}

	if refused := q.refusal(store, err, len(given) > 0); refused != nil {
		return nil, false, false, q.hintKit(refused)
	}

	// Add the keys, or create the repository.
	switch {
	case err == nil:
		err = objstore.Probe(ctx, store)
		if err == nil && !fresh { // an interrupted Add created it, perhaps without all keys
			err = addSlots(ctx, rp, q)
		}
	case repo.Locked(err):
		rp, needed, err = r.joinRepo(ctx, store, q, label, given)
	default:
		rp, needed, err = r.createRepo(ctx, store, q, label)
		created = rp != nil
	}
	if err != nil {
		if rp != nil {
			rp.Close()
		}
		return nil, created, needed, err
	}

	rp.OwnStore()
	return rp, created, needed, nil
}

// joinRepo opens a repository with the secrets of the request, and adds this host's key and the recipients of the
// request. The results are those of createRepo.
func (r *Remote) joinRepo(
	ctx context.Context, store objstore.Store, q AddRequest, label string, given []repo.Secret,
) (rp *repo.Repo, needed bool, err error) {
	if rp, err = repo.Open(ctx, store, given...); err != nil {
		return nil, false, err
	}

	if err := objstore.Probe(ctx, store); err != nil {
		return rp, false, err
	}

	if err := addSlot(ctx, rp, repo.NewSlot{Label: label, Recipient: r.Recipient}); err != nil {
		return rp, true, err
	}

	return rp, true, addSlots(ctx, rp, AddRequest{Recipients: q.Recipients})
}

// createRepo creates a repository in an empty store, with this host's key and the other keys of the request. needed
// reports, even with an error, that a repository may have this host's key now. With an error, rp may be a repository to
// close.
func (r *Remote) createRepo(
	ctx context.Context, store objstore.Store, q AddRequest, label string,
) (rp *repo.Repo, needed bool, err error) {
	if err := checkEmpty(ctx, store, q.Name); err != nil {
		return nil, false, err
	}

	if err := objstore.Probe(ctx, store); err != nil {
		return nil, false, err
	}

	rp, err = repo.Create(ctx, store, repo.NewSlot{Label: label, Recipient: r.Recipient})
	if err != nil {
		return nil, errs.KindOf(err) != errs.Exists && errs.KindOf(err) != errs.Invalid, err
	}

	return rp, true, addSlots(ctx, rp, q)
}

// refusal returns the error for a request that Add must refuse, or nil. err is the result of opening the repository
// with this host's key; given reports whether the request has a secret.
func (q AddRequest) refusal(store objstore.Store, err error, given bool) error {
	switch {
	case err == nil:
		return nil
	case repo.Locked(err) && q.MustCreate:
		return errs.New(errs.Exists, opAdd, q.Name, "a repository already exists at %s", store).
			WithHint("remove %s to open it, or use another prefix or directory", errs.Param("create"))
	case repo.Locked(err) && given:
		return nil
	case repo.Locked(err):
		return errs.New(errs.Permission, opAdd, q.Name, "there is a repository at %s, but %w", store, errNoKey).
			WithHint("provide a key with %s, or the repository's passphrase with %s or %s", errs.Param("identity", "FILE"),
				errs.Param("passphrase"), errs.Param("passphrase-file", "FILE"))
	case !errs.Is(err, errs.NotFound):
		return err
	case q.MustExist:
		return errs.New(errs.NotFound, opAdd, q.Name, "there is no repository at %s", store).
			WithHint("check the URL, or remove %s to create a new repository", errs.Param("no-create"))
	case q.Identity != "":
		return errs.New(errs.NotFound, opAdd, q.Name, "there is no repository at %s for the identity to open", store).
			WithHint("check the URL, or remove %s to create a new repository", errs.Param("identity"))
	}

	return nil
}

// hintKit replaces the hint of a NotFound error if the request is that of a recovery kit: a kit only opens a repository
// that exists, and hints that lead to a new one do not apply.
func (q AddRequest) hintKit(err error) error {
	var e *errs.Error
	if len(q.Config) > 0 && errs.Is(err, errs.NotFound) && errors.As(err, &e) {
		e.WithHint("check the URL and that the disk is mounted; if the repository has moved, run %s",
			errs.Run("remote add", q.Name, "URL", errs.Param("kit", "FILE")))
	}
	return err
}

// checkEmpty returns an error if the store has anything but leftovers of a probe.
func checkEmpty(ctx context.Context, s objstore.Store, name string) error {
	for o, err := range s.List(ctx, "") {
		if err != nil {
			return err
		}
		if !strings.HasPrefix(o.Key, "probe/") {
			return notEmpty(s, name, o.Key)
		}
	}
	return nil
}

// notEmpty returns the error for a store that has objects, but no config of a repository.
func notEmpty(s objstore.Store, name, key string) error {
	dir, _, _ := strings.Cut(key, "/")
	if slices.Contains([]string{"heads", "manifests", "segments"}, dir) {
		return errs.New(errs.Damaged, opAdd, name, "the repository at %s has lost its config", s).
			WithHint("restore the config from a recovery kit with %s, or run %s in a pool that knows this remote",
				errs.Param("kit", "FILE"), errs.Run("remote repair", "REMOTE"))
	}
	return errs.New(errs.Exists, opAdd, name, "%s is neither empty nor a repository: it contains %q", s, key).
		WithHint("use an empty directory or bucket, or another prefix in the bucket")
}

// secrets returns the secrets of the request that may open an existing repository.
func (q AddRequest) secrets() (out []repo.Secret, err error) {
	if q.Identity != "" {
		s, err := repo.Identity(q.Identity)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	if q.Passphrase != "" {
		out = append(out, repo.Passphrase(q.Passphrase))
	}
	return out, nil
}

// addSlots adds the passphrase and the recipients of the request to a repository.
func addSlots(ctx context.Context, rp *repo.Repo, q AddRequest) error {
	var slots []repo.NewSlot
	if q.Passphrase != "" {
		slots = append(slots, repo.NewSlot{Label: PassphraseLabel, Passphrase: q.Passphrase})
	}

	for _, to := range q.Recipients {
		slots = append(slots, repo.NewSlot{Label: RecipientLabel(to), Recipient: to})
	}

	for _, s := range slots {
		if err := addSlot(ctx, rp, s); err != nil {
			return err
		}
	}

	return nil
}

// addSlot adds a slot, unless the repository already has one for that recipient, or for a passphrase any one with a
// passphrase. If the label is taken, addSlot appends a number to it.
func addSlot(ctx context.Context, rp *repo.Repo, s repo.NewSlot) error {
	there, err := rp.Slots(ctx)
	if err != nil {
		return err
	}

	// Return if the key is there; collect the labels.
	labels := map[string]bool{}
	for _, i := range there {
		if i.Recipient == s.Recipient && (s.Recipient != "" || i.Kind == repo.SlotPassphrase) {
			return nil
		}
		labels[i.Label] = true
	}

	for n, label := 2, s.Label; labels[s.Label]; n++ {
		s.Label = fmt.Sprintf("%s %d", label, n)
	}

	return rp.AddSlot(ctx, s)
}

// Load reads a remote of a pool. Errors: NotFound, Damaged, TooNew, Permission.
func Load(pool, name string, access Access) (*Remote, error) {
	if err := ref.CheckName(opOpen, name); err != nil {
		return nil, err
	}

	dir := filepath.Join(remotesDir(pool), name)
	b, err := os.ReadFile(filepath.Join(dir, remoteName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, noSuchRemote(pool, name)
	}

	if err != nil {
		return nil, errs.Wrap(opOpen, name, err)
	}

	damaged := func(file, format string, args ...any) error {
		return errs.New(errs.Damaged, opOpen, name, file+": "+format, args...).
			WithHint("restore %s from a backup, or add the repository under another name with %s and another key",
				filepath.Join(dir, file), errs.Run("remote add", "NAME", "URL"))
	}

	// Parse remote.json, and the format alone first.
	r := &Remote{dir: dir, access: access}
	var v struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return nil, damaged(remoteName, "%w", err)
	}

	if v.Format > remoteFormat {
		return nil, errs.New(errs.TooNew, opOpen, name, "the remote was added by a newer pando (format %d)", v.Format).
			WithHint("upgrade pando")
	}

	if err := json.Unmarshal(b, r); err != nil {
		return nil, damaged(remoteName, "%w", err)
	}

	if r.Name != name || r.URL == "" || r.Mark.ID.IsZero() || r.Format < 1 {
		return nil, damaged(remoteName, "values are missing or belong to another remote")
	}

	// Read this host's key.
	key, err := os.ReadFile(filepath.Join(dir, identityName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, damaged(identityName, "the file with this host's key does not exist")
	}
	if err != nil {
		return nil, errs.Wrap(opOpen, name, err)
	}

	r.identity = strings.TrimSpace(string(key))
	if _, err := repo.Identity(r.identity); err != nil {
		return nil, damaged(identityName, "%v", err)
	}

	return r, nil
}

// noSuchRemote is the error about a remote that a pool does not have. It is of kind NotFound.
func noSuchRemote(pool, name string) error {
	err := errs.New(errs.NotFound, opOpen, name, "no such remote")
	if all, lerr := List(pool); lerr == nil && len(all) > 0 {
		return err.WithHint("use one of the remotes of this pool: %s", strings.Join(all, ", "))
	}
	return err.WithHint("list remotes with %s, or add this one with %s", errs.Run("remote ls"),
		errs.Run("remote add", name, "URL"))
}

// Find reads the remote of a pool with a name; "" stands for the only one. It returns the kinds of Load, and Invalid if
// name is none, or is empty while there are several.
func Find(op, pool, name string, access Access) (*Remote, error) {
	if name != "" {
		if err := ref.CheckName(op, name); err != nil {
			return nil, err
		}
		return Load(pool, name, access)
	}

	all, err := List(pool)
	if err != nil {
		return nil, err
	}
	switch len(all) {
	case 0:
		return nil, errs.New(errs.NotFound, op, "", "this pool has no remote").
			WithHint("add one with %s", errs.Run("remote add", "NAME", "URL"))
	case 1:
		return Load(pool, all[0], access)
	}

	many := errs.New(errs.Invalid, op, "", "this pool has %d remotes and none was chosen", len(all))
	if flag := map[string]string{opPush: "to", opPull: "from"}[op]; flag != "" {
		return nil, many.WithHint("choose one with %s: %s", errs.Param(flag), strings.Join(all, ", "))
	}
	return nil, many.WithHint("choose one: %s", strings.Join(all, ", "))
}

// List lists the names of a pool's remotes, in order.
func List(pool string) ([]string, error) {
	entries, err := os.ReadDir(remotesDir(pool))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}

	var out []string
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			out = append(out, e.Name())
		}
	}

	slices.Sort(out)
	return out, errs.Wrap("list remotes", pool, err)
}

// RemoveRequest names the remote to remove.
type RemoveRequest struct {
	Name  string
	Force bool // even if the repository cannot be reached

	// LoseKeys, with Force: even if no other key opens the repository, or that cannot be found out.
	LoseKeys bool
}

// Remove removes a remote from the pool: its address, this host's key, and the records of pushes. The repository does
// not change; it keeps this host's slot. Errors: NotFound; Conflict if this host's key is the only one that opens the
// repository, unless LoseKeys; those of Load and Remote.Open. With Force, the pool's copy of the config says which keys
// there are if the repository cannot be reached.
func Remove(ctx context.Context, e *engine.Engine, q RemoveRequest, access Access) error {
	top := remotesDir(e.Dir())
	if err := ref.CheckName(opRemove, q.Name); err != nil {
		return err
	}

	unlock, err := lockRemotes(ctx, opRemove, top)
	if err != nil {
		return err
	}

	defer unlock()

	// Refuse to remove the only key.
	dir := filepath.Join(top, q.Name)
	r, err := Load(e.Dir(), q.Name, access)
	if errs.Is(err, errs.NotFound) {
		return err
	}

	switch {
	case q.Force && q.LoseKeys:
	case err != nil && q.Force:
		return unknownKeys(opRemove, q.Name, err)
	case err != nil:
		return err
	default:
		if err := r.checkOtherKeys(ctx, q.Force); err != nil {
			return err
		}
	}

	// Free the name in one step, then delete the files.
	away := filepath.Join(top, removePrefix+q.Name)
	if err := os.RemoveAll(away); err != nil {
		return errs.Wrap(opRemove, q.Name, err)
	}

	if err := os.Rename(dir, away); err != nil {
		return errs.Wrap(opRemove, q.Name, err)
	}

	if err := durable.SyncDir(top); err != nil {
		return errs.Wrap(opRemove, q.Name, err)
	}

	if err := os.RemoveAll(away); err != nil {
		return errs.Wrap(opRemove, q.Name, err)
	}

	// Drop the links to the repository unless another remote uses it.
	if r == nil || r.sharedRepo(e.Dir()) {
		return nil
	}

	return e.Transfer().DropLinks(ctx, r.Mark.ID.String())
}

// sharedRepo reports whether another remote of the pool has the same repository.
func (r *Remote) sharedRepo(pool string) bool {
	names, _ := List(pool)
	for _, n := range names {
		if o, err := Load(pool, n, Access{}); err == nil && n != r.Name && o.Mark.ID == r.Mark.ID {
			return true
		}
	}
	return false
}

// IdentityFile returns the path of this host's key.
func (r *Remote) IdentityFile() string { return filepath.Join(r.dir, identityName) }

// Open opens the repository, with retries. The caller closes it. Errors: NotFound, Permission, Conflict (the repository
// is not the one that the remote was added with), Damaged (its keys were reset to an older state), and the kinds of the
// store.
func (r *Remote) Open(ctx context.Context) (*repo.Repo, error) { return r.OpenLimited(ctx, 0) }

// OpenLimited is Open with a rate limit for uploads and downloads; 0 means no limit.
func (r *Remote) OpenLimited(ctx context.Context, bytesPerSecond int64) (*repo.Repo, error) {
	store, err := r.openStore(ctx, bytesPerSecond, false)
	if err != nil {
		return nil, err
	}

	id, err := repo.Identity(r.identity)
	if err != nil {
		_ = objstore.Close(store) // the first error counts
		return nil, err
	}

	rp, err := repo.Open(ctx, store, id)
	if err != nil {
		_ = objstore.Close(store) // the first error counts
		return nil, r.hintCopy(ctx, err)
	}

	rp.OwnStore()
	if err := rp.Check(r.Mark); err != nil {
		rp.Close()
		return nil, r.hintCopy(ctx, err)
	}

	r.recordSeen(rp)
	return rp, nil
}

// recordSeen records the state of a repository, so that a later Open notices if the repository was reset to an older
// one. It ignores errors: without the record, only a later check is weaker, and the copy of config older.
func (r *Remote) recordSeen(rp *repo.Repo) {
	_ = r.keepConfig(rp)
	if m := rp.Mark(); m != r.Mark {
		r.Mark = m
		_ = r.saveMetadata()
	}
}

// openStore opens the store of the remote's URL, with retries and a rate limit.
func (r *Remote) openStore(ctx context.Context, bytesPerSecond int64, create bool) (objstore.Store, error) {
	s, err := OpenStore(ctx, r.URL, r.access, create)
	if err != nil {
		return nil, err
	}
	if r.wrap != nil {
		s = r.wrap(s)
	}
	if bytesPerSecond > 0 {
		s = objstore.Limit(s, bytesPerSecond)
	}

	o := r.retry
	if r.access.Attempts > 0 {
		o.Attempts = r.access.Attempts
	}

	o.OnRetry, o.OnAnswer = r.access.OnRetry, r.access.OnAnswer
	if !strings.HasPrefix(r.URL, "file:") {
		o.Reach = reach
	}

	return objstore.Retry(s, o), nil
}

// hostLabel returns this host's name for display.
func hostLabel() string {
	h, err := os.Hostname()
	if err != nil || h == "" {
		return "unknown host"
	}
	return h
}

// remotesDir returns the directory of a pool's remotes.
func remotesDir(pool string) string { return filepath.Join(pool, "remotes") }

// lockRemotes creates the directory of remotes if necessary, and locks it against other commands that add or remove
// remotes. It waits up to 15 s for the lock. Errors: InUse.
func lockRemotes(ctx context.Context, op, dir string) (func(), error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, errs.Wrap(op, dir, err)
	}

	f, err := os.Open(dir)
	if err != nil {
		return nil, errs.Wrap(op, dir, err)
	}

	for wait, begun := time.Millisecond, time.Now(); ; wait = min(2*wait, 100*time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}

		if !errs.IsAny(err, unix.EWOULDBLOCK, unix.EINTR) || time.Since(begun) > 15*time.Second {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, errs.New(errs.InUse, op, dir, "another pando process is adding or removing a remote").
					WithHint("retry after it finishes")
			}
			return nil, errs.Wrap(op, dir, err)
		}

		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, errs.Wrap(op, dir, ctx.Err())
		case <-time.After(wait):
		}
	}
}
