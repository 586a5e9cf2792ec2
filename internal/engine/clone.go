package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// cloneWorkers is the number of clones made at the same time. Clones of one origin
// are serialized by the filesystem; several workers keep it busy while one of them
// waits for the catalogue or a mount.
const cloneWorkers = 4

// maxClones is the largest number of clones per call.
const maxClones = 100_000

// CloneRequest says what to clone.
type CloneRequest struct {
	From      ref.Ref
	Object    string        // ID of the object that From must name, else Conflict; "": any
	Name      ref.Name      // name of the volume; with Count, NAME-1 to NAME-Count
	Count     int           // number of volumes; 0: one, called Name
	Mount     bool          // whether the clones are mounted
	MountDir  string        // mount point, with Count the directory above; "": below the pool
	May       Rights        // what the mount allows
	SizeBytes int64         // size of the clones; 0: that of the origin
	TTL       time.Duration // how long the clones live; 0: without a limit
	Ephemeral bool          // whether they need not survive a reboot, so that nothing waits for the disk
	Labels    driver.Labels // labels of each clone; those of the origin are not copied
	Overlay   bool          // whether they hold only what differs from the golden, whose files all share in memory

	// GoldenDecides makes clones overlays, without Overlay, if that is the default of their golden, and possible.
	GoldenDecides bool
	Freeze        Freeze // whether the writes to an origin in use are stopped
}

// Prepare is called with each clone before it exists for others, and with the directory below the pool where it is
// mounted for that time: nobody else can get there. It may be called concurrently.
type Prepare func(ctx context.Context, name, dir string) error

// cloning is a request under way.
type cloning struct {
	e *Engine
	CloneRequest
	op       string      // name of the operation in marks: clone, fork, run, adopt
	prepare  Prepare     // called with each clone before others can see it; nil: nothing is called
	template catalog.Row // empty upper layer of an overlay, or what an empty volume is cloned from
	empty    bool        // whether an empty volume is made instead of a clone of From
}

// mounts reports whether the clones are mounted while they are made.
func (q *cloning) mounts() bool { return q.Mount || q.prepare != nil }

const (
	opClone = "clone"
	opFork  = "fork"
	opRun   = ledger.OpRun
)

// clonePlan is one volume to be created.
type clonePlan struct {
	row    catalog.Row
	target content.Target // where it is mounted first
	then   content.Target // where it is mounted after Prepare; zero: it stays where it is, or is not mounted
	mark   catalog.Mark
	att    catalog.MountRecord
}

// Clone makes volumes from a generation, a snapshot or a volume, which may be in
// use (see Snapshot): all of them, or none. If the first generation of the golden is
// being built, Clone waits for it. Durable on return, unless ephemeral. NotFound,
// Exists, Invalid, NoSpace, InUse, Unsupported, Conflict.
func (e *Engine) Clone(ctx context.Context, q CloneRequest) ([]api.Object, error) {
	return (&cloning{e: e, CloneRequest: q, op: opClone}).clone(ctx)
}

// CloneAndPrepare is Clone with prepare called for each clone, before it is mounted where the user wants it. If prepare
// fails, or this process is killed, there is no clone.
func (e *Engine) CloneAndPrepare(ctx context.Context, q CloneRequest, prepare Prepare) ([]api.Object, error) {
	return (&cloning{e: e, CloneRequest: q, op: opClone, prepare: prepare}).clone(ctx)
}

// Fork is Clone of a volume, which may be in use. Invalid if From is something else.
func (e *Engine) Fork(ctx context.Context, q CloneRequest) ([]api.Object, error) {
	return (&cloning{e: e, CloneRequest: q, op: opFork}).clone(ctx)
}

// clone makes the clones: all of them, or none.
func (q *cloning) clone(ctx context.Context) (_ []api.Object, err error) {
	e := q.e
	ctx, end := e.ledger.Begin(ctx, q.op)
	defer end(&err)

	names, err := q.names()
	if err != nil {
		return nil, err
	}

	if err := e.needRoot(q.op, q.From.String()); err != nil {
		return nil, err
	}

	if _, err := endOf("clone", q.Name.String(), time.Now(), q.TTL); err != nil {
		return nil, err
	}
	if q.SizeBytes < 0 {
		return nil, errs.New(errs.Invalid, "clone", q.Name.String(), "the size must not be negative (got %d)", q.SizeBytes)
	}

	if err := e.pool.Admit(ctx, q.op, q.From.String(), 0); err != nil {
		return nil, err
	}

	// Plan and mark the clones. A golden that is not there may be one whose first generation is being built.
	plans, l, err := q.planClones(ctx, names)
	if errs.Is(err, errs.NotFound) && !q.empty {
		if err := e.awaitGolden(ctx, q.From.Name); err != nil {
			return nil, err
		}
		plans, l, err = q.planClones(ctx, names)
	}
	if err != nil {
		return nil, err
	}

	// Make the clones, then record all of them in one commit.
	progress.From(ctx).Start(progress.Cloning, int64(len(plans)), 0)
	err = q.makeClones(ctx, l, plans)
	if err == nil {
		err = q.commitClones(ctx, l.Row, plans)
	}
	if err != nil {
		e.undoClones(ctx, plans)
		return nil, errs.Wrap(q.op, q.From.String(), err)
	}

	out := make([]api.Object, len(plans))
	for i, p := range plans {
		out[i] = volumeOf(p.row, e.caps.Name, p.att.Mountpoint)
	}

	return out, nil
}

// names returns the names of the clones: NAME, or with a count NAME-1 and so on. It returns Invalid.
func (q *cloning) names() ([]string, error) {
	if err := q.Name.Required("clone"); err != nil {
		return nil, err
	}

	if q.Count == 0 {
		return []string{q.Name.String()}, nil
	}

	if q.Count < 0 || q.Count > maxClones {
		return nil, errs.New(errs.Invalid, "clone", q.Name.String(), "the count must be between 1 and %d (got %d)", maxClones,
			q.Count)
	}

	names := make([]string, q.Count)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%d", q.Name, i+1)
	}

	return names, ref.CheckName("clone", names[len(names)-1]) // the number may have made it too long
}

// planClones decides everything about the clones, reserves their names and marks the work.
func (q *cloning) planClones(ctx context.Context, names []string) ([]*clonePlan, content.Live, error) {
	e := q.e
	var l content.Live
	if err := q.decideTemplate(ctx); err != nil {
		return nil, l, err
	}

	if err := q.admitCloneSize(ctx, int64(len(names))); err != nil {
		return nil, l, err
	}

	// Check the user's directories before the transaction: its duration must not depend on them.
	targets := make([]content.Target, len(names))
	var fs driver.FS // filesystem of the origin when the directories of the user were checked; "" without such directories
	if q.Mount && q.MountDir != "" {
		var err error
		if fs, err = q.checkCloneTargets(ctx, names, targets); err != nil {
			return nil, l, err
		}
	}

	var plans []*clonePlan
	err := e.ledger.Claim(ctx, q.op, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		origin, originRef, err := q.resolveOrigin(tx)
		if err != nil {
			return nil, err
		}

		if q.op == opFork && origin.Kind != driver.Volume {
			return nil, errs.New(errs.Invalid, opFork, q.From.String(), "it is a %s, not a volume",
				kindOf(origin.Kind, q.From.String())).
				WithHint("use %s", errs.Run("clone", q.From, q.Name))
		}

		if fs != "" && origin.FS != fs {
			return nil, errs.New(errs.Conflict, q.op, q.From.String(), "it has been replaced by another in the meantime").
				WithHint("try again")
		}

		size, err := q.cloneSize(origin)
		if err != nil {
			return nil, err
		}

		if q.Overlay {
			if err := q.checkOverlayOrigin(origin); err != nil {
				return nil, err
			}
			size = q.template.SizeBytes
		}

		if l, err = e.content.FindLive(tx, origin, q.Freeze); err != nil {
			return nil, err
		}

		// Plan each clone, and mark it.
		now := time.Now().UTC()
		plans = plans[:0]
		marks := make([]catalog.Mark, 0, len(names))
		for i, n := range names {
			if err := tx.CheckFree(q.op, n); err != nil {
				return nil, err
			}

			id := q.cloneIdentity(ctx, n, origin, originRef, now)
			id.SizeBytes = size
			p := &clonePlan{target: targets[i]}
			if err := q.planMounts(p, n, origin.FS); err != nil {
				return nil, err
			}
			from := origin
			if q.Overlay {
				from = q.template
			}

			p.row = cloneRow(e.caps, from, id, now)
			p.mark = catalog.Mark{ID: id.ID, Op: q.op, Name: n, Reads: origin.ID, Mountpoint: p.target.Path,
				MadeDir: p.target.Made, Freezes: l.Freezes()}
			plans = append(plans, p)
			marks = append(marks, p.mark)
		}

		return marks, nil
	})

	return plans, l, err
}

// planMounts decides where a clone is mounted while it is made. The target of its plan is where the user wants it.
func (q *cloning) planMounts(p *clonePlan, name string, fs driver.FS) error {
	if !q.mounts() || q.MountDir != "" && q.prepare == nil {
		return nil
	}
	below, err := q.e.content.CheckTarget("clone", name, fs, "", q.May)
	if err != nil {
		return err
	}
	p.target, p.then = below, p.target

	// Prepare writes files for the owner of the volume.
	if q.prepare != nil && q.May.Owner != nil {
		if p.then.Path == "" {
			p.then = below
		}
		p.target.May.Owner = nil
	}
	return nil
}

// admitCloneSize checks the size that clones are to have.
func (q *cloning) admitCloneSize(ctx context.Context, count int64) error {
	e := q.e
	if q.SizeBytes == 0 || q.Overlay || q.empty {
		return nil
	}

	var origin catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if origin, _, err = q.resolveOrigin(tx); err == nil {
			_, err = q.cloneSize(origin)
		}
		return err
	}); err != nil {
		return err
	}

	g, err := e.growthOf(ctx, origin)
	if err != nil {
		return err
	}
	return e.admitSize(ctx, wantedSize{q.op, q.From.String(), roundUp(q.SizeBytes), count, g})
}

// decideTemplate finds what an overlay or an empty volume is cloned from.
func (q *cloning) decideTemplate(ctx context.Context) error {
	e := q.e
	if !q.empty {
		return q.decideOverlay(ctx)
	}

	fs := e.caps.FS[0]
	s, err := e.pool.Space(ctx)
	if err == nil {
		q.template, err = e.template(ctx, emptyVolume, fs, imageBytes(s, 0))
	}
	return err
}

// resolveOrigin returns what clones are made from, and its reference; an empty volume has none.
func (q *cloning) resolveOrigin(tx *catalog.Tx) (row catalog.Row, reference string, err error) {
	if q.empty {
		return q.template, "", nil
	}
	row, err = tx.Resolve(q.op, q.From)
	if err == nil && q.Object != "" && string(row.ID) != q.Object {
		err = errs.New(errs.Conflict, q.op, q.From.String(), "it has been replaced by another in the meantime").
			WithHint("try again")
	}
	return row, tx.RefOf(row), err
}

// checkCloneTargets checks the mount points of clones in a directory that the user has named, and returns them in
// targets. The filesystem of the origin, which it returns, decides how a clone is mounted.
func (q *cloning) checkCloneTargets(ctx context.Context, names []string, targets []content.Target) (driver.FS, error) {
	e := q.e
	var origin catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		origin, err = tx.Resolve(q.op, q.From)
		return err
	}); err != nil {
		return "", err
	}

	for i, n := range names {
		dir := q.MountDir
		if q.Count > 0 {
			dir = filepath.Join(dir, n)
		}
		t, err := e.content.CheckTarget("clone", n, origin.FS, dir, q.May)
		if err != nil {
			return "", err
		}
		targets[i] = t
	}

	return origin.FS, nil
}

// cloneIdentity returns the identity of a clone, but for its size.
func (q *cloning) cloneIdentity(
	ctx context.Context, name string, origin catalog.Row, originRef string, now time.Time,
) driver.Identity {
	e := q.e
	id := e.newIdentity(ctx, driver.Volume)
	id = id.WithContentOf(origin.Identity)
	id.Name, id.Labels = name, q.Labels
	id.Origin, id.OriginID, id.Ephemeral = originRef, origin.ID, q.Ephemeral
	id.Soon = q.Mount
	id.Golden, id.Generation = origin.Golden, origin.Generation
	if q.Overlay {
		id = id.WithContentOf(q.template.Identity)
		id.Lower = origin.ID
	}
	if q.empty {
		id.OriginID = ""
	}
	if q.TTL > 0 {
		id.ExpiresAt = now.Add(q.TTL)
	}
	return id
}

// cloneRow returns the row of a fresh clone, with the space that its origin had when that was measured: an estimate if
// the origin is a volume, which may have been written to since.
func cloneRow(c driver.Caps, origin catalog.Row, id driver.Identity, now time.Time) catalog.Row {
	row := catalog.Row{Identity: id, UsedAt: now, Usage: cloneUsage(c, origin)}
	if origin.Kind != driver.Volume {
		row.MeasuredAt = origin.MeasuredAt
	}
	return row
}

// cloneUsage returns the space a fresh clone uses, which needs no measurement.
func cloneUsage(c driver.Caps, origin catalog.Row) driver.Usage {
	u := origin.Usage
	if c.Sharing {
		return driver.Usage{LogicalBytes: u.LogicalBytes, SharedBytes: u.LogicalBytes, Extents: u.Extents}
	}
	return driver.Usage{LogicalBytes: u.LogicalBytes, ExclusiveBytes: u.LogicalBytes, Extents: u.Extents}
}

// cloneSize returns the size of a clone's block device. It returns Invalid or Unsupported.
func (q *cloning) cloneSize(origin catalog.Row) (int64, error) {
	e := q.e
	if q.SizeBytes == 0 || q.Overlay || q.empty {
		return origin.SizeBytes, nil
	}

	if !origin.FS.IsImage() {
		return 0, errs.New(errs.Unsupported, "clone", q.From.String(),
			"%s volumes of the %s driver have no size of their own: they share the space of the pool", origin.FS, e.caps.Name).
			WithHint("remove %s", errs.Param("size"))
	}

	size := roundUp(q.SizeBytes)
	if size < origin.SizeBytes {
		return 0, errs.New(errs.Invalid, "clone", q.From.String(),
			"the size must be at least that of the origin, %s (got %s)",
			errs.FormatBytes(origin.SizeBytes), errs.FormatBytes(q.SizeBytes)).
			WithHint("use a larger %s, or remove it: a volume can grow but not shrink", errs.Param("size"))
	}

	return size, nil
}

// makeClones makes the planned clones, of which nobody knows yet.
func (q *cloning) makeClones(ctx context.Context, l content.Live, plans []*clonePlan) error {
	e := q.e
	if q.Overlay {
		return q.cloneRest(ctx, q.template.ID, q.template, plans)
	}

	if l.InUse() {
		// Copy the volume in use once and clone the copy, so that all clones show
		// the same moment.
		first := plans[0]
		if err := e.copyLive(ctx, l, first.row.Identity, false); err != nil {
			return err
		}
		if err := q.cloneRest(ctx, first.row.ID, l.Row, plans[1:]); err != nil {
			return err
		}
		defer progress.From(ctx).Add(1, 0)
		return q.readyClone(ctx, l.Row, first)
	}

	// Durable clones share blocks that must be on the disk.
	if !q.Ephemeral {
		if err := e.content.SyncEphemeral(ctx, l.Row); err != nil {
			return cloneError(err, plans[0])
		}
	}

	return q.cloneRest(ctx, l.Row.ID, l.Row, plans)
}

// cloneRest makes clones of the object from, which is not in use: origin or a copy of it.
func (q *cloning) cloneRest(ctx context.Context, from driver.ObjectID, origin catalog.Row, plans []*clonePlan) error {
	e := q.e
	if len(plans) == 0 {
		return nil
	}

	b, err := e.beginBatch(ctx, from, len(plans))
	if err != nil {
		return cloneError(err, plans[0])
	}

	defer b.Close()

	if err := forClones(ctx, plans, func(ctx context.Context, p *clonePlan) error {
		defer progress.From(ctx).Add(1, 0)
		return cloneError(b.Clone(ctx, p.row.Identity), p)
	}); err != nil {
		return err
	}

	if !q.Ephemeral {
		if err := b.Flush(ctx); err != nil {
			return err
		}
	}

	return forClones(ctx, plans, func(ctx context.Context, p *clonePlan) error {
		return q.readyClone(ctx, origin, p)
	})
}

// forClones calls fn for each plan, cloneWorkers at a time, until one fails.
func forClones(ctx context.Context, plans []*clonePlan, fn func(context.Context, *clonePlan) error) error {
	if len(plans) == 1 {
		return fn(ctx, plans[0])
	}

	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(cloneWorkers)
	for _, p := range plans {
		g.Go(func() error {
			if err := gctx.Err(); err != nil {
				return err
			}
			return fn(gctx, p)
		})
	}

	return g.Wait()
}

// beginBatch starts a batch of n clones of an object. They are durable after Flush: they
// share one wait for the disk if the driver supports that.
func (e *Engine) beginBatch(ctx context.Context, from driver.ObjectID, n int) (driver.Batch, error) {
	if b, ok := e.drv.(driver.Batcher); ok && n > 1 {
		return b.Batch(ctx, from)
	}
	return oneByOne{e.drv, from}, nil
}

// oneByOne is a driver.Batch whose clones are durable as soon as they are made.
type oneByOne struct {
	drv  driver.Driver
	from driver.ObjectID
}

func (o oneByOne) Clone(ctx context.Context, id driver.Identity) error {
	return o.drv.Clone(ctx, o.from, id)
}
func (oneByOne) Flush(context.Context) error { return nil }
func (oneByOne) Close() error                { return nil }

// cloneError turns NotFound into a Conflict that says that the origin was destroyed.
func cloneError(err error, p *clonePlan) error {
	if errs.Is(err, errs.NotFound) {
		return errs.New(errs.Conflict, "clone", p.row.Origin, "it has just been destroyed")
	}
	return err
}

// readyClone grows, mounts and prepares a clone before it is recorded.
func (q *cloning) readyClone(ctx context.Context, origin catalog.Row, p *clonePlan) error {
	e := q.e
	if p.row.SizeBytes > origin.SizeBytes {
		if err := e.growInside(ctx, p.row); err != nil {
			return err
		}
	}

	if !q.mounts() {
		return nil
	}

	a, err := e.content.Mount(ctx, p.row, p.target)
	if err != nil {
		return err
	}

	p.att = a
	if q.prepare == nil {
		return nil
	}

	if err := q.prepareClone(ctx, p); err != nil || q.Mount && p.then.Path == "" {
		return err
	}

	if err := e.content.Unmount(ctx, reasonFor("clone"), p.row, a, true); err != nil {
		return err
	}

	p.att = catalog.MountRecord{}
	if !q.Mount {
		return nil
	}

	// Only now may others change what is in it.
	if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		return tx.MoveMark(p.row.ID, p.then.Path, p.then.Made)
	}); err != nil {
		return err
	}

	if a, err = e.content.Mount(ctx, p.row, p.then); err == nil {
		p.att = a
	}
	return err
}

// prepareClone calls Prepare with a mounted clone. What that has written is durable on return, unless the clone is
// ephemeral.
func (q *cloning) prepareClone(ctx context.Context, p *clonePlan) error {
	dir, err := os.Open(p.att.Mountpoint)
	if err != nil {
		return errs.Wrap(q.op, p.row.Name, err)
	}
	defer dir.Close()

	if err := q.prepare(ctx, p.row.Name, p.att.Mountpoint); err != nil || q.Ephemeral {
		return err
	}
	return errs.Wrap(q.op, p.row.Name, unix.Syncfs(int(dir.Fd())))
}

// growInside grows the filesystem in the image of a volume that is being made to the size of the image. Durable on
// return, unless the volume is ephemeral.
func (e *Engine) growInside(ctx context.Context, row catalog.Row) error {
	if err := e.content.GrowImage(ctx, row.ID, row.FS, row.SizeBytes); err != nil || row.Ephemeral {
		return err
	}
	return e.syncImage(ctx, row.ID)
}

// syncImage makes the content of an image durable.
func (e *Engine) syncImage(ctx context.Context, id driver.ObjectID) error {
	return e.content.WithPath(ctx, id, func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		return f.Sync()
	})
}

// commitClones records the clones, in one commit.
func (q *cloning) commitClones(ctx context.Context, origin catalog.Row, plans []*clonePlan) error {
	e := q.e
	// A power loss may lose an ephemeral volume, and so its row as well.
	return e.cat.Update(ctx, catalog.Durability(!q.Ephemeral), func(tx *catalog.Tx) error {
		for _, p := range plans {
			if err := tx.PutObject(p.row); err != nil {
				return err
			}

			if q.Mount {
				if err := tx.RecordFirstMount(p.row, p.att); err != nil {
					return err
				}
			}

			if q.op == opRun {
				// The mark stays until the program has ended, but the golden may be destroyed.
				if err := tx.StopReading(p.row.ID); err != nil {
					return err
				}
				continue
			}

			if err := tx.Unmark(p.row.ID); err != nil {
				return err
			}
		}

		return tx.SetUsed(origin.ID, time.Now())
	})
}

// undoClones unmounts and removes the clones made so far.
func (e *Engine) undoClones(ctx context.Context, plans []*clonePlan) {
	ctx = context.WithoutCancel(ctx)
	var ids []driver.ObjectID
	for _, p := range plans {
		if p.att.ID != "" {
			if err := e.content.Unmount(ctx, reasonFor("clone"), p.row, p.att, false); err != nil {
				continue // already in use: the mark stays, and recovery retries
			}
		}
		ids = append(ids, p.row.ID)
	}
	e.ledger.DestroyUnfinished(ctx, ids...)
}

// roundUp rounds a size up to a multiple of 4096 bytes.
func roundUp(n int64) int64 { return (n + 4095) / 4096 * 4096 }
