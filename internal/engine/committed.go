package engine

import (
	"context"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/pool"
)

// What tells that an object may be somebody's: its row. But a catalogue can lose rows: its
// log is cut or damaged, or somebody restores an old copy. So nothing whole is destroyed
// for want of a row alone, unless it is proved that it never had one:
//
//   - The driver notes beside the object that it was committed, before the operation that
//     made it reports success (driver.Committer). Within a boot no note means no success.
//   - Where a driver cannot, the catalogue must be known to have every commit that was
//     waited for (catalog.Continuous).
//   - After a reboot neither proves anything: the note may have been lost with the power.
//     What has none is left alone for strayAge, so that people can bring it back. Where a
//     driver notes nothing, it stays for good.

// strayAge is how long an object that was being made when the host went down, as far as
// can be told, is kept.
const strayAge = 7 * 24 * time.Hour

// noteCommitted notes that objects are in the catalogue. What cannot be noted now is noted
// by the first command after the next boot.
func (e *Engine) noteCommitted(ids []driver.ObjectID) {
	c, ok := e.drv.(driver.Committer)
	if !ok {
		return
	}
	for _, id := range ids {
		_ = c.Commit(id)
	}
}

// neverCommitted reports whether it is sure that what a dead process was making, and what
// has no row, was never said to be there.
func (e *Engine) neverCommitted(ctx context.Context, m catalog.Mark) (bool, error) {
	_, err := e.drv.Attachment(ctx, m.ID)
	if errs.Is(err, errs.NotFound) {
		return true, nil // only half there, or nothing
	}
	if kernel.EarlierBoot(m.BootID, m.At) {
		return false, nil
	}
	c, ok := e.drv.(driver.Committer)
	if !ok {
		return e.cat.Continuous(), nil
	}
	was, err := c.Committed(m.ID)
	switch {
	case errs.Is(err, errs.NotFound):
		return true, nil
	case errs.Is(err, errs.Damaged), errs.Is(err, errs.TooNew):
		return false, nil
	}
	return err == nil && !was, err
}

// isGarbage reports whether an object that is in no row, and that nobody works on, may be
// destroyed.
func (e *Engine) isGarbage(o driver.Object, buried bool) bool {
	if !o.Whole || buried || o.Identity.Kind == driver.Scratch {
		return true
	}
	if !kernel.EarlierBoot(o.Identity.BootID, o.Identity.CreatedAt) {
		return false
	}
	return o.Identity.Ephemeral || e.notesCommits() && isUnfinished(o) && time.Since(o.Identity.CreatedAt) > strayAge
}

// notesCommits reports whether the driver notes what was committed. If not, the age of
// what has no row says nothing: it may have been in use for years.
func (e *Engine) notesCommits() bool {
	_, ok := e.drv.(driver.Committer)
	return ok
}

// isUnfinished reports whether an object without a row looks as if it was being made when
// the host went down.
func isUnfinished(o driver.Object) bool {
	return !o.Committed && kernel.EarlierBoot(o.Identity.BootID, o.Identity.CreatedAt)
}

// strayText says what an object without a row is, and what will become of it.
func (e *Engine) strayText(o driver.Object) errs.Message {
	what := string(o.Identity.Kind) + " " + describe(o.Identity)
	back := errs.Messagef("%s would bring it back", errs.Run("init", errs.Param("rebuild")))
	if !isUnfinished(o) {
		return errs.Messagef("%s is in the pool but not in the catalogue: %s", what, back)
	}
	text := errs.Messagef("%s was being made when the host went down, or the catalogue lost it: %s", what, back)
	if !e.notesCommits() {
		return text
	}
	return errs.Messagef("%s, until %s", text, o.Identity.CreatedAt.Add(strayAge).Local().Format("2006-01-02 15:04"))
}

// upgradePool brings a pool of an older format up to date, once.
func (e *Engine) upgradePool(ctx context.Context) error {
	unlock, err := pool.Lock(ctx, e.pool.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	now, err := pool.Read(e.pool.Dir)
	if err != nil || now.Config.Format >= pool.Format {
		return err // another process was faster
	}

	if up, ok := e.drv.(driver.Upgrader); ok {
		// What a dead process was making is not committed; all else counts as if it were,
		// so that it is kept.
		making := map[driver.ObjectID]bool{}
		if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
			marks, err := tx.Marks()
			for _, m := range marks {
				_, has, gerr := tx.Get(m.ID)
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
