package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"runtime"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"

	"golang.org/x/sync/errgroup"
)

// Info describes a volume, a snapshot, or a generation of a golden. Its JSON
// form is stable.
type Info struct {
	Name           string             `json:"name"`
	ID             string             `json:"id"`
	Kind           Kind               `json:"kind"`
	FS             driver.FS          `json:"fs"`
	Driver         string             `json:"driver"`
	State          State              `json:"state"`
	Origin         string             `json:"origin"` // reference; "" if it was imported
	Golden         string             `json:"golden"` // name of the golden; of a volume, its origin
	Generation     int                `json:"generation"`
	Mountpoint     string             `json:"mountpoint"` // directory or link where a volume is mounted; "": it is not
	CreatedAt      time.Time          `json:"created_at"`
	LastUsedAt     time.Time          `json:"last_used_at"`
	ExpiresAt      *time.Time         `json:"expires_at"`
	Ephemeral      bool               `json:"ephemeral"`
	Overlay        bool               `json:"overlay"`         // whether it holds only what differs from its golden
	SizeBytes      int64              `json:"size_bytes"`      // size of the block device; 0: as large as the pool
	LogicalBytes   int64              `json:"logical_bytes"`   // space that a full copy would use
	ExclusiveBytes int64              `json:"exclusive_bytes"` // space that destroying it would return
	SharedBytes    int64              `json:"shared_bytes"`
	Extents        int64              `json:"extents"`          // number of pieces on disk
	MeasuredAt     *time.Time         `json:"measured_at"`      // when the bytes were measured
	PinnedUntil    *time.Time         `json:"pinned_until"`     // end of the pin; year 2200: until it is unpinned
	Consistency    driver.Consistency `json:"consistency"`      // how consistent a snapshot is: clean, crash
	Mirror         bool               `json:"mirror,omitempty"` // whether a generation was made from its golden's source

	Labels   driver.Labels `json:"labels"`    // a generation has those of its golden
	OwnerUID uint32        `json:"owner_uid"` // user ID of the owner, also of the volume or golden of a point
}

// Mounted reports whether the volume is mounted.
func (i Info) Mounted() bool { return i.Mountpoint != "" }

// Kind is what a reference names, in the words of users.
type Kind string

// The kinds.
const (
	KindVolume   Kind = "volume"
	KindSnapshot Kind = "snapshot"
	KindGolden   Kind = "golden" // a golden, or a generation of it

	// What only GC speaks of.
	KindLayer Kind = "layer" // what overlays of a removed generation share
	KindTrash Kind = "trash" // an object that is destroyed, and to be removed
	KindTie   Kind = "tie"   // an object that is destroyed, and needed by others
)

// kindOf returns the kind of an object.
func kindOf(k driver.Kind) Kind {
	if k == driver.Generation {
		return KindGolden
	}
	return Kind(k)
}

// State is what an object is doing.
type State string

// The states.
const (
	StateIdle       State = "idle"       // a snapshot, or a volume that is not mounted
	StateMounted    State = "mounted"    // a volume that is mounted
	StateCurrent    State = "current"    // a generation that new clones are made of
	StateSuperseded State = "superseded" // a generation that new clones are not made of
)

// rowInfo fills in what a row says, whatever its kind.
func rowInfo(r catalog.Row, driverName string) Info {
	i := Info{
		Name: r.Name, ID: string(r.ID), Kind: Kind(r.Kind), FS: r.FS, Driver: driverName, State: StateIdle,
		Origin: r.Origin, Golden: r.Golden, Generation: r.Generation,
		CreatedAt: r.CreatedAt, LastUsedAt: r.UsedAt, Ephemeral: r.Ephemeral, Overlay: r.IsOverlay(),
		SizeBytes: r.SizeBytes, LogicalBytes: r.Usage.LogicalBytes, ExclusiveBytes: r.Usage.ExclusiveBytes,
		SharedBytes: r.Usage.SharedBytes, Extents: r.Usage.Extents, Consistency: r.Consistency, Mirror: r.Mirror,
		Labels: r.Labels, OwnerUID: r.Owner,
	}

	if !r.ExpiresAt.IsZero() {
		i.ExpiresAt = &r.ExpiresAt
	}
	if !r.MeasuredAt.IsZero() {
		i.MeasuredAt = &r.MeasuredAt
	}
	if r.Pinned.After(time.Now()) {
		i.PinnedUntil = &r.Pinned
	}

	return i
}

func volumeInfo(r catalog.Row, driverName, mountpoint string) Info {
	i := rowInfo(r, driverName)
	if mountpoint != "" {
		i.State, i.Mountpoint = StateMounted, mountpoint
	}
	// For users: the golden that the volume was cloned from.
	if o, err := ref.Parse("", r.Origin); err == nil && r.Golden == "" {
		if n, ok := o.Generation(); ok {
			i.Golden, i.Generation = o.Name, n
		}
	}
	return i
}

func generationInfo(r catalog.Row, g catalog.Golden, driverName string) Info {
	i := rowInfo(r, driverName)
	i.Kind, i.Name, i.Labels = KindGolden, r.Golden, g.Labels
	i.State = StateSuperseded
	if r.Generation == g.Current {
		i.State = StateCurrent
	}
	return i
}

// infoOf describes the object that a reference names, as the catalogue has it. NotFound.
func (e *Engine) infoOf(tx *catalog.Tx, op string, r ref.Ref) (Info, error) {
	row, err := tx.Resolve(op, r)
	if err != nil {
		return Info{}, err
	}

	one := []catalog.Row{row}
	if err := tx.CurrentOrigins(one); err != nil {
		return Info{}, err
	}

	switch row = one[0]; row.Kind {
	case driver.Generation:
		g, _, err := tx.Golden(row.Golden)
		return generationInfo(row, g, e.caps.Name), err
	case driver.Snapshot:
		return snapshotInfo(row, r.Name, e.caps.Name), nil
	}

	att, has, err := tx.MountRecord(row.ID)
	return e.volumeNow(row, att, has), err
}

// volumeNow describes a volume with its current mount point.
func (e *Engine) volumeNow(r catalog.Row, a catalog.MountRecord, has bool) Info {
	if has && e.content.MountState(r, a) != content.NotMounted {
		return volumeInfo(r, e.caps.Name, a.Mountpoint)
	}
	return volumeInfo(r, e.caps.Name, "")
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

// Detail is what Show reports.
type Detail struct {
	Info
	OriginID string `json:"origin_id"`
	Base     string `json:"base"`           // generation that a volume or snapshot descends from, if any
	Keep     int    `json:"keep,omitempty"` // number of generations that a golden keeps; 0: all
	// OverlayPolicy says whether clones of a golden are overlays.
	OverlayPolicy string           `json:"overlay_policy,omitempty"`
	Source        json.RawMessage  `json:"source,omitempty"` // what a refresh of a golden makes new generations from
	CloneCost     driver.CloneCost `json:"clone_cost"`
	Generations   []Info           `json:"generations,omitempty"`
	Snapshots     []Info           `json:"snapshots,omitempty"`
	Durable       bool             `json:"durable"`        // whether it survives a reboot
	Held          bool             `json:"held,omitempty"` // whether it is still mounted, but not where Pando mounted it

	// StallSeconds is how long copying a mounted volume may stop its writers, in seconds, if noticeable.
	StallSeconds float64 `json:"stall_seconds,omitempty"`

	// TiedBytes is the space of destroyed objects that stay as long as this object or others need them.
	TiedBytes int64 `json:"tied_bytes,omitempty"`

	Key *driver.Key `json:"key,omitempty"` // key of the pool's filesystem; nil: not encrypted

	Layers *Layers `json:"layers,omitempty"` // layers of an overlay
}

// Show describes the object that a reference names, measured now. It first flushes the
// data that programs have written to a mounted volume, so that it counts. NotFound.
func (e *Engine) Show(ctx context.Context, r ref.Ref) (Detail, error) {
	s, err := e.readShown(ctx, r)
	if err != nil {
		return Detail{}, err
	}

	// Flush a mounted volume, so that what programs have written counts.
	d := Detail{OriginID: string(s.row.OriginID), CloneCost: e.caps.CloneCost, Durable: !s.row.Ephemeral}
	state := content.NotMounted
	if s.has {
		state = e.content.MountState(s.row, s.att)
		d.Held = state == content.HeldElsewhere
		if state == content.Mounted && s.att.MountID != 0 {
			e.content.FlushToMeasure(ctx, s.row, s.att)
		}
	}

	// Measure the object, and record the figures.
	one := []catalog.Row{s.row}
	if err := e.measureRows(ctx, one, false); err != nil {
		return Detail{}, errs.Wrap("show", r.String(), err)
	}

	s.row = one[0]
	d.TiedBytes = s.row.Usage.TiedBytes
	d.StallSeconds = e.content.Stall(s.row).Seconds()
	if k, err := e.keyOf(ctx, s.row.ID); err == nil && k.Root != "" {
		d.Key = &k
	}

	d.Layers = s.layers
	if s.row.Kind != driver.Generation && s.row.Golden != "" {
		d.Base = ref.Generation(s.row.Golden, s.row.Generation)
	}

	if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		return tx.SetUsage(s.row.ID, s.row.Usage, s.row.MeasuredAt)
	}); err != nil {
		return Detail{}, err
	}

	// Describe the object, with its generations or snapshots.
	switch s.row.Kind {
	case driver.Generation:
		d.describeGolden(s.row, s.golden, s.gens, e.caps.Name)
	case driver.Snapshot:
		d.Info = snapshotInfo(s.row, r.Name, e.caps.Name)
	default:
		mountpoint := ""
		if state != content.NotMounted {
			mountpoint = s.att.Mountpoint
		}
		d.Info = volumeInfo(s.row, e.caps.Name, mountpoint)
		for _, snap := range s.snaps {
			d.Snapshots = append(d.Snapshots, snapshotInfo(snap, r.Name, e.caps.Name))
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
	gens   []catalog.Row // of a golden, if Show was asked for all of it
	snaps  []catalog.Row // of a volume
	layers *Layers       // of an overlay
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
			if r.At == "" {
				s.gens, err = tx.Generations(s.row.Golden)
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
		err = cmp.Or(tx.CurrentOrigins(one), tx.CurrentOrigins(s.snaps), tx.CurrentOrigins(s.gens))
		s.row = one[0]
		return err
	})
	return s, err
}

// describeGolden describes a generation, which has just been measured, and lists the generations gens.
func (d *Detail) describeGolden(row catalog.Row, golden catalog.Golden, gens []catalog.Row, driverName string) {
	d.Info = generationInfo(row, golden, driverName)
	for _, g := range gens {
		if g.ID == row.ID {
			g = row
		}
		d.Generations = append(d.Generations, generationInfo(g, golden, driverName))
	}
	d.Keep, d.OverlayPolicy, d.Source = golden.Keep, golden.Overlay.String(), sourceJSON(golden)
}

// GoldenInfo is a row of Goldens.
type GoldenInfo struct {
	Info
	Generations int `json:"generations"` // number of generations that exist
	Volumes     int `json:"volumes"`     // cloned from any of these generations

	OverlayPolicy string `json:"overlay_policy"` // whether clones are overlays

	Source json.RawMessage `json:"source,omitempty"` // what a refresh makes new generations from
}

// Goldens lists the goldens by name, each with its current generation.
func (e *Engine) Goldens(ctx context.Context) ([]GoldenInfo, error) {
	out := []GoldenInfo{}
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		goldens, err := visibleGoldens(tx, "golden ls")
		if err != nil {
			return err
		}

		// Find the current generation of each, and count the others.
		at := map[string]int{}
		byName := map[string]catalog.Golden{}
		for i, g := range goldens {
			at[g.Name], byName[g.Name] = i, g
		}

		out = make([]GoldenInfo, len(goldens))
		owner := map[driver.ObjectID]int{}
		if err := tx.Rows(driver.Generation, func(r catalog.Row) error {
			i, ok := at[r.Golden]
			if !ok {
				return nil
			}
			owner[r.ID] = i
			out[i].Generations++
			if g := byName[r.Golden]; g.Current == r.Generation {
				n := out[i].Generations
				out[i] = GoldenInfo{Info: generationInfo(r, g, e.caps.Name), Generations: n,
					OverlayPolicy: g.Overlay.String(), Source: sourceJSON(g)}
			}
			return nil
		}); err != nil {
			return err
		}

		// Count the clones of each.
		counts, err := tx.ClonesByOrigin()
		if err != nil {
			return err
		}

		for id, n := range counts {
			if i, ok := owner[id]; ok {
				out[i].Volumes += n
			}
		}

		return nil
	})

	return out, err
}

// RemoveGolden removes a golden with all its generations, or one generation
// that is not the current one. Clones are not affected. NotFound, InUse (it is
// being built), Invalid (the current generation, while there are others).
func (e *Engine) RemoveGolden(ctx context.Context, r ref.Ref) (_ *DestroyReport, err error) {
	ctx, end := e.ledger.Begin(ctx, "destroy")
	defer end(&err)

	if err := e.needRoot("golden rm", r.String()); err != nil {
		return nil, err
	}

	// Lock the golden, so that nobody builds it.
	unlock, _, err := e.lockGolden(ctx, r.Name)
	if err != nil {
		return nil, err
	}

	defer unlock()

	// Find what to destroy.
	var going []doomed
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, err := tx.Resolve("golden rm", r)
		if err != nil {
			return err
		}

		if row.Kind != driver.Generation {
			return errs.New(errs.Invalid, "golden rm", r.String(), "it is a volume, not a golden").
				WithHint("remove it with %s", errs.Run("destroy", r.String()))
		}

		gens, err := tx.Generations(r.Name)
		if err != nil {
			return err
		}

		g, _, err := tx.Golden(r.Name)
		if err != nil {
			return err
		}

		if r.At != "" && row.Generation == g.Current && len(gens) > 1 {
			return errs.New(errs.Invalid, "golden rm", r.String(), "it is the current generation").
				WithHint("publish another generation first, or remove the whole golden with %s", errs.Run("golden rm", r.Name))
		}

		// A golden is destroyed as a whole, in one commit, or not at all.
		d := doomed{row: row, ref: ref.Generation(row.Golden, row.Generation), whole: r.At == "" || len(gens) == 1}
		going = []doomed{d}
		return nil
	})
	if err != nil {
		return nil, err
	}

	return e.destroyRows(ctx, going, destroyOptions{}), ctx.Err()
}

// PoolInfo describes the pool.
type PoolInfo struct {
	Dir            string           `json:"dir"`
	ID             string           `json:"id"`
	Driver         string           `json:"driver"`
	Why            string           `json:"why"`
	Backing        string           `json:"backing"` // file of a loop-backed pool
	BackingBytes   int64            `json:"backing_bytes"`
	CloneCost      driver.CloneCost `json:"clone_cost"`
	TotalBytes     int64            `json:"total_bytes"`
	UsedBytes      int64            `json:"used_bytes"`
	FreeBytes      int64            `json:"free_bytes"`
	MinFreePercent float64          `json:"min_free_percent"`
	Volumes        int              `json:"volumes"`
	Mounted        int              `json:"mounted"`
	Snapshots      int              `json:"snapshots"`
	Goldens        int              `json:"goldens"`
	Generations    int              `json:"generations"`
	LogicalBytes   int64            `json:"logical_bytes"`  // space that full copies of everything would use
	PhysicalBytes  int64            `json:"physical_bytes"` // space in use
	SavedRatio     float64          `json:"saved_ratio"`    // logical / physical
	TrashObjects   int              `json:"trash_objects"`  // destroyed, not yet reclaimed
	TrashBytes     int64            `json:"trash_bytes"`    //
	MeasuredExact  bool             `json:"measured_exact"` // logical bytes were measured now

	// If exact:
	Ties      int   `json:"ties,omitempty"`       // destroyed objects that others still need
	TiedBytes int64 `json:"tied_bytes,omitempty"` // space that would return without them
}

// plausibleBytes corrects an estimate of the space that the pool's data uses. It cannot exceed the used space of its
// filesystem; and if that filesystem is the pool's own, it cannot be much less, apart from what a filesystem itself
// needs.
func (e *Engine) plausibleBytes(estimate int64, s pool.Space) int64 {
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
func (e *Engine) Pool(ctx context.Context, q PoolRequest) (PoolInfo, error) {
	if err := e.askForPool(ctx, "show"); err != nil {
		return PoolInfo{}, err
	}

	s, err := e.pool.Space(ctx)
	if err != nil {
		return PoolInfo{}, err
	}

	c := e.config()
	p := PoolInfo{
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
		return p.count(tx)
	})

	// Choose the best figure for the space in use.
	if !q.Exact {
		p.PhysicalBytes = e.plausibleBytes(p.PhysicalBytes, s)
	}

	if exactBytes {
		p.PhysicalBytes = physical
	} else if _, own := e.drv.(driver.Spacer); own && q.Exact {
		p.PhysicalBytes = s.UsedBytes // only the pool uses it
	}

	for _, a := range mounts {
		if !kernel.EarlierBoot(a.BootID, a.At) {
			p.Mounted++
		}
	}

	// Add up what destroyed objects still occupy, which reads all objects.
	if t, ok := e.drv.(driver.Tied); ok && q.Exact && err == nil {
		var ties []driver.Tie
		if ties, err = t.Ties(ctx); err != nil {
			return p, err
		}
		p.Ties = len(ties)
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

// count fills in the numbers of objects and tombstones, and the sums of their recorded sizes.
func (p *PoolInfo) count(tx *catalog.Tx) error {
	n, err := tx.Count()
	if err != nil {
		return err
	}

	p.Volumes, p.Snapshots, p.Goldens, p.Generations = n.Volumes, n.Snapshots, n.Goldens, n.Generations
	tombstones, err := tx.Unreclaimed(0)
	if err != nil {
		return err
	}

	for _, g := range tombstones {
		p.TrashObjects++
		p.TrashBytes += g.Bytes
	}

	p.LogicalBytes, p.PhysicalBytes, err = tx.TotalUsage()
	return err
}
