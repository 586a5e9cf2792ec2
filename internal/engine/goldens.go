package engine

import (
	"context"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// Goldens lists the goldens by name, each with its current generation.
func (e *Engine) Goldens(ctx context.Context) ([]api.Golden, error) {
	out := []api.Golden{}
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		goldens, err := visibleGoldens(tx, "golden ls")
		if err != nil {
			return err
		}

		at := map[string]int{}
		for i, g := range goldens {
			at[g.Name] = i
			out = append(out, goldenOf(g))
		}

		// Find the current generation of each, and count the others.
		owner := map[driver.ObjectID]int{}
		if err := tx.Rows(driver.Generation, func(r catalog.Row) error {
			i, ok := at[r.Golden]
			if !ok {
				return nil
			}
			owner[r.ID] = i
			out[i].GenerationCount++
			if g := goldens[i]; g.Current == r.Generation {
				out[i].Current.Object = generationOf(r, g, e.caps.Name)
			}
			return nil
		}); err != nil {
			return err
		}

		// Count the clones of each.
		counts, err := tx.ClonesByOrigin()
		for id, n := range counts {
			if i, ok := owner[id]; ok {
				out[i].VolumeCount += n
			}
		}
		return err
	})

	return out, err
}

// Golden describes the golden of a generation, which becomes its current one, and lists its generations. NotFound.
func (e *Engine) Golden(ctx context.Context, current api.Detail) (out api.Golden, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		g, ok, err := tx.ResolveGolden("show", current.Golden)
		if err != nil {
			return err
		}
		if !ok {
			return errs.New(errs.NotFound, "show", current.Golden, "the golden has just been removed")
		}

		gens, err := tx.Generations(g.Name)
		if err != nil {
			return err
		}
		if err := tx.CurrentOrigins(gens); err != nil {
			return err
		}

		counts, err := tx.ClonesByOrigin()
		if err != nil {
			return err
		}

		out = goldenOf(g)
		out.Current, out.GenerationCount = current, len(gens)
		for _, r := range gens {
			out.VolumeCount += counts[r.ID]
			o := generationOf(r, g, e.caps.Name)
			if o.ID == current.ID {
				o = current.Object
			}
			out.Generations = append(out.Generations, o)
		}
		return nil
	})
	return out, err
}

// goldenOf describes a golden, without its generations.
func goldenOf(g catalog.Golden) api.Golden {
	return api.Golden{
		Ref: g.Name, Kind: api.KindGolden, Name: g.Name, Keep: g.Keep, OverlayPolicy: g.Overlay.String(),
		Source: sourceJSON(g), Labels: g.Labels, OwnerUID: g.Owner,
	}
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
		row, err := tx.ResolveKind("golden rm", r, api.KindGolden, api.KindGeneration)
		if err != nil {
			return err
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
