package engine

import (
	"context"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

const opFlatten = "flatten"

// FlattenRequest says which volume to make independent of all others.
type FlattenRequest struct {
	Volume ref.Name
	DryRun bool // whether only the cost of a flatten is reported
}

// Flatten is the result of Engine.Flatten.
type Flatten struct {
	api.Object
	Tied      bool  `json:"tied"`       // the volume depends on its origin; if not, there is nothing to do
	CostBytes int64 `json:"cost_bytes"` // bytes to read and to write
	FreeBytes int64 `json:"free_bytes"` // free space of the pool before
	// the volume was an overlay, and holds all its files itself now
	WasOverlay bool    `json:"was_overlay"`
	Done       bool    `json:"done"`             // the volume was copied and replaced
	Snapshots  int     `json:"snapshot_count"`   // number of snapshots of the volume, which stay as they are
	Seconds    float64 `json:"duration_seconds"` // time that it took
}

// Flatten makes a volume independent: it copies the volume, and replaces it with the
// copy, which shares no block with any other object, in one commit. From then on no
// destroyed object is kept because of this volume. If the driver does not tie volumes
// to their origins, there is nothing to do. An overlay becomes a volume that holds all its
// files, as if it had been cloned from its golden without Overlay. Durable on return. NotFound, InUse (it is
// mounted), NoSpace.
func (e *Engine) Flatten(ctx context.Context, q FlattenRequest) (_ Flatten, err error) {
	ctx, end := e.ledger.Begin(ctx, opFlatten)
	defer end(&err)

	start, name := time.Now(), q.Volume.String()
	fl, tied := e.drv.(driver.Flattener)
	out := Flatten{Tied: tied}
	if err := e.needRoot(opFlatten, name); err != nil {
		return out, err
	}

	// Find the volume.
	var vol catalog.Row
	look := func(tx *catalog.Tx) (catalog.Row, catalog.Row, error) {
		row, err := tx.ResolveVolume(opFlatten, name)
		if err != nil {
			return row, row, err
		}
		l, err := e.content.FindLive(tx, row, FreezeIfNeeded)
		if err == nil && l.InUse() && (tied || row.IsOverlay()) && !q.DryRun {
			err = errs.New(errs.InUse, opFlatten, name, "the volume is mounted at %s", l.Record.Mountpoint).
				WithHint("unmount it first with %s", errs.Run("umount", name))
		}
		vol = row
		return row, row, err
	}

	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		if _, _, err := look(tx); err != nil {
			return err
		}
		snaps, err := tx.Snapshots(vol.Lineage())
		out.Snapshots = len(snaps)
		return err
	}); err != nil {
		return out, err
	}

	out.Object = volumeOf(vol, e.caps.Name, "")
	out.WasOverlay = vol.IsOverlay()
	out.Tied = tied || out.WasOverlay
	if !out.Tied {
		return out, nil
	}

	// Report the cost.
	s, err := e.pool.Space(ctx)
	if err != nil {
		return out, err
	}

	out.FreeBytes = s.FreeBytes
	if out.CostBytes, err = e.flattenCost(ctx, fl, vol); err != nil {
		return out, err
	}

	if q.DryRun {
		return out, nil
	}

	// Replace the volume by a copy.
	if err := e.pool.Admit(ctx, opFlatten, name, out.CostBytes); err != nil {
		return out, err
	}

	row, err := e.replaceByCopy(ctx, q, fl, look)
	if err != nil {
		return out, err
	}

	out.Object, out.Done, out.Seconds = volumeOf(row, e.caps.Name, ""), true, time.Since(start).Seconds()
	return out, nil
}

// flattenCost returns how many bytes a flatten reads and writes, at most.
func (e *Engine) flattenCost(ctx context.Context, fl driver.Flattener, vol catalog.Row) (int64, error) {
	if !vol.IsOverlay() {
		return fl.FlattenCost(ctx, vol.ID)
	}
	return e.overlayCost(ctx, vol)
}

// overlayCost returns how many bytes it takes, at most, to make a volume that holds all files of an overlay.
func (e *Engine) overlayCost(ctx context.Context, vol catalog.Row) (int64, error) {
	var lower catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		lower, _, err = tx.Object(vol.Lower)
		return err
	}); err != nil {
		return 0, err
	}

	golden, err := bytesToCopy(ctx, e, lower)
	if err != nil {
		return 0, err
	}
	u, err := e.drv.Usage(ctx, vol.ID)
	return golden + u.LogicalBytes, err
}

// replaceByCopy replaces a volume with an independent copy, and destroys its previous
// object.
func (e *Engine) replaceByCopy(
	ctx context.Context, q FlattenRequest, fl driver.Flattener, look func(*catalog.Tx) (catalog.Row, catalog.Row, error),
) (catalog.Row, error) {
	s := &succession{e: e, op: opFlatten, next: e.newIdentity(ctx, driver.Volume)}
	if err := s.claim(ctx, look); err != nil {
		return catalog.Row{}, err
	}

	// Only the blocks differ: the volume keeps its origin.
	s.next.Origin, s.next.OriginID = s.vol.Origin, s.vol.OriginID
	if s.vol.IsOverlay() {
		return s.replaceOverlay(ctx, q)
	}

	progress.From(ctx).Start(progress.Copying, 0, 0)
	last := int64(0)
	err := fl.Flatten(ctx, s.vol.ID, s.draft(), func(done, total int64) {
		if last == 0 {
			progress.From(ctx).Start(progress.Copying, 0, total)
		}
		progress.From(ctx).Add(0, done-last)
		last = done
	})
	if err == nil {
		err = s.commit(ctx)
	}
	if err != nil {
		s.giveUp(ctx)
		return catalog.Row{}, errs.Wrap(opFlatten, q.Volume.String(), err)
	}

	s.dropPredecessor(ctx)
	return s.row, nil
}
