package engine

import (
	"cmp"
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

const opResize = "resize"

// maxVolumeBytes is the size of the largest ext4, 1 EiB.
const maxVolumeBytes = 1 << 60

// ResizeRequest says which volume to resize.
type ResizeRequest struct {
	Volume    ref.Name
	SizeBytes int64 // rounded up to whole blocks of 4 KiB
	Tracker   *progress.Tracker
}

// Resized is the result of Resize.
type Resized struct {
	Info
	BeforeBytes int64 `json:"size_before_bytes"`
}

// Resize enlarges a volume, even while programs use it: its block device and the filesystem on it. The switch is one
// commit: after a crash the volume has its old size or the new one, and the next command finishes what is left to do.
// With the size that the volume has already, it grows the filesystem if that is smaller. Snapshots keep their size.
// Durable on return. Invalid (smaller than the volume is), NotFound, Unsupported (a tree or an overlay, or a driver
// that cannot), NoSpace, InUse, Damaged.
func (e *Engine) Resize(ctx context.Context, q ResizeRequest) (Resized, error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	name := q.Volume.String()
	if err := e.needRoot(opResize, name); err != nil {
		return Resized{}, err
	}

	if q.SizeBytes <= 0 || q.SizeBytes > maxVolumeBytes {
		return Resized{}, errs.New(errs.Invalid, opResize, name, "the size must be between 1 byte and 1 EiB (got %d)",
			q.SizeBytes)
	}

	if err := e.pool.Admit(ctx, opResize, name, 0); err != nil {
		return Resized{}, err
	}

	// Mark the volume: nobody may copy or mount it in the meantime.
	size := roundUp(q.SizeBytes)
	var row catalog.Row
	err := e.ledger.Claim(ctx, opResize, true, func(tx *catalog.Tx) (_ []catalog.Mark, err error) {
		if row, err = tx.ResolveVolume(opResize, name); err != nil {
			return nil, err
		}
		l, err := e.content.FindLive(tx, row, FreezeIfNeeded)
		if err == nil {
			err = e.checkResize(ctx, l, size)
		}
		return []catalog.Mark{{ID: row.ID, Op: opResize}}, err
	})
	if err != nil {
		return Resized{}, err
	}

	// Enlarge the image, record the size, and let everything follow that.
	q.Tracker.Start("resizing", 0, 0)
	err = e.enlargeImage(ctx, row, size)
	merr := e.matchSize(context.WithoutCancel(ctx), row.ID, err != nil)
	if merr == nil { // else the mark stays, so that the next command does the rest
		err = cmp.Or(err, e.ledger.Unmark(ctx, row.ID))
	}
	if err = cmp.Or(err, merr); err != nil {
		return Resized{}, errs.Wrap(opResize, name, err)
	}

	info, err := e.resized(ctx, row.ID)
	return Resized{Info: info, BeforeBytes: row.SizeBytes}, err
}

// checkResize checks that a volume can get a size.
func (e *Engine) checkResize(ctx context.Context, l content.Live, size int64) error {
	row := l.Row
	switch {
	case row.IsOverlay():
		return errs.New(errs.Unsupported, opResize, row.Name, "it is an overlay, which this command does not support").
			WithHint("make it a volume of its own with %s", errs.Run("flatten", row.Name))
	case !row.FS.IsImage():
		return errs.New(errs.Unsupported, opResize, row.Name,
			"%s volumes of the %s driver have no size of their own: they share the space of the pool", row.FS, e.caps.Name).
			WithHint("%s, or enlarge the pool's filesystem", errs.FreeSpace())
	case size < row.SizeBytes:
		return errs.New(errs.Invalid, opResize, row.Name, "the volume has %s and cannot shrink (got %s)",
			errs.FormatBytes(row.SizeBytes), errs.FormatBytes(size)).
			WithHint("to make a smaller one, export its files with %s, and import them with a smaller %s",
				errs.Run("export", row.Name, row.Name+".tar"), errs.Param("size"))
	}

	if _, ok := e.drv.(driver.Resizer); !ok {
		return errs.New(errs.Unsupported, opResize, row.Name, "the %s driver cannot resize volumes", e.caps.Name).
			WithHint("clone it with a larger %s", errs.Param("size"))
	}

	if size > row.SizeBytes {
		if err := e.content.CanGrow(l); err != nil {
			return err
		}
	}

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

// enlargeImage enlarges the image of a volume, and records its size. On error, matchSize undoes what was done.
func (e *Engine) enlargeImage(ctx context.Context, row catalog.Row, size int64) error {
	if size == row.SizeBytes {
		return nil
	}

	if err := e.drv.(driver.Resizer).Resize(ctx, row.ID, size); err != nil {
		return err
	}

	return e.cat.Update(ctx, catalog.Durability(!row.Ephemeral), func(tx *catalog.Tx) error {
		now, ok, err := tx.Object(row.ID)
		if err != nil || !ok {
			return err
		}
		now.SizeBytes = size
		return tx.SetIdentity(now.Identity)
	})
}

// matchSize makes a volume as large as the catalogue says: its image, its identity, its block device and the
// filesystem on it. An image that is larger was enlarged by an operation that did not record it, and nothing uses the
// rest yet. Idempotent. With lenient, a filesystem that does not grow is a warning.
func (e *Engine) matchSize(ctx context.Context, id driver.ObjectID, lenient bool) error {
	var l content.Live
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, ok, err := tx.Object(id)
		if err == nil && ok {
			l, err = e.content.FindLive(tx, row, FreezeIfNeeded)
		}
		return err
	})
	if err != nil || l.Row.ID == "" {
		return err
	}

	if r, ok := e.drv.(driver.Resizer); ok {
		if err := r.Resize(ctx, id, l.Row.SizeBytes); err != nil {
			return err
		}
	}

	if err := e.matchIdentity(ctx, id); err != nil {
		return err
	}

	err = e.content.Grow(ctx, l)
	switch {
	case err == nil:
		return nil
	case lenient:
		warnings.Add(ctx, "the filesystem of %s did not grow: %v; retry with %s", l.Row.Name, err,
			errs.Run("resize", l.Row.Name, itoa(int(l.Row.SizeBytes))))
		return nil
	}

	return err
}

// resized describes a volume after a resize.
func (e *Engine) resized(ctx context.Context, id driver.ObjectID) (info Info, err error) {
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
