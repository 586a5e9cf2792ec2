package content

import (
	"context"
	"errors"
	"os"

	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// Busy returns the InUse error that unmounting a volume would return because programs in this namespace use its mount,
// and unmounts nothing. nil: it is not mounted, or the kernel could unmount it now. Copies of the mount in other
// namespaces, and who has a raw volume open, only show when it is unmounted. It must not run twice at a time on one
// volume.
func (acc *Access) Busy(ctx context.Context, why Reason, row catalog.Row, a catalog.MountRecord) error {
	m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint)
	if err != nil || !m.Root || a.MountID == 0 || m.ID != a.MountID {
		return nil
	}

	// The kernel unmounts only what has been marked by an earlier call, and not used since. A mount that is not busy is
	// marked (EAGAIN).
	useMount(a.Mountpoint)
	err = unix.Unmount(a.Mountpoint, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW)
	useMount(a.Mountpoint)
	if !errors.Is(err, unix.EBUSY) {
		return nil
	}

	return acc.HeldError(ctx, why, row, a)
}

// useMount uses a mount, which removes the mark of an earlier call of umount2 with MNT_EXPIRE.
func useMount(path string) {
	if f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0); err == nil {
		_ = f.Close()
	}
}
