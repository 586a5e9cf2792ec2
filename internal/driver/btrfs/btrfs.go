// Package btrfs keeps each volume as one subvolume, and makes clones and
// snapshots of it with btrfs snapshots, by system calls only. Their cost does not
// depend on the content: it is one commit of the filesystem's transaction.
//
// # Durability
//
// Making a snapshot commits a transaction, in which every name made before in
// the same filesystem becomes durable too. So for clones and snapshots the
// identity is written first and the subvolume, in one step, last: both are
// durable with a single commit, where writing the identity last would take
// two. At every moment, even after a crash, an object is whole if it has both.
// Making an empty subvolume does not commit it: its directory must be synced.
//
// The kernel makes each snapshot in a commit of its own, one at a time in one directory
// (create_snapshot and btrfs_mksubvol in fs/btrfs/ioctl.c). So clones cannot share a commit,
// and this driver is not a driver.Batcher.
//
// # Subvolumes inside volumes
//
// Users, and programs such as container engines, make subvolumes inside a
// volume. A btrfs snapshot does not include those; this driver clones them too,
// one after the other, each at a moment of its own. It finds them by an index, so
// that the search costs nothing when there are none. A subvolume cannot be
// destroyed before those inside it are: Destroy does both. Streams cannot hold
// them: an object with subvolumes inside cannot be sent.
//
// # Streams
//
// The kernel writes them, and package btrfsstream reads them, without btrfs-progs.
// A received subvolume has the UUID of the subvolume that was sent as its "received
// UUID". The kernel refers to it by that UUID when it is sent on, so that increments
// fit wherever an object has been. Streams do not hold, and so lose, inode flags
// (chattr), preallocated space, and the data of fs-verity. Nothing reports the loss:
// to find these, every inode would have to be read, while the cost of a stream depends
// only on what has changed.
package btrfs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/objdir"
	"pando/internal/linux/extent"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"

	"golang.org/x/sys/unix"
)

// Name of the driver.
const Name = "btrfs"

const ext = ".subvol"

// Driver is a driver.Driver.
type Driver struct {
	objdir.Shared
	dir *objdir.Dir
	f   *os.File // of dir, for ioctls
}

var (
	_ driver.Driver   = (*Driver)(nil)
	_ driver.Rewriter = (*Driver)(nil)
	_ driver.Syncer   = (*Driver)(nil)
	_ driver.Opener   = Open

	_ driver.Inspector = (*Driver)(nil)
	_ driver.Committer = (*Driver)(nil)
)

// Open is a driver.Opener. With create it tries whether subvolumes can be made
// and removed, which needs root.
func Open(_ context.Context, dir, poolID string, create bool) (driver.Driver, error) {
	if create {
		if err := Probe(dir); err != nil {
			return nil, err
		}
	}

	d, err := objdir.Open(dir, poolID, ext, create)
	if err != nil {
		return nil, err
	}

	if err := checkMagic("open pool", d.File()); err != nil {
		d.Close()
		return nil, err
	}

	return &Driver{d, d, d.File()}, nil
}

func checkMagic(op string, f *os.File) error {
	is, err := kernel.IsBtrfs(f)
	if err != nil {
		return errs.Wrap(op, f.Name(), err)
	}
	if !is {
		return errs.New(errs.Unsupported, op, f.Name(), "it is not on btrfs").
			WithHint("use a directory on btrfs, or another %s", errs.Param("driver"))
	}
	return nil
}

// Probe tries to make and remove a subvolume in dir. Unsupported if that is not
// possible there, Permission if the caller lacks the permission.
func Probe(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return errs.Wrap("init", dir, err)
	}

	defer f.Close()

	if err := checkMagic("init", f); err != nil {
		return err
	}

	// Always use the same name, and first remove the one that a dead process has left.
	const name = ".pando-probe"
	if err := kernel.SubvolDestroy(f, name); err != nil && !errors.Is(err, unix.ENOENT) {
		return probeError(dir, err)
	}

	if err := kernel.SubvolCreate(f, name); err != nil {
		return probeError(dir, err)
	}

	if err := kernel.SubvolDestroy(f, name); err != nil {
		return probeError(dir, err)
	}

	return nil
}

func probeError(dir string, err error) error {
	switch errs.KindOf(err) {
	case errs.Permission, errs.NoSpace, errs.IO:
		return errs.Wrap("init", dir, err)
	}
	return errs.New(errs.Unsupported, "init", dir, "cannot make subvolumes: %w", err).
		WithHint("use a directory on btrfs, or another %s", errs.Param("driver"))
}

// Caps implements driver.Driver.
func (d *Driver) Caps() driver.Caps {
	return driver.Caps{
		Name:      Name,
		FS:        []driver.FS{driver.Native},
		CloneCost: driver.CostConstant,
		Sharing:   true,
		Atomic:    true,
		NeedsRoot: true,
	}
}

// Create implements driver.Driver. Ephemeral volumes are not committed.
func (d *Driver) Create(ctx context.Context, id driver.Identity) error {
	const op = "create"
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	if err := kernel.SubvolCreate(d.f, d.subvolumeName(id.ID)); err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	err := os.Chmod(d.dir.Data(id.ID), 0o755) // the umask has taken part of it
	if err == nil {
		err = d.dir.Put(id, objdir.DurabilityOf(id))
	}
	if err != nil {
		// If this fails too, the remaining data has no identity.
		_ = d.destroyTree(d.subvolumeName(id.ID))
		return errs.Wrap(op, id.Ref(), err)
	}

	return nil
}

// Clone implements driver.Driver. Even ephemeral clones are durable: the kernel
// offers no other way.
func (d *Driver) Clone(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	return d.snapshot(ctx, "clone", from, id, false)
}

// Snapshot implements driver.Driver. Subvolumes that a user made inside the
// volume are each snapshotted at a moment of their own.
func (d *Driver) Snapshot(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	return d.snapshot(ctx, "snapshot", from, id, true)
}

func (d *Driver) snapshot(
	ctx context.Context, op string, from driver.ObjectID, id driver.Identity, readOnly bool,
) error {
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	src, err := d.openSubvolume(from)
	if err != nil {
		return errs.Wrap(op, cmp.Or(id.Origin, string(from)), err)
	}

	defer src.Close()

	// Without an identity it may be an incomplete snapshot of nested subvolumes.
	if _, err := d.dir.Get(from); errs.Is(err, errs.NotFound) {
		return errs.Wrap(op, cmp.Or(id.Origin, string(from)), err)
	}

	// Data that a dead process left under this ID must not become whole by
	// the identity that is written first.
	if _, err := os.Lstat(d.dir.Data(id.ID)); err == nil {
		return errs.Wrap(op, id.Ref(), unix.EEXIST)
	}

	info, err := kernel.SubvolInfoOf(src)
	if err != nil {
		return errs.Wrap(op, cmp.Or(id.Origin, string(from)), err)
	}

	nested, err := kernel.SubvolChildren(d.f, info.ID)
	if err != nil {
		return errs.Wrap(op, cmp.Or(id.Origin, string(from)), err)
	}

	if len(nested) == 0 {
		// Write the identity first: see the package's comment. It also reserves the ID.
		if err := d.dir.Put(id, objdir.InNext); err != nil {
			return errs.Wrap(op, id.Ref(), err)
		}
		if err := kernel.SubvolSnapshot(d.f, d.subvolumeName(id.ID), src, readOnly); err != nil {
			_ = d.dir.Remove(id.ID)
			return errs.Wrap(op, id.Ref(), err)
		}
		return nil
	}

	if err := kernel.SubvolSnapshot(d.f, d.subvolumeName(id.ID), src, false); err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	err = d.snapshotNested(ctx, src, nested, d.dir.Data(id.ID), readOnly)
	if err == nil {
		err = d.dir.Put(id, objdir.OnDisk)
	}
	if err != nil {
		_ = d.destroyTree(d.subvolumeName(id.ID))
		return errs.Wrap(op, id.Ref(), err)
	}

	return nil
}

// snapshotNested puts snapshots of the subvolumes inside src into its writable
// snapshot at path to, in place of the empty directories that btrfs made there.
// It then makes to read-only if readOnly is set.
func (d *Driver) snapshotNested(
	ctx context.Context, src *os.File, nested []kernel.SubvolChild, to string, readOnly bool,
) error {
	dst, err := os.Open(to)
	if err != nil {
		return err
	}

	defer dst.Close()
	for _, c := range nested {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := d.snapshotChild(ctx, src, c, dst, to); err != nil {
			return fmt.Errorf("subvolume %s: %w", filepath.Join(c.Dir, c.Name), err)
		}
	}

	if readOnly {
		return kernel.SubvolSetReadOnly(dst, true)
	}

	return nil
}

func (d *Driver) snapshotChild(ctx context.Context, src *os.File, c kernel.SubvolChild, dst *os.File, to string) error {
	rel := filepath.Join(c.Dir, c.Name)
	child, err := treewalk.Open(src, rel)
	if errors.Is(err, unix.ENOENT) {
		return nil // destroyed in the meantime
	}
	if err != nil {
		return err
	}

	defer child.Close()

	info, err := kernel.SubvolInfoOf(child)
	if err != nil {
		return err
	}
	if info.ID != c.ID {
		return nil // another one by now: made after the snapshot
	}

	grandchildren, err := kernel.SubvolChildren(d.f, c.ID)
	if err != nil {
		return err
	}

	parent, err := treewalk.Open(dst, c.Dir)
	if err != nil {
		return err
	}

	defer parent.Close()

	// The directory may be immutable, as it is in the origin.
	taken := kernel.UnprotectFile(int(parent.Fd()))
	if err := unix.Unlinkat(int(parent.Fd()), c.Name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}

	if err := kernel.SubvolSnapshot(parent, c.Name, child, info.ReadOnly && len(grandchildren) == 0); err != nil {
		return err
	}

	if err := kernel.Protect(int(parent.Fd()), taken); err != nil {
		return err
	}

	if len(grandchildren) == 0 {
		return nil
	}

	return d.snapshotNested(ctx, child, grandchildren, filepath.Join(to, rel), info.ReadOnly)
}

// openSubvolume opens the root of an object's subvolume. NotFound.
func (d *Driver) openSubvolume(id driver.ObjectID) (*os.File, error) {
	if driver.ValidID(string(id)) {
		f, err := os.Open(d.dir.Data(id))
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, errs.Wrap("open", string(id), err)
		}
	}
	return nil, errs.New(errs.NotFound, "open", string(id), "no such object in the pool")
}

func (d *Driver) subvolumeName(id driver.ObjectID) string { return string(id) + ext }

// Destroy implements driver.Driver. A kernel thread frees the space; Sync wakes it.
func (d *Driver) Destroy(_ context.Context, id driver.ObjectID) error {
	if !driver.ValidID(string(id)) {
		return errs.New(errs.Invalid, "destroy", string(id), "not the ID of an object")
	}
	if err := d.dir.Remove(id); err != nil {
		return err
	}
	return errs.Wrap("destroy", string(id), d.destroyTree(d.subvolumeName(id)))
}

// destroyTree destroys the subvolume called name in the directory of objects,
// with the subvolumes inside it. Absent is success.
func (d *Driver) destroyTree(name string) error {
	err := kernel.SubvolDestroy(d.f, name)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case !errs.IsAny(err, unix.ENOTEMPTY, unix.EPERM):
		return err
	}

	f, err := treewalk.Open(d.f, name)
	if err != nil {
		return err
	}

	defer f.Close()

	if err := prepareDestroy(f); err != nil {
		return err
	}

	info, err := kernel.SubvolInfoOf(f)
	if err != nil {
		return err
	}

	if err := d.destroyNested(f, info.ID); err != nil {
		return err
	}

	return kernel.SubvolDestroy(d.f, name)
}

// prepareDestroy makes the subvolume with the root f ready to be destroyed: the content of a read-only one cannot be
// destroyed, nor can one whose root is immutable (chattr).
func prepareDestroy(f *os.File) error {
	if err := kernel.SubvolSetReadOnly(f, false); err != nil {
		return err
	}
	kernel.UnprotectFile(int(f.Fd())) // if that fails, destroying it says so
	return nil
}

// destroyNested destroys the subvolumes inside the subvolume with number id and
// root f, the deepest first.
func (d *Driver) destroyNested(f *os.File, id uint64) error {
	nested, err := kernel.SubvolChildren(d.f, id)
	if err != nil {
		return err
	}

	for _, c := range nested {
		child, err := treewalk.Open(f, filepath.Join(c.Dir, c.Name))
		if err != nil {
			return fmt.Errorf("subvolume %s: %w", filepath.Join(c.Dir, c.Name), err)
		}

		if err = prepareDestroy(child); err == nil {
			err = d.destroyNested(child, c.ID)
		}

		child.Close()
		if parent, e := treewalk.Open(f, c.Dir); e == nil {
			kernel.UnprotectFile(int(parent.Fd()))
			parent.Close()
		}
		if err == nil {
			err = kernel.SubvolDestroyID(d.f, c.ID)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("subvolume %s: %w", filepath.Join(c.Dir, c.Name), err)
		}
	}

	return nil
}

// Usage implements driver.Driver. It walks the tree and those of subvolumes
// inside. Files so small that btrfs keeps them in its metadata count as shared
// in a clone until they change, although their origin may be gone.
func (d *Driver) Usage(ctx context.Context, id driver.ObjectID) (driver.Usage, error) {
	f, err := d.openSubvolume(id)
	if err != nil {
		return driver.Usage{}, err
	}

	defer f.Close()
	u, err := d.measureTree(ctx, f, d.dir.Data(id))
	if errors.Is(err, fs.ErrNotExist) {
		return driver.Usage{}, errs.New(errs.NotFound, "measure", string(id), "destroyed in the meantime")
	}
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

func (d *Driver) measureTree(ctx context.Context, f *os.File, path string) (extent.Usage, error) {
	info, err := kernel.SubvolInfoOf(f)
	if err != nil {
		return extent.Usage{}, err
	}

	var o extent.TreeOptions
	if info.Snapshot {
		o.InlineSharedUntil = info.Created
	}

	sum, err := extent.MeasureTree(ctx, path, o)
	if err != nil {
		return extent.Usage{}, err
	}

	nested, err := kernel.SubvolChildren(d.f, info.ID)
	if err != nil {
		return extent.Usage{}, err
	}

	for _, c := range nested {
		rel := filepath.Join(c.Dir, c.Name)
		child, err := treewalk.Open(f, rel)
		if err != nil {
			return extent.Usage{}, fmt.Errorf("subvolume %s: %w", rel, err)
		}
		u, err := d.measureTree(ctx, child, filepath.Join(path, rel))
		child.Close()
		if err != nil {
			return extent.Usage{}, err
		}
		sum.Add(u)
	}

	return sum, nil
}

// Attachment implements driver.Driver.
func (d *Driver) Attachment(_ context.Context, id driver.ObjectID) (driver.Attachment, error) {
	f, err := d.openSubvolume(id)
	if err != nil {
		return driver.Attachment{}, err
	}

	defer f.Close()
	i, err := d.dir.Get(id)
	if err != nil {
		return driver.Attachment{}, err
	}

	info, err := kernel.SubvolInfoOf(f)
	if err != nil {
		return driver.Attachment{}, errs.Wrap("attach", string(id), err)
	}

	return driver.Attachment{
		FS:       driver.Native,
		Tree:     d.dir.Data(id),
		ReadOnly: info.ReadOnly || i.Kind.Immutable(),
	}, nil
}

// SetIdentity implements driver.Rewriter. An object that becomes a snapshot or
// a generation becomes read-only, but for files that are open for writing, and
// one that becomes a volume writable.
func (d *Driver) SetIdentity(ctx context.Context, id driver.Identity) error {
	const op = "write identity"
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	f, err := d.openSubvolume(id.ID)
	if err != nil {
		return err
	}

	defer f.Close()

	// The order matters: after a crash between the two, the identity alone keeps the
	// object from being attached writable.
	if err := d.dir.Replace(id); err != nil {
		return err
	}

	return errs.Wrap(op, string(id.ID), setMode(f, id.Kind))
}

// setMode makes the subvolume of an object of that kind read-only or writable. A
// writable one loses its received UUID: the kernel would otherwise still take it for
// a copy of the subvolume that it was received from, and increments would be based
// on it.
func setMode(f *os.File, kind driver.Kind) error {
	if kind.Immutable() {
		return kernel.SubvolSetReadOnly(f, true)
	}
	if err := kernel.SubvolSetReadOnly(f, false); err != nil {
		return err
	}
	info, err := kernel.SubvolInfoOf(f)
	if err != nil || info.ReceivedUUID == [16]byte{} {
		return err
	}
	return kernel.SubvolSetReceived(f, [16]byte{}, 0)
}

// Inspect implements driver.Inspector.
func (d *Driver) Inspect(_ context.Context, id driver.Identity) (driver.Condition, error) {
	c, st, err := d.dir.Inspect(id.ID)
	if err != nil || st == nil {
		return c, err
	}

	f, err := d.openSubvolume(id.ID)
	if err == nil {
		defer f.Close()
		var info kernel.SubvolInfo
		if info, err = kernel.SubvolInfoOf(f); err == nil {
			immutable := id.Kind.Immutable()
			switch {
			case immutable && !info.ReadOnly:
				c.Mode = "its subvolume is writable"
			case !immutable && info.ReadOnly:
				c.Mode = "its subvolume is read-only"
			}
			_, err = f.Readdirnames(1)
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		c.Err = errs.Wrap("open", string(id.ID), err)
	}

	return c, nil
}

// Restore implements driver.Inspector.
func (d *Driver) Restore(_ context.Context, id driver.Identity) error {
	f, err := d.openSubvolume(id.ID)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := d.dir.Force(id); err != nil {
		return err
	}
	return errs.Wrap("write identity", string(id.ID), setMode(f, id.Kind))
}

// Sync implements driver.Syncer. It also wakes the kernel thread that frees the
// space of destroyed subvolumes, but does not wait for it.
func (d *Driver) Sync(context.Context) error {
	return errs.Wrap("sync", d.dir.Path(), kernel.BtrfsSync(d.f))
}
