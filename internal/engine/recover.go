package engine

import (
	"context"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/ledger"
	"pando/internal/loopdev"
	"pando/internal/warnings"

	"golang.org/x/sys/unix"
)

// Recovery is what Maintain has cleaned up.
type Recovery struct {
	Undone    int            // interrupted operations that were undone or finished
	Reclaimed int            // destroyed objects whose space was still to be returned
	Expired   int            // volumes and snapshots destroyed because their time was over
	Swept     *Sweep         // set if this was the first command after a boot
	Warnings  []errs.Message // what could not be cleaned up, and stays
}

// forgetAt is the number of reclaimed tombstones at which a command spends a
// disk flush to be able to forget them.
const forgetAt = 512

// Maintain does what is due, and cleans up behind operations that are no more: after a boot it compares the pool with
// the catalogue; it undoes or finishes what was interrupted or could not be undone, removes what was destroyed, for up
// to a second, destroys what has expired, and forgets what was removed. With nothing to do it costs one query. A
// command does it before its work, and a service now and then; it may be called while others work. A thing that
// cannot be cleaned up is a warning in Recovery: it must not keep people from working with the rest.
func (e *Engine) Maintain(ctx context.Context) (r Recovery, err error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	said := &warnings.List{}
	ctx = warnings.Collect(freeing(ctx), said)
	if callOf(ctx).freed == nil { // a gc takes the time it needs
		ctx = ledger.ReclaimUntil(ctx, time.Now().Add(ledger.ReclaimBound))
	}
	err = e.maintain(ctx, &r)
	if errs.Is(err, errs.NoSpace) {
		// Else no command could free any.
		warnings.Add(ctx, "could not clean up what was interrupted: %v", err)
		err = nil
	}
	r.Warnings = said.Messages()
	return r, err
}

func (e *Engine) maintain(ctx context.Context, r *Recovery) error {
	var s catalog.Summary
	var marks []catalog.Mark
	var graves []catalog.Tombstone
	if err := e.cat.LostError(); err != nil {
		// What it still says may be wrong: nothing is done by it.
		warnings.Add(ctx, "%v (%s)", err, errs.HintIn(err))
		return nil
	}
	err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if s, err = tx.Summary(); err != nil {
			return err
		}
		if s.Marks > 0 {
			if marks, err = tx.Marks(); err != nil {
				return err
			}
		}
		if s.Unreclaimed > 0 {
			graves, err = tx.Unreclaimed(0)
		}
		return err
	})
	if err != nil {
		return err
	}
	if s.Swept.BeforeBoot() {
		sweep, err := e.sweepAfterBoot(ctx)
		if err != nil {
			return err
		}
		r.Swept = sweep
	}
	if len(marks) > 0 {
		done, err := e.ledger.CleanUp(ctx, marks)
		r.Undone += done.Marks
		if err != nil {
			return err
		}
	}
	if len(graves) > 0 {
		r.Reclaimed += e.ledger.Reclaim(ctx, graves)
	}
	if s.Expired > 0 {
		r.Expired += e.expire(ctx)
	}
	if s.Reclaimed >= forgetAt {
		return e.ledger.ForgetReclaimed(ctx)
	}
	return nil
}

// expireMost is how many volumes whose time is over one command destroys.
const expireMost = 256

// expire destroys volumes whose time is over, but those that are pinned or in use.
func (e *Engine) expire(ctx context.Context) int {
	var due []doomed
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		rows, err := tx.Expired(time.Now(), expireMost)
		for _, r := range rows {
			due = append(due, doomed{row: r, ref: r.Name})
		}
		return err
	}); err != nil || len(due) == 0 || e.needRoot("expire", "") != nil {
		return 0 // whoever can, will
	}
	isDue := func(_ *catalog.Tx, r catalog.Row, _ bool) (bool, error) {
		now := time.Now()
		return !r.ExpiresAt.IsZero() && !r.ExpiresAt.After(now) && !r.Pinned.After(now), nil
	}
	report := e.destroyRows(ctx, due, destroyOptions{op: opExpire, why: "its time to live was over", still: isDue})
	for _, err := range report.Failed {
		if !errs.Is(err, errs.InUse) {
			warnings.Add(ctx, "a volume whose time is over could not be destroyed: %v", err)
		}
	}
	return len(report.Destroyed)
}

// work is what the ledger needs of an Engine: see [ledger.Work].
type work struct{ e *Engine }

func (w work) Thaw(ctx context.Context, read driver.ObjectID) error { return w.e.thawFor(ctx, read) }

func (w work) Detach(ctx context.Context, m catalog.Mark) error { return w.e.undoAttach(ctx, m) }

func (w work) Remove(ctx context.Context, id driver.ObjectID, ref, why string) error {
	return w.e.remove(ctx, id, ref, why)
}

func (w work) Finish(ctx context.Context, m catalog.Mark, row catalog.Row) error {
	e := w.e
	var attached catalog.Attached
	var hasAttached bool
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		attached, hasAttached, err = tx.Attached(m.ID)
		return err
	}); err != nil {
		return err
	}

	switch {
	case m.Op == opPin, m.Op == opKeep, m.Op == opRewind, m.Op == opRebase, m.Op == opFlatten, m.Op == opPull:
		if err := e.matchIdentity(ctx, m.ID); err != nil {
			return err
		}
	case m.Op == opFsck:
		if err := e.restoreIdentity(ctx, m.ID); err != nil {
			return err
		}
	case m.Op == opRun:
		return e.finishRun(ctx, row, attached, hasAttached)
	case m.Op == opAdopt:
		return e.finishAdopt(ctx, m, row, attached, hasAttached)
	case hasAttached && e.look(row, attached) == gone:
		// An umount that had done its work but not said so.
		if err := e.removeTarget(ctx, row.Name, attached); err != nil {
			return err
		}
	case !hasAttached && m.Mountpoint != "":
		if err := e.undoAttach(ctx, m); err != nil {
			return err
		}
	}

	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if hasAttached && e.look(row, attached) == gone {
			if err := tx.Detach(m.ID); err != nil {
				return err
			}
		}
		return tx.Unmark(m.ID)
	})
}

// undoAttach takes away the mount that a dead process may have made at
// m.Mountpoint and not recorded. Whatever else is mounted there is left alone.
func (e *Engine) undoAttach(ctx context.Context, m catalog.Mark) error {
	name := m.Name
	if name == "" {
		name = e.cat.RefOf(ctx, m.ID)
	}
	if err := e.undoMount(ctx, m, name); err != nil {
		return err
	}
	return e.removeMarked(ctx, name, m)
}

func (e *Engine) undoMount(ctx context.Context, m catalog.Mark, name string) error {
	w, err := e.drv.Attachment(ctx, m.ID)
	if errs.Is(err, errs.NotFound) {
		return nil // not whole, so never attached
	}
	if err != nil {
		return err
	}
	at, err := kernel.MountAt(unix.AT_FDCWD, m.Mountpoint)
	mounted := err == nil && at.Root
	if w.Tree != "" {
		var st unix.Stat_t
		if err := unix.Stat(w.Tree, &st); err != nil || !mounted || st.Dev != at.Dev || st.Ino != at.Ino {
			return nil
		}
		return e.unmountQuietly(m.Mountpoint, at.ID)
	}
	if w.Source != "" {
		// Mounted again, it has the same number as where it is mounted already.
		if !mounted {
			return nil
		}
		if dev, err := mountedDevice(w); err != nil || dev != at.Dev {
			return err
		}
		return e.unmountQuietly(m.Mountpoint, at.ID)
	}
	if on, err := e.imageAttached(m.ID); err != nil || !on && !w.Block {
		return err
	}
	if mounted {
		if is, err := e.deviceIs(ctx, m.ID, w, at.Dev); err != nil {
			return err
		} else if is {
			if err := e.unmountQuietly(m.Mountpoint, at.ID); err != nil {
				return err
			}
		}
	}
	if !w.Block {
		if err := e.clearLoops(w.Image); err != nil {
			return err
		}
	}
	if free, err := e.releaseDevice(ctx, m.ID, w, releaseWait, false); err != nil || free {
		return err
	}
	return errs.New(errs.InUse, "recover", name, "its image is still attached")
}

// deviceIs reports whether the block device with number dev is an object's image.
func (e *Engine) deviceIs(ctx context.Context, id driver.ObjectID, w driver.Attachment, dev uint64) (bool, error) {
	if w.Block {
		f, err := e.activate(ctx, id)
		if err != nil {
			return false, err
		}
		defer f.Close()
		var st unix.Stat_t
		return unix.Fstat(int(f.Fd()), &st) == nil && st.Rdev == dev, nil
	}
	all, err := loopdev.List()
	if err != nil {
		return false, err
	}
	for _, b := range all {
		if e.isImage(id, b) && loopdev.DeviceNumber(b.Index) == dev {
			return true, nil
		}
	}
	return false, nil
}

func (e *Engine) unmountQuietly(path string, id uint64) error {
	if err := e.unmountAt(path, id, false); err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}
	return nil
}

// clearLoops detaches the loop devices on an image. Those that are mounted
// clear when their mount goes.
func (e *Engine) clearLoops(image string) error {
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

// Sync makes all that was made and destroyed durable, and wakes what frees space
// in the background.
func (e *Engine) Sync(ctx context.Context) error {
	if s, ok := e.syncer(); ok {
		return s.Sync(ctx)
	}
	return nil
}
