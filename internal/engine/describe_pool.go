package engine

import (
	"context"

	"pando/internal/api"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"
)

// plausibleBytes corrects an estimate of the space that the pool's data uses. It cannot exceed the used space of its
// filesystem; and if that filesystem is the pool's own, it cannot be much less, apart from what a filesystem itself
// needs.
func plausibleBytes(e *Engine, estimate int64, s pool.Space) int64 {
	_, own := e.drv.(driver.Spacer)
	if own || e.pool.Config.Backing != nil {
		estimate = max(estimate, s.UsedBytes-s.TotalBytes/20-256<<20)
	}
	return min(estimate, s.UsedBytes)
}

// PoolRequest says how to describe the pool.
type PoolRequest struct {
	Exact bool // measure everything in the pool
}

// Pool describes the pool.
func (e *Engine) Pool(ctx context.Context, q PoolRequest) (api.Pool, error) {
	if err := e.askForPool(ctx, "show"); err != nil {
		return api.Pool{}, err
	}

	s, err := e.pool.Space(ctx)
	if err != nil {
		return api.Pool{}, err
	}

	c := e.config()
	p := api.Pool{
		Dir: e.pool.Dir, ID: c.ID, Driver: c.Driver, Why: c.Why, CloneCost: e.caps.CloneCost,
		TotalBytes: s.TotalBytes, UsedBytes: s.UsedBytes, FreeBytes: s.FreeBytes,
		MinFreePercent: c.MinFreePercent, MeasuredExact: q.Exact,
	}

	if c.Backing != nil {
		p.Backing, p.BackingBytes = e.pool.BackingFile(), c.Backing.SizeBytes
	}

	// Measure everything, if requested.
	var physical int64
	exactBytes := false
	if q.Exact {
		if physical, exactBytes, err = e.measureAll(ctx); err != nil {
			return p, err
		}
	}

	// Count what the catalogue has.
	var mounts map[driver.ObjectID]catalog.MountRecord
	err = e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if mounts, err = tx.MountRecords(); err != nil {
			return err
		}
		return countPool(tx, &p)
	})

	// Choose the best figure for the space in use.
	if !q.Exact {
		p.PhysicalBytes = plausibleBytes(e, p.PhysicalBytes, s)
	}

	if exactBytes {
		p.PhysicalBytes = physical
	} else if _, own := e.drv.(driver.Spacer); own && q.Exact {
		p.PhysicalBytes = s.UsedBytes // only the pool uses it
	}

	for _, a := range mounts {
		if !kernel.EarlierBoot(a.BootID, a.At) {
			p.MountedCount++
		}
	}

	// Add up what destroyed objects still occupy, which reads all objects.
	if t, ok := e.drv.(driver.Tied); ok && q.Exact && err == nil {
		var ties []driver.Tie
		if ties, err = t.Ties(ctx); err != nil {
			return p, err
		}
		p.TieCount = len(ties)
		for _, t := range ties {
			p.TiedBytes += t.Bytes
		}
	}

	if p.PhysicalBytes > 0 {
		p.SavedRatio = float64(p.LogicalBytes) / float64(p.PhysicalBytes)
	}

	return p, err
}

// measureAll measures all objects, records the figures, and returns the result of physicalBytes for them.
func (e *Engine) measureAll(ctx context.Context) (physical int64, exact bool, err error) {
	var rows []catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		return tx.Rows("", func(r catalog.Row) error { rows = append(rows, r); return nil })
	}); err != nil {
		return 0, false, err
	}

	if err := e.measureRows(ctx, rows, true); err != nil {
		return 0, false, err
	}

	return e.physicalBytes(ctx, rows)
}

// countPool fills in the numbers of objects and tombstones, and the sums of their recorded sizes.
func countPool(tx *catalog.Tx, p *api.Pool) error {
	n, err := tx.Count()
	if err != nil {
		return err
	}

	p.VolumeCount, p.SnapshotCount, p.GoldenCount, p.GenerationCount = n.Volumes, n.Snapshots, n.Goldens, n.Generations
	tombstones, err := tx.Unreclaimed(0)
	if err != nil {
		return err
	}

	for _, g := range tombstones {
		p.TrashCount++
		p.TrashBytes += g.Bytes
	}

	p.LogicalBytes, p.PhysicalBytes, err = tx.TotalUsage()
	return err
}
