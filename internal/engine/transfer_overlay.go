package engine

import (
	"context"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// An overlay is sent as two points: its lower layer, a generation, and its upper layer, the changes. A pull makes the
// lower layer first, or uses the one that is here.

// prepareLower makes sure that this pool can hold an overlay on the lower layer. Unsupported, Permission, NotFound.
func (r *receive) prepareLower(ctx context.Context) error {
	if r.q.Lower == "" {
		return nil
	}

	if os.Geteuid() != 0 {
		return errs.New(errs.Permission, opPull, r.ref, "it is an overlay: only root can write its upper layer").
			WithHint("run it as root")
	}

	var lower catalog.Row
	if err := r.e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		lower, err = tx.ResolvePoint(opPull, r.q.Lower)
		return err
	}); err != nil {
		return err
	}

	// The empty upper layer is made with the first overlay, and tried.
	if err := r.e.checkUpperKey(ctx, opPull, r.ref, lower.ID); err != nil {
		return err
	}
	_, err := r.e.upperTemplate(ctx, lower.FS, lower.SizeBytes)
	return err
}

// planLower finds the lower layer, and returns the marks that keep it from being destroyed.
func (r *receive) planLower(tx *catalog.Tx) (marks []catalog.Mark, err error) {
	if r.lower = (catalog.Row{}); r.q.Lower == "" {
		return nil, nil
	}

	if r.lower, err = tx.ResolvePoint(opPull, r.q.Lower); err != nil {
		return nil, err
	}

	if r.lower.Kind == driver.Snapshot || r.lower.FS.IsImage() != r.point.FS.IsImage() || r.lower.FS == driver.None {
		return nil, errs.New(errs.Invalid, opPull, r.ref, "no overlay like this is possible on %s", tx.RefOf(r.lower))
	}

	// A removed generation goes with the last overlay on it, so an overlay keeps it.
	keeps := r.lower.ID
	if r.lower.Kind == driver.Layer {
		overlay, ok, err := tx.OverlayOn(r.lower.ID)
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, errs.New(errs.NotFound, opPull, r.ref, "%s has just been destroyed", tx.RefOf(r.lower)).
				WithHint("try again")
		}
		keeps = overlay.ID
	}

	r.point.Lower = r.lower.ID
	return []catalog.Mark{{ID: driver.NewID(), Op: opPull, Reads: keeps}}, nil
}

// HoldPoint keeps a point, and the lower layer of an overlay with it, from being destroyed until release is called. It
// returns NotFound or InUse.
func (e *Transfer) HoldPoint(ctx context.Context, id driver.ObjectID) (release func(), err error) {
	ctx, end := e.ledger.Begin(ctx, opPush)
	h, err := e.ledger.Hold(ctx, opPush, id)
	if err != nil {
		end(&err)
		return nil, err
	}

	return func() {
		h.Release(ctx)
		end(nil)
	}, nil
}
