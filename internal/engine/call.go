package engine

import (
	"context"
	"time"

	"pando/internal/catalog"
)

// call is the state of one call of a method, which its context carries: an Engine itself has none, as calls may be
// made concurrently.
type call struct {
	op    *catalog.Operation // that its marks belong to; nil outside of begin
	cat   *catalog.Catalog   // of op
	freed *freed             // not nil during a gc: what was removed, and what that returned
	frees bool               // it frees space, and may spend the pool's reserve for that
	until time.Time          // removes what was destroyed before for as long; zero: for recoverBound at a time
}

type callKey struct{}

func callOf(ctx context.Context) call {
	c, _ := ctx.Value(callKey{}).(call)
	return c
}

func withCall(ctx context.Context, c call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

// begin begins a call of a method that marks what it works on, and must be the first thing that it does. Its marks are
// its own, and end with it: what is left of them then, as it could not be undone, the next call or command cleans up.
// A method that is called by another is part of the other's call.
func (e *Engine) begin(ctx context.Context) (_ context.Context, end func()) {
	c := callOf(ctx)
	if c.op != nil && c.cat == e.cat {
		return ctx, func() {}
	}
	c.op, c.cat = e.cat.Begin(), e.cat
	return withCall(c.op.In(ctx), c), c.op.End
}

// reclaimContext bounds the time that may be spent on removing what was destroyed before. A gc takes the time that it
// needs.
func reclaimContext(ctx context.Context) (context.Context, context.CancelFunc) {
	c := callOf(ctx)
	switch {
	case c.freed != nil:
		return context.WithCancel(ctx)
	case c.until.IsZero():
		return context.WithTimeout(ctx, recoverBound)
	}
	return context.WithDeadline(ctx, c.until)
}
