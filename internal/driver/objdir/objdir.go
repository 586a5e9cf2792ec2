// Package objdir is the on-disk layout that drivers on ordinary filesystems
// share: where an object's data is stored, and its identity beside it.
//
//	objects/<id>.<ext>   the data: an image file, a subvolume or a directory
//	objects/<id>.meta    a file with the identity: one line of JSON
//
// The identity is written under another name and renamed, so that readers always find
// all of it or nothing. Its mode tells whether the object was committed (see
// [Dir.Commit]). FORMAT.md has the table.
//
// Names that are not of this form are not Pando's and are never touched.
package objdir

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/durable"

	"golang.org/x/sys/unix"
)

const (
	metaExt = ".meta"
	newExt  = ".new" // after that: in the making
)

// Dir is a directory of objects. It may be used concurrently.
type Dir struct {
	path string // absolute, of objects/
	pool string
	ext  string // ".img"
	f    *os.File
	st   fs.FileInfo // of f
	logs bool        // see Logs
}

// Shared are the methods of a driver that Dir implements. Drivers embed it.
type Shared interface {
	driver.Committer
	List(context.Context) iter.Seq2[driver.Object, error]
	Close() error // releases the directory, so that its filesystem can be unmounted
}

// Open opens (or, with create, makes) DIR/objects. ext is the extension of the
// data of objects, with its dot. NotFound if it does not exist.
func Open(dir, poolID, ext string, create bool) (*Dir, error) {
	p := filepath.Join(dir, "objects")
	if create {
		if err := os.Mkdir(p, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, errs.Wrap("open pool", p, err)
		}
		if err := durable.SyncDir(dir); err != nil {
			return nil, errs.Wrap("open pool", p, err)
		}
	}

	f, err := os.OpenFile(p, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, errs.Wrap("open pool", p, err)
	}

	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, errs.Wrap("open pool", p, err)
	}

	return &Dir{path: p, pool: poolID, ext: ext, f: f, st: st}, nil
}

// Path returns the absolute path of the directory.
func (d *Dir) Path() string { return d.path }

// File returns the open directory, which only Close may close. It is open since before any write, so that syncfs
// reports every write error.
func (d *Dir) File() *os.File { return d.f }

// Data returns the absolute path of an object's data.
func (d *Dir) Data(id driver.ObjectID) string { return filepath.Join(d.path, string(id)+d.ext) }

func (d *Dir) metaPath(id driver.ObjectID) string { return filepath.Join(d.path, string(id)+metaExt) }

// Inspect examines the files of an object. It fills in only part of the Condition: the
// driver adds what only it knows.
func (d *Dir) Inspect(id driver.ObjectID) (driver.Condition, fs.FileInfo, error) {
	var c driver.Condition
	if _, err := os.Lstat(d.metaPath(id) + newExt); err == nil {
		c.Leftover = true
	}

	st, err := os.Lstat(d.Data(id))
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil, nil
	}
	if err != nil {
		return c, nil, errs.Wrap("inspect", string(id), err)
	}

	c.Data = true
	return c, st, nil
}

// Sync makes the directory durable: every name made or removed before the call.
func (d *Dir) Sync() error {
	return errs.Wrap("sync", d.path, d.f.Sync())
}

// Close releases the directory.
func (d *Dir) Close() error { return d.f.Close() }

// List yields the objects, including data without an identity and identities without
// data. See driver.Driver.
func (d *Dir) List(ctx context.Context) iter.Seq2[driver.Object, error] {
	return func(yield func(driver.Object, error) bool) {
		all, err := d.listEntries(ctx)
		if err != nil {
			yield(driver.Object{}, err)
			return
		}

		for batch := range slices.Chunk(all, listBatch) {
			for _, o := range d.readObjects(batch) {
				if ctx.Err() != nil {
					yield(driver.Object{}, ctx.Err())
					return
				}
				if !yield(o, nil) {
					return
				}
			}
		}
	}
}

// listBatch is how many objects are read before they are yielded, and listWorkers how many
// of them at once.
const (
	listBatch   = 1024
	listWorkers = 4
)

// entry is an object with at least one name in the directory.
type entry struct {
	id   driver.ObjectID
	data bool // its data exists
}

// listEntries lists the objects with at least one name in the directory.
func (d *Dir) listEntries(ctx context.Context) ([]entry, error) {
	f, err := os.Open(d.path)
	if err != nil {
		return nil, errs.Wrap("list", d.path, err)
	}

	defer f.Close()

	var out []entry
	at := map[driver.ObjectID]int{} // an object has two names
	for {
		names, err := f.Readdirnames(4096)
		for _, n := range names {
			id, ok := d.ownerOf(n)
			if !ok {
				continue
			}
			i, known := at[id]
			if !known {
				i = len(out)
				at[id] = i
				out = append(out, entry{id: id})
			}
			out[i].data = out[i].data || n[driver.IDLength:] == d.ext
		}

		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err == io.EOF:
			return out, nil
		case err != nil:
			return nil, errs.Wrap("list", d.path, err)
		}
	}
}

// readObjects reads the identities of a batch.
func (d *Dir) readObjects(batch []entry) []driver.Object {
	out := make([]driver.Object, len(batch))
	var g sync.WaitGroup
	for w := range listWorkers {
		g.Go(func() {
			for i := w; i < len(batch); i += listWorkers {
				out[i] = d.readObject(batch[i])
			}
		})
	}
	g.Wait()
	return out
}

// readObject reads one identity, and checks for the data unless it was seen before: Destroy removes the identity first,
// so that an object with an identity still has its data.
func (d *Dir) readObject(e entry) driver.Object {
	o := driver.Object{ID: e.id}
	var err error
	o.Identity, o.Committed, err = d.readIdentity(e.id)
	if err == nil && !e.data {
		_, err = os.Lstat(d.Data(e.id))
	}

	switch {
	case err == nil:
		o.Whole = true
		return o
	case errors.Is(err, fs.ErrNotExist), errs.Is(err, errs.NotFound):
		return driver.Object{ID: e.id}
	}

	// An object that cannot be examined is not garbage.
	return driver.Object{ID: e.id, Err: errs.Wrap("list", string(e.id), err)}
}

// ownerOf returns the object that a directory entry belongs to.
func (d *Dir) ownerOf(name string) (driver.ObjectID, bool) {
	if len(name) <= driver.IDLength || !driver.ValidID(name[:driver.IDLength]) {
		return "", false
	}
	switch rest := name[driver.IDLength:]; {
	case rest == metaExt, rest == metaExt+newExt, rest == d.ext, strings.HasPrefix(rest, d.ext+"."):
		return driver.ObjectID(name[:driver.IDLength]), true
	}
	return "", false
}
