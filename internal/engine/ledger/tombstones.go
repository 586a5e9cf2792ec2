package ledger

import (
	"context"
	"slices"
	"sync"
	"time"

	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"

	"golang.org/x/sync/errgroup"
)

// ReclaimBound is how long a command may spend on removing objects that earlier commands destroyed, unless ReclaimUntil
// says otherwise.
const ReclaimBound = time.Second

type untilKey struct{}

// ReclaimUntil returns a context in which calls remove objects that earlier commands destroyed until t, and leave the
// rest to the next command. The zero time: without a limit.
func ReclaimUntil(ctx context.Context, t time.Time) context.Context {
	return context.WithValue(ctx, untilKey{}, t)
}

// withReclaimBound returns a context that ends when a call must stop removing objects that earlier commands destroyed.
func withReclaimBound(ctx context.Context) (context.Context, context.CancelFunc) {
	until, has := ctx.Value(untilKey{}).(time.Time)
	switch {
	case !has:
		return context.WithTimeout(ctx, ReclaimBound)
	case until.IsZero():
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, until)
}

// Reclaim removes destroyed objects that still exist, except those that a live operation is removing, for as long as
// the call may. It returns how many it removed. An object that cannot be removed is a warning, and is left to the next
// command.
func (l *Ledger) Reclaim(ctx context.Context, tombstones []catalog.Tombstone) (removed int) {
	bounded, cancel := withReclaimBound(ctx)
	defer cancel()
	for batch := range slices.Chunk(tombstones, cleanUpBatch) {
		if bounded.Err() != nil {
			break
		}
		removed += l.reclaimBatch(ctx, bounded, batch)
	}
	return removed
}

// removeWorkers is how many objects are removed at once.
const removeWorkers = 4

// reclaimBatch is Reclaim for a batch, which shares its transactions. It removes objects until bounded ends.
func (l *Ledger) reclaimBatch(ctx, bounded context.Context, tombstones []catalog.Tombstone) int {
	// Find the objects that no live operation is removing.
	free := make([]catalog.Tombstone, 0, len(tombstones))
	if err := l.cat.View(ctx, func(tx *catalog.Tx) error {
		free = free[:0]
		for _, g := range tombstones {
			m, err := tx.BlockingMarks(g.ID, "", false)
			if err != nil {
				return err
			}
			if len(m) == 0 {
				free = append(free, g)
			}
		}
		return nil
	}); err != nil {
		reportUnreclaimed(ctx, bounded, tombstones[0], err)
		return 0
	}

	// Remove them, some at a time.
	var mu sync.Mutex
	var gone []catalog.Tombstone
	var g errgroup.Group
	g.SetLimit(removeWorkers)

	for _, tombstone := range free {
		if bounded.Err() != nil {
			break // the next command removes the rest
		}
		g.Go(func() error {
			if err := l.work.Remove(bounded, tombstone.ID, tombstone.Ref, "destroyed earlier"); err != nil {
				reportUnreclaimed(ctx, bounded, tombstone, err)
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			gone = append(gone, tombstone)
			return nil
		})
	}

	_ = g.Wait() // each has reported

	if len(gone) == 0 {
		return 0
	}

	// Record what was removed.
	if err := l.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		for _, tombstone := range gone {
			if err := tx.SetReclaimed(tombstone.ID); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		reportUnreclaimed(ctx, bounded, gone[0], err) // the next command finds them removed
		return 0
	}

	return len(gone)
}

// reportUnreclaimed warns that an object could not be removed, unless only the time was up.
func reportUnreclaimed(ctx, bounded context.Context, g catalog.Tombstone, err error) {
	if bounded.Err() == nil {
		warnings.Add(ctx, "%s is destroyed, but its space could not be reclaimed yet: %v", g.Ref, err)
	}
}

// ForgetReclaimed makes the removal of objects durable, and then deletes their tombstones.
func (l *Ledger) ForgetReclaimed(ctx context.Context) error {
	before := time.Now()
	if s, ok := l.drv.(driver.Syncer); ok {
		if err := s.Sync(ctx); err != nil {
			return err
		}
	}
	return l.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.ForgetReclaimed(before) })
}
