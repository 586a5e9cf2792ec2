package content

import (
	"context"
	"errors"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// Busy finds a volume whose Unmount would fail, and changes nothing. Where InUse leaves it to the umount of an image to
// show who holds it, Busy finds out before, for callers that unmount all volumes or none. A program may still begin to
// use a volume in the meantime. InUse.
func (acc *Access) Busy(ctx context.Context, why Reason, volumes []Volume) error {
	for _, err := range acc.InUse(ctx, why, volumes) {
		if err != nil {
			return err
		}
	}

	var tables *mount.Tables
	for _, v := range volumes {
		if !v.HasRecord {
			continue
		}
		w, err := acc.attachmentOf(ctx, v.Row)
		if err != nil {
			continue // as in InUse
		}

		// Whoever has its files open, or something mounted below.
		if used, err := acc.busyHere(ctx, v, w); err != nil {
			return err
		} else if used {
			return acc.heldError(ctx, why, v.Row, v.Record, w)
		}

		// Copies of the mount in other namespaces.
		if tables == nil {
			if tables, err = mount.ReadTables(ctx); err != nil {
				return err
			}
		}
		found, err := mountsOf(tables, v.Row, v.Record, w)
		if err != nil {
			return err
		}
		if len(found) > 0 && !acc.waitCopiesGone(ctx, v.Row, v.Record, w) {
			return acc.heldError(ctx, why, v.Row, v.Record, w)
		}
	}

	return nil
}

// busyHere reports whether something uses a volume where it is mounted in this namespace.
func (acc *Access) busyHere(ctx context.Context, v Volume, w driver.Attachment) (bool, error) {
	a := v.Record
	switch {
	case acc.OwnMountState(v.Row, a) != Mounted:
		return false, nil
	case a.MountID == 0: // a block device, or a link to a tree
		holders, _ := mount.Holders(ctx, mount.Query{Dev: deviceOf(a, w)})
		return len(holders) > 0, nil
	}

	// The first of these calls only looks: umount(2), MNT_EXPIRE. Whatever follows a path to the mount, such as
	// deviceHere, takes its mark away, so that this remains the first.
	deviceHere(a)
	err := unix.Unmount(a.Mountpoint, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW)
	deviceHere(a)
	switch {
	case errors.Is(err, unix.EBUSY):
		return true, nil
	case err == nil || errors.Is(err, unix.EAGAIN):
		return false, nil
	}
	return false, errs.Wrap("look whether it is in use", v.Row.Name, err)
}

// deviceHere returns the device number of what is mounted where a mount record says; 0 if that is unknown.
func deviceHere(a catalog.MountRecord) uint64 {
	m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint)
	if err != nil {
		return 0
	}
	return m.Dev
}
