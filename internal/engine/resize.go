package engine

import (
	"cmp"
	"context"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

const opResize = "resize"

// ResizeRequest says which volume to resize.
type ResizeRequest struct {
	Volume    ref.Name
	SizeBytes int64 // rounded up to whole blocks of 4 KiB
	Add       bool  // SizeBytes is added to the size that the volume has
}

// Resized is the result of Resize.
type Resized struct {
	api.Object
	BeforeBytes int64 `json:"size_before_bytes"` // size of the volume before
}

// Resize enlarges a volume, even while programs use it: its block device and the filesystem on it. After a crash the
// volume has its old size or the new one. If the filesystem cannot grow, nothing has changed. With the size that the
// volume has already, it grows the filesystem if that is smaller. Snapshots keep their size. Durable on return. Invalid
// (smaller than the volume is, or too large for the pool or the filesystem), NotFound, Unsupported (a tree or an
// overlay, or a driver that cannot), NoSpace, InUse, Conflict (mounted or unmounted in the meantime), Damaged.
func (e *Engine) Resize(ctx context.Context, q ResizeRequest) (_ Resized, err error) {
	ctx, end := e.ledger.Begin(ctx, opResize)
	defer end(&err)

	name := q.Volume.String()
	if err := e.needRoot(opResize, name); err != nil {
		return Resized{}, err
	}

	if q.SizeBytes <= 0 || q.SizeBytes > maxVolumeBytes {
		return Resized{}, errs.New(errs.Invalid, opResize, name, "the size must be between 1 byte and 1 EiB (got %d)",
			q.SizeBytes)
	}

	// Check what pool and filesystem can do before anything changes.
	r := &resize{e: e, q: q}
	if err := e.cat.View(ctx, r.find); err != nil {
		return Resized{}, err
	}

	before := r.live.Row.SizeBytes
	g, err := e.growthOf(ctx, r.live.Row)
	if err != nil {
		return Resized{}, err
	}

	if r.size > before {
		if err := e.admitSize(ctx, wantedSize{opResize, name, r.size, 1, g}); err != nil {
			return Resized{}, err
		}
	} else if err := e.pool.Admit(ctx, opResize, name, g.Cost(r.size)); err != nil {
		return Resized{}, err
	}

	// Grow the volume in place if programs use it, else a copy of it.
	progress.From(ctx).Start(progress.Resizing, 0, 0)
	id := r.live.Row.ID
	switch {
	case r.live.InUse():
		err = r.growUsed(ctx)
	case r.size > before || g.Grows(r.size):
		id, err = r.growCopy(ctx)
	}
	if err != nil {
		return Resized{}, errs.Wrap(opResize, name, err)
	}

	info, err := r.resized(ctx, id)
	return Resized{Object: info, BeforeBytes: before}, err
}

// resize is the state of one Resize.
type resize struct {
	e    *Engine
	q    ResizeRequest
	live content.Live
	size int64 // new size of the volume in bytes; set by find
}

// find finds the volume and the size that it gets, and checks that it can have one.
func (r *resize) find(tx *catalog.Tx) error {
	row, err := tx.ResolveVolume(opResize, r.q.Volume.String())
	if err != nil {
		return err
	}

	r.size = roundUp(r.q.SizeBytes)
	if r.q.Add {
		r.size = roundUp(row.SizeBytes + r.q.SizeBytes)
	}

	r.live, err = r.e.content.FindLive(tx, row, FreezeIfNeeded)
	if err != nil {
		return err
	}
	return r.check(row)
}

// again finds the volume again, to mark it. Conflict if it has another size now, or is in use now and was not before.
func (r *resize) again(tx *catalog.Tx) error {
	before, size := r.live, r.size
	if err := r.find(tx); err != nil {
		return err
	}
	if r.live.InUse() != before.InUse() || r.live.Row.ID != before.Row.ID || r.size != size {
		return errs.New(errs.Conflict, opResize, r.q.Volume.String(),
			"it has been mounted, unmounted, replaced or resized in the meantime").
			WithHint("try again")
	}
	return nil
}

// check checks that the volume can get the size.
func (r *resize) check(row catalog.Row) error {
	e := r.e
	switch {
	case row.IsOverlay():
		return errs.New(errs.Unsupported, opResize, row.Name, "it is an overlay, which this command does not support").
			WithHint("make it a volume of its own with %s", errs.Run("flatten", row.Name))
	case !row.FS.IsImage():
		return errs.New(errs.Unsupported, opResize, row.Name,
			"%s volumes of the %s driver have no size of their own: they share the space of the pool", row.FS, e.caps.Name).
			WithHint("free space with %s and %s, or enlarge the pool's filesystem", errs.Run("destroy"), errs.Run("gc"))
	case r.size < row.SizeBytes:
		return errs.New(errs.Invalid, opResize, row.Name, "the volume has %s and cannot shrink (got %s)",
			errs.FormatBytes(row.SizeBytes), errs.FormatBytes(r.q.SizeBytes)).
			WithHint("to make a smaller one, export its files with %s, and import them with a smaller %s",
				errs.Run("export", row.Name, row.Name+".tar"), errs.Param("size"))
	}

	if _, ok := e.drv.(driver.Resizer); !ok {
		return errs.New(errs.Unsupported, opResize, row.Name, "the %s driver cannot resize volumes", e.caps.Name).
			WithHint("clone it with a larger %s", errs.Param("size"))
	}

	if r.size > row.SizeBytes {
		return e.content.CanGrow(r.live)
	}

	return nil
}

// checkImageSize checks that the image of a volume has the size that the catalogue says.
func (r *resize) checkImageSize(ctx context.Context, row catalog.Row) error {
	e := r.e
	ins, ok := e.drv.(driver.Inspector)
	if !ok {
		return nil
	}

	c, err := ins.Inspect(ctx, row.Identity)
	if err == nil && c.Err != nil {
		err = c.Err
	}
	if err == nil && c.SizeBytes != row.SizeBytes {
		err = errs.New(errs.Damaged, opResize, row.Name, "its image has %d bytes, the catalogue says %d", c.SizeBytes,
			row.SizeBytes).
			WithHint("check the pool with %s", errs.Run("fsck"))
	}

	return err
}

// growCopy replaces a volume that nobody uses by a larger copy, in one commit, and returns the ID of the copy. Whatever
// happens before that, the volume is as it was: a program that enlarges a filesystem and is killed can leave it
// unreadable.
func (r *resize) growCopy(ctx context.Context) (driver.ObjectID, error) {
	e := r.e
	s := &succession{e: e, op: opResize, next: e.newIdentity(ctx, driver.Volume)}
	err := s.claim(ctx, func(tx *catalog.Tx) (catalog.Row, catalog.Row, error) {
		err := r.again(tx)
		if err == nil {
			err = r.checkImageSize(ctx, r.live.Row)
		}
		return r.live.Row, r.live.Row, err
	})
	if err != nil {
		return "", err
	}

	s.next.Origin, s.next.OriginID, s.next.SizeBytes = s.vol.Origin, s.vol.OriginID, r.size
	err = e.drv.Clone(ctx, s.vol.ID, s.draft())
	if err == nil {
		err = e.growInside(ctx, catalog.Row{Identity: s.next})
	}
	if err == nil {
		err = s.commit(ctx)
	}
	if err != nil {
		s.giveUp(ctx)
		return "", err
	}

	s.dropPredecessor(ctx)
	return s.next.ID, nil
}

// growUsed enlarges a volume that programs use. The switch is the commit of the new size: after a crash the next
// command finishes what is left to do.
func (r *resize) growUsed(ctx context.Context) error {
	// Mark the volume: nobody may copy or unmount it in the meantime.
	e := r.e
	err := e.ledger.Claim(ctx, opResize, true, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		err := r.again(tx)
		if err == nil {
			err = r.checkImageSize(ctx, r.live.Row)
		}
		// Its filesystem may be frozen by this operation itself.
		return []catalog.Mark{{ID: r.live.Row.ID, Op: opResize, Reads: r.live.Row.ID}}, err
	})
	if err != nil {
		return err
	}

	// Enlarge the image, record the size, and let everything follow that. On error, go back to the size before.
	row := r.live.Row
	err = e.drv.(driver.Resizer).Resize(ctx, row.ID, r.size)
	if err == nil {
		err = r.recordSize(ctx, row, r.size)
	}
	if err == nil {
		content.AtStep("enlarged")
		var grow error
		grow, err = e.matchSize(ctx, row.ID)
		err = cmp.Or(err, grow)
	}
	if err != nil {
		if uerr := r.undoGrowth(context.WithoutCancel(ctx), row); uerr != nil {
			// The mark stays, so that the next command goes on.
			warnings.Add(ctx, "%s could not be brought back to its size of %s: %v", row.Name, errs.FormatBytes(row.SizeBytes),
				uerr)
			return err
		}
	}
	if uerr := e.ledger.Unmark(ctx, row.ID); err == nil {
		err = uerr
	}

	return err
}

// undoGrowth gives a volume the size that it had, or what its filesystem has grown to if that is more.
func (r *resize) undoGrowth(ctx context.Context, before catalog.Row) error {
	e := r.e
	l, err := e.liveNow(ctx, before.ID)
	if err != nil {
		return err
	}

	used, err := e.content.FilesystemBytes(ctx, l)
	if err != nil {
		return err
	}

	size := max(before.SizeBytes, roundUp(used))
	if err := r.recordSize(ctx, before, size); err != nil {
		return err
	}
	l.Row.SizeBytes = size
	return e.matchImage(ctx, l)
}

// recordSize records the size of a volume.
func (r *resize) recordSize(ctx context.Context, row catalog.Row, size int64) error {
	e := r.e
	return e.cat.Update(ctx, catalog.Durability(!row.Ephemeral), func(tx *catalog.Tx) error {
		now, ok, err := tx.Object(row.ID)
		if err != nil || !ok {
			return err
		}
		now.SizeBytes = size
		return tx.SetIdentity(now.Identity)
	})
}

// liveNow finds out whether an object is in use. Its row is zero if there is no such object.
func (e *Engine) liveNow(ctx context.Context, id driver.ObjectID) (l content.Live, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, ok, err := tx.Object(id)
		if err == nil && ok {
			l, err = e.content.FindLive(tx, row, FreezeIfNeeded)
		}
		return err
	})
	return l, err
}

// matchSize makes a volume as large as the catalogue says: its image, its identity, its block device and the filesystem
// on it. grow is the error of the last step. Idempotent.
func (e *Engine) matchSize(ctx context.Context, id driver.ObjectID) (grow, err error) {
	l, err := e.liveNow(ctx, id)
	if err != nil || l.Row.ID == "" {
		return nil, err
	}

	if err := e.matchImage(ctx, l); err != nil {
		return nil, err
	}
	return e.content.Grow(ctx, l, freezes{e, id, id}), nil
}

// matchImage makes the image, the identity and the block device of a volume as large as l.Row says. An image that is
// larger was enlarged by an operation that did not record it or has failed, and nothing uses the rest.
func (e *Engine) matchImage(ctx context.Context, l content.Live) error {
	if r, ok := e.drv.(driver.Resizer); ok {
		if err := r.Resize(ctx, l.Row.ID, l.Row.SizeBytes); err != nil {
			return err
		}
	}

	if err := e.matchIdentity(ctx, l.Row.ID); err != nil || !l.InUse() {
		return err
	}
	return e.content.MatchDevice(ctx, l)
}

// finishResize ends a resize of a process that died. A filesystem that cannot grow is a warning: the volume is usable.
func (w work) finishResize(ctx context.Context, row catalog.Row) error {
	e := w.e
	if row.Kind != driver.Volume { // the previous object of one that has been replaced
		return e.matchIdentity(ctx, row.ID)
	}

	grow, err := e.matchSize(ctx, row.ID)
	if err != nil || errs.Is(grow, errs.InUse) {
		return cmp.Or(err, grow)
	}
	if grow != nil {
		warnings.Add(ctx, "the filesystem of %s did not grow: %v; retry with %s", row.Name, grow,
			errs.Run("resize", row.Name, itoa(int(row.SizeBytes))))
	}
	return nil
}

// resized describes a volume after a resize.
func (r *resize) resized(ctx context.Context, id driver.ObjectID) (info api.Object, err error) {
	e := r.e
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, ok, err := tx.Object(id)
		if err != nil || !ok {
			return err
		}
		att, has, err := tx.MountRecord(id)
		info = e.volumeNow(row, att, has)
		return err
	})
	return info, err
}
