package content

import (
	"context"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// OverlayRoots are the open root directories of an overlay and its layers.
type OverlayRoots struct {
	Lower  *os.File // read-only
	Upper  *os.File // of what overlayfs keeps in the upper layer
	Merged *os.File // the overlay
}

// WithOverlay mounts an overlay detached, where nothing else sees it, calls fn with its roots, and unmounts it again:
// when it returns, everything is in the upper layer, which is the object id. If this process is killed, the kernel
// unmounts it. With readOnly nothing is written to a tree; an image may be, to replay its log.
func (acc *Access) WithOverlay(
	ctx context.Context, id driver.Identity, readOnly bool, fn func(OverlayRoots) error,
) error {
	what, err := acc.drv.Attachment(ctx, id.ID)
	if err != nil {
		return err
	}

	err = acc.withLayers(ctx, id, what, readOnly, fn)
	acc.releaseLower(ctx, id)

	// Wait until the block device of the upper layer is gone. That of the lower one may be in use by other overlays.
	if what.Image == "" {
		return acc.BlameFull(ctx, err)
	}
	free, rerr := acc.releaseDevice(context.WithoutCancel(ctx), id.ID, what, 30*time.Second, false)
	if err == nil {
		err = rerr
	}
	if err == nil && !free {
		err = errs.New(errs.InUse, "umount", what.Image, "something else has mounted it")
	}

	return acc.BlameFull(ctx, err)
}

// withLayers is WithOverlay, but for the end of the block device.
func (acc *Access) withLayers(
	ctx context.Context, id driver.Identity, what driver.Attachment, readOnly bool, fn func(OverlayRoots) error,
) error {
	// Mount the layers.
	upper, err := acc.mountUpper(ctx, catalog.Row{Identity: id}, &catalog.MountRecord{}, what, readOnly)
	if err != nil {
		return err
	}

	defer upper.Close()

	lower, err := acc.mountLower(ctx, id.Lower)
	if err != nil {
		return err
	}

	defer lower.Close()

	AtStep("layers mounted")
	return withRoot(upper, func(root *os.File) error {
		return withRoot(lower, func(low *os.File) error {
			return withMerged(ctx, lower, upper, low, root, readOnly, fn)
		})
	})
}

// withMerged mounts an overlay from its layers, whose roots are low and up, and calls fn.
func withMerged(
	ctx context.Context, lower, upper *mount.Detached, low, up *os.File, readOnly bool, fn func(OverlayRoots) error,
) error {
	if err := checkUpper(up, mount.UpperDir); err != nil {
		return err
	}

	fd, err := unix.Openat(int(up.Fd()), mount.UpperDir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return errs.Wrap("open", up.Name(), err)
	}

	roots := OverlayRoots{Lower: low, Upper: os.NewFile(uintptr(fd), up.Name()), Merged: low}
	defer roots.Upper.Close()

	// An upper layer that was never mounted has nothing, not even the attributes of the root.
	unused, err := isUnused(up)
	switch {
	case err != nil:
		return err
	case unused && readOnly:
		return fn(roots)
	case !readOnly:
		if err := prepareUpper(ctx, lower, upper); err != nil {
			return err
		}
	}

	m, err := mount.Overlay{Lower: lower, Upper: upper, Name: "pando", Options: OverlayOptions(false),
		ReadOnly: readOnly}.Mount()
	if err != nil {
		return err
	}

	return insideMount(m, !readOnly, func(root *os.File) error {
		roots.Merged = root
		return fn(roots)
	})
}
