package content

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// A frozen filesystem outlives its last mount: umount(2) succeeds at once, but the kernel keeps the filesystem and its
// block device until it is thawed, for which it has to be mounted again. There is no cheap way to detect a freeze
// before: FIFREEZE stops a filesystem that is not frozen, and a reconfiguration makes ext4 commit. So after each umount
// pando checks whether the filesystem still exists, and mounts a frozen one again at once.

// restricted are the attributes of a restored mount whose own are not known.
const restricted = mount.Attributes(unix.MOUNT_ATTR_NOATIME | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)

// RestoreFrozen mounts a volume again if its frozen filesystem was unmounted, as by an umount that was killed before it
// noticed. InUse if it is frozen, whether or not it could be mounted again, as the error says. nil if it is not frozen;
// then it changes nothing. The caller has marked the volume.
func (acc *Access) RestoreFrozen(ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord) error {
	ns, err := kernel.MountNamespace()
	if err != nil || ns != a.MountNS || a.MountID == 0 || kernel.EarlierBoot(a.BootID, a.At) {
		return nil
	}
	if acc.OwnMountState(row, a) != HeldElsewhere {
		return nil
	}

	w, err := acc.attachmentOf(ctx, row)
	if err != nil {
		return nil // it is damaged or gone
	}

	return acc.restoreFrozen(ctx, why, row, &a, w, restricted)
}

// restoreFrozen is RestoreFrozen for a mount that had these attributes. It updates a.
func (acc *Access) restoreFrozen(
	ctx context.Context, why Reason, row catalog.Row, a *catalog.MountRecord, w driver.Attachment, attrs mount.Attributes,
) error {
	m := acc.openFrozen(ctx, row, *a, w)
	if m == nil {
		return nil
	}

	defer m.Close()

	if err := acc.restoreMount(ctx, m, row.Owner, a, attrs); err != nil {
		return errs.New(errs.InUse, why.Op, row.Name, "its filesystem is frozen; it could not be mounted at %s again: %w",
			a.Mountpoint, err).
			WithHint("%s", thawElsewhere(row.FS, deviceOf(*a, w)))
	}

	return errs.New(errs.InUse, why.Op, row.Name, "its filesystem is frozen").
		WithHint("thaw it with `fsfreeze --unfreeze %s`, or wait until the program that froze it does, then try again",
			errs.ShellWord(a.Mountpoint))
}

// openFrozen mounts the filesystem of an attached image once more, detached, if it is frozen. nil if it is not, or has
// gone, or if the caller will find out more.
func (acc *Access) openFrozen(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, w driver.Attachment,
) *mount.Detached {
	// An overlay cannot be mounted again while its upper layer is in use.
	if w.Image == "" || row.IsOverlay() || !filesystemStays(row.FS, deviceOf(a, w)) {
		return nil
	}

	m, err := acc.remountDetached(ctx, row, a, w, true)
	if err != nil {
		return nil
	}

	if frozen, err := m.Frozen(); err != nil || !frozen {
		m.Close()
		return nil
	}

	return m
}

// frozenElsewhereError is the error that a volume's frozen filesystem is not mounted where it was; nil if it is not
// frozen.
func (acc *Access) frozenElsewhereError(
	ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord, w driver.Attachment,
) error {
	m := acc.openFrozen(ctx, row, a, w)
	if m == nil {
		return nil
	}
	m.Close()
	return errs.New(errs.InUse, why.Op, row.Name, "its filesystem is frozen and no longer mounted at %s",
		a.Mountpoint).
		WithHint("%s", thawElsewhere(row.FS, deviceOf(a, w)))
}

// thawElsewhere tells how to thaw a filesystem that is not mounted.
func thawElsewhere(fs driver.FS, dev uint64) errs.Message {
	device := fmt.Sprintf("/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev))
	return errs.Messagef("mount it and thaw it: `mount -t %s %s /mnt; fsfreeze --unfreeze /mnt; umount /mnt`", fs, device)
}

// filesystemStays reports whether the kernel still has the filesystem on a block device, without waiting for anything:
// the kernel removes its entry in sysfs before the last umount returns.
func filesystemStays(fs driver.FS, dev uint64) bool {
	if dev == 0 || fs == driver.None {
		return false
	}
	device, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev)))
	if err != nil {
		return false
	}
	_, err = os.Stat(filepath.Join("/sys/fs", string(fs), filepath.Base(device)))
	return !errors.Is(err, os.ErrNotExist)
}
