package engine

import (
	"context"
	"encoding/json"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/ledger"

	"golang.org/x/sync/errgroup"
)

const opPin = "pin"

// PinRequest says what to pin, and for how long.
type PinRequest struct {
	Ref ref.Ref       // volume, snapshot or generation to pin
	For time.Duration // how long it stays pinned; 0: until it is unpinned
}

// Pin keeps a volume, snapshot or generation from being destroyed, by anybody and
// for any reason. A second pin replaces the first. Durable on return. NotFound, Invalid.
func (e *Engine) Pin(ctx context.Context, q PinRequest) (_ api.Object, err error) {
	ctx, end := e.ledger.Begin(ctx, opPin)
	defer end(&err)

	until := driver.Forever
	if q.For != 0 {
		if until, err = endOf(opPin, q.Ref.String(), time.Now(), q.For); err != nil {
			return api.Object{}, err
		}
	}
	return e.pinUntil(ctx, q.Ref, until)
}

// endOf returns when a span ends. It returns Invalid if that is in the past, or later than can be stored.
func endOf(op, reference string, now time.Time, span time.Duration) (time.Time, error) {
	end := now.Add(span).UTC()
	switch {
	case span < 0:
		return end, errs.New(errs.Invalid, op, reference, "the duration must not be negative (got %s)", span)
	case !end.Before(driver.Forever):
		return end, errs.New(errs.Invalid, op, reference, "the duration must end before the year %d (got %s)",
			driver.Forever.Year(), span)
	}
	return end, nil
}

// Unpin undoes Pin. It does nothing if the object is not pinned.
func (e *Engine) Unpin(ctx context.Context, r ref.Ref) (_ api.Object, err error) {
	ctx, end := e.ledger.Begin(ctx, opPin)
	defer end(&err)

	return e.pinUntil(ctx, r, time.Time{})
}

func (e *Engine) pinUntil(ctx context.Context, r ref.Ref, until time.Time) (api.Object, error) {
	if err := e.needRoot(opPin, r.String()); err != nil {
		return api.Object{}, err
	}

	var row catalog.Row
	var golden catalog.Golden
	var att catalog.MountRecord
	var has bool
	err := e.changeRow(ctx, opPin, func(tx *catalog.Tx) (id driver.ObjectID, err error) {
		row, err = tx.Resolve(opPin, r)
		return row.ID, err
	}, func(tx *catalog.Tx) (err error) {
		if att, has, err = tx.MountRecord(row.ID); err != nil {
			return err
		}
		if row.Kind == driver.Generation {
			if golden, _, err = tx.Golden(row.Golden); err != nil {
				return err
			}
		}
		row.Pinned = until
		return tx.SetPinned(row.ID, until)
	})
	if err != nil {
		return api.Object{}, err
	}

	switch row.Kind {
	case driver.Generation:
		return generationOf(row, golden, e.caps.Name), nil
	case driver.Snapshot:
		return snapshotOf(row, r.Name, e.caps.Name), nil
	}

	return e.volumeNow(row, att, has), nil
}

// changeRow is changeRows for one object, which find looks up.
func (e *Engine) changeRow(
	ctx context.Context, op string, find func(*catalog.Tx) (driver.ObjectID, error), change func(*catalog.Tx) error,
) error {
	return e.changeRows(ctx, rowsChange{op: op, find: func(tx *catalog.Tx) ([]catalog.Mark, error) {
		id, err := find(tx)
		return []catalog.Mark{{ID: id, Op: op}}, err
	}, change: change})
}

// rowsChange is a change of the rows of objects.
type rowsChange struct {
	op      string
	find    ledger.Check            // returns the marks of the objects
	change  func(*catalog.Tx) error // writes the rows
	readers bool                    // wait for operations that only read one of the objects, too
}

// changeRows changes rows of objects in the catalogue, durably and all at once, and then their identities in the pool.
// If this process dies between the two, it leaves marks, and the next command writes the identities.
func (e *Engine) changeRows(ctx context.Context, c rowsChange) error {
	var ids []driver.ObjectID
	if err := e.ledger.Claim(ctx, c.op, c.readers, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		marks, err := c.find(tx)
		if err != nil {
			return nil, err
		}

		ids = nil
		for _, m := range marks {
			ids = append(ids, m.ID)
		}
		return marks, nil
	}); err != nil {
		return err
	}

	err := e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if err := c.change(tx); err != nil {
			return err
		}
		for _, id := range ids {
			if err := checkIdentityFits(tx, c.op, id, 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		if err = e.matchIdentities(context.WithoutCancel(ctx), ids); err != nil {
			return err // the marks stay, so that the next command writes the identities
		}
	}

	if uerr := e.ledger.Unmark(ctx, ids...); err == nil {
		err = uerr
	}

	return err
}

// checkIdentityFits refuses a row whose identity could not be written, or not with spare bytes more: the catalogue
// would have it, and the pool never would. Invalid.
func checkIdentityFits(tx *catalog.Tx, op string, id driver.ObjectID, spare int) error {
	row, ok, err := tx.Object(id)
	if err != nil || !ok {
		return err
	}
	whole, err := wholeIdentity(tx, row)
	if err != nil {
		return err
	}

	const version = 64 // what the JSON has besides: the version, a checksum
	b, err := json.Marshal(whole)
	most := driver.MaxIdentityBytes - version - spare
	if n := len(b) + len(whole.Extra); err == nil && n > most {
		err = errs.New(errs.Invalid, op, tx.RefOf(row), "what the pool keeps of it would have %d bytes, and can have %d", n,
			most).WithHint("use shorter names and labels")
	}
	return err
}

// identitiesAtOnce is how many identities are written at the same time: each waits for the disk.
const identitiesAtOnce = 8

// matchIdentities is matchIdentity for several objects.
func (e *Engine) matchIdentities(ctx context.Context, ids []driver.ObjectID) error {
	if len(ids) == 1 {
		return e.matchIdentity(ctx, ids[0])
	}

	progress.From(ctx).Start(progress.WritingIdentities, int64(len(ids)), 0)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(identitiesAtOnce)
	for _, id := range ids {
		g.Go(func() error {
			defer progress.From(ctx).Add(1, 0)
			return e.matchIdentity(ctx, id)
		})
	}
	return g.Wait()
}

// matchIdentity writes the identity that the catalogue has of an object to the pool.
func (e *Engine) matchIdentity(ctx context.Context, id driver.ObjectID) error {
	var row catalog.Row
	var ok bool
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if row, ok, err = tx.Object(id); err != nil || !ok {
			return err
		}
		row.Identity, err = wholeIdentity(tx, row)
		return err
	}); err != nil || !ok {
		return err
	}

	return e.writeIdentity(ctx, row.Identity)
}

// restoreIdentity writes the identity that the catalogue has of an object to the pool,
// even if the identity that is there cannot be read.
func (e *Engine) restoreIdentity(ctx context.Context, id driver.ObjectID) error {
	ins, ok := e.drv.(driver.Inspector)
	if !ok {
		return e.matchIdentity(ctx, id)
	}

	var want driver.Identity
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, ok, err := tx.Object(id)
		if err == nil && !ok {
			err = errs.New(errs.NotFound, opFsck, string(id), "it has just been destroyed")
		}
		if err == nil {
			want, err = wholeIdentity(tx, row)
		}
		return err
	}); err != nil {
		return err
	}

	return ins.Restore(ctx, want)
}

// wholeIdentity returns the identity of a row, with the fields that the catalogue keeps in
// the row of the golden.
func wholeIdentity(tx *catalog.Tx, r catalog.Row) (driver.Identity, error) {
	id := r.Identity
	if r.Kind == driver.Generation {
		g, ok, err := tx.Golden(r.Golden)
		if err != nil {
			return id, err
		}
		if ok && g.Current == r.Generation {
			id.GoldenProperties = g.GoldenProperties
		}
		if ok && !g.CreatedAt.Equal(r.CreatedAt) {
			id.Since = g.CreatedAt
		}
	}

	return id, nil
}
