package content

import (
	"cmp"
	"context"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/loopdev"

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
// device. InUse if a file stays attached.
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
	d, err := attach(ctx, f, o)
	if err != nil {
		return nil, err
	}

	return &blockDevice{path: d.Path, loop: d.Index, dev: st.Dev, ino: st.Ino, close: d.Close}, nil
}

// openVolume is openDevice for a volume that is to be mounted. Its error says who uses it.
func (acc *Access) openVolume(
	ctx context.Context, row catalog.Row, w driver.Attachment, o loopdev.Options,
) (*blockDevice, error) {
	dev, err := acc.openDevice(ctx, row.ID, w, o)
	if errs.Is(err, errs.InUse) && !w.Block {
		err = acc.usedError(ctx, Reason{Op: "mount"}, Volume{Row: row}, w)
	}
	return dev, err
}

// detachPatience is how long an image may stay attached that is about to be detached: a child that any process has
// forked keeps the files and devices that were open then until it begins a program, which a busy host may delay.
const detachPatience = time.Second

// attach attaches an image to a loop device. InUse if it stays attached to another one.
func attach(ctx context.Context, image *os.File, o loopdev.Options) (*loopdev.Device, error) {
	for deadline := time.Now().Add(detachPatience); ; {
		d, err := loopdev.Attach(ctx, image, o)
		if !errs.Is(err, errs.InUse) || time.Now().After(deadline) {
			return d, err
		}

		AtStep("attached already")
		if _, err := loopdev.WaitDetached(ctx, image.Name(), detachPatience); err != nil {
			return nil, err
		}
	}
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

// staysAttached is imageAttached for an image that may be about to be detached, and that nothing accounts for.
func (acc *Access) staysAttached(
	ctx context.Context, why Reason, id driver.ObjectID, w driver.Attachment,
) (bool, error) {
	on, err := acc.imageAttached(id)
	if err == nil && !on && w.Image != "" && !w.Block {
		others, err := loopdev.Unlocked(w.Image)
		return len(others) > 0, err
	}
	if err != nil || !on || why.Gentle {
		return on, err
	}

	AtStep("attached already")
	free, err := acc.releaseDevice(ctx, id, w, detachPatience, true)
	return !free, err
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
	on, err := loopdev.On(image)
	if err != nil {
		return err
	}

	for _, b := range on {
		if err := b.Clear(); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}

	return nil
}

// ReleaseWait is how long a block device may take to disappear after its last umount.
const ReleaseWait = 10 * time.Second
