package engine

import (
	"context"

	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
)

// upgradePool upgrades a pool of an older format to the current one.
func (e *Engine) upgradePool(ctx context.Context) error {
	unlock, err := pool.Lock(ctx, e.pool.Dir)
	if err != nil {
		return err
	}

	defer unlock()

	now, err := pool.Read(e.pool.Dir)
	if err != nil || now.Config.Format >= pool.Format {
		return err // another process has upgraded it
	}

	if up, ok := e.drv.(driver.Upgrader); ok {
		// Objects that a dead process was making are not committed. All others count as
		// committed, so that they are kept.
		making := map[driver.ObjectID]bool{}
		if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
			marks, err := tx.Marks()
			for _, m := range marks {
				_, has, gerr := tx.Object(m.ID)
				if gerr != nil {
					return gerr
				}
				making[m.ID] = !has
			}
			return err
		}); err != nil {
			return err
		}

		if err := up.Upgrade(ctx, func(id driver.ObjectID) bool { return !making[id] }); err != nil {
			return err
		}
	}

	// From here on commits are counted.
	if err := e.cat.Update(ctx, catalog.Durable, func(*catalog.Tx) error { return nil }); err != nil {
		return err
	}

	return now.SetFormat(pool.Format)
}
