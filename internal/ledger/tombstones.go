package ledger

import (
	"context"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/warnings"
)

// ReclaimBound is how long a command may spend on removing what was destroyed before it, unless ReclaimUntil says
// otherwise.
const ReclaimBound = time.Second

type untilKey struct{}

// ReclaimUntil returns a context in which calls remove what was destroyed before them until then, and leave the rest
// to the next command. The zero time: for as long as it takes.
func ReclaimUntil(ctx context.Context, t time.Time) context.Context {
	return context.WithValue(ctx, untilKey{}, t)
}

// bounded ends when a call may not go on removing what was destroyed before it.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	until, has := ctx.Value(untilKey{}).(time.Time)
	switch {
	case !has:
		return context.WithTimeout(ctx, ReclaimBound)
	case until.IsZero():
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, until)
}

// Reclaim removes destroyed objects that are still there, but those that a living operation is removing, for as long
// as the call may. It returns how many it has removed. What cannot be removed is a warning, and stays for the next
// command.
func (l *Ledger) Reclaim(ctx context.Context, graves []catalog.Tombstone) (removed int) {
	bounded, cancel := bounded(ctx)
	defer cancel()
	for _, g := range graves {
		if bounded.Err() != nil {
			return removed
		}
		busy := false
		err := l.cat.View(ctx, func(tx *catalog.Tx) error {
			m, err := tx.Blocking(g.ID, "", false)
			busy = len(m) > 0
			return err
		})
		if err == nil && !busy {
			if err = l.work.Remove(bounded, g.ID, g.Ref, "destroyed earlier"); err == nil {
				err = l.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.Reclaimed(g.ID) })
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

// ForgetReclaimed makes the removal of objects durable, and then forgets it.
func (l *Ledger) ForgetReclaimed(ctx context.Context) error {
	before := time.Now()
	if s, ok := l.drv.(driver.Syncer); ok {
		if err := s.Sync(ctx); err != nil {
			return err
		}
	}
	return l.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.ForgetReclaimed(before) })
}
