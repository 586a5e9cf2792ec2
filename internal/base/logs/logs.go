// Package logs takes a log to the code that works: the context of a call carries it. A front end decides where it goes;
// without one, nothing is logged.
package logs

import (
	"context"
	"log/slog"
)

type key struct{}

// With returns a context of calls that write to l. Its handler may be called concurrently, and should be quick.
func With(ctx context.Context, l *slog.Logger) context.Context {
	return context.WithValue(ctx, key{}, l)
}

var none = slog.New(slog.DiscardHandler)

// From returns the log that a context carries, or one that goes nowhere. What is logged must hold no secrets: texts
// with URLs go through [errs.MaskURLs], as those of errors do.
func From(ctx context.Context) *slog.Logger {
	if l, ok := ctx.Value(key{}).(*slog.Logger); ok {
		return l
	}
	return none
}
