package engine

import (
	"context"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/logs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
)

// Recovery describes what Maintain has cleaned up.
type Recovery struct {
	Undone    int            // interrupted operations that were undone or finished
	Reclaimed int            // objects destroyed earlier and removed now
	Expired   int            // expired volumes that were destroyed
	Swept     *Sweep         // set if this was the first command after a boot
	Warnings  []errs.Message // things that could not be cleaned up, and stay
}

// forgetAt is the number of reclaimed tombstones at which a command waits for a disk
// flush in order to forget them.
const forgetAt = 512

// Maintain does due maintenance, and cleans up after operations that have died. After a boot it compares the pool with
// the catalogue. It undoes or finishes interrupted operations, removes destroyed objects for up to a second, destroys
// expired volumes, and forgets what it has removed. With nothing to do it costs one query. A command calls it before
// its own work, and a service from time to time; other operations may run at the same time. now is the time by the
// caller's clock: it decides what has expired, and which pins have ended, but for those without an end. Things that it
// cannot clean up are warnings in Recovery: they must not keep users from working with the rest.
func (e *Engine) Maintain(ctx context.Context, now time.Time) (r Recovery, err error) {
	ctx, end := e.ledger.Begin(ctx, "recover")
	defer end(&err)

	said := &warnings.List{}
	ctx = warnings.Collect(mayUseReserve(ctx), said)
	if callOf(ctx).freed == nil { // a gc takes the time it needs
		ctx = ledger.ReclaimUntil(ctx, time.Now().Add(ledger.ReclaimBound))
	}

	if !now.Before(driver.Forever) {
		now = driver.Forever.Add(-1)
	}
	err = e.maintain(ctx, now, &r)
	if errs.Is(err, errs.NoSpace) {
		// Go on, or no command could free space.
		warnings.Add(ctx, "could not clean up after interrupted operations: %v", err)
		err = nil
	}

	r.Warnings = said.Messages()
	if r.Undone+r.Reclaimed+r.Expired > 0 || r.Swept != nil {
		logs.From(ctx).InfoContext(ctx, "cleaned up", "undone", r.Undone, "reclaimed", r.Reclaimed, "expired", r.Expired,
			"swept", r.Swept != nil)
	}
	return r, err
}

func (e *Engine) maintain(ctx context.Context, now time.Time, r *Recovery) error {
	var s catalog.Summary
	var marks []catalog.Mark
	var tombstones []catalog.Tombstone
	if err := e.cat.LostError(); err != nil {
		// The catalogue may be wrong: do nothing that relies on it.
		warnings.Add(ctx, "%v (%s)", err, errs.HintIn(err))
		return nil
	}

	err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if s, err = tx.Summary(now); err != nil {
			return err
		}

		if s.Marks > 0 {
			if marks, err = tx.Marks(); err != nil {
				return err
			}
		}

		if s.Unreclaimed > 0 {
			tombstones, err = tx.Unreclaimed(0)
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

	if len(tombstones) > 0 {
		r.Reclaimed += e.ledger.Reclaim(ctx, tombstones)
	}
	if s.Expired > 0 {
		r.Expired += e.destroyExpired(ctx, now)
	}
	if s.Reclaimed >= forgetAt {
		return e.ledger.ForgetReclaimed(ctx)
	}

	return nil
}

// expireMost limits how many expired volumes one command destroys.
const expireMost = 256

// destroyExpired destroys volumes that have expired by now, except those that are pinned or in use, and
// returns their number.
func (e *Engine) destroyExpired(ctx context.Context, now time.Time) int {
	var due []doomed
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		rows, err := tx.Expired(now, expireMost)
		for _, r := range rows {
			due = append(due, doomed{row: r, ref: r.Name})
		}
		return err
	}); err != nil || len(due) == 0 || e.needRoot("expire", "") != nil {
		return 0 // left to a command that can
	}

	isDue := func(_ *catalog.Tx, r catalog.Row, _ bool) (bool, error) {
		return !r.ExpiresAt.IsZero() && !r.ExpiresAt.After(now) && !r.Pinned.After(now), nil
	}
	report := e.destroyRows(ctx, due, destroyOptions{op: opExpire, why: "it had expired", still: isDue, now: now})
	for _, err := range report.Failed {
		if !errs.Is(err, errs.InUse) {
			warnings.Add(ctx, "could not destroy an expired volume: %v", err)
		}
	}

	return len(report.Destroyed)
}

// work provides what the ledger needs of an Engine: see [ledger.Work].
type work struct{ e *Engine }

func (w work) Remove(ctx context.Context, id driver.ObjectID, ref, why string) error {
	return w.e.removeObject(ctx, id, ref, why)
}

func (w work) Finish(ctx context.Context, m catalog.Mark, row catalog.Row) error {
	e := w.e
	var rec catalog.MountRecord
	var hasRec bool
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		rec, hasRec, err = tx.MountRecord(m.ID)
		return err
	}); err != nil {
		return err
	}

	switch {
	case slices.Contains([]string{opPin, opKeep, opSet, opRewind, opRebase, opFlatten, opPull, opRename, opLabel}, m.Op):
		if err := e.matchIdentity(ctx, m.ID); err != nil {
			return err
		}
	case m.Op == opResize:
		if err := w.finishResize(ctx, row); err != nil {
			return err
		}
	case row.Kind == driver.Layer: // a generation that was removed while overlays needed it
		if err := e.matchIdentity(ctx, m.ID); err != nil {
			return err
		}
	case m.Op == opFsck:
		if err := e.restoreIdentity(ctx, m.ID); err != nil {
			return err
		}
	case m.Op == opRun:
		return w.finishRun(ctx, row, rec, hasRec)
	case m.Op == opAdopt:
		return w.finishAdopt(ctx, m, row, rec, hasRec)
	case hasRec && e.content.MountState(row, rec) == content.NotMounted:
		// An umount that had done its work but not said so.
		if err := e.content.RemoveTarget(ctx, row.Name, rec); err != nil {
			return err
		}
	case hasRec:
		// An umount that was killed between unmounting a frozen filesystem and putting it back.
		if err := e.content.RestoreFrozen(ctx, reasonFor("recover"), row, rec); err != nil && !errs.Is(err, errs.InUse) {
			return err
		}
	case m.Mountpoint != "":
		if err := w.UndoMount(ctx, m); err != nil {
			return err
		}
	}

	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if hasRec && e.content.MountState(row, rec) == content.NotMounted {
			if err := tx.ForgetMount(m.ID); err != nil {
				return err
			}
		}
		return tx.Unmark(m.ID)
	})
}

// UndoMount implements [ledger.Work].
func (w work) UndoMount(ctx context.Context, m catalog.Mark) error {
	e := w.e
	name := m.Name
	if name == "" {
		name = e.cat.RefOf(ctx, m.ID)
	}
	return e.content.UndoMount(ctx, name, m)
}

// Sync makes everything created and destroyed so far durable, and wakes the filesystem's
// background work that frees space.
func (e *Engine) Sync(ctx context.Context) (err error) {
	ctx, end := e.ledger.Begin(ctx, "sync")
	defer end(&err)
	if s, ok := e.syncer(); ok {
		return s.Sync(ctx)
	}
	return nil
}
