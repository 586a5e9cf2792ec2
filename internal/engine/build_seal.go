package engine

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

const opSeal = "seal"

// Results of builds are published unsealed, so that nobody waits for that. They are sealed in their place by a gc, and
// while the command of a later build runs: clones of them then cost as little as those of other generations.

// sealResults seals results that are not yet, at most limit (0: all), and returns how many it has changed. One that
// does not fit into the pool stays as it is for a later call.
func (e *Engine) sealResults(ctx context.Context, limit int) (n int, err error) {
	d, ok := e.drv.(driver.Resealer)
	if !ok {
		return 0, nil
	}

	var ids []driver.ObjectID
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		ids, err = tx.Unsealed(limit)
		return err
	}); err != nil {
		return 0, err
	}

	for _, id := range ids {
		changed, err := e.sealResult(ctx, d, id)
		switch {
		case ctx.Err() != nil:
			return n, ctx.Err()
		case errs.Is(err, errs.NoSpace):
			warnings.Add(ctx, "could not yet seal %s, which makes clones of it slower: %v", e.cat.RefOf(ctx, id), err)
			return n, nil
		case errs.Is(err, errs.NotFound): // it is no generation any more
			if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.SetSealed(id) }); err != nil {
				return n, err
			}
		case err != nil && !errs.Is(err, errs.InUse):
			return n, err
		case changed:
			n++
		}
	}

	return n, nil
}

// sealResult seals one result, and reports whether that has changed anything.
func (e *Engine) sealResult(ctx context.Context, d driver.Resealer, id driver.ObjectID) (bool, error) {
	held, err := e.ledger.Hold(ctx, opSeal, id)
	if err != nil {
		return false, err
	}
	defer held.Release(ctx)

	row := held.Rows[0]
	if err := e.pool.Admit(ctx, opSeal, held.Refs[0], row.Usage.LogicalBytes); err != nil {
		return false, err
	}
	changed, err := d.Reseal(ctx, id, nil)
	if err != nil {
		return false, err
	}

	usage := row.Usage
	if changed {
		if usage, err = e.drv.Usage(ctx, id); err != nil {
			return false, err
		}
	}
	return changed, e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if changed {
			if err := tx.SetUsage(id, usage, time.Now()); err != nil {
				return err
			}
		}
		return tx.SetSealed(id)
	})
}

// sealAtOnce limits how many results are sealed while a command runs.
const sealAtOnce = 16

// sealMeanwhile seals earlier results until stop is called, which waits for the end of that.
func (e *Engine) sealMeanwhile(ctx context.Context) (stop func()) {
	// The operation of the build has marks of its own: use another.
	ctx, end := e.ledger.Begin(context.WithoutCancel(ctx))
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer end()
		_, _ = e.sealResults(ctx, sealAtOnce) // what fails here, a gc reports
	}()
	return func() { cancel(); <-done }
}
