package engine

import (
	"context"
	"encoding/json"
	"slices"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine/catalog"
)

const opRefresh = "refresh"

// sourceJSON returns the source of a golden, nil if it has none.
func sourceJSON(g catalog.Golden) json.RawMessage {
	if !json.Valid([]byte(g.Source)) {
		return nil
	}
	return json.RawMessage(g.Source)
}

// Sourced is what GoldenSource reports.
type Sourced struct {
	Source  string     // where the golden comes from, see driver.GoldenProperties; "": nowhere
	Current api.Object // the current generation
	Numbers []int      // numbers of all generations, the newest first
	Mirrors []Mirror   // the generations that were made from a source, the newest first
}

// Mirror is a generation that was made from the source of its golden: see driver.Identity.
type Mirror struct {
	api.Object
	Volume string // ID of the volume that was filled
}

// Mirror returns a generation, if it was made from a source.
func (s Sourced) Mirror(generation int) (Mirror, bool) {
	for _, m := range s.Mirrors {
		if m.Generation == generation {
			return m, true
		}
	}
	return Mirror{}, false
}

// GoldenSource returns where a golden comes from. If the first generation is being built, it waits for it. NotFound.
func (e *Engine) GoldenSource(ctx context.Context, golden ref.Name) (Sourced, error) {
	if err := e.awaitGolden(ctx, golden.String()); err != nil {
		return Sourced{}, err
	}

	var out Sourced
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		id, err := currentGeneration(tx, opRefresh, golden.String())
		if err != nil {
			return err
		}

		g, _, err := tx.Golden(golden.String())
		if err != nil {
			return err
		}

		gens, err := tx.Generations(golden.String())
		out = Sourced{Source: g.Source}
		for _, r := range slices.Backward(gens) {
			out.Numbers = append(out.Numbers, r.Generation)
			if r.ID == id {
				out.Current = generationOf(r, g, e.caps.Name)
			}
			if r.Mirror {
				out.Mirrors = append(out.Mirrors, Mirror{generationOf(r, g, e.caps.Name), string(r.OriginID)})
			}
		}
		return err
	})
	return out, err
}

// Filled describes a volume that was filled from the source of a golden, and to which no session could write. A
// generation that is published from it is a mirror: see driver.Identity.
type Filled struct {
	Source  string      // where the golden comes from, from now on
	Origin  string      // origin of the generation, for users
	Current *api.Object // generation that must be the current one, the zero Object: there must be no golden; nil: any
}

// check returns an error if the golden is not as it was when the volume was filled. NotFound, Exists, Conflict.
func (f *Filled) check(tx *catalog.Tx, op, name string, g catalog.Golden, exists bool) error {
	if f.Current == nil {
		return nil
	}
	if !exists {
		if f.Current.ID == "" {
			return nil
		}
		return errs.New(errs.NotFound, op, name, "the golden has been removed in the meantime")
	}

	// Its number is not enough: the golden may have been removed, and made again.
	row, _, err := tx.Generation(name, g.Current)
	switch {
	case err != nil || string(row.ID) == f.Current.ID:
		return err
	case f.Current.ID == "":
		return errs.New(errs.Exists, op, name, "golden %q has been made in the meantime", name).
			WithHint("fetch what is new with %s", errs.Run("golden refresh", name))
	}
	return errs.New(errs.Conflict, op, name, "%s has been published in the meantime",
		ref.Generation(name, g.Current)).WithHint("try again")
}

// whyMirror says why the generation that mirrorOf finds stays.
const whyMirror = "the next refresh of the golden continues it"

// mirrorOf returns the newest of a golden's generations that was made from a source, which the next refresh continues;
// 0 if there is none.
func mirrorOf(gens []catalog.Row) (generation int) {
	for _, r := range gens {
		if r.Mirror {
			generation = max(generation, r.Generation)
		}
	}
	return generation
}

// LockSource keeps other processes from filling the same golden from its source: one fetches, the others wait. As long
// as the golden does not exist, its clones wait too. waited reports whether another process held the lock first. The
// lock ends with the process. Calls with the returned context do not wait for this lock, which their caller holds.
func (e *Engine) LockSource(
	ctx context.Context, golden ref.Name,
) (locked context.Context, unlock func(), waited bool, err error) {
	name := golden.String()
	if err := e.askForGolden(ctx, opRefresh, name); err != nil {
		return ctx, nil, false, err
	}
	if unlock, waited, err = e.lockGolden(ctx, sourceOf(name)); err != nil {
		return ctx, nil, false, err
	}
	return context.WithValue(ctx, sourceKey{e.pool.Dir, name}, true), unlock, waited, nil
}

// sourceKey is the key in contexts of those who hold the lock of a source.
type sourceKey struct{ pool, golden string }

// holdsSource reports whether the caller has locked the source of a golden.
func (e *Engine) holdsSource(ctx context.Context, golden string) bool {
	return ctx.Value(sourceKey{e.pool.Dir, golden}) != nil
}

// sourceOf returns the name under which lockGolden locks the source of a golden. No golden can have such a name.
func sourceOf(golden string) string { return "source of " + golden }
