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

// blockDevice is an object's image as a block device. It stays at least until close; a mount made by then keeps it.
type blockDevice struct {
	path     string
	loop     int    // index of the loop device; -1: the driver's own device
	dev, ino uint64 // of the image file behind the loop device; of the driver's own device its number, and 0
	close    func() error
}

// openDevice makes an object's image a block device: it attaches a file to a loop device, or activates the driver's own
// device. InUse if a file is already attached.
func (acc *Access) openDevice(
	ctx context.Context, id driver.ObjectID, w driver.Attachment, o loopdev.Options,
) (*blockDevice, error) {
	if w.Block {
		f, err := acc.activateDevice(ctx, id)
		if err != nil {
			return nil, err
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			f.Close()
			return nil, errs.Wrap("attach", f.Name(), err)
		}
		return &blockDevice{path: f.Name(), loop: -1, dev: st.Rdev, close: f.Close}, nil
	}

	f, err := os.OpenFile(w.Image, os.O_RDWR, 0)
	if err != nil {
		return nil, errs.Wrap("mount", w.Image, err)
	}

	defer f.Close()

	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errs.Wrap("mount", w.Image, err)
	}

	o.SectorBytes = w.SectorBytes
	d, err := loopdev.Attach(ctx, f, o)
	if err != nil {
		return nil, err
	}

	return &blockDevice{path: d.Path, loop: d.Index, dev: st.Dev, ino: st.Ino, close: d.Close}, nil
}

func (acc *Access) activateDevice(ctx context.Context, id driver.ObjectID) (*os.File, error) {
	a, ok := acc.drv.(driver.Activator)
	if !ok {
		return nil, errs.New(errs.Unsupported, "attach", string(id), "the %s driver has no block devices", acc.caps.Name)
	}
	return a.Activate(ctx, id)
}

// releaseDevice waits until an object's image is no longer a block device, at most for the time given. It returns false
// if a mount or process, maybe in another mount namespace, holds it. With going, the object is about to be destroyed:
// then a device of the driver's own may stay if nothing holds it, as it is removed with the object.
func (acc *Access) releaseDevice(
	ctx context.Context, id driver.ObjectID, w driver.Attachment, most time.Duration, going bool,
) (bool, error) {
	if !w.Block {
		return loopdev.WaitDetached(ctx, w.Image, most)
	}

	a, ok := acc.drv.(driver.Activator)
	if !ok {
		return true, nil
	}
	if going {
		return acc.waitDeviceUnheld(ctx, a, id, most)
	}

	err := a.Deactivate(ctx, id)
	if errs.Is(err, errs.InUse) {
		return false, nil
	}

	return err == nil, err
}

func (acc *Access) waitDeviceUnheld(
	ctx context.Context, a driver.Activator, id driver.ObjectID, most time.Duration,
) (bool, error) {
	deadline := time.Now().Add(most)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		held, err := a.Held(ctx, id)
		if err != nil || !held {
			return err == nil, err
		}
		if time.Now().After(deadline) {
			return false, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// OpenPath returns the path of an object's image file or block device. The block device stays until it is closed.
func (acc *Access) OpenPath(ctx context.Context, id driver.ObjectID) (path string, closePath func() error, err error) {
	w, err := acc.drv.Attachment(ctx, id)
	if err != nil {
		return "", nil, err
	}
	if !w.Block {
		return w.Image, func() error { return nil }, nil
	}

	f, err := acc.activateDevice(ctx, id)
	if err != nil {
		return "", nil, err
	}

	return f.Name(), func() error {
		err := f.Close()
		// Others may use it too: the last one deactivates it.
		if free, derr := acc.releaseDevice(context.WithoutCancel(ctx), id, w, 0, false); err == nil && free {
			err = derr
		}
		return err
	}, nil
}

// WithPath calls fn with a path as OpenPath returns it.
func (acc *Access) WithPath(ctx context.Context, id driver.ObjectID, fn func(path string) error) error {
	path, closePath, err := acc.OpenPath(ctx, id)
	if err != nil {
		return err
	}
	return cmp.Or(fn(path), closePath())
}

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

	return acc.blameFull(ctx, err)
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

// imageAttached reports whether an object's image is a block device now, and in use if it is the driver's own device.
func (acc *Access) imageAttached(id driver.ObjectID) (bool, error) {
	if a, ok := acc.drv.(driver.Activator); ok {
		return a.Held(context.Background(), id)
	}
	w, err := acc.drv.Attachment(context.Background(), id)
	if err != nil || w.Image == "" {
		return false, err
	}
	return loopdev.Attached(w.Image)
}

func (acc *Access) isImage(id driver.ObjectID, b loopdev.Bound) bool {
	w, err := acc.drv.Attachment(context.Background(), id)
	if err != nil || w.Image == "" {
		return false
	}
	var st unix.Stat_t
	return unix.Stat(w.Image, &st) == nil && b.SameFile(&st)
}

// clearLoops detaches the loop devices of an image. Mounted ones disappear with their mount.
func (acc *Access) clearLoops(image string) error {
	var st unix.Stat_t
	if err := unix.Stat(image, &st); err != nil {
		return nil
	}

	all, err := loopdev.List()
	if err != nil {
		return err
	}

	for _, b := range all {
		if b.SameFile(&st) {
			if err := b.Clear(); err != nil && !errs.Is(err, errs.NotFound) {
				return err
			}
		}
	}

	return nil
}

// ReleaseWait is how long a block device may take to disappear after its last umount.
const ReleaseWait = 10 * time.Second

// CanMount reports whether this process may mount.
func CanMount() bool { return os.Geteuid() == 0 }
