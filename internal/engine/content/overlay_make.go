package content

import (
	"context"
	"os"
	"path/filepath"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/mount"
	"pando/internal/linux/zfs"

	"golang.org/x/sys/unix"
)

// MakeUpper makes an empty filesystem, given its root, an upper layer.
func MakeUpper(root *os.File) error {
	for _, dir := range []string{mount.UpperDir, mount.WorkDir} {
		if err := unix.Mkdirat(int(root.Fd()), dir, 0o755); err != nil {
			return errs.Wrap("make directory", dir, err)
		}
	}
	return nil
}

// TryUpper makes sure that an object, an empty volume, can become an upper layer. Whether overlayfs can keep changes in
// the filesystem of a tree depends on both, and on their versions: so it tries it, and leaves the tree empty.
// Unsupported.
func (acc *Access) TryUpper(ctx context.Context, id driver.Identity) error {
	if id.FS.IsImage() {
		return nil // the filesystems of images can
	}

	what, err := acc.drv.Attachment(ctx, id.ID)
	if err != nil {
		return err
	}

	if !CanMount() && what.Tree != "" {
		return tryUserUpper(ctx, what.Tree)
	}

	upper, err := acc.mountUpper(ctx, catalog.Row{Identity: id}, &catalog.MountRecord{}, what, false)
	if err != nil {
		return err
	}

	defer upper.Close()

	return withRoot(upper, func(root *os.File) error {
		if err := MakeUpper(root); err != nil {
			return err
		}

		if err := tryOverlayOn(upper); err != nil {
			return upperRefused(what, err)
		}

		return removeUpper(root)
	})
}

// tryOverlayOn mounts an overlay on an upper layer, and makes a change in it that needs all that overlayfs wants of the
// filesystem: it renames a directory of the lower layer.
func tryOverlayOn(upper *mount.Detached) error {
	lower, err := mount.Device("tmpfs", "pando", []string{"mode=755"}, false)
	if err != nil {
		return err
	}

	defer lower.Close()

	err = withRoot(lower, func(root *os.File) error { return unix.Mkdirat(int(root.Fd()), "before", 0o755) })
	if err != nil {
		return err
	}

	m, err := mount.Overlay{Lower: lower, Upper: upper, Name: "pando", Options: OverlayOptions(false)}.Mount()
	if err != nil {
		return err
	}

	defer m.Close()

	return withRoot(m, func(root *os.File) error {
		err := unix.Renameat(int(root.Fd()), "before", int(root.Fd()), "after")
		return errs.Wrap("rename a directory", "", err)
	})
}

// removeUpper removes everything of an upper layer, given its root.
func removeUpper(root *os.File) error {
	for _, dir := range []string{mount.UpperDir, mount.WorkDir} {
		if err := os.RemoveAll(filepath.Join("/proc/self/fd", strconv.Itoa(int(root.Fd())), dir)); err != nil {
			return errs.Wrap("remove", dir, err)
		}
	}
	return nil
}

// upperRefused explains that overlayfs cannot keep changes in a tree.
func upperRefused(what driver.Attachment, why error) error {
	if what.Type != "zfs" {
		return errs.New(errs.Unsupported, "", "", "overlayfs cannot keep changes in the pool's filesystem: %w", why).
			WithHint("remove %s", errs.Param("overlay"))
	}
	return errs.New(errs.Unsupported, "", "", "overlayfs cannot keep changes in datasets of OpenZFS %s: %w",
		zfs.Version(), why).
		WithHint("remove %s, upgrade OpenZFS to 2.2 or newer, or import the golden with %s", errs.Param("overlay"),
			errs.Param("fs", "ext4"))
}
