// Package plain keeps each volume as a directory, and copies all of it for every
// clone and snapshot. It works on any filesystem and without root. Its cost grows
// with the data. Where the filesystem can share blocks between files, copies share
// them, but nothing relies on that.
//
// A snapshot is a copy that is never attached writable. It shows one moment only if
// nothing writes to the volume during the copy: a directory cannot be frozen.
//
// Without root, owners, device nodes, and attributes and flags that only root can set
// are lost in copies.
package plain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/objdir"
	"pando/internal/linux/extent"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// Name of the driver.
const Name = "plain"

const ext = ".tree"

// Driver is a driver.Driver.
type Driver struct {
	objdir.Shared
	dir *objdir.Dir
	f   *os.File // of dir, for syncfs
}

var (
	_ driver.Driver   = (*Driver)(nil)
	_ driver.Rewriter = (*Driver)(nil)
	_ driver.Finisher = (*Driver)(nil)
	_ driver.Syncer   = (*Driver)(nil)
	_ driver.Opener   = Open
	_ driver.Batcher  = (*Driver)(nil)

	_ driver.Inspector = (*Driver)(nil)
	_ driver.Committer = (*Driver)(nil)
)

// Open is a driver.Opener.
func Open(_ context.Context, dir, poolID string, create bool) (driver.Driver, error) {
	d, err := objdir.Open(dir, poolID, ext, create)
	if err != nil {
		return nil, err
	}
	return &Driver{d, d, d.File()}, nil
}

// Caps implements driver.Driver.
func (d *Driver) Caps() driver.Caps {
	return driver.Caps{
		Name:      Name,
		FS:        []driver.FS{driver.Native},
		CloneCost: driver.CostData,
		Sharing:   false,
		Atomic:    false,
		NeedsRoot: false,
	}
}

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, id driver.Identity) error {
	// An empty directory needs only itself to be synced.
	empty := func(dst *os.File) error {
		if id.Ephemeral {
			return nil
		}
		return dst.Sync()
	}

	return d.makeObject(ctx, "create", id, empty, func() error { return d.dir.Put(id, objdir.DurabilityOf(id)) })
}

// Clone implements driver.Driver.
func (d *Driver) Clone(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	return d.copyObject(ctx, "clone", from, id, copyOnce, d.finisher(id))
}

// Snapshot implements driver.Driver. Nothing may write to the volume while it runs; Conflict if that is noticed. See
// CopyLive.
func (d *Driver) Snapshot(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	return d.copyObject(ctx, "snapshot", from, id, copyOnce, d.finisher(id))
}

// livePasses is how often files that changed during the copy are copied again.
const livePasses = 6

// CopyLive implements driver.LiveCopier.
func (d *Driver) CopyLive(
	ctx context.Context, from driver.ObjectID, id driver.Identity, immutable bool, _ func(func() error) error,
) error {
	op := "clone"
	if immutable {
		op = "snapshot"
	}

	return d.copyObject(ctx, op, from, id, func(ctx context.Context, src string, dst *os.File, o treecopy.Options) error {
		_, err := treecopy.CopyStable(ctx, src, dst, o, livePasses)
		var e *errs.Error
		if errors.As(err, &e) && e.Kind == errs.Conflict {
			e.Hint = "stop what writes to it, or unmount it"
		}
		return err
	}, d.finisher(id))
}

type copier func(ctx context.Context, src string, dst *os.File, o treecopy.Options) error

func copyOnce(ctx context.Context, src string, dst *os.File, o treecopy.Options) error {
	_, err := treecopy.CopyDir(ctx, src, dst, o)
	return err
}

// checkOrigin reports whether copies can be made of an object. NotFound.
func (d *Driver) checkOrigin(from driver.ObjectID) error {
	if err := d.findObject(from); err != nil {
		return err
	}
	// Without an identity it may be an incomplete copy.
	if _, err := d.dir.Get(from); errs.Is(err, errs.NotFound) {
		return err
	}
	return nil
}

// copyObject makes a copy of an object under id's ID, and calls finish when its content is complete.
func (d *Driver) copyObject(
	ctx context.Context, op string, from driver.ObjectID, id driver.Identity, copyTree copier, finish func() error,
) error {
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}
	if err := d.checkOrigin(from); err != nil {
		return errs.Wrap(op, cmp.Or(id.Origin, string(from)), err)
	}
	return d.makeObject(ctx, op, id, func(dst *os.File) error {
		// The root is the volume's own: its mode is its owner's choice.
		return copyTree(ctx, d.dir.Data(from), dst, treecopy.Options{Unprivileged: os.Geteuid() != 0, OwnRoot: true})
	}, finish)
}

// finisher returns the func that makes the copy id whole and, unless it is ephemeral, durable.
func (d *Driver) finisher(id driver.Identity) func() error {
	return func() error {
		// Sync all content before the identity. One sync of the filesystem takes a fraction of the
		// time that syncing each file would.
		if !id.Ephemeral {
			if err := unix.Syncfs(int(d.f.Fd())); err != nil {
				return err
			}
		}
		return d.dir.Put(id, objdir.DurabilityOf(id))
	}
}

// makeObject creates the directory of id, calls fill to fill it, and calls finish, which makes it whole. On error
// nothing remains.
func (d *Driver) makeObject(
	ctx context.Context, op string, id driver.Identity, fill func(*os.File) error, finish func() error,
) error {
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	path := d.dir.Data(id.ID)
	if err := os.Mkdir(path, 0o700); err != nil {
		return wrapCopyError(op, id.Ref(), err)
	}

	err := d.fillDirectory(ctx, path, fill, finish)
	if err != nil {
		// If this fails too, the remaining data has no identity, and the caller's record
		// names it as garbage.
		_ = treewalk.Remove(context.WithoutCancel(ctx), path)
		return wrapCopyError(op, id.Ref(), err)
	}

	return nil
}

func (d *Driver) fillDirectory(
	ctx context.Context, path string, fill func(*os.File) error, finish func() error,
) error {
	dst, err := os.Open(path)
	if err != nil {
		return err
	}

	defer dst.Close()
	if err := dst.Chmod(0o755); err != nil { // Mkdir's mode is subject to the umask
		return err
	}

	if err := fill(dst); err != nil {
		return err
	}

	if err := ctx.Err(); err != nil {
		return err
	}

	return finish()
}

// wrapCopyError replaces the operation "import" in errors of copying with op, and for a full
// pool sets a hint that fits: volumes of this driver have no size of their own.
func wrapCopyError(op, ref string, err error) error {
	var e *errs.Error
	if !errors.As(err, &e) || e.Err == nil || e.Op == op {
		return errs.Wrap(op, ref, err)
	}
	cause := fmt.Errorf("%s: %w", e.Ref, e.Err)
	if e.Kind == errs.NoSpace {
		return errs.Wrap(op, ref, cause)
	}
	return &errs.Error{Kind: e.Kind, Op: op, Ref: ref, Hint: e.Hint, Err: cause}
}

// findObject looks up the directory of an object. NotFound.
func (d *Driver) findObject(id driver.ObjectID) error {
	if driver.ValidID(string(id)) {
		_, err := os.Lstat(d.dir.Data(id))
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap("look up", string(id), err)
		}
	}
	return errs.New(errs.NotFound, "look up", string(id), "no such object in the pool")
}

// Destroy implements driver.Driver. Its cost grows with the number of files.
// InUse if something is mounted inside; everything else has then been removed, and the
// object is no longer whole. It does not stop for ctx before the identity is removed,
// and may be repeated.
func (d *Driver) Destroy(ctx context.Context, id driver.ObjectID) error {
	if !driver.ValidID(string(id)) {
		return errs.New(errs.Invalid, "destroy", string(id), "not the ID of an object")
	}
	if err := d.dir.Remove(id); err != nil {
		return err
	}
	return errs.Wrap("destroy", string(id), treewalk.Remove(ctx, d.dir.Data(id)))
}

// Usage implements driver.Driver. It walks the tree.
func (d *Driver) Usage(ctx context.Context, id driver.ObjectID) (driver.Usage, error) {
	if err := d.findObject(id); err != nil {
		return driver.Usage{}, err
	}

	u, err := extent.MeasureTree(ctx, d.dir.Data(id), extent.TreeOptions{})
	if err != nil {
		return driver.Usage{}, errs.Wrap("measure", string(id), err)
	}

	return driver.Usage{
		LogicalBytes:   u.Exclusive + u.Shared,
		ExclusiveBytes: u.Exclusive,
		SharedBytes:    u.Shared,
		Extents:        u.Extents,
	}, nil
}

// Attachment implements driver.Driver.
func (d *Driver) Attachment(_ context.Context, id driver.ObjectID) (driver.Attachment, error) {
	if err := d.findObject(id); err != nil {
		return driver.Attachment{}, err
	}

	i, err := d.dir.Get(id)
	if err != nil {
		return driver.Attachment{}, err
	}

	return driver.Attachment{
		FS:       driver.Native,
		Tree:     d.dir.Data(id),
		ReadOnly: i.Kind.Immutable(),
	}, nil
}

// SetIdentity implements driver.Rewriter.
func (d *Driver) SetIdentity(ctx context.Context, id driver.Identity) error {
	if err := d.Caps().Check(ctx, "write identity", id); err != nil {
		return err
	}
	if err := d.findObject(id.ID); err != nil {
		return err
	}
	return d.dir.Replace(id)
}

// Inspect implements driver.Inspector. It checks no mode: users choose that of a tree.
func (d *Driver) Inspect(_ context.Context, id driver.Identity) (driver.Condition, error) {
	c, st, err := d.dir.Inspect(id.ID)
	if err != nil || st == nil {
		return c, err
	}

	f, err := os.Open(d.dir.Data(id.ID))
	if err == nil {
		_, err = f.Readdirnames(1)
		f.Close()
	}
	if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
		return c, nil // a volume's root can have a mode that keeps its owner out
	}
	if err != nil && !errors.Is(err, io.EOF) {
		c.Err = errs.Wrap("open", string(id.ID), err)
	}

	return c, nil
}

// Restore implements driver.Inspector.
func (d *Driver) Restore(_ context.Context, id driver.Identity) error {
	if err := d.findObject(id.ID); err != nil {
		return err
	}
	return d.dir.Force(id)
}

// Finish implements driver.Finisher.
func (d *Driver) Finish(ctx context.Context, id driver.Identity) error { return d.SetIdentity(ctx, id) }

// Sync implements driver.Syncer. It syncs the whole filesystem.
func (d *Driver) Sync(context.Context) error {
	return errs.Wrap("sync", d.dir.Path(), unix.Syncfs(int(d.f.Fd())))
}
