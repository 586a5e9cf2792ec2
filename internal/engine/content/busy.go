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
		if err := acc.unlessHeld(ctx, why, v.Row, v.Record, w, deviceOf(v.Record, w), func() error {
			return acc.busyHere(ctx, v, w)
		}); err != nil {
			return err
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

// busyHere is InUse if something uses a volume where it is mounted in this namespace.
func (acc *Access) busyHere(ctx context.Context, v Volume, w driver.Attachment) error {
	const op = "look whether it is in use"
	used := errs.New(errs.InUse, op, v.Row.Name, "it is")
	a := v.Record
	switch {
	case acc.OwnMountState(v.Row, a) != Mounted:
		return nil
	case a.MountID == 0: // a block device, or a link to a tree
		if holders, _ := mount.Holders(ctx, mount.Query{Dev: deviceOf(a, w)}); len(holders) > 0 {
			return used
		}
		return nil
	}

	// The first of these calls only looks: umount(2), MNT_EXPIRE. Whatever follows a path to the mount, such as
	// deviceHere, takes its mark away, so that this remains the first.
	deviceHere(a)
	err := unix.Unmount(a.Mountpoint, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW)
	deviceHere(a)
	switch {
	case errors.Is(err, unix.EBUSY):
		return used
	case err == nil || errors.Is(err, unix.EAGAIN):
		return nil
	}
	return errs.Wrap(op, v.Row.Name, err)
}

// deviceHere returns the device number of what is mounted where a mount record says; 0 if that is unknown.
func deviceHere(a catalog.MountRecord) uint64 {
	m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint)
	if err != nil {
		return 0
	}
	return m.Dev
}
