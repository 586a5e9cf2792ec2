package engine

import (
	"cmp"
	"context"
	"runtime"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"

	"golang.org/x/sync/errgroup"
)

// kindOf returns the kind of what a reference names: for a golden, the kind of its rows is that of a generation.
func kindOf(k driver.Kind, reference string) api.Kind {
	if k == driver.Generation && !strings.Contains(reference, "@") {
		return api.KindGolden
	}
	return api.Kind(k)
}

// objectOf describes what a row says, whatever its kind.
func objectOf(r catalog.Row, reference, driverName string) api.Object {
	o := api.Object{
		Ref: reference, Kind: api.Kind(r.Kind), ID: string(r.ID), Name: r.Name, Golden: r.Golden, Generation: r.Generation,
		FS: r.FS, Driver: driverName, State: api.StateIdle, Origin: r.Origin, OriginRemoved: r.OriginGone,
		CreatedAt: r.CreatedAt, LastUsedAt: r.UsedAt, Ephemeral: r.Ephemeral, Overlay: r.IsOverlay(),
		SizeBytes: r.SizeBytes, LogicalBytes: r.Usage.LogicalBytes, ExclusiveBytes: r.Usage.ExclusiveBytes,
		SharedBytes: r.Usage.SharedBytes, Extents: r.Usage.Extents, Consistency: r.Consistency, Mirror: r.Mirror,
		Labels: r.Labels, OwnerUID: r.Owner,
	}

	if !r.ExpiresAt.IsZero() {
		o.ExpiresAt = &r.ExpiresAt
	}
	if !r.MeasuredAt.IsZero() {
		o.MeasuredAt = &r.MeasuredAt
	}
	if o.Pinned = r.Pinned.After(time.Now()); o.Pinned && r.Pinned.Before(driver.Forever) {
		o.PinnedUntil = &r.Pinned
	}

	return o
}

func volumeOf(r catalog.Row, driverName, mountpoint string) api.Object {
	o := objectOf(r, r.Name, driverName)
	if mountpoint != "" {
		o.State, o.Mountpoint = api.StateMounted, mountpoint
	}
	// For users: the golden that the volume was cloned from.
	if from, err := ref.Parse("", r.Origin); err == nil && r.Golden == "" {
		if n, ok := from.Generation(); ok {
			o.Golden, o.Generation = from.Name, n
		}
	}
	return o
}

func snapshotOf(r catalog.Row, volume, driverName string) api.Object {
	o := objectOf(r, volume+"@"+r.Name, driverName)
	o.Volume = volume
	return o
}

func generationOf(r catalog.Row, g catalog.Golden, driverName string) api.Object {
	o := objectOf(r, ref.Generation(r.Golden, r.Generation), driverName)
	o.Name, o.Labels = "", g.Labels
	o.State = api.StateSuperseded
	if r.Generation == g.Current {
		o.State = api.StateCurrent
	}
	return o
}

// describe describes the object that a reference names, as the catalogue has it. NotFound.
func (e *Engine) describe(tx *catalog.Tx, op string, r ref.Ref) (api.Object, error) {
	row, err := tx.Resolve(op, r)
	if err != nil {
		return api.Object{}, err
	}

	one := []catalog.Row{row}
	if err := tx.CurrentOrigins(one); err != nil {
		return api.Object{}, err
	}

	switch row = one[0]; row.Kind {
	case driver.Generation:
		g, _, err := tx.Golden(row.Golden)
		return generationOf(row, g, e.caps.Name), err
	case driver.Snapshot:
		return snapshotOf(row, r.Name, e.caps.Name), nil
	}

	att, has, err := tx.MountRecord(row.ID)
	return e.volumeNow(row, att, has), err
}

// volumeNow describes a volume with its current mount point.
func (e *Engine) volumeNow(r catalog.Row, a catalog.MountRecord, has bool) api.Object {
	if has && e.content.MountState(r, a) != content.NotMounted {
		return volumeOf(r, e.caps.Name, a.Mountpoint)
	}
	return volumeOf(r, e.caps.Name, "")
}

// measureRows measures rows in place. With record, it also writes the figures to the
// catalogue.
func (e *Engine) measureRows(ctx context.Context, rows []catalog.Row, record bool) error {
	if m, ok := e.drv.(driver.Measurer); ok && len(rows) > 1 {
		return e.measureAtOnce(ctx, m, rows, record)
	}

	now := time.Now().UTC()
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))

	for i := range rows {
		g.Go(func() error {
			if err := gctx.Err(); err != nil {
				return err
			}

			u, err := e.drv.Usage(gctx, rows[i].ID)
			if errs.Is(err, errs.NotFound) {
				return nil // just destroyed
			}
			if err != nil {
				return err
			}

			rows[i].Usage, rows[i].MeasuredAt = u, now
			return nil
		})
	}

	if err := g.Wait(); err != nil || !record {
		return err
	}

	return e.recordUsage(ctx, rows)
}

// cheapUsage reports whether the cost of measuring a volume depends at most on the
// number of its extents.
func (e *Engine) cheapUsage(fs driver.FS) bool {
	_, ok := e.drv.(driver.Measurer)
	return ok || fs.IsImage()
}

// measureAtOnce is measureRows with a single request to the driver.
func (e *Engine) measureAtOnce(ctx context.Context, m driver.Measurer, rows []catalog.Row, record bool) error {
	if record { // recorded figures must be exact
		if err := e.Sync(ctx); err != nil {
			return err
		}
	}

	now := time.Now().UTC()
	all, err := m.Usages(ctx)
	if err != nil {
		return err
	}

	for i := range rows {
		if u, ok := all[rows[i].ID]; ok {
			rows[i].Usage, rows[i].MeasuredAt = u, now
		}
	}

	if !record {
		return nil
	}

	return e.recordUsage(ctx, rows)
}

// recordUsage writes the measured figures to the catalogue.
func (e *Engine) recordUsage(ctx context.Context, rows []catalog.Row) error {
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		for _, r := range rows {
			if err := tx.SetUsage(r.ID, r.Usage, r.MeasuredAt); err != nil {
				return err
			}
		}
		return nil
	})
}

// Show describes the object that a reference names, measured now. It first flushes the
// data that programs have written to a mounted volume, so that it counts. NotFound.
func (e *Engine) Show(ctx context.Context, r ref.Ref) (api.Detail, error) {
	s, err := e.readShown(ctx, r)
	if err != nil {
		return api.Detail{}, err
	}

	// Flush a mounted volume, so that what programs have written counts.
	d := api.Detail{OriginID: string(s.row.OriginID), CloneCost: e.caps.CloneCost}
	state := content.NotMounted
	if s.has {
		state = e.content.MountState(s.row, s.att)
		d.Held = state == content.HeldElsewhere
		if state == content.Mounted && s.att.MountID != 0 {
			e.content.FlushToMeasure(ctx, s.row, s.att)
		}
	}

	// Measure the object, and its snapshots unless they are many, and record the figures.
	rows := []catalog.Row{s.row}
	if len(s.snaps) <= exactUpTo && e.cheapUsage(s.row.FS) {
		rows = append(rows, s.snaps...)
	}
	if err := e.measureRows(ctx, rows, true); err != nil {
		return api.Detail{}, errs.Wrap("show", r.String(), err)
	}

	s.row = rows[0]
	copy(s.snaps, rows[1:])
	d.TiedBytes = s.row.Usage.TiedBytes
	d.StallSeconds = e.content.Stall(s.row).Seconds()
	if k, err := e.keyOf(ctx, s.row.ID); err == nil && k.Root != "" {
		d.Key = &k
	}

	d.Layers = s.layers
	if s.row.Kind != driver.Generation && s.row.Golden != "" {
		d.Base = ref.Generation(s.row.Golden, s.row.Generation)
	}

	// Describe the object, a volume with its snapshots.
	switch s.row.Kind {
	case driver.Generation:
		d.Object = generationOf(s.row, s.golden, e.caps.Name)
	case driver.Snapshot:
		d.Object = snapshotOf(s.row, r.Name, e.caps.Name)
	default:
		mountpoint := ""
		if state != content.NotMounted {
			mountpoint = s.att.Mountpoint
		}
		d.Object = volumeOf(s.row, e.caps.Name, mountpoint)
		d.Snapshots = []api.Object{}
		for _, snap := range s.snaps {
			d.Snapshots = append(d.Snapshots, snapshotOf(snap, r.Name, e.caps.Name))
		}
	}

	return d, nil
}

// shown is what the catalogue has about an object that Show describes.
type shown struct {
	row    catalog.Row
	att    catalog.MountRecord
	has    bool // it has a mount record
	golden catalog.Golden
	snaps  []catalog.Row // snapshots of a volume
	layers *api.Layers   // layers of an overlay
}

// readShown reads what the catalogue has about an object. NotFound.
func (e *Engine) readShown(ctx context.Context, r ref.Ref) (s shown, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if s.row, err = tx.Resolve("show", r); err != nil {
			return err
		}

		if s.row.IsOverlay() {
			if s.layers, err = layersOf(tx, s.row); err != nil {
				return err
			}
		}

		switch s.row.Kind {
		case driver.Generation:
			if s.golden, _, err = tx.Golden(s.row.Golden); err != nil {
				return err
			}
		case driver.Volume:
			if s.att, s.has, err = tx.MountRecord(s.row.ID); err != nil {
				return err
			}
			s.snaps, err = tx.Snapshots(s.row.Lineage())
		}
		if err != nil {
			return err
		}

		one := []catalog.Row{s.row}
		err = cmp.Or(tx.CurrentOrigins(one), tx.CurrentOrigins(s.snaps))
		s.row = one[0]
		return err
	})
	return s, err
}
