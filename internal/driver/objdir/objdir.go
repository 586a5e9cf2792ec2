// Package objdir is the on-disk layout that drivers on ordinary filesystems
// share: where an object's data lies, and its identity beside it.
//
//	objects/<id>.<ext>   the data: an image file, a subvolume or a directory
//	objects/<id>.meta    a symbolic link whose target is the identity as JSON
//
// The identity is a symbolic link because symlink(2) makes it whole in one
// step, without a data block and on every filesystem, and because one fsync of
// the directory then covers both. `readlink` shows it. FORMAT.md has the table.
//
// Names that are not of this form are not Pando's and are never touched.
package objdir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/driver"
	"pando/internal/durable"
	"pando/internal/errs"

	"golang.org/x/sys/unix"
)

const metaExt = ".meta"

// maxIdentityBytes is the longest target that a symbolic link can have on
// Linux (PATH_MAX includes the terminating NUL); XFS allows 1,023.
const maxIdentityBytes = 1023

// Dir is a directory of objects. It may be used concurrently.
type Dir struct {
	path string // absolute, of objects/
	pool string
	ext  string // ".img"
	f    *os.File
}

// Open opens (or, with create, makes) DIR/objects. ext is the extension of the
// data of objects, with its dot. NotFound if it is not there.
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
	return &Dir{path: p, pool: poolID, ext: ext, f: f}, nil
}

// Path is the absolute path of the directory.
func (d *Dir) Path() string { return d.path }

// Data is the absolute path of an object's data.
func (d *Dir) Data(id driver.ObjectID) string { return filepath.Join(d.path, string(id)+d.ext) }

func (d *Dir) meta(id driver.ObjectID) string { return filepath.Join(d.path, string(id)+metaExt) }

// Put writes the identity, which makes the object whole. The caller has made
// the data; Put does not sync. Exists if there is one already, Invalid if it
// could not be read back.
func (d *Dir) Put(id driver.Identity) error {
	b, err := d.encode(id)
	if err != nil {
		return err
	}
	return errs.Wrap("write identity", string(id.ID), os.Symlink(string(b), d.meta(id.ID)))
}

// Check reports whether Put could write the identity, as far as that can be told
// before. Invalid.
func (d *Dir) Check(id driver.Identity) error {
	_, err := d.encode(id)
	return err
}

// Replace puts a new identity in the place of the old one, atomically and
// durably. NotFound if there was none.
func (d *Dir) Replace(id driver.Identity) error {
	if _, err := d.Get(id.ID); err != nil && !errs.Is(err, errs.Damaged) {
		return err
	}
	return d.Force(id)
}

// Force is Replace whether or not there is an identity that can be read.
func (d *Dir) Force(id driver.Identity) error {
	b, err := d.encode(id)
	if err != nil {
		return err
	}
	// The temporary name carries the ID, so that Remove and List know it.
	tmp := d.meta(id.ID) + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap("write identity", string(id.ID), err)
	}
	if err := os.Symlink(string(b), tmp); err != nil {
		return errs.Wrap("write identity", string(id.ID), err)
	}
	if err := os.Rename(tmp, d.meta(id.ID)); err != nil {
		_ = os.Remove(tmp)
		return errs.Wrap("write identity", string(id.ID), err)
	}
	return d.Sync()
}

func (d *Dir) encode(id driver.Identity) ([]byte, error) {
	return Encode(id, d.pool, maxIdentityBytes)
}

// Encode is the JSON form of an identity of an object in a pool. Invalid if it is
// longer than most bytes, or could not be read back.
func Encode(id driver.Identity, pool string, most int) ([]byte, error) {
	id.Version = driver.IdentityVersion
	id.Pool = pool
	b, err := json.Marshal(id)
	if err != nil {
		return nil, errs.Wrap("write identity", string(id.ID), err)
	}
	if len(b) > most {
		return nil, errs.New(errs.Invalid, "write identity", string(id.ID), "%d bytes of identity, at most %d fit", len(b), most)
	}
	// Nothing is written that could not be read: it would be found damaged.
	back, err := Decode(b)
	if err == nil && (back.Name != id.Name || back.Golden != id.Golden || back.Origin != id.Origin || back.BootID != id.BootID) {
		err = errors.New("a name is not valid UTF-8")
	}
	if err != nil {
		return nil, &errs.Error{Kind: errs.Invalid, Op: "write identity", Ref: string(id.ID), Err: err}
	}
	return b, nil
}

// Inspect says what lies under an ID, but for what only the driver knows: the
// rest of the Condition is the caller's.
func (d *Dir) Inspect(id driver.ObjectID) (driver.Condition, fs.FileInfo, error) {
	var c driver.Condition
	if _, err := os.Lstat(d.meta(id) + ".new"); err == nil {
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

// Get reads the identity. NotFound, Damaged (not of this pool, not of this
// ID, not JSON), TooNew.
func (d *Dir) Get(id driver.ObjectID) (driver.Identity, error) {
	t, err := os.Readlink(d.meta(id))
	if err != nil {
		if errors.Is(err, unix.EINVAL) {
			return driver.Identity{}, errs.New(errs.Damaged, "read identity", string(id), "%s is not a symbolic link", d.meta(id))
		}
		return driver.Identity{}, errs.Wrap("read identity", string(id), err)
	}
	i, err := Decode([]byte(t))
	if err != nil {
		return driver.Identity{}, errs.Wrap("read identity", string(id), err)
	}
	if i.ID != id || i.Pool != d.pool {
		return driver.Identity{}, errs.New(errs.Damaged, "read identity", string(id), "it says object %q of pool %q", i.ID, i.Pool)
	}
	return i, nil
}

// Decode reads the JSON form of an identity. Damaged, TooNew.
func Decode(b []byte) (driver.Identity, error) {
	var v struct {
		Version int `json:"v"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return driver.Identity{}, &errs.Error{Kind: errs.Damaged, Err: err}
	}
	if v.Version > driver.IdentityVersion {
		return driver.Identity{}, (&errs.Error{Kind: errs.TooNew,
			Err: fmt.Errorf("identity of format %d, this Pando knows up to %d", v.Version, driver.IdentityVersion)}).WithHint("upgrade pando")
	}
	var i driver.Identity
	if err := json.Unmarshal(b, &i); err != nil {
		return driver.Identity{}, &errs.Error{Kind: errs.Damaged, Err: err}
	}
	if v.Version < 1 || !driver.ValidID(string(i.ID)) || i.SizeBytes < 0 || i.Generation < 0 ||
		i.Keep < 0 ||
		i.Volume != "" && !driver.ValidID(string(i.Volume)) || i.Replaces != "" && !driver.ValidID(string(i.Replaces)) || i.OriginID != "" && !driver.ValidID(string(i.OriginID)) {
		return driver.Identity{}, &errs.Error{Kind: errs.Damaged, Err: errors.New("identity with impossible values")}
	}
	switch i.Kind {
	case driver.Volume, driver.Snapshot, driver.Generation, driver.Scratch:
	default:
		return driver.Identity{}, &errs.Error{Kind: errs.Damaged, Err: fmt.Errorf("unknown kind of object %q", i.Kind)}
	}
	switch i.Consistency {
	case "", driver.Clean, driver.Crash:
	default:
		return driver.Identity{}, &errs.Error{Kind: errs.Damaged, Err: fmt.Errorf("unknown consistency %q", i.Consistency)}
	}
	switch i.FS {
	case driver.Native, driver.Ext4, driver.XFS, driver.None:
	default:
		return driver.Identity{}, &errs.Error{Kind: errs.Damaged, Err: fmt.Errorf("unknown filesystem %q", i.FS)}
	}
	return i, nil
}

// Remove takes the identity away, so that what remains is not whole. Absent is
// success.
func (d *Dir) Remove(id driver.ObjectID) error {
	for _, p := range []string{d.meta(id), d.meta(id) + ".new"} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap("remove identity", string(id), err)
		}
	}
	return nil
}

// Sync makes the directory durable: every name made or removed before the call.
func (d *Dir) Sync() error {
	return errs.Wrap("sync", d.path, d.f.Sync())
}

// Close releases the directory.
func (d *Dir) Close() error { return d.f.Close() }

// List yields the objects, data without identity and identity without data
// among them. See driver.Driver.
func (d *Dir) List(ctx context.Context) iter.Seq2[driver.Object, error] {
	return func(yield func(driver.Object, error) bool) {
		f, err := os.Open(d.path)
		if err != nil {
			yield(driver.Object{}, errs.Wrap("list", d.path, err))
			return
		}
		defer f.Close()
		seen := map[driver.ObjectID]struct{}{} // an object has two names
		for {
			names, err := f.Readdirnames(4096)
			for _, n := range names {
				id, ok := d.owner(n)
				if !ok {
					continue
				}
				if _, dup := seen[id]; dup {
					continue
				}
				seen[id] = struct{}{}
				if ctx.Err() != nil {
					yield(driver.Object{}, ctx.Err())
					return
				}
				o := driver.Object{ID: id}
				o.Identity, o.Err = d.Get(id)
				if errs.Is(o.Err, errs.NotFound) {
					o.Err = nil
				} else if o.Err == nil {
					// What cannot be looked at is not garbage.
					if _, err := os.Lstat(d.Data(id)); err == nil {
						o.Whole = true
					} else if !errors.Is(err, fs.ErrNotExist) {
						o.Err = errs.Wrap("list", string(id), err)
					}
				}
				if !o.Whole {
					o.Identity = driver.Identity{}
				}
				if !yield(o, nil) {
					return
				}
			}
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(driver.Object{}, errs.Wrap("list", d.path, err))
				return
			}
		}
	}
}

// owner says which object a directory entry belongs to.
func (d *Dir) owner(name string) (driver.ObjectID, bool) {
	if len(name) <= driver.IDLength || !driver.ValidID(name[:driver.IDLength]) {
		return "", false
	}
	switch rest := name[driver.IDLength:]; {
	case rest == metaExt, rest == metaExt+".new", rest == d.ext, strings.HasPrefix(rest, d.ext+"."):
		return driver.ObjectID(name[:driver.IDLength]), true
	}
	return "", false
}
