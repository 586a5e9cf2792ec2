package engine

import (
	"context"
	"time"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// ExpireRequest says when a volume ends.
type ExpireRequest struct {
	Volume ref.Name
	TTL    time.Duration // time from now after which a command destroys it; 0: it stays until somebody destroys it
}

// Expire sets or removes the time limit of a volume, as Clone does. Durable on return. NotFound, Invalid.
func (e *Engine) Expire(ctx context.Context, q ExpireRequest) (_ api.Object, err error) {
	ctx, end := e.ledger.Begin(ctx, opSet)
	defer end(&err)

	name := q.Volume.String()
	if err := e.needRoot(opSet, name); err != nil {
		return api.Object{}, err
	}

	var until time.Time
	if q.TTL != 0 {
		if until, err = endOf(opSet, name, time.Now(), q.TTL); err != nil {
			return api.Object{}, err
		}
	}

	var row catalog.Row
	var att catalog.MountRecord
	var has bool
	err = e.changeRow(ctx, opSet, func(tx *catalog.Tx) (id driver.ObjectID, err error) {
		row, err = tx.ResolveVolume(opSet, name)
		return row.ID, err
	}, func(tx *catalog.Tx) (err error) {
		if att, has, err = tx.MountRecord(row.ID); err != nil {
			return err
		}
		row.ExpiresAt = until
		return tx.SetExpires(row.ID, until)
	})
	if err != nil {
		return api.Object{}, err
	}

	return e.volumeNow(row, att, has), nil
}
