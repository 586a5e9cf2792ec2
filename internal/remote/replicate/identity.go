package replicate

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/durable"
	"pando/internal/remote/repo"

	"golang.org/x/sys/unix"
)

const opWriter = "remote writer"

const identityFormat = 1

// writerIdentity is the content of POOL/writer/identity: the ID under which the pool writes heads, if it is not the
// pool's own ID.
type writerIdentity struct {
	Format int       `json:"format"`
	ID     string    `json:"id"`
	MadeAt time.Time `json:"made_at"`
}

// writerOf returns the pool as a writer of heads, with the pool's ID or the one that NewWriter gave it. Errors:
// Damaged, TooNew.
func writerOf(e *engine.Engine) (repo.Writer, error) {
	me := repo.Writer{Pool: e.PoolID(), Host: hostLabel()}
	path := filepath.Join(e.Dir(), writerDir, identityFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return me, nil
	}
	if err != nil {
		return me, errs.Wrap(opWriter, path, err)
	}

	var id writerIdentity
	err = json.Unmarshal(b, &id)
	switch {
	case err == nil && id.Format > identityFormat:
		return me, errs.New(errs.TooNew, opWriter, path, "a newer pando wrote this pool's writer identity (format %d)",
			id.Format).
			WithHint("upgrade pando")
	case err != nil || id.Format < 1 || id.ID == "":
		return me, errs.New(errs.Damaged, opWriter, path, "cannot read the pool's writer identity").
			WithHint("create a new one with %s", errs.Run("remote writer", errs.Param("new")))
	}

	me.Pool = id.ID
	return me, nil
}

// WriterIdentity is the identity under which a pool writes volumes on remotes.
type WriterIdentity struct {
	ID   string `json:"id"`   // ID under which the pool writes
	Host string `json:"host"` // name of the host
	New  bool   `json:"new"`  // the identity has just been created
	// ID that the pool had before; absent: it could not be read
	Previous string `json:"previous,omitempty"`
}

// Writer returns the identity of a pool. Errors: Damaged, TooNew.
func Writer(e *engine.Engine) (WriterIdentity, error) {
	me, err := writerOf(e)
	return WriterIdentity{ID: me.Pool, Host: me.Host}, err
}

// NewWriter gives a pool an identity of its own. From then on, volumes on remotes that it wrote under the old identity
// belong to the pool of which this one is a copy, or to no pool. This pool can take them over. Interrupted pushes are
// abandoned, because the other pool may resume them; the next pushes start from the beginning. The new identity is
// durable on return. InUse: a push is under way.
func NewWriter(ctx context.Context, e *engine.Engine) (WriterIdentity, error) {
	unlock, err := lockRemotes(ctx, opWriter, remotesDir(e.Dir()))
	if err != nil {
		return WriterIdentity{}, err
	}

	defer unlock()

	old, err := writerOf(e)
	if errs.Is(err, errs.TooNew) {
		return WriterIdentity{}, err
	}

	out := WriterIdentity{ID: string(driver.NewID()), Host: old.Host, New: true}
	if err == nil {
		out.Previous = old.Pool
	}

	// Remove the journals of interrupted pushes first: no process may find them together with the new identity.
	paths, unlockAll, err := lockJournals(e.Dir())
	if err != nil {
		return WriterIdentity{}, err
	}

	defer unlockAll()

	for _, path := range paths {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return WriterIdentity{}, errs.Wrap(opWriter, path, err)
		}
		if err := durable.SyncDir(filepath.Dir(path)); err != nil {
			return WriterIdentity{}, errs.Wrap(opWriter, path, err)
		}
	}

	// Write the identity.
	if err := putIdentity(e.Dir(), out.ID); err != nil {
		return WriterIdentity{}, errs.Wrap(opWriter, e.Dir(), err)
	}

	return out, nil
}

// putIdentity writes an identity. It is durable on return.
func putIdentity(pool, id string) error {
	dir := filepath.Join(pool, writerDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}

	content := writerIdentity{Format: identityFormat, ID: id, MadeAt: time.Now().UTC().Truncate(time.Second)}
	b, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return err
	}

	if err := durable.WriteFile(filepath.Join(dir, identityFile), append(b, '\n')); err != nil {
		return err
	}

	return durable.SyncDir(pool)
}

// lockJournals locks the journals of all unfinished pushes, and returns their paths. InUse: one of the pushes is under
// way.
func lockJournals(pool string) (paths []string, unlock func(), err error) {
	var files []*os.File
	unlock = func() {
		for _, f := range files {
			_ = f.Close()
		}
	}

	paths, err = filepath.Glob(filepath.Join(escapeGlob(remotesDir(pool)), "*", journalDir, "*"))
	for _, path := range paths {
		f, oerr := os.OpenFile(path, os.O_RDWR, 0)
		if errors.Is(oerr, fs.ErrNotExist) {
			continue
		}

		if oerr == nil {
			files = append(files, f)
			oerr = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		}
		if errors.Is(oerr, unix.EWOULDBLOCK) {
			err = errs.New(errs.InUse, opWriter, strings.TrimPrefix(path, remotesDir(pool)+"/"), "another pando is pushing").
				WithHint("wait until it finishes, or stop it")
			break
		}

		if err = errs.Wrap(opWriter, path, oerr); err != nil {
			break
		}
	}
	if err != nil {
		unlock()
		return nil, nil, err
	}

	return paths, unlock, nil
}
