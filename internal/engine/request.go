package engine

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// Request identifies a request that makes objects: see WithRequest.
type Request = driver.Request

type requestKey struct{}

// WithRequest returns a context in which Clone, Fork, Snapshot, SnapshotGroup, Import and Publish record the request in
// what they make. They return Exists and make nothing if there is something that a request with this key has made: of
// several repetitions at the same time, also in different processes, one makes it. MadeBy finds it.
func WithRequest(ctx context.Context, r Request) context.Context {
	return context.WithValue(ctx, requestKey{}, r)
}

func requestIn(ctx context.Context) Request {
	r, _ := ctx.Value(requestKey{}).(Request)
	return r
}

// MadeBy returns what a request with a key has made, as it is now, and which request that was. It returns nothing if
// there is nothing, or everything has been destroyed.
func (e *Engine) MadeBy(ctx context.Context, key string) (Request, []Info, error) {
	var r Request
	var infos []Info
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		rows, err := tx.MadeBy(key)
		if err != nil {
			return err
		}

		infos = nil
		for _, row := range rows {
			full, err := ref.Parse("show", tx.RefOf(row))
			if err != nil {
				return err
			}
			i, err := e.infoOf(tx, "show", full)
			if catalog.ScopeOf(ctx) != nil && errs.Is(err, errs.NotFound) { // its name now is none of the user's business
				return errs.New(errs.NotFound, "show", "", "what a request with this key has made is no longer shown to you").
					WithHint("use a new key")
			}
			if err != nil {
				return err
			}
			r = row.Request
			infos = append(infos, i)
		}
		return nil
	})
	return r, infos, err
}

// firstOf returns an error in the transaction that records what a request has made, if another process was faster.
// Exists.
func firstOf(ctx context.Context, tx *catalog.Tx, op string) error {
	r := requestIn(ctx)
	if r.IsZero() {
		return nil
	}
	rows, err := tx.MadeBy(r.Key)
	if err == nil && len(rows) > 0 {
		err = errs.New(errs.Exists, op, tx.RefOf(rows[0]), "a request with the same key has made it already")
	}
	return err
}
