package engine

import (
	"context"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// exactUpTo is the largest number of volumes that Volumes measures each time. With
// more, it reports the last figures: from creation, umount, show or ls --exact.
const exactUpTo = 64

// VolumesRequest says what to list.
type VolumesRequest struct {
	// Exact measures each volume, at a cost that grows with its extents. Without it, figures that cannot have changed or
	// would take too long to measure are the last ones (see api.Object.MeasuredAt).
	Exact bool
	// Snapshots lists the snapshots of each volume behind it, the oldest first.
	Snapshots bool
}

// Volumes lists the volumes by name.
func (e *Engine) Volumes(ctx context.Context, q VolumesRequest) ([]api.Object, error) {
	var rows []catalog.Row
	var mounts map[driver.ObjectID]catalog.MountRecord
	volumes := map[driver.ObjectID]string{} // names by lineage, for snapshots
	err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if mounts, err = tx.MountRecords(); err != nil {
			return err
		}
		n, err := tx.Count()
		if err != nil {
			return err
		}
		rows = make([]catalog.Row, 0, n.Volumes)
		if err := visibleVolumes(tx, "ls", func(r catalog.Row) error { rows = append(rows, r); return nil }); err != nil {
			return err
		}
		if q.Snapshots {
			if rows, err = withSnapshots(tx, rows, volumes); err != nil {
				return err
			}
		}
		return tx.CurrentOrigins(rows)
	})
	if err != nil {
		return nil, err
	}

	if q.Exact || len(rows) <= exactUpTo && e.cheapUsage(e.caps.FS[0]) {
		if err := e.measureRows(ctx, rows, q.Exact); err != nil {
			return nil, err
		}
	}

	out := make([]api.Object, len(rows))
	for i, r := range rows {
		if r.Kind == driver.Snapshot {
			out[i] = snapshotOf(r, volumes[r.Volume], e.caps.Name)
			continue
		}
		a, has := mounts[r.ID]
		out[i] = e.volumeNow(r, a, has)
	}

	return out, nil
}

// withSnapshots puts the snapshots of volumes behind them, as far as they may be seen, and fills in the names of the
// volumes by their lineages.
func withSnapshots(tx *catalog.Tx, volumes []catalog.Row, names map[driver.ObjectID]string) ([]catalog.Row, error) {
	snaps := map[driver.ObjectID][]catalog.Row{}
	if err := tx.Rows(driver.Snapshot, func(r catalog.Row) error {
		snaps[r.Volume] = append(snaps[r.Volume], r)
		return nil
	}); err != nil {
		return nil, err
	}

	var out []catalog.Row
	for _, v := range volumes {
		out = append(out, v)
		names[v.Lineage()] = v.Name
		for _, s := range snaps[v.Lineage()] {
			switch err := tx.Ask("ls", s); {
			case err == nil:
				out = append(out, s)
			case unlessHidden(err) != nil:
				return nil, err
			}
		}
	}
	return out, nil
}

// VolumeScan says which volumes to read, and in which order.
type VolumeScan = catalog.VolumeScan

// VolumeOrder is a property by which volumes can be read in order.
type VolumeOrder = catalog.VolumeOrder

// VolumePlace is a place in a list of volumes.
type VolumePlace = catalog.VolumePlace

// The orders, and the place of a time that is not set: after all others.
const (
	ByName      = catalog.ByName
	ByCreated   = catalog.ByCreated
	ByUsed      = catalog.ByUsed
	ByExpires   = catalog.ByExpires
	ByMeasured  = catalog.ByMeasured
	BySize      = catalog.BySize
	ByLogical   = catalog.ByLogical
	ByExclusive = catalog.ByExclusive
	ByShared    = catalog.ByShared
	ByExtents   = catalog.ByExtents
	Never       = catalog.Never
)

// ScanVolumes calls fn for volumes in an order, with the figures last measured, until it returns false. fn must not use
// the engine. [catalog.Tx.ScanVolumes] says what it costs.
func (e *Engine) ScanVolumes(ctx context.Context, q VolumeScan, fn func(api.Object) (more bool)) error {
	return e.cat.View(ctx, func(tx *catalog.Tx) error {
		update := tx.OriginUpdater()
		return tx.ScanVolumes(q, func(r catalog.Row, mounted bool) (more bool, err error) {
			if err := tx.Ask("ls", r); err != nil {
				return true, unlessHidden(err)
			}
			if err := update(&r); err != nil {
				return false, err
			}

			var a catalog.MountRecord
			if mounted {
				if a, mounted, err = tx.MountRecord(r.ID); err != nil {
					return false, err
				}
			}
			return fn(e.volumeNow(r, a, mounted)), nil
		})
	})
}

// MeasuresVolumes reports whether Volumes measures each volume, as there are few.
func (e *Engine) MeasuresVolumes(ctx context.Context) (few bool, err error) {
	if !e.cheapUsage(e.caps.FS[0]) {
		return false, nil
	}
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		many, err := tx.HasMoreVolumes(exactUpTo)
		few = !many
		return err
	})
	return few, err
}

// Mountpoints reports whether and where volumes are mounted now (api.Object.Mounted): those
// with the names, or all that have a mount record. It measures nothing, so the cost
// depends only on their number. NotFound, Invalid if a name is not that of a volume.
func (e *Engine) Mountpoints(ctx context.Context, op string, names ...ref.Name) ([]api.Object, error) {
	var out []api.Object
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		out = nil
		mounts, err := tx.MountRecords()
		if err != nil {
			return err
		}

		for _, n := range names {
			r, err := tx.ResolveVolume(op, n.String())
			if err != nil {
				return err
			}
			a, has := mounts[r.ID]
			out = append(out, e.volumeNow(r, a, has))
		}

		if len(names) > 0 {
			return nil
		}

		return visibleVolumes(tx, op, func(r catalog.Row) error {
			if a, has := mounts[r.ID]; has {
				out = append(out, e.volumeNow(r, a, has))
			}
			return nil
		})
	})

	return out, err
}
