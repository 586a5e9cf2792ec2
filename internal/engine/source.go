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

// GoldenSource returns the source of a golden (see driver.GoldenProperties), and the current generation. NotFound.
func (e *Engine) GoldenSource(ctx context.Context, golden ref.Name) (source string, current Info, err error) {
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

// LockSource keeps other processes from filling the same golden from its source: one fetches, the others wait. waited
// reports whether another process held the lock first. The lock ends with the process.
func (e *Engine) LockSource(
	ctx context.Context, golden ref.Name, t *progress.Tracker,
) (unlock func(), waited bool, err error) {
	return e.lockGolden(ctx, "source of "+golden.String(), t)
}
