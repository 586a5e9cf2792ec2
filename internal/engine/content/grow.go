package content

import (
	"context"
	"errors"
	"os"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/fsprobe"
	"pando/internal/linux/kernel"
	"pando/internal/linux/run"

	"golang.org/x/sys/unix"
)

// Grow makes the filesystem of a volume as large as its image, which has l.Row.SizeBytes. If the volume is in use, its
// block device and its filesystem grow while programs use them. Idempotent. Permission: see CanGrow. The caller has
// marked the volume.
func (acc *Access) Grow(ctx context.Context, l Live) error {
	if !l.InUse() {
		return acc.GrowImage(ctx, l.Row.ID, l.Row.FS, l.Row.SizeBytes)
	}

	if err := acc.growDevice(ctx, l); err != nil || l.Row.FS == driver.None {
		return err
	}

	root, release, err := acc.openMounted(ctx, l)
	if err != nil {
		return err
	}

	defer release()
	if err := growFilesystem(root, l.Row.FS, l.Row.SizeBytes); !errors.Is(err, unix.EPERM) {
		return err
	}

	// ext4 asks for the capability even if there is nothing to do.
	if done, err := acc.hasSize(ctx, l.Row); err != nil || done {
		return err
	}

	return mayNotGrow(l)
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

// hasSize reports whether the filesystem in an image is as large as the image.
func (acc *Access) hasSize(ctx context.Context, row catalog.Row) (done bool, err error) {
	err = acc.WithPath(ctx, row.ID, func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		p, err := fsprobe.Probe(f, row.SizeBytes)
		done = p.Bytes+fsBlockBytes > row.SizeBytes
		return err
	})
	return done, err
}

// fsBlockBytes is the largest block of an ext4 that can be mounted everywhere.
const fsBlockBytes = 4096

// growDevice makes the loop device of a volume in use as large as the image.
func (acc *Access) growDevice(ctx context.Context, l Live) error {
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

// GrowImage makes the filesystem in an image that nobody uses as large as the image.
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
			return growError(err, size)
		})
	}

	return err
}

// growError explains why resize2fs has failed, if its words tell: they advise to repair an image that the caller is
// about to remove.
func growError(err error, size int64) error {
	fail := func(kind errs.Kind, hint string) error {
		return errs.New(kind, "", "", "its filesystem cannot grow to %s", errs.FormatBytes(size)).WithHint("%s", hint)
	}
	switch {
	case err == nil:
		return nil
	case strings.Contains(err.Error(), "No space left on device"):
		return fail(errs.NoSpace, "free space in the pool, or choose a smaller size")
	case strings.Contains(err.Error(), "indirect block found"), strings.Contains(err.Error(), "too large"):
		return fail(errs.Invalid, "choose a smaller size, or import the golden with a larger one: ext4 grows only so far")
	}
	return err
}

// growFilesystem grows a mounted filesystem.
func growFilesystem(root *os.File, fs driver.FS, size int64) error {
	if fs == driver.XFS {
		return kernel.GrowXFS(root, size)
	}

	return kernel.GrowExt4(root, size)
}
