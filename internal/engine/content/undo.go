package content

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"

	"golang.org/x/sys/unix"
)

// UndoMount removes the mount of an object, called name, that a dead process may have made at m.Mountpoint and not
// recorded. It leaves any other mount there alone. InUse.
func (acc *Access) UndoMount(ctx context.Context, name string, m catalog.Mark) error {
	if err := acc.undoMount(ctx, m, name); err != nil {
		return err
	}
	return acc.removeMarked(ctx, name, m)
}

func (acc *Access) undoMount(ctx context.Context, m catalog.Mark, name string) error {
	w, err := acc.drv.Attachment(ctx, m.ID)
	if errs.Is(err, errs.NotFound) {
		return nil // incomplete, so it was never mounted
	}
	if err != nil {
		return err
	}

	at, err := kernel.MountAt(unix.AT_FDCWD, m.Mountpoint)
	mounted := err == nil && at.Root
	if mounted && isOverlayAt(m.ID, m.Mountpoint) {
		if err := acc.unmountQuietly(m.Mountpoint, at.ID); err != nil {
			return err
		}
		mounted = false
	}

	if w.Tree != "" {
		var st unix.Stat_t
		if err := unix.Stat(w.Tree, &st); err != nil || !mounted || st.Dev != at.Dev || st.Ino != at.Ino {
			return nil
		}
		return acc.unmountQuietly(m.Mountpoint, at.ID)
	}

	if w.Source != "" {
		// A second mount of the filesystem has the same device number as the existing one.
		if !mounted {
			return nil
		}
		if dev, err := mountedDevice(w); err != nil || dev != at.Dev {
			return err
		}
		return acc.unmountQuietly(m.Mountpoint, at.ID)
	}

	if on, err := acc.imageAttached(m.ID); err != nil || !on && !w.Block {
		return err
	}

	if mounted {
		if is, err := acc.deviceIs(ctx, m.ID, w, at.Dev); err != nil {
			return err
		} else if is {
			if err := acc.unmountQuietly(m.Mountpoint, at.ID); err != nil {
				return err
			}
			// Its device disappears with the mount. Searching all devices for others takes time in proportion to their number.
			if free, err := acc.releaseDevice(ctx, m.ID, w, releaseGrace, false); err != nil || free {
				return err
			}
		}
	}

	if !w.Block {
		if err := acc.clearLoops(w.Image); err != nil {
			return err
		}
	}

	if free, err := acc.releaseDevice(ctx, m.ID, w, ReleaseWait, false); err != nil || free {
		return err
	}

	return errs.New(errs.InUse, "recover", name, "its image is still attached to a block device")
}

// deviceIs reports whether the block device with number dev is an object's image.
func (acc *Access) deviceIs(ctx context.Context, id driver.ObjectID, w driver.Attachment, dev uint64) (bool, error) {
	if w.Block {
		f, err := acc.activateDevice(ctx, id)
		if err != nil {
			return false, err
		}
		defer f.Close()
		var st unix.Stat_t
		return unix.Fstat(int(f.Fd()), &st) == nil && st.Rdev == dev, nil
	}

	b, err := loopdev.LookupNumber(dev)
	if errs.Is(err, errs.NotFound) {
		return false, nil
	}

	return err == nil && acc.isImage(id, b), err
}

func (acc *Access) unmountQuietly(path string, id uint64) error {
	if err := acc.unmountAt(path, id, false); err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}
	return nil
}
