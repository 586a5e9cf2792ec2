package content

import (
	"context"
	"errors"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/fsprobe"
	"pando/internal/linux/kernel"
	"pando/internal/linux/run"

	"golang.org/x/sys/unix"
)

// Grow makes the filesystem of a volume as large as its image and its block device, which have l.Row.SizeBytes. If
// programs use it, its log is empty on return. Else it could contain, after a power loss, what lies beyond the size
// that the superblock on disk still says, which XFS does not replay. Idempotent. Permission: see CanGrow. InUse:
// another program has frozen it. The caller has marked the volume; others records what this operation freezes.
func (acc *Access) Grow(ctx context.Context, l Live, others Freezes) error {
	if l.Row.FS == driver.None {
		return nil
	}

	if !l.InUse() {
		return acc.WithImage(ctx, l.Row.ID, ImageOptions{}, func(root *os.File) error {
			return growFilesystem(root, l.Row.FS, l.Row.SizeBytes)
		})
	}

	root, release, err := acc.openMounted(ctx, l)
	if err != nil {
		return err
	}
	defer release()

	// While it is frozen, growing it would wait for ever, and nothing could end that.
	if err := acc.emptyLog(ctx, l, root, others); err != nil {
		return err
	}

	if err := growFilesystem(root, l.Row.FS, l.Row.SizeBytes); errors.Is(err, unix.EPERM) {
		// ext4 asks for the capability even if there is nothing to do.
		used, err := acc.FilesystemBytes(ctx, l)
		if err != nil || used+fsBlockBytes > l.Row.SizeBytes {
			return err
		}
		return mayNotGrow(l)
	} else if err != nil {
		return err
	}

	AtStep("grown")
	return acc.emptyLog(ctx, l, root, others)
}

// emptyLog writes everything that is in the log of a mounted filesystem to its place, by freezing it for a moment.
func (acc *Access) emptyLog(ctx context.Context, l Live, root *os.File, others Freezes) error {
	return acc.copyFrozen(ctx, l, root, others, func(quiet func(func() error) error) error {
		return quiet(func() error { return nil })
	})
}

// FilesystemBytes returns the size of the filesystem of a volume that is in use; 0 for a raw one.
func (acc *Access) FilesystemBytes(ctx context.Context, l Live) (int64, error) {
	switch l.Row.FS {
	case driver.None:
		return 0, nil
	case driver.XFS: // its superblock on disk is behind
		root, release, err := acc.openMounted(ctx, l)
		if err != nil {
			return 0, err
		}
		defer release()
		return kernel.XFSBytes(root)
	}

	w, err := acc.drv.Attachment(ctx, l.Row.ID)
	if err != nil {
		return 0, err
	}

	path, done, err := acc.reopenDevice(ctx, l, w)
	if err != nil {
		return 0, err
	}
	defer done()
	dev, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer dev.Close()
	p, err := fsprobe.Probe(dev, l.Row.SizeBytes)
	if err == nil && p.Bytes == 0 {
		err = errs.New(errs.Damaged, "grow", l.Row.Name, "its filesystem has no valid superblock: %s", p.Damage)
	}
	return p.Bytes, err
}

// CanGrow returns an error if this process may not grow the filesystem of a volume that is in use. Permission.
func (acc *Access) CanGrow(l Live) error {
	if l.Row.FS != driver.Ext4 || !l.InUse() || kernel.Capable(unix.CAP_SYS_RESOURCE) {
		return nil
	}
	return mayNotGrow(l)
}

func mayNotGrow(l Live) error {
	return errs.New(errs.Permission, "grow", l.Row.Name,
		"growing a mounted ext4 needs the capability CAP_SYS_RESOURCE, which this process does not have").
		WithHint("unmount it first with %s, or run pando outside the container", errs.Run("umount", l.Row.Name))
}

// fsBlockBytes is the largest block of an ext4 that can be mounted everywhere.
const fsBlockBytes = 4096

// MatchDevice makes the loop device of a volume in use as large as the image.
func (acc *Access) MatchDevice(ctx context.Context, l Live) error {
	w, err := acc.drv.Attachment(ctx, l.Row.ID)
	if err != nil || w.Block {
		return err
	}

	path, done, err := acc.reopenDevice(ctx, l, w)
	if err != nil {
		return err
	}
	defer done()
	dev, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dev.Close()
	return os.NewSyscallError("LOOP_SET_CAPACITY", unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0))
}

// GrowImage makes the filesystem in an image as large as the image. If this process is killed, the image may be
// unreadable: it is that of an object that is being made.
func (acc *Access) GrowImage(ctx context.Context, id driver.ObjectID, fs driver.FS, size int64) error {
	if fs == driver.None {
		return nil
	}

	err := acc.WithImage(ctx, id, ImageOptions{}, func(root *os.File) error { return growFilesystem(root, fs, size) })
	if fs == driver.Ext4 && errors.Is(err, unix.EPERM) {
		// Root in a container often lacks the capability to grow a mounted ext4.
		// The image is unmounted now, so resize2fs can do it.
		err = acc.WithPath(ctx, id, func(path string) error {
			_, err := run.Program(ctx, "resize2fs", "-f", path)
			return err
		})
	}

	return err
}

// growFilesystem grows a mounted filesystem. What that wrote has reached the image on return: the pool may be full, and
// unmounting would not say so.
func growFilesystem(root *os.File, fs driver.FS, size int64) error {
	grow := kernel.GrowExt4
	if fs == driver.XFS {
		grow = kernel.GrowXFS
	}

	AtStep("growing")
	if err := grow(root, size); err != nil {
		return err
	}
	return os.NewSyscallError("syncfs", unix.Syncfs(int(root.Fd())))
}
