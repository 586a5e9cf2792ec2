package engine

import (
	"context"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

const opKeep, opSet = "keep", "set"

// KeepRequest says how many generations a golden is to keep.
type KeepRequest struct {
	Golden      ref.Name
	Generations int // the newest; 0: all
}

// Keep is SetGolden of how many generations are kept.
func (e *Engine) Keep(ctx context.Context, q KeepRequest) ([]string, error) {
	return e.setGolden(ctx, opKeep, SetRequest{Golden: q.Golden, Keep: &q.Generations})
}

// SetRequest says how to change the properties of a golden. Those that are nil stay.
type SetRequest struct {
	Golden  ref.Name
	Keep    *int // newest generations that it keeps; 0: all
	Overlay *driver.OverlayPolicy
}

// SetGolden changes properties of a golden, and removes generations that it no longer keeps, unless they are pinned. It
// returns those that it removed. If the first generation is being built, it waits for it. Durable on return. NotFound,
// Invalid.
func (e *Engine) SetGolden(ctx context.Context, q SetRequest) ([]string, error) {
	return e.setGolden(ctx, opSet, q)
}

func (e *Engine) setGolden(ctx context.Context, op string, q SetRequest) (_ []string, err error) {
	ctx, end := e.ledger.Begin(ctx, op)
	defer end(&err)

	golden := q.Golden.String()
	if q.Keep != nil && *q.Keep < 0 {
		return nil, errs.New(errs.Invalid, op, golden, "the number of generations must not be negative (got %d)", *q.Keep).
			WithHint("use 0 to keep all generations, 1 to keep only the current one")
	}

	if err := e.needRoot(op, golden); err != nil {
		return nil, err
	}

	if err := e.awaitGolden(ctx, golden); err != nil {
		return nil, err
	}

	unlock, _, err := e.lockGolden(ctx, golden)
	if err != nil {
		return nil, err
	}

	defer unlock()

	if err := e.changeRow(ctx, op, func(tx *catalog.Tx) (driver.ObjectID, error) {
		return currentGeneration(tx, op, golden)
	}, func(tx *catalog.Tx) error {
		g, _, err := tx.Golden(golden)
		if err != nil {
			return err
		}

		if q.Keep != nil {
			g.Keep = *q.Keep
		}
		if q.Overlay != nil {
			g.Overlay = *q.Overlay
		}
		return tx.PutGolden(g)
	}); err != nil {
		return nil, err
	}

	return e.removeOldGenerations(ctx, golden)
}

// currentGeneration returns the object of a golden's current generation, which holds the properties of the golden.
// NotFound, Invalid (it is a volume), Damaged.
func currentGeneration(tx *catalog.Tx, op, golden string) (driver.ObjectID, error) {
	g, ok, err := tx.ResolveGolden(op, golden)
	if err == nil && !ok {
		_, err = tx.ResolveKind(op, ref.Ref{Name: golden}, api.KindGolden) // why it is not there
	}
	if err != nil {
		return "", err
	}

	row, ok, err := tx.Generation(golden, g.Current)
	if err == nil && !ok {
		err = errs.New(errs.Damaged, op, golden, "generation %d is missing from the catalogue", g.Current).
			WithHint("check the pool with %s", errs.Run("fsck"))
	}

	return row.ID, err
}

// removeOldGenerations removes the generations that the golden's retention does not keep,
// and returns their references. The caller holds the golden's lock. Generations in use
// stay until the next publish or gc, and the one that the next refresh continues stays.
func (e *Engine) removeOldGenerations(ctx context.Context, golden string) ([]string, error) {
	var going []doomed
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		g, ok, err := tx.Golden(golden)
		if err != nil || !ok || g.Keep == 0 {
			return err
		}
		gens, err := tx.Generations(golden)
		mirror := mirrorOf(gens)
		for i, r := range gens {
			stays := i >= len(gens)-g.Keep || r.Generation == g.Current || r.Generation == mirror
			if !stays && checkPin(r, "", time.Now()) == nil {
				going = append(going, doomed{row: r, ref: ref.Generation(golden, r.Generation)})
			}
		}
		return err
	})
	if err != nil || len(going) == 0 {
		return nil, err
	}

	report := e.destroyRows(ctx, going, destroyOptions{why: "not kept by the retention of its golden"})
	var out []string
	for _, d := range report.Destroyed {
		out = append(out, d.Ref)
	}

	return out, report.firstFailure()
}

// removeOldOrWarn is removeOldGenerations for use after a generation was published: a
// failure is only a warning.
func (e *Engine) removeOldOrWarn(ctx context.Context, golden string) []string {
	out, err := e.removeOldGenerations(ctx, golden)
	if err != nil {
		warnings.Add(ctx, "could not yet remove older generations of %s: %v", golden, err)
	}
	return out
}
