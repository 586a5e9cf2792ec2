package engine

import (
	"context"
	"encoding/json"

	"pando/internal/base/progress"
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

// GoldenSource returns the source of a golden (see driver.GoldenProperties), and the current generation. If the first
// generation is being built, it waits for it. NotFound.
func (e *Engine) GoldenSource(
	ctx context.Context, golden ref.Name, t *progress.Tracker,
) (source string, current Info, err error) {
	if err := e.awaitGolden(ctx, golden.String(), t); err != nil {
		return "", Info{}, err
	}

	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		id, err := currentGeneration(tx, opRefresh, golden.String())
		if err != nil {
			return err
		}

		row, _, err := tx.Object(id)
		if err != nil {
			return err
		}

		g, _, err := tx.Golden(golden.String())
		source, current = g.Source, generationInfo(row, g, e.caps.Name)
		return err
	})
	return source, current, err
}

// LockSource keeps other processes from filling the same golden from its source: one fetches, the others wait. As long
// as the golden does not exist, its clones wait too. waited reports whether another process held the lock first. The
// lock ends with the process. Calls with the returned context do not wait for this lock, which their caller holds.
func (e *Engine) LockSource(
	ctx context.Context, golden ref.Name, t *progress.Tracker,
) (locked context.Context, unlock func(), waited bool, err error) {
	name := golden.String()
	if unlock, waited, err = e.lockGolden(ctx, sourceOf(name), t); err != nil {
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
