package engine

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

// sweepDevices detaches block devices of this pool that no record or operation accounts for. A device that is mounted
// somewhere stays until it is unmounted.
func (w *sweeping) sweepDevices(ctx context.Context) error {
	e, c := w.e, w.view
	strays, err := e.content.StrayDevices(ctx, c.rows, c.mounts)
	if err != nil {
		return err
	}

	for _, d := range strays {
		if c.marked[d.ID] {
			continue
		}
		if err := w.ifUnaccounted(ctx, d, func() error { return w.sweepDevice(ctx, d) }); err != nil {
			return err
		}
	}

	return nil
}

// sweepDevice detaches a device that nothing accounts for, and reports one that is in use.
func (w *sweeping) sweepDevice(ctx context.Context, d content.StrayDevice) error {
	e, s := w.e, w.found
	gone, err := e.content.DetachStray(ctx, d)
	if gone {
		s.Loops++
	}
	if !errs.Is(err, errs.InUse) {
		return err
	}

	s.Kept = append(s.Kept, errs.Messagef("%s of %s is held by something that Pando did not create or has lost track of",
		d.Path(), e.cat.RefOf(ctx, d.ID)))
	return nil
}

// opSweep is the operation of marks on objects whose devices a sweep detaches.
const opSweep = "gc"

// ifUnaccounted calls fn if no mount record and no operation accounts for a block device. Until it returns, no process
// starts working on the object: reading an object may attach a device for a moment.
func (w *sweeping) ifUnaccounted(ctx context.Context, d content.StrayDevice, fn func() error) error {
	e := w.e
	attached := false
	err := e.ledger.ClaimNow(ctx, opSweep, true, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		a, has, err := tx.MountRecord(d.ID)
		if attached = has && (d.Loop() < 0 || a.Loop == d.Loop()); err != nil || attached {
			return nil, err
		}
		return []catalog.Mark{{ID: d.ID, Op: opSweep}}, nil
	})
	if errs.Is(err, errs.InUse) || err == nil && attached {
		return nil
	}
	if err != nil {
		return err
	}

	err = fn()
	if uerr := e.ledger.Unmark(ctx, d.ID); err == nil {
		err = uerr
	}

	return err
}
