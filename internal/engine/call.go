package engine

import "context"

// call is the state of one call of a method. Its context carries it: an Engine itself has no such state, as its methods
// may be called concurrently.
type call struct {
	freed *freed // not nil during a gc: the objects removed, and the space that returned
	frees bool   // it frees space, and may spend the pool's reserve for that
}

type callKey struct{}

func callOf(ctx context.Context) call {
	c, _ := ctx.Value(callKey{}).(call)
	return c
}

func withCall(ctx context.Context, c call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}
