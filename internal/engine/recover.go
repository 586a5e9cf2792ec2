package engine

import (
	"cmp"
	"context"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
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

// recoverBound is how long a command may spend on removing what was destroyed
// before it. `gc` takes the time it needs.
const recoverBound = time.Second

// Maintain does what is due, and cleans up behind operations that are no more: after a boot it compares the pool with
// the catalogue; it undoes or finishes what was interrupted or could not be undone, removes what was destroyed, for up
// to a second, destroys what has expired, and forgets what was removed. With nothing to do it costs one query. A
// command does it before its work, and a service now and then; it may be called while others work. A thing that
// cannot be cleaned up is a warning in Recovery: it must not keep people from working with the rest.
func (e *Engine) Maintain(ctx context.Context) (r Recovery, err error) {
	ctx, end := e.begin(ctx)
	defer end()

	c := callOf(ctx)
	said := &warnings.List{}
	c.until, c.frees = time.Now().Add(recoverBound), true
	ctx = warnings.Collect(withCall(ctx, c), said)
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
		done, err := e.recoverMarks(ctx, marks)
		r.Undone += done.cleaned
		if err != nil {
			return err
		}
	}
	if len(graves) > 0 {
		r.Reclaimed += e.reclaim(ctx, graves)
	}
	if s.Expired > 0 {
		r.Expired += e.expire(ctx)
	}
	if s.Reclaimed >= forgetAt {
		return e.forgetReclaimed(ctx)
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
	report := e.destroyRows(ctx, due, destroyOptions{op: opExpire, why: "its time to live was over", still: func(_ *catalog.Tx, r catalog.Row, _ bool) (bool, error) {
		return !r.ExpiresAt.IsZero() && !r.ExpiresAt.After(time.Now()) && !r.Pinned.After(time.Now()), nil
	}})
	for _, err := range report.Failed {
		if !errs.Is(err, errs.InUse) {
			warnings.Add(ctx, "a volume whose time is over could not be destroyed: %v", err)
		}
	}
	return len(report.Destroyed)
}

// recovered is what became of the marks of dead processes.
type recovered struct {
	cleaned int                       // marks taken away
	failed  map[driver.ObjectID]error // why others stay
}

// recoverMarks undoes or finishes what dead processes were doing. Marks of living processes are left alone.
func (e *Engine) recoverMarks(ctx context.Context, marks []catalog.Mark) (recovered, error) {
	done := recovered{failed: map[driver.ObjectID]error{}}
	seen := map[string]bool{}
	for _, m := range marks {
		if seen[m.Owner] {
			continue
		}
		seen[m.Owner] = true
		if err := e.bury(ctx, m.Owner, &done); err != nil {
			return done, err
		}
	}
	return done, nil
}

// bury cleans up after one process, if it is dead.
func (e *Engine) bury(ctx context.Context, owner string, done *recovered) (err error) {
	grave, err := e.cat.Claim(owner)
	if err != nil || grave == nil {
		return err
	}
	all := false
	defer func() {
		if cerr := grave.Close(all); err == nil {
			err = cerr
		}
	}()
	ctx = grave.In(ctx)
	// What was read before the claim may have been cleaned up by somebody else.
	var marks []catalog.Mark
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		marks, err = tx.MarksOf(owner)
		return err
	}); err != nil {
		return err
	}
	all = true
	for _, m := range marks {
		if err := ctx.Err(); err != nil {
			all = false
			return err
		}
		if err := e.finish(ctx, m); err != nil {
			all = false
			done.failed[m.ID] = err
			warnings.Add(ctx, "a %s that was interrupted could not be cleaned up: %v", m.Op, err)
			continue
		}
		done.cleaned++
	}
	return nil
}

// finish brings one interrupted operation to the state before it or after it.
func (e *Engine) finish(ctx context.Context, m catalog.Mark) error {
	var row catalog.Row
	var exists, buried, hasAttached bool
	var attached catalog.Attached
	err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if row, exists, err = tx.Get(m.ID); err != nil {
			return err
		}
		if attached, hasAttached, err = tx.Attached(m.ID); err != nil {
			return err
		}
		buried, err = tx.Tombstone(m.ID)
		return err
	})
	if err != nil {
		return err
	}
	if m.Freezes {
		if err := e.thawFor(ctx, m.Reads); err != nil {
			return err
		}
	}
	switch {
	case !exists:
		// It was being made, or it was being destroyed and no longer exists.
		if !buried {
			if never, err := e.neverCommitted(ctx, m); err != nil {
				return err
			} else if !never {
				// The sweep after a boot, gc and fsck say so again.
				warnings.Add(ctx, "%s was being made by a %s that died, or the catalogue lost it: it stays in the pool; %s says more",
					cmp.Or(m.Name, string(m.ID)), m.Op, errs.Run("fsck"))
				return e.unmark(ctx, m.ID)
			}
		}
		if m.Mountpoint != "" {
			if err := e.undoAttach(ctx, m); err != nil {
				return err
			}
		}
		// Removing it may take longer than this command may: a tombstone lets
		// it go on where it stops.
		grave := catalog.Tombstone{ID: m.ID, Ref: cmp.Or(m.Name, "what an interrupted "+m.Op+" left"), At: time.Now()}
		if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
			if err := tx.Bury(grave); err != nil { // unless it is buried already
				return err
			}
			return tx.Unmark(m.ID)
		}); err != nil || buried {
			return err // a grave that was there before is next in recover
		}
		e.reclaim(ctx, []catalog.Tombstone{grave})
		return nil
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

// reclaim removes destroyed objects that are still there, but those that a
// living process is removing, for as long as the call may. It returns how many it has
// removed.
func (e *Engine) reclaim(ctx context.Context, graves []catalog.Tombstone) (removed int) {
	bounded, cancel := reclaimContext(ctx)
	defer cancel()
	for _, g := range graves {
		if bounded.Err() != nil {
			return removed
		}
		busy := false
		err := e.cat.View(ctx, func(tx *catalog.Tx) error {
			m, err := tx.Blocking(g.ID, "", false)
			busy = len(m) > 0
			return err
		})
		if err == nil && !busy {
			if err = e.remove(bounded, g.ID, g.Ref, "destroyed earlier"); err == nil {
				err = e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.Reclaimed(g.ID) })
			}
		}
		if err != nil && bounded.Err() != nil {
			return removed // the next command goes on
		}
		if err != nil {
			warnings.Add(ctx, "%s is destroyed, but its space could not be returned yet: %v", g.Ref, err)
			continue
		}
		if !busy {
			removed++
		}
	}
	return removed
}

// forgetReclaimed makes the removal of objects durable, and then forgets it.
func (e *Engine) forgetReclaimed(ctx context.Context) error {
	before := time.Now()
	if s, ok := e.syncer(); ok {
		if err := s.Sync(ctx); err != nil {
			return err
		}
	}
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.ForgetReclaimed(before) })
}

// Sync makes all that was made and destroyed durable, and wakes what frees space
// in the background.
func (e *Engine) Sync(ctx context.Context) error {
	if s, ok := e.syncer(); ok {
		return s.Sync(ctx)
	}
	return nil
}
