package engine

import (
	"context"
	"path"
	"slices"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine/catalog"
)

// MatchRequest says what to look for.
type MatchRequest struct {
	Op    string        // operation to find it for, as in errors
	What  []ref.Pattern // references and globs, see Match
	Kinds []api.Kind    // kinds to find: volume, snapshot, golden, generation
}

// Match finds what patterns name, without repeats: volumes and goldens by their names, snapshots and generations by
// what stands behind the @. A glob leaves out what has another kind and what may not be seen. NotFound (a reference
// that names nothing, or a glob that matches nothing), Invalid (a malformed glob, or a reference to another kind).
func (e *Engine) Match(ctx context.Context, q MatchRequest) (out []ref.Ref, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		out = nil
		seen := map[ref.Ref]bool{}
		return matchEach(tx, q, func(r ref.Ref, _ catalog.Row) error {
			if !seen[r] {
				seen[r] = true
				out = append(out, r)
			}
			return nil
		})
	})
	return out, err
}

// matchEach calls fn for what patterns name, perhaps repeatedly. The row of a golden is that of its current generation.
func matchEach(tx *catalog.Tx, q MatchRequest, fn func(ref.Ref, catalog.Row) error) error {
	for _, p := range q.What {
		if p.Glob == "" {
			row, err := tx.ResolveKind(q.Op, p.Ref, q.Kinds...)
			if err == nil {
				err = fn(p.Ref, row)
			}
			if err != nil {
				return err
			}
			continue
		}

		g, err := newGlob(q, p.Glob)
		if err != nil {
			return err
		}
		if err := g.each(tx, fn); err != nil {
			return err
		}
	}
	return nil
}

// glob is a pattern for names, with an @ also for what stands behind it.
type glob struct {
	MatchRequest
	text string
	name string // pattern for the name
	at   string // pattern for what stands behind the @; "": there is no @
}

// newGlob reads a glob. It returns Invalid.
func newGlob(q MatchRequest, text string) (g glob, err error) {
	g = glob{MatchRequest: q, text: text}
	has := false
	if g.name, g.at, has = strings.Cut(text, "@"); has && g.at == "" {
		return g, errs.New(errs.Invalid, q.Op, text, "nothing stands behind the @").
			WithHint("write %s@* for everything that does", g.name)
	}
	for _, part := range []string{g.name, g.at} {
		if _, err := path.Match(part, ""); err != nil {
			return g, errs.New(errs.Invalid, q.Op, text, "the pattern is malformed").WithHint("use *, ? and [a-z]")
		}
	}
	return g, nil
}

// each calls fn for what the glob matches. NotFound if that is nothing.
func (g glob) each(tx *catalog.Tx, fn func(ref.Ref, catalog.Row) error) error {
	some := false
	found := func(r ref.Ref, row catalog.Row) error {
		some = true
		return fn(r, row)
	}
	if err := g.eachVolume(tx, found); err != nil {
		return err
	}
	if err := g.eachGolden(tx, found); err != nil {
		return err
	}
	if some {
		return nil
	}

	list := errs.Run("ls")
	switch {
	case g.Kinds[0] == api.KindGolden:
		list = errs.Run("golden ls")
	case g.at != "":
		list = errs.Run("ls", errs.Param("snapshots"))
	}
	return errs.New(errs.NotFound, g.Op, g.text, "no %s matches", g.noun()).WithHint("list %ss with %s", g.noun(), list)
}

// noun is what the glob looks for.
func (g glob) noun() string {
	switch {
	case g.at == "":
		return string(g.Kinds[0])
	case g.Kinds[0] == api.KindGolden:
		return string(api.KindGeneration)
	}
	return string(api.KindSnapshot)
}

// wants reports whether it looks for a kind that is named without an @, or with one.
func (g glob) wants(without, with api.Kind) bool {
	if g.at != "" {
		return slices.Contains(g.Kinds, with)
	}
	return slices.Contains(g.Kinds, without)
}

// eachVolume calls fn for volumes, or their snapshots.
func (g glob) eachVolume(tx *catalog.Tx, fn func(ref.Ref, catalog.Row) error) error {
	if !g.wants(api.KindVolume, api.KindSnapshot) {
		return nil
	}

	// Read all names first: the rows of snapshots are another query.
	var volumes []catalog.Row
	if err := visibleVolumes(tx, g.Op, func(r catalog.Row) error {
		if ok, _ := path.Match(g.name, r.Name); ok {
			volumes = append(volumes, r)
		}
		return nil
	}); err != nil {
		return err
	}

	for _, v := range volumes {
		if g.at == "" {
			if err := fn(ref.Ref{Name: v.Name}, v); err != nil {
				return err
			}
			continue
		}

		snaps, err := tx.Snapshots(v.Lineage())
		if err != nil {
			return err
		}
		for _, s := range snaps {
			if err := g.matchAt(tx, ref.Ref{Name: v.Name, At: s.Name}, s, fn); err != nil {
				return err
			}
		}
	}
	return nil
}

// eachGolden calls fn for goldens, or their generations.
func (g glob) eachGolden(tx *catalog.Tx, fn func(ref.Ref, catalog.Row) error) error {
	if !g.wants(api.KindGolden, api.KindGeneration) {
		return nil
	}

	goldens, err := visibleGoldens(tx, g.Op)
	if err != nil {
		return err
	}
	for _, golden := range goldens {
		if ok, _ := path.Match(g.name, golden.Name); !ok {
			continue
		}

		gens, err := tx.Generations(golden.Name)
		if err != nil {
			return err
		}
		for _, r := range gens {
			switch {
			case g.at != "":
				err = g.matchAt(tx, ref.Ref{Name: r.Golden, At: itoa(r.Generation)}, r, fn)
			case r.Generation == golden.Current:
				err = fn(ref.Ref{Name: golden.Name}, r)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// matchAt calls fn for a snapshot or generation, if what stands behind its @ matches, and it may be seen.
func (g glob) matchAt(tx *catalog.Tx, r ref.Ref, row catalog.Row, fn func(ref.Ref, catalog.Row) error) error {
	if ok, _ := path.Match(g.at, r.At); !ok {
		return nil
	}
	if err := tx.Ask(g.Op, row); err != nil {
		return unlessHidden(err)
	}
	return fn(r, row)
}
