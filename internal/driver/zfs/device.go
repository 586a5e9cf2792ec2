package zfs

import (
	"context"
	"os"
	"time"

	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/zfs"
)

// deviceLimit is how long a block device is awaited, and leaveLimit how long its
// going.
const (
	deviceLimit = 10 * time.Second
	leaveLimit  = 3 * time.Second
	// comingLimit is how long is waited for a device before it is asked for again:
	// another process may just have taken it away.
	comingLimit = 2 * time.Second
)

// Activate implements driver.Activator. It runs no program if the device is there,
// or was asked for when the object was made.
func (d *Driver) Activate(ctx context.Context, id driver.ObjectID) (*os.File, error) {
	const op = "activate"
	if !driver.ValidID(string(id)) {
		return nil, errs.New(errs.NotFound, op, string(id), "no such object in the pool")
	}
	ds := d.dataset(id)
	f, err := zfs.OpenDevice(ds)
	if !errs.Is(err, errs.NotFound) {
		return f, err
	}
	deadline := time.Now().Add(deviceLimit)
	if o, ok := d.memo.get(id); ok && o.Identity.Soon {
		if f, err := zfs.AwaitDevice(ctx, ds, comingLimit); !errs.Is(err, errs.Unsupported) {
			return f, err
		}
	}
	for {
		err := d.do(ctx, "set", "volmode=dev", ds)
		if zfs.Is(err, zfs.Absent) {
			d.memo.drop(id)
			return nil, d.absent(ctx, op, id)
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

// Deactivate implements driver.Activator.
func (d *Driver) Deactivate(ctx context.Context, id driver.ObjectID) error {
	const op = "deactivate"
	if !driver.ValidID(string(id)) {
		return errs.New(errs.Invalid, op, string(id), "not an object's ID")
	}
	ds := d.dataset(id)
	inUse := errs.New(errs.InUse, op, string(id), "its block device %s is in use", zfs.Device(ds))
	deadline := time.Now().Add(leaveLimit)
	for {
		path, held, err := d.device(id)
		if err != nil {
			return err
		}
		if !held {
			err := d.do(ctx, "set", "volmode=none", ds)
			if zfs.Is(err, zfs.Absent) {
				return d.alive(ctx)
			}
			if err != nil {
				return err
			}
			d.memo.drop(id)
			// Whoever has it open keeps it, and the kernel does not try again.
			if path == "" || zfs.AwaitNoDevice(ctx, ds, path, 100*time.Millisecond) {
				return nil
			}
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			if !held {
				_ = zfs.ZFS.Do(context.WithoutCancel(ctx), "set", "volmode=dev", ds) // it is there, and so it shall be said
			}
			return inUse
		}
		time.Sleep(30 * time.Millisecond)
	}
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
	_, held, err := d.device(id)
	return held, err
}

// device is the path of an object's block device, "" if there is none, and whether
// somebody has it exclusively.
func (d *Driver) device(id driver.ObjectID) (path string, held bool, err error) {
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
	held, err = zfs.HeldExclusively(f)
	return f.Name(), held, err
}
