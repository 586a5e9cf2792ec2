package engine

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
	"pando/internal/linux/kernel"
)

// Rights are permissions of a mounted volume that could give its users control of the host.
type Rights = content.Rights

// MountRequest says which volume to mount, and where.
type MountRequest struct {
	Volume ref.Name
	Dir    string // "": the default place below the pool
	May    Rights // what the mount allows
}

// Mount mounts a volume. It does nothing if the volume is mounted there already.
// NotFound, Invalid (the mount point), InUse (it is mounted elsewhere, or without these
// rights), Permission, Conflict (another process is replacing the mount point).
//
// Dir is found, and made if necessary, with the rights of this process: see MountOn for directories of others.
func (e *Engine) Mount(ctx context.Context, q MountRequest) (api.Object, error) {
	return e.mount(ctx, q, nil)
}

// MountOn is Mount on a directory that the caller has opened, perhaps with O_PATH, and keeps open until MountOn
// returns: on no other one, whatever is renamed in the meantime. Dir is not read. Conflict: the directory has no path
// here any more, or another directory is there now.
func (e *Engine) MountOn(ctx context.Context, q MountRequest, dir *os.File) (api.Object, error) {
	var err error
	if q.Dir, err = os.Readlink("/proc/self/fd/" + itoa(int(dir.Fd()))); err != nil {
		return api.Object{}, errs.Wrap("mount", q.Volume.String(), err)
	}
	return e.mount(ctx, q, dir)
}

// mount is Mount on the directory that only is, unless that is nil.
func (e *Engine) mount(ctx context.Context, q MountRequest, only *os.File) (_ api.Object, err error) {
	ctx, end := e.ledger.Begin(ctx, ledger.OpMount)
	defer end(&err)

	name, dir, may := q.Volume.String(), q.Dir, q.May

	if err := e.needRoot("mount", name); err != nil {
		return api.Object{}, err
	}

	// Return if the volume is mounted there already, and check the mount point.
	var row catalog.Row
	var att catalog.MountRecord
	var has bool
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if row, err = tx.ResolveVolume("mount", name); err != nil {
			return err
		}
		att, has, err = tx.MountRecord(row.ID)
		return err
	}); err != nil {
		return api.Object{}, err
	}

	if has {
		state := e.content.Settled(ctx, reasonFor("mount"), row, att)
		if done, err := e.alreadyMounted(state, row, att, dir, may); done || err != nil {
			return volumeOf(row, e.caps.Name, att.Mountpoint), err
		}
	}

	t, err := e.content.CheckTarget("mount", name, row.FS, dir, may)
	if err == nil && only != nil {
		err = t.CheckIs(only)
	}
	if err != nil {
		return api.Object{}, err
	}

	// Mark the work, after checking again in the transaction.
	already := false
	err = e.ledger.Claim(ctx, ledger.OpMount, true, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		if row, err = tx.ResolveVolume("mount", name); err != nil {
			return nil, err
		}

		if att, has, err = tx.MountRecord(row.ID); err != nil {
			return nil, err
		}

		if has {
			state := e.content.OwnMountState(row, att)
			if already, err = e.alreadyMounted(state, row, att, dir, may); already || err != nil {
				return nil, err
			}
			// The record is stale: the volume has been unmounted, or the host has rebooted.
			if err := tx.ForgetMount(row.ID); err != nil {
				return nil, err
			}
		}

		return []catalog.Mark{{ID: row.ID, Op: "mount", Mountpoint: t.Path, MadeDir: t.Made}}, nil
	})
	if err != nil || already {
		return volumeOf(row, e.caps.Name, att.Mountpoint), err
	}

	// Mount it.
	ledger.NoteCommitted(e.drv, row.ID) // in case the process that made it died before it could
	att, err = e.content.Mount(ctx, row, t)
	if err != nil {
		e.ledger.UnmarkFailed(ctx, row.ID, err)
		return api.Object{}, errs.Wrap("mount", name, err)
	}

	if err := e.recordMount(ctx, row, att); err != nil {
		return api.Object{}, errs.Wrap("mount", name, err)
	}

	return volumeOf(row, e.caps.Name, att.Mountpoint), nil
}

// recordMount records a mount and removes the mark of the work. On error it unmounts the volume again; if it cannot,
// the mark stays.
func (e *Engine) recordMount(ctx context.Context, row catalog.Row, att catalog.MountRecord) error {
	err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if err := tx.RecordMount(att); err != nil {
			return err
		}
		if err := tx.SetUsed(row.ID, time.Now()); err != nil {
			return err
		}
		return tx.Unmark(row.ID)
	})
	if err != nil && e.content.Unmount(context.WithoutCancel(ctx), reasonFor("mount"), row, att, false) == nil {
		_ = e.ledger.Unmark(ctx, row.ID)
	}
	return err
}

// alreadyMounted reports whether the volume is already mounted as requested. InUse if
// it is mounted elsewhere, or without the requested rights.
func (e *Engine) alreadyMounted(
	state content.State, row catalog.Row, a catalog.MountRecord, dir string, may Rights,
) (bool, error) {
	switch state {
	case content.NotMounted:
		return false, nil
	case content.HeldElsewhere:
		return false, e.content.HeldError(context.Background(), reasonFor("mount"), row, a)
	}

	if dir == "" || samePath(dir, a.Mountpoint) {
		has, why := content.RightsOf(a), ""
		switch {
		case may.Dev && !has.Dev || may.SUID && !has.SUID:
			why = "without the requested rights"
		case may.Owner != nil && !reflect.DeepEqual(may.Owner, has.Owner):
			why = "for another owner"
		default:
			return true, nil
		}
		return false, errs.New(errs.InUse, "mount", row.Name, "it is already mounted at %s, %s", a.Mountpoint, why).
			WithHint("unmount it first with %s", errs.Run("umount", row.Name))
	}

	return false, errs.New(errs.InUse, "mount", row.Name, "it is already mounted at %s", a.Mountpoint).
		WithHint("unmount it first with %s", errs.Run("umount", row.Name))
}

// UmountRequest says what to unmount.
type UmountRequest struct {
	Volume  ref.Name
	Discard bool // give up data that could not be stored in the pool
}

// Umount undoes Mount, and returns space that was freed inside the volume to the pool.
// It does nothing if the volume is not mounted. NotFound, InUse (naming the processes
// that use it). NoSpace or IO if data written to the volume since it was mounted could not
// be stored in the pool: the volume stays mounted, unless Discard is set.
func (e *Engine) Umount(ctx context.Context, q UmountRequest) (_ api.Object, err error) {
	ctx, end := e.ledger.Begin(ctx, ledger.OpUmount)
	defer end(&err)

	return e.umount(ctx, q.Volume.String(), q.Discard)
}

// umount is Umount within an operation that has begun.
func (e *Engine) umount(ctx context.Context, name string, discard bool) (api.Object, error) {
	if err := e.needRoot("umount", name); err != nil {
		return api.Object{}, err
	}

	ctx = mayUseReserve(ctx) // data that does not fit on the disk would stay in memory for ever

	// Mark the work, if the volume is mounted.
	var row catalog.Row
	var att catalog.MountRecord
	var has bool
	err := e.ledger.Claim(ctx, ledger.OpUmount, false, func(tx *catalog.Tx) (_ []catalog.Mark, err error) {
		if row, err = tx.ResolveVolume("umount", name); err != nil {
			return nil, err
		}
		if att, has, err = tx.MountRecord(row.ID); err != nil || !has {
			return nil, err
		}
		return []catalog.Mark{{ID: row.ID, Op: "umount"}}, nil
	})
	if err != nil || !has {
		return volumeOf(row, e.caps.Name, ""), err
	}

	// Write back what programs have written, and unmount.
	if ns, err := kernel.MountNamespace(); err == nil && ns != att.MountNS && att.MountID != 0 &&
		e.content.MountState(row, att) == content.HeldElsewhere {
		_ = e.ledger.Unmark(ctx, row.ID)
		return api.Object{}, e.content.HeldError(ctx, reasonFor("umount"), row, att)
	}

	err = e.content.InUse(ctx, reasonFor("umount"), []content.Volume{{Row: row, Record: att, HasRecord: true}})[0]
	if err == nil && e.content.OwnMountState(row, att) == content.Mounted {
		if err := e.content.UmountWriteBack(ctx, row, att, discard); err != nil {
			_ = e.ledger.Unmark(ctx, row.ID)
			return api.Object{}, err
		}
	}
	if err == nil {
		err = e.content.Unmount(ctx, reasonFor("umount"), row, att, true)
	}
	if err != nil {
		e.ledger.UnmarkFailed(ctx, row.ID, err)
		return api.Object{}, errs.Wrap("umount", name, err)
	}

	err = e.recordUmount(ctx, &row)
	return volumeOf(row, e.caps.Name, ""), err
}

// recordUmount measures an unmounted volume, if that is cheap, and records that it is no longer mounted.
func (e *Engine) recordUmount(ctx context.Context, row *catalog.Row) error {
	usage, uerr := driver.Usage{}, error(nil)
	measured := row.FS.IsImage() && e.cheapAtUmount() // a tree would have to be walked
	if measured {
		usage, uerr = e.drv.Usage(ctx, row.ID)
	}

	return e.cat.Update(context.WithoutCancel(ctx), catalog.Soft, func(tx *catalog.Tx) error {
		if measured && uerr == nil {
			row.Usage, row.MeasuredAt = usage, time.Now()
			if err := tx.SetUsage(row.ID, usage, row.MeasuredAt); err != nil {
				return err
			}
		}

		if err := tx.ForgetMount(row.ID); err != nil {
			return err
		}

		if err := tx.ForgetLost(row.ID); err != nil {
			return err
		}

		if err := tx.SetUsed(row.ID, time.Now()); err != nil {
			return err
		}

		return tx.Unmark(row.ID)
	})
}

// cheapAtUmount reports whether a volume can be measured right after it was unmounted.
// A driver that measures all volumes at once has the figures only some time later, and
// listings ask it for them.
func (e *Engine) cheapAtUmount() bool {
	_, ok := e.drv.(driver.Measurer)
	return !ok
}

// samePath reports whether path a leads to b, which is absolute.
func samePath(a, b string) bool {
	abs, err := filepath.Abs(a)
	if err != nil {
		return false
	}
	if abs == b {
		return true
	}
	real, err := filepath.EvalSymlinks(abs)
	return err == nil && real == b
}
