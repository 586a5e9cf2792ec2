package zfs

import (
	"context"
	"hash/fnv"
	"io"
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/waiting"
	"pando/internal/driver"
	"pando/internal/linux/zfs"

	"golang.org/x/sys/unix"
)

// deviceLimit is how long Pando waits for a block device to appear, and leaveLimit
// how long for it to disappear.
const (
	deviceLimit = 10 * time.Second
	leaveLimit  = 3 * time.Second
	// comingLimit is how long activate waits for a device before it requests the device
	// again: another process may just have removed it.
	comingLimit = 2 * time.Second
	// lockLimit is how long Pando waits for processes that make a device appear or
	// disappear, each of which takes no longer than the limits above.
	lockLimit = time.Minute
)

// deviceLocks is a file in the driver's directory. A byte of it, chosen by a hash of
// the ID, is locked while a block device is made to appear (shared) or to disappear
// (exclusive): ZFS removes a device even while processes have it open.
const deviceLocks = "devices"

// lockDevice waits for the right to make a device appear or, if exclusive, disappear.
// The returned func releases the lock.
func (d *Driver) lockDevice(ctx context.Context, op string, id driver.ObjectID, exclusive bool) (func(), error) {
	f, err := os.OpenFile(filepath.Join(d.dir, deviceLocks), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errs.Wrap(op, string(id), err)
	}

	h := fnv.New32a()
	_, _ = io.WriteString(h, string(id)) // never fails
	l := unix.Flock_t{Type: unix.F_RDLCK, Start: int64(h.Sum32()), Len: 1}
	if exclusive {
		l.Type = unix.F_WRLCK
	}

	w := waiting.Wait{
		Op: op, Ref: string(id), What: "the block device of " + string(id), Limit: lockLimit,
		Holders: func() []waiting.Process { return waiting.LockHolders(f.Name(), l.Start) },
	}
	err = w.Until(ctx, func() (bool, error) {
		again := l
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &again)
		if errs.IsAny(err, unix.EAGAIN, unix.EACCES, unix.EINTR) {
			return false, nil
		}
		return err == nil, errs.Wrap(op, string(id), err)
	})
	if err != nil {
		f.Close()
		return nil, err
	}

	return func() { f.Close() }, nil
}

// Activate implements driver.Activator. It runs no program if the device exists,
// or was requested when the object was made. The file holds a lock on the device
// (flock) that makes Deactivate wait, as udev's locks do while udev examines it.
func (d *Driver) Activate(ctx context.Context, id driver.ObjectID) (*os.File, error) {
	const op = "activate"
	if !driver.ValidID(string(id)) {
		return nil, errs.New(errs.NotFound, op, string(id), "no such object in the pool")
	}

	unlock, err := d.lockDevice(ctx, op, id, false)
	if err != nil {
		return nil, err
	}

	defer unlock()

	f, err := d.activate(ctx, id)
	if err != nil {
		return nil, err
	}

	// Lock the device.
	w := waiting.Wait{
		Op: op, Ref: string(id), What: "the block device " + f.Name(), Limit: lockLimit,
		Holders: func() []waiting.Process { return waiting.LockHolders(f.Name(), 0) },
	}
	err = w.Until(ctx, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		if errs.IsAny(err, unix.EWOULDBLOCK, unix.EINTR) {
			return false, nil
		}
		return err == nil, errs.Wrap(op, string(id), err)
	})
	if err != nil {
		f.Close()
		return nil, err
	}

	return f, nil
}

// activate makes the device appear, unless it exists, and opens it. The caller holds the lock of lockDevice.
func (d *Driver) activate(ctx context.Context, id driver.ObjectID) (*os.File, error) {
	const op = "activate"
	ds := d.dataset(id)
	f, err := zfs.OpenDevice(ds)
	if !errs.Is(err, errs.NotFound) {
		return f, err
	}

	// Wait for a device that was requested when the object was made.
	deadline := time.Now().Add(deviceLimit)
	if o, ok := d.memo.lookup(id); ok && o.Identity.Soon {
		if f, err := zfs.AwaitDevice(ctx, ds, comingLimit); !errs.Is(err, errs.Unsupported) {
			return f, err
		}
	}

	// Request it, again and again until the deadline.
	for {
		err := d.runChange(ctx, "set", "volmode=dev", ds)
		if zfs.Is(err, zfs.Absent) {
			d.memo.forget(id)
			return nil, d.absentError(ctx, op, id)
		}
		if err != nil {
			return nil, err
		}
		left := time.Until(deadline)
		f, err := zfs.AwaitDevice(ctx, ds, max(min(comingLimit, left), 0))
		if !errs.Is(err, errs.Unsupported) || left <= comingLimit {
			return f, err
		}
	}
}

// Deactivate implements driver.Activator. It does not notice in advance a process that
// has the device open without an exclusive claim or a lock. Such a process keeps the
// device from disappearing until it closes it: that is InUse too.
func (d *Driver) Deactivate(ctx context.Context, id driver.ObjectID) error {
	const op = "deactivate"
	if !driver.ValidID(string(id)) {
		return errs.New(errs.Invalid, op, string(id), "not the ID of an object")
	}

	unlock, err := d.lockDevice(ctx, op, id, true)
	if err != nil {
		return err
	}

	defer unlock()

	// Wait until nobody holds it.
	ds := d.dataset(id)
	inUse := errs.New(errs.InUse, op, string(id), "its block device %s is in use", zfs.Device(ds))
	path := ""
	for deadline := time.Now().Add(leaveLimit); ; {
		var held bool
		if path, held, err = d.findDevice(id, true); err != nil {
			return err
		}
		if !held {
			break
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return inUse
		}
		time.Sleep(30 * time.Millisecond)
	}

	// Remove it.
	err = d.runChange(ctx, "set", "volmode=none", ds)
	if zfs.Is(err, zfs.Absent) {
		return d.checkRoot(ctx)
	}
	if err != nil {
		return err
	}

	d.memo.forget(id)
	if path == "" || zfs.AwaitNoDevice(ctx, ds, path, leaveLimit) {
		return nil
	}

	return inUse
}

// Active implements driver.Activator.
func (d *Driver) Active(context.Context) ([]driver.ObjectID, error) {
	names, err := zfs.Devices(d.root)
	if err != nil {
		return nil, err
	}
	var out []driver.ObjectID
	for _, n := range names {
		if driver.ValidID(n) {
			out = append(out, driver.ObjectID(n))
		}
	}
	return out, nil
}

// Held implements driver.Activator. It runs no program.
func (d *Driver) Held(_ context.Context, id driver.ObjectID) (bool, error) {
	_, held, err := d.findDevice(id, false)
	return held, err
}

// findDevice returns the path of an object's block device, "" if there is none, and whether
// a process has it open exclusively or, with locks, has a lock on it.
func (d *Driver) findDevice(id driver.ObjectID, locks bool) (path string, held bool, err error) {
	if !driver.ValidID(string(id)) {
		return "", false, nil
	}

	f, err := zfs.OpenDevice(d.dataset(id))
	if errs.Is(err, errs.NotFound) {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}

	defer f.Close()
	if locks {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			return f.Name(), true, nil
		}
	}

	held, err = zfs.HeldExclusively(f)
	return f.Name(), held, err
}
