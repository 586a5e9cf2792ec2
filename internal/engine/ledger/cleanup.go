package ledger

import (
	"cmp"
	"context"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// Cleaned is the result of cleaning up marks of dead operations.
type Cleaned struct {
	Marks  int                       // removed, with the leftovers they named
	Failed map[driver.ObjectID]error // why the others stay
}

// CleanUp undoes or finishes the work of dead operations. It leaves marks of live operations alone. Cleaned.Failed and
// a warning name what could not be cleaned up; the error is that of the catalogue, or of ctx.
func (l *Ledger) CleanUp(ctx context.Context, marks []catalog.Mark) (Cleaned, error) {
	done := Cleaned{Failed: map[driver.ObjectID]error{}}
	seen := map[string]bool{}
	for _, m := range marks {
		if seen[m.Owner] {
			continue
		}
		seen[m.Owner] = true
		if err := l.cleanUpOrphan(ctx, m.Owner, &done); err != nil {
			return done, err
		}
	}

	return done, nil
}

// CleanedMarks returns how many marks of dead operations CleanUp has removed so far, with what they named.
func (l *Ledger) CleanedMarks() int64 { return l.cleaned.Load() }

// cleanUpOrphan cleans up after one operation, if it is dead.
func (l *Ledger) cleanUpOrphan(ctx context.Context, owner string, done *Cleaned) (err error) {
	orphan, err := l.cat.LockOrphan(owner)
	if err != nil || orphan == nil {
		return err
	}

	all := false
	defer func() {
		if cerr := orphan.Close(all); err == nil {
			err = cerr
		}
	}()

	ctx = orphan.In(ctx)

	// Read the marks again: another process may have cleaned up some before the orphan was locked.
	var marks []catalog.Mark
	if err := l.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		marks, err = tx.MarksOf(owner)
		return err
	}); err != nil {
		return err
	}

	// Finish the operation's work, some marks at a time.
	all = true
	for batch := range slices.Chunk(marks, cleanUpBatch) {
		if err := ctx.Err(); err != nil {
			all = false
			return err
		}
		failed := l.finishBatch(ctx, batch)
		done.Marks += len(batch) - len(failed)
		l.cleaned.Add(int64(len(batch) - len(failed)))
		for _, m := range batch {
			if err := failed[m.ID]; err != nil {
				all = false
				done.Failed[m.ID] = err
				warnings.Add(ctx, "an interrupted %s could not be cleaned up: %v", m.Op, err)
			}
		}
	}

	return nil
}

// cleanUpBatch is how many marks are cleaned up in one transaction. A process that dies between two batches leaves the
// rest marked; if it dies within one, the whole batch stays marked, as each mark goes in the commit that adds its
// tombstone.
var cleanUpBatch = 256 // tests compare

// finishBatch brings interrupted operations to the state before or after them, and returns the ones that failed.
func (l *Ledger) finishBatch(ctx context.Context, marks []catalog.Mark) (failed map[driver.ObjectID]error) {
	failed = map[driver.ObjectID]error{}
	fail := func(marks []catalog.Mark, err error) map[driver.ObjectID]error {
		for _, m := range marks {
			failed[m.ID] = err
		}
		return failed
	}

	rows, hasTombstone, err := l.readMarked(ctx, marks)
	if err != nil {
		return fail(marks, err)
	}

	// Finish operations on objects with a row one by one: each needs transactions of its own.
	var ready, dying []catalog.Mark // without a row: marks to remove, and those of them whose objects are removed too
	for _, m := range marks {
		if err := ctx.Err(); err != nil {
			return fail(marks, err)
		}

		row, exists := rows[m.ID]
		remove, err := l.undoSideEffects(ctx, m, hasTombstone[m.ID], exists)
		switch {
		case err != nil:
			failed[m.ID] = err
		case exists:
			if err := l.work.Finish(ctx, m, row); err != nil {
				failed[m.ID] = err
			}
		default:
			ready = append(ready, m)
			if remove {
				dying = append(dying, m)
			}
		}
	}

	if len(ready) == 0 {
		return failed
	}

	// Replace the marks by tombstones, and remove the objects. If that takes longer than this command may spend on it,
	// the tombstones let the next command continue.
	tombstones := make([]catalog.Tombstone, len(dying))
	for i, m := range dying {
		ref := cmp.Or(m.Name, "leftovers of an interrupted "+m.Op)
		tombstones[i] = catalog.Tombstone{ID: m.ID, Ref: ref, At: time.Now()}
	}

	if err := l.replaceMarks(ctx, ready, tombstones); err != nil {
		return fail(ready, err)
	}

	// Older tombstones are left to the call that reclaims all of them.
	tombstones = slices.DeleteFunc(tombstones, func(g catalog.Tombstone) bool { return hasTombstone[g.ID] })
	l.Reclaim(ctx, tombstones)
	return failed
}

// readMarked returns the rows of the marked objects that have one, and which of the objects have a tombstone.
func (l *Ledger) readMarked(
	ctx context.Context, marks []catalog.Mark,
) (rows map[driver.ObjectID]catalog.Row, hasTombstone map[driver.ObjectID]bool, err error) {
	rows = make(map[driver.ObjectID]catalog.Row, len(marks))
	hasTombstone = make(map[driver.ObjectID]bool, len(marks))
	err = l.cat.View(ctx, func(tx *catalog.Tx) error {
		for _, m := range marks {
			row, exists, err := tx.Object(m.ID)
			if err != nil {
				return err
			}
			if exists {
				rows[m.ID] = row
			}
			if hasTombstone[m.ID], err = tx.HasTombstone(m.ID); err != nil {
				return err
			}
		}

		return nil
	})
	return rows, hasTombstone, err
}

// replaceMarks removes marks and adds tombstones, in one commit. A tombstone that an object already has stays.
func (l *Ledger) replaceMarks(ctx context.Context, marks []catalog.Mark, tombstones []catalog.Tombstone) error {
	return l.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		for _, g := range tombstones {
			if err := tx.AddTombstone(g); err != nil {
				return err
			}
		}
		for _, m := range marks {
			if err := tx.Unmark(m.ID); err != nil {
				return err
			}
		}
		return nil
	})
}

// undoSideEffects undoes what an operation did besides making or removing an object, and reports whether the object is
// to be removed: it was being made, or it was being destroyed and no longer has a row.
func (l *Ledger) undoSideEffects(
	ctx context.Context, m catalog.Mark, hasTombstone, exists bool,
) (remove bool, err error) {
	if m.Freezes {
		if err := l.work.Thaw(ctx, m.Reads); err != nil {
			return false, err
		}
	}

	if exists {
		return false, nil
	}

	if !hasTombstone {
		never, err := l.neverCommitted(ctx, m)
		if err != nil {
			return false, err
		}
		if !never {
			// The sweep after a boot, gc and fsck warn of it again.
			warnings.Add(ctx,
				"%s was being made by an interrupted %s, or the catalogue lost it: it stays in the pool; run %s for details",
				cmp.Or(m.Name, string(m.ID)), m.Op, errs.Run("fsck"))
			return false, nil
		}
	}

	if m.Mountpoint == "" {
		return true, nil
	}

	return true, l.work.UndoMount(ctx, m)
}
