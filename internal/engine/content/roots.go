package content

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// WithImage mounts a volume's image detached, where nothing else sees it, calls fn with its root, and unmounts it
// again: when it returns, everything is in the image. If this process is killed, the kernel unmounts it.
func (acc *Access) WithImage(
	ctx context.Context, id driver.ObjectID, o ImageOptions, fn func(root *os.File) error,
) error {
	w, err := acc.drv.Attachment(ctx, id)
	if err != nil {
		return err
	}

	dev, err := acc.openDevice(ctx, id, w, loopdev.Options{DirectIO: !o.Buffered})
	if err != nil {
		return err
	}

	options := append(slices.Clone(w.Options), o.Extra...)
	m, err := mount.Device(string(cmp.Or(o.FS, w.FS)), dev.path, options, w.Block && w.ReadOnly)
	if cerr := dev.close(); err == nil && cerr != nil {
		m.Close()
		err = errs.Wrap("mount", w.Image, cerr)
	}
	if err == nil {
		err = insideMount(m, !w.ReadOnly, fn)
	}

	free, werr := acc.releaseDevice(context.WithoutCancel(ctx), id, w, 30*time.Second, false)
	if err == nil {
		err = werr
	}
	if err == nil && !free {
		err = errs.New(errs.InUse, "umount", w.Image, "something else has mounted %s", dev.path)
	}

	return acc.BlameFull(ctx, err)
}

// ImageOptions of WithImage.
type ImageOptions struct {
	Buffered bool      // through the page cache of the pool: for images that are read again at once
	FS       driver.FS // what the image holds, if the object does not say so yet; "": what the object says
	Extra    []string  // mount options
}

// WithTree calls fn with the root of an object's tree, for a volume that is not an image. readOnly: nothing can be
// changed through it.
func (acc *Access) WithTree(
	ctx context.Context, id driver.ObjectID, readOnly bool, fn func(root *os.File) error,
) error {
	w, err := acc.drv.Attachment(ctx, id)
	if err != nil {
		return err
	}

	var m *mount.Detached
	switch {
	case w.Source != "":
		m, err = mount.Device(w.Type, w.Source, w.Options, readOnly || w.ReadOnly)
		err = acc.blameKey(ctx, id, w.Source, err)
	case readOnly && CanMount():
		m, err = mount.Tree(w.Tree, true)
	default:
		root, err := os.Open(w.Tree)
		if err != nil {
			return errs.Wrap("open", w.Tree, err)
		}
		defer root.Close()
		return fn(root)
	}
	if err != nil {
		return err
	}

	return insideMount(m, w.Source != "" && !readOnly, fn)
}

// blameKey turns an error of a mount into Permission if the object's encryption key is not loaded.
func (acc *Access) blameKey(ctx context.Context, id driver.ObjectID, what string, err error) error {
	keyed, ok := acc.drv.(driver.Keyed)
	if err == nil || !ok || !errors.Is(err, unix.EACCES) {
		return err
	}
	k, kerr := keyed.Key(ctx, id)
	if kerr != nil || k.Root == "" || k.Loaded {
		return err
	}
	return errs.New(errs.Permission, "mount", what, "its encryption key is not loaded").
		WithHint("load it with `zfs load-key %s`, or from a file with `zfs load-key -L file:///PATH %s`",
			k.Root, k.Root)
}

// insideMount calls fn with the root of a detached mount, and unmounts it. written: fn may have written to it; a
// failure to write that back, in a full pool for example, is then an error.
func insideMount(m *mount.Detached, written bool, fn func(root *os.File) error) error {
	root, err := m.Open()
	if err == nil {
		if err = fn(root); err == nil && written {
			err = errs.Wrap("umount", root.Name(), unix.Syncfs(int(root.Fd())))
		}
		root.Close()
	}
	if cerr := m.Close(); err == nil {
		err = cerr
	}
	return err
}

// sourceDevice returns the st_dev of a filesystem that is mounted by name. It stays the same for as long as the
// filesystem is mounted anywhere. InUse if it is unmounted but files in it are open: ZFS does not mount it again then.
func sourceDevice(w driver.Attachment) (uint64, error) {
	m, err := mount.Device(w.Type, w.Source, w.Options, true)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	info, err := m.Info()
	return info.Dev, err
}

// mountedDevice is sourceDevice for a filesystem that is already mounted: for writing, in which case it cannot be
// mounted read-only as well (zpl_mount_impl of OpenZFS), or read-only. Mounting it once more writes nothing.
func mountedDevice(w driver.Attachment) (uint64, error) {
	dev, err := sourceDevice(w)
	if !errors.Is(err, unix.EBUSY) {
		return dev, err
	}
	m, err := mount.Device(w.Type, w.Source, w.Options, false)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	info, err := m.Info()
	return info.Dev, err
}

// CanMount reports whether this process may mount.
func CanMount() bool { return os.Geteuid() == 0 }
