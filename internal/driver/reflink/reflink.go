// Package reflink keeps each volume as one image file, and makes clones of it
// with FICLONE: the filesystem that the pool is on (XFS, btrfs, bcachefs) lets
// both files share their blocks until one is written.
//
// The cost of a clone depends on the number of extents of its origin, so goldens
// are sealed into few (see Seal). An image contains an ext4, an XFS or nothing.
package reflink

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/imagefs"
	"pando/internal/driver/objdir"
	"pando/internal/linux/extent"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// Name of the driver.
const Name = "reflink"

// Driver is a driver.Driver.
type Driver struct {
	objdir.Shared
	dir     *objdir.Dir
	ordered bool // syncing one file makes all durable that was done before, but data of other files
}

var (
	_ driver.Driver   = (*Driver)(nil)
	_ driver.Sealer   = (*Driver)(nil)
	_ driver.Rewriter = (*Driver)(nil)
	_ driver.Resizer  = (*Driver)(nil)
	_ driver.Syncer   = (*Driver)(nil)
	_ driver.Opener   = Open
	_ driver.Batcher  = (*Driver)(nil)

	_ driver.Addresser = (*Driver)(nil)

	_ driver.Inspector = (*Driver)(nil)
	_ driver.Committer = (*Driver)(nil)
)

// Open is a driver.Opener.
func Open(_ context.Context, dir, poolID string, create bool) (driver.Driver, error) {
	if create {
		if err := Probe(dir); err != nil {
			return nil, err
		}
	}

	d, err := objdir.Open(dir, poolID, ".img", create)
	if err != nil {
		return nil, err
	}

	ordered := kernel.IsXFS(d.Path())
	if ordered {
		d.Logs()
	}

	return &Driver{Shared: d, dir: d, ordered: ordered}, nil
}

// Probe tries whether files in dir can share blocks. Unsupported if not.
func Probe(dir string) error {
	unsupported := func(err error) error {
		return (&errs.Error{Kind: errs.Unsupported, Op: "init", Ref: dir,
			Err: fmt.Errorf("this filesystem cannot share blocks between files: %w", err)}).
			WithHint("use a directory on XFS (reflink=1) or btrfs, or let %s make a loop-backed XFS pool here", errs.Run("init"))
	}

	var f [2]*os.File
	for i := range f {
		fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if errs.IsAny(err, unix.EOPNOTSUPP, unix.EISDIR) {
			return unsupported(fmt.Errorf("O_TMPFILE: %w", err))
		}
		if err != nil {
			return errs.Wrap("init", dir, err)
		}
		f[i] = os.NewFile(uintptr(fd), filepath.Join(dir, "probe"))
		defer f[i].Close()
	}

	if _, err := f[0].Write(make([]byte, 64<<10)); err != nil {
		return errs.Wrap("init", dir, err)
	}

	if err := kernel.Reflink(f[1], f[0]); err != nil {
		if errs.KindOf(err) == errs.NoSpace {
			return errs.Wrap("init", dir, err)
		}
		return unsupported(err)
	}

	return nil
}

// Caps implements driver.Driver.
func (d *Driver) Caps() driver.Caps {
	return driver.Caps{
		Name:      Name,
		FS:        []driver.FS{driver.Ext4, driver.XFS, driver.None},
		CloneCost: driver.CostExtents,
		Sharing:   true,
		Atomic:    true,
		NeedsRoot: true,
	}
}

// Create implements driver.Driver. The image is sparse.
func (d *Driver) Create(ctx context.Context, id driver.Identity) error {
	if err := d.Caps().Check(ctx, "create", id); err != nil {
		return err
	}

	if err := imagefs.CheckSize(id); err != nil {
		return err
	}

	if id.Sector == 0 {
		id.Sector = imagefs.SectorBytes
	}

	return d.makeImage(id, 0o600, objdir.DurabilityOf(id), func(f *os.File) (bool, error) {
		if err := f.Truncate(id.SizeBytes); err != nil {
			return true, err
		}
		return true, imagefs.Make(ctx, id.FS, f.Name(), id.SizeBytes)
	})
}

// Clone implements driver.Driver.
func (d *Driver) Clone(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	return d.clone(ctx, "clone", from, id, 0o600, nil)
}

// Snapshot implements driver.Driver.
func (d *Driver) Snapshot(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	return d.clone(ctx, "snapshot", from, id, 0o400, nil)
}

// CopyLive implements driver.LiveCopier. Only the reflink itself needs quiet:
// making it durable does not.
func (d *Driver) CopyLive(
	ctx context.Context, from driver.ObjectID, id driver.Identity, immutable bool, quiet func(func() error) error,
) error {
	if immutable {
		return d.clone(ctx, "snapshot", from, id, 0o400, quiet)
	}
	return d.clone(ctx, "clone", from, id, 0o600, quiet)
}

func (d *Driver) clone(
	ctx context.Context, op string, from driver.ObjectID, id driver.Identity, mode fs.FileMode,
	quiet func(func() error) error,
) error {
	src, err := d.openOrigin(from)
	if err != nil {
		return errs.Wrap(op, id.Origin, err)
	}
	defer src.Close()
	return d.cloneOf(ctx, op, src, id, cloneOptions{mode: mode, until: objdir.DurabilityOf(id), quiet: quiet})
}

// cloneOptions says how an image is cloned.
type cloneOptions struct {
	mode  fs.FileMode
	until objdir.Until
	quiet func(func() error) error // see driver.LiveCopier; nil: nobody writes to the origin
}

// cloneOf makes the object id with the content of src.
func (d *Driver) cloneOf(ctx context.Context, op string, src *origin, id driver.Identity, o cloneOptions) error {
	src.completeIdentity(&id)
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	if id.SizeBytes < src.size {
		return errs.New(errs.Invalid, op, id.Name, "%d bytes is smaller than its origin's %d", id.SizeBytes, src.size).
			WithHint("a volume can grow but not shrink")
	}

	return d.makeImage(id, o.mode, o.until, func(f *os.File) (bool, error) {
		take := func() error { return kernel.Reflink(f, src.File) }
		var err error
		if o.quiet != nil {
			err = o.quiet(take)
		} else {
			err = take()
		}
		if err != nil {
			return false, err
		}
		if id.SizeBytes > src.size {
			return false, f.Truncate(id.SizeBytes)
		}

		return false, nil
	})
}

// makeImage creates the image of id, calls fill to write it, and makes it whole, and as durable as until says.
// fill reports whether it wrote data, rather than only sharing blocks that are already on disk. On error nothing
// remains.
func (d *Driver) makeImage(
	id driver.Identity, mode fs.FileMode, until objdir.Until, fill func(*os.File) (wrote bool, err error),
) error {
	path := d.dir.Data(id.ID)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, mode)
	if err != nil {
		return errs.Wrap("create", id.Name, err)
	}

	defer f.Close()

	wrote, err := fill(f)
	if err == nil && until == objdir.OnDisk && (wrote || !d.ordered) {
		err = f.Sync()
	}
	if err == nil {
		err = d.dir.Put(id, until)
	}
	if err != nil {
		_ = os.Remove(path) // if this fails too, the caller's record makes the leftover garbage
		return errs.Wrap("create", id.Name, err)
	}

	return nil
}

// origin is the open image that clones are made from.
type origin struct {
	*os.File
	size   int64  // bytes
	sector uint32 // bytes
}

// completeIdentity fills in the fields that a clone takes over from its origin.
func (o *origin) completeIdentity(id *driver.Identity) {
	if id.Sector == 0 {
		id.Sector = o.sector
	}
	if id.SizeBytes == 0 {
		id.SizeBytes = o.size
	}
}

// openOrigin opens the image that an object is to be made from. NotFound even if the
// object is incomplete: a clone of it would be whole.
func (d *Driver) openOrigin(from driver.ObjectID) (*origin, error) {
	id, err := d.dir.Get(from)
	if err != nil {
		return nil, err
	}
	f, size, err := d.openImage(from)
	if err != nil {
		return nil, err
	}
	return &origin{File: f, size: size, sector: id.Sector}, nil
}

// openImage opens the image of an object and returns its size.
func (d *Driver) openImage(id driver.ObjectID) (*os.File, int64, error) {
	f, err := os.Open(d.dir.Data(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, errs.New(errs.NotFound, "open", string(id), "no such object in the pool")
	}
	if err != nil {
		return nil, 0, errs.Wrap("open", string(id), err)
	}

	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, errs.Wrap("open", string(id), err)
	}

	return f, st.Size(), nil
}

// Destroy implements driver.Driver.
func (d *Driver) Destroy(_ context.Context, id driver.ObjectID) error {
	if err := d.dir.Remove(id); err != nil {
		return err
	}
	if err := os.Remove(d.dir.Data(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap("destroy", string(id), err)
	}
	return nil
}

// Resize implements driver.Resizer.
func (d *Driver) Resize(_ context.Context, id driver.ObjectID, size int64) error {
	f, err := os.OpenFile(d.dir.Data(id), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return errs.New(errs.NotFound, "resize", string(id), "no such object in the pool")
	}
	if err != nil {
		return errs.Wrap("resize", string(id), err)
	}

	defer f.Close()
	st, err := f.Stat()
	if err == nil && st.Size() != size {
		err = f.Truncate(size)
	}
	if err == nil {
		err = f.Sync()
	}

	return errs.Wrap("resize", string(id), err)
}

// Usage implements driver.Driver. Its cost is that of reading the extents.
func (d *Driver) Usage(_ context.Context, id driver.ObjectID) (driver.Usage, error) {
	f, _, err := d.openImage(id)
	if err != nil {
		return driver.Usage{}, err
	}

	defer f.Close()
	u, err := extent.Measure(f, true)
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

// Address implements driver.Addresser. Its cost is that of reading the extents.
func (d *Driver) Address(_ context.Context, id driver.ObjectID) (string, error) {
	f, _, err := d.openImage(id)
	if err != nil {
		return "", err
	}
	defer f.Close()
	a, err := extent.Address(f)
	return a, errs.Wrap("read extents", string(id), err)
}

// Attachment implements driver.Driver.
func (d *Driver) Attachment(_ context.Context, id driver.ObjectID) (driver.Attachment, error) {
	i, err := d.dir.Get(id)
	if err != nil {
		return driver.Attachment{}, err
	}

	if _, err := os.Lstat(d.dir.Data(id)); err != nil {
		return driver.Attachment{}, errs.Wrap("open", string(id), err)
	}

	return driver.Attachment{
		Image:       d.dir.Data(id),
		FS:          i.FS,
		Options:     imagefs.MountOptions(i.FS),
		NoSync:      imagefs.NoSyncOptions(i.FS),
		SectorBytes: i.Sector,
		ReadOnly:    i.Kind.Immutable(),
	}, nil
}

// SetIdentity implements driver.Rewriter.
func (d *Driver) SetIdentity(_ context.Context, id driver.Identity) error {
	if id.Kind.Immutable() {
		if err := os.Chmod(d.dir.Data(id.ID), 0o400); err != nil {
			return errs.Wrap("write identity", id.Ref(), err)
		}
	}
	return d.dir.Replace(id)
}

// imageMode is the mode of the image of an object.
func imageMode(k driver.Kind) fs.FileMode {
	if k.Immutable() {
		return 0o400
	}
	return 0o600
}

// Inspect implements driver.Inspector.
func (d *Driver) Inspect(_ context.Context, id driver.Identity) (driver.Condition, error) {
	c, st, err := d.dir.Inspect(id.ID)
	if err != nil || st == nil {
		return c, err
	}

	if !st.Mode().IsRegular() {
		c.Err = errs.New(errs.Damaged, "open", string(id.ID), "its image is not a regular file")
		return c, nil
	}

	c.SizeBytes = st.Size()
	if want := imageMode(id.Kind); st.Mode().Perm() != want {
		c.Mode = fmt.Sprintf("its image has mode %04o, not %04o", st.Mode().Perm(), want)
	}

	return c, nil
}

// Restore implements driver.Inspector.
func (d *Driver) Restore(_ context.Context, id driver.Identity) error {
	f, _, err := d.openImage(id.ID)
	if err != nil {
		return err
	}

	defer f.Close()
	if err := f.Chmod(imageMode(id.Kind)); err != nil {
		return errs.Wrap("write identity", id.Ref(), err)
	}

	if err := f.Sync(); err != nil {
		return errs.Wrap("write identity", id.Ref(), err)
	}

	return d.dir.Force(id)
}

// Sync implements driver.Syncer.
func (d *Driver) Sync(context.Context) error { return d.dir.Sync() }
