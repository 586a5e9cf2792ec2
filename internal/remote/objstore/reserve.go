package objstore

import "context"

// Reserver is a store that can be full, and keeps some room back for what frees space: that has to write first.
type Reserver interface {
	// KeepReserve makes sure that the room is kept back, unless too little is left. It may be repeated.
	KeepReserve(ctx context.Context) error
}

// KeepReserve calls the method of stores that keep room back.
func KeepReserve(ctx context.Context, s Store) error {
	if r, ok := s.(Reserver); ok {
		return r.KeepReserve(ctx)
	}
	return nil
}

type reserveKey struct{}

// WithReserve returns a context with which writes may use the room that a store has kept back.
func WithReserve(ctx context.Context) context.Context {
	return context.WithValue(ctx, reserveKey{}, true)
}

// MayUseReserve reports whether ctx is that of WithReserve.
func MayUseReserve(ctx context.Context) bool { return ctx.Value(reserveKey{}) != nil }
