package engine

import (
	"context"
	"errors"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

// resultRequest says how to publish the result of a build.
type resultRequest struct {
	golden    string
	vol       catalog.Row // unmounted, and marked by this process
	record    driver.Build
	origin    catalog.Row // what the volume was cloned from
	originRef string
	keep      *int
	labels    map[string]string
	tracker   *progress.Tracker

	made func(driver.ObjectID) // called before the generation is recorded; may be nil
}

// publishResult makes an unmounted volume, which is ephemeral, the next generation of a golden, which is sealed later.
// Nobody waits for it but those who publish the same golden. Durable on return.
func (e *Engine) publishResult(ctx context.Context, q resultRequest) (out Published, err error) {
	unlock, _, err := e.lockGolden(ctx, q.golden, q.tracker)
	if err != nil {
		return out, err
	}
	defer unlock()

	b, err := e.startBuild(ctx, buildRequest{op: opBuild, name: q.golden, keep: q.keep, labels: q.labels})
	if err != nil {
		return out, err
	}

	b.gen.Build = q.record
	b.gen.Origin, b.gen.OriginID = q.originRef, q.origin.ID
	out.Info, err = b.publishUnsealed(ctx, q)
	if err != nil {
		b.undoBuild(ctx)
		return Published{}, errs.Wrap(opBuild, q.golden, err)
	}

	out.Removed = e.removeOldOrWarn(ctx, q.golden)
	return out, nil
}

// publishUnsealed makes the generation of a result from a volume in the fastest way that the driver has.
func (b *build) publishUnsealed(ctx context.Context, q resultRequest) (Info, error) {
	e := b.e
	if err := e.content.SyncEphemeral(ctx, q.vol); err != nil {
		return Info{}, err
	}

	if _, copies := e.drv.(driver.Finisher); copies {
		// A snapshot is a copy, so the copy becomes the generation.
		b.scratch = b.scratch.WithContentOf(q.vol.Identity)
		b.scratch.Origin, b.scratch.OriginID = q.originRef, q.origin.ID
		if err := e.drv.Clone(ctx, q.vol.ID, b.scratch); err != nil {
			return Info{}, err
		}
		b.keepLog(q, b.scratch.ID) // Finish keeps the ID
		return b.publishGeneration(ctx, q.tracker)
	}

	// Make the generation from the volume itself.
	b.gen = b.gen.WithContentOf(q.vol.Identity)
	b.gen.CreatedAt = time.Now().UTC()
	if b.fresh {
		b.golden.CreatedAt = b.gen.CreatedAt
	} else {
		b.gen.Since = b.golden.CreatedAt
	}
	if err := e.drv.Snapshot(ctx, q.vol.ID, b.gen); err != nil {
		return Info{}, err
	}
	b.keepLog(q, b.gen.ID)

	row, err := b.measureResult(ctx, q.origin)
	if err != nil {
		return Info{}, err
	}

	_, b.unsealed = e.drv.(driver.Resealer)
	return b.recordGeneration(ctx, row)
}

func (b *build) keepLog(q resultRequest, id driver.ObjectID) {
	if q.made != nil {
		q.made(id)
	}
}

// measureResult returns the row of a result, with the space that it uses if that is cheap to measure.
func (b *build) measureResult(ctx context.Context, origin catalog.Row) (catalog.Row, error) {
	var err error
	if b.gen, err = b.e.fillSector(ctx, b.gen); err != nil {
		return catalog.Row{}, err
	}

	row := catalog.Row{Identity: b.gen, UsedAt: time.Now(), Usage: cloneUsage(b.e.caps, origin),
		MeasuredAt: origin.MeasuredAt}
	if !b.e.cheapUsage(row.FS) {
		return row, nil
	}

	row.MeasuredAt = row.UsedAt
	row.Usage, err = b.e.drv.Usage(ctx, row.ID)
	return row, err
}

// notStored is the error of a build whose data could not be stored. Its clone is about to be destroyed, so the hint of
// an umount is of no use.
func notStored(err error) error {
	var e *errs.Error
	if kind := errs.KindOf(err); !errors.As(err, &e) || kind != errs.NoSpace && kind != errs.IO {
		return err
	}
	return errs.New(e.Kind, opBuild, "", "%v", e.Err). // without the hint in it
								WithHint("free space with %s and %s, and repeat the build", errs.Run("destroy"), errs.Run("gc"))
}

// umountForResult unmounts the volume of a run that is to be published, under the mark of the run: a process that dies
// leaves a run, which the next command ends. InUse, with the processes that still use it; NoSpace or IO if what the
// command wrote could not be stored.
func (e *Engine) umountForResult(ctx context.Context, id driver.ObjectID) (row catalog.Row, err error) {
	var att catalog.MountRecord
	var has bool
	if err = e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		var exists bool
		if row, exists, err = tx.Object(id); err == nil && !exists {
			err = errs.New(errs.NotFound, opBuild, string(id), "the clone was destroyed while the command ran in it")
		}
		if err != nil {
			return err
		}
		att, has, err = tx.MountRecord(id)
		return err
	}); err != nil || !has {
		return row, err
	}

	used := e.content.InUse(ctx, reasonFor(opBuild), []content.Volume{{Row: row, Record: att, HasRecord: true}})
	if err = used[0]; err != nil {
		return row, err
	}
	if e.content.OwnMountState(row, att) == content.Mounted {
		if err = e.content.UmountWriteBack(ctx, row, att); err != nil {
			return row, notStored(err)
		}
	}
	if err = e.content.Unmount(ctx, reasonFor(opBuild), row, att, true); err != nil {
		return row, err
	}

	return row, e.cat.Update(context.WithoutCancel(ctx), catalog.Soft, func(tx *catalog.Tx) error {
		if err := tx.ForgetMount(id); err != nil {
			return err
		}
		return tx.ForgetLost(id)
	})
}
