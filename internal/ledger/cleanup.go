package ledger

import (
	"cmp"
	"context"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/warnings"
)

// Cleaned is what became of marks of dead operations.
type Cleaned struct {
	Marks  int                       // removed, with what they stood for
	Failed map[driver.ObjectID]error // why others stay
}

// CleanUp undoes or finishes what dead operations were doing. Marks of living ones are left alone. What cannot be
// cleaned up is in Cleaned.Failed, and a warning; the error is that of the catalogue, or of ctx.
func (l *Ledger) CleanUp(ctx context.Context, marks []catalog.Mark) (Cleaned, error) {
	done := Cleaned{Failed: map[driver.ObjectID]error{}}
	seen := map[string]bool{}
	for _, m := range marks {
		if seen[m.Owner] {
			continue
		}
		seen[m.Owner] = true
		if err := l.bury(ctx, m.Owner, &done); err != nil {
			return done, err
		}
	}
	return done, nil
}

// bury cleans up after one operation, if it is dead.
func (l *Ledger) bury(ctx context.Context, owner string, done *Cleaned) (err error) {
	grave, err := l.cat.Claim(owner)
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
	if err := l.cat.View(ctx, func(tx *catalog.Tx) (err error) {
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
		if err := l.finish(ctx, m); err != nil {
			all = false
			done.Failed[m.ID] = err
			warnings.Add(ctx, "a %s that was interrupted could not be cleaned up: %v", m.Op, err)
			continue
		}
		done.Marks++
	}
	return nil
}

// finish brings one interrupted operation to the state before it or after it.
func (l *Ledger) finish(ctx context.Context, m catalog.Mark) error {
	var row catalog.Row
	var exists, buried bool
	err := l.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if row, exists, err = tx.Get(m.ID); err != nil {
			return err
		}
		buried, err = tx.Tombstone(m.ID)
		return err
	})
	if err != nil {
		return err
	}
	if m.Freezes {
		if err := l.work.Thaw(ctx, m.Reads); err != nil {
			return err
		}
	}
	if exists {
		return l.work.Finish(ctx, m, row)
	}

	// It was being made, or it was being destroyed and no longer exists.
	if !buried {
		if never, err := l.neverCommitted(ctx, m); err != nil {
			return err
		} else if !never {
			// The sweep after a boot, gc and fsck say so again.
			warnings.Add(ctx,
				"%s was being made by a %s that died, or the catalogue lost it: it stays in the pool; %s says more",
				cmp.Or(m.Name, string(m.ID)), m.Op, errs.Run("fsck"))
			return l.Unmark(ctx, m.ID)
		}
	}
	if m.Mountpoint != "" {
		if err := l.work.Detach(ctx, m); err != nil {
			return err
		}
	}

	// Removing it may take longer than this command may: a tombstone lets it go on where it stops.
	grave := catalog.Tombstone{ID: m.ID, Ref: cmp.Or(m.Name, "what an interrupted "+m.Op+" left"), At: time.Now()}
	if err := l.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if err := tx.Bury(grave); err != nil { // unless it is buried already
			return err
		}
		return tx.Unmark(m.ID)
	}); err != nil || buried {
		return err // a grave that was there before is next in recover
	}
	l.Reclaim(ctx, []catalog.Tombstone{grave})
	return nil
}
