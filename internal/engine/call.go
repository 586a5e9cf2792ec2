package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Report collects what calls have to say besides their results. It may be used concurrently.
type Report struct {
	mu       sync.Mutex
	warnings []string
}

// WithReport returns a context with which the methods of an Engine report to r. Warnings of calls whose context
// has no report are dropped: calls of one Engine at the same time share nothing that one could find them in.
func WithReport(ctx context.Context, r *Report) context.Context {
	c := callOf(ctx)
	c.report = r
	return withCall(ctx, c)
}

// Warnings lists what went wrong without failing a call, the oldest first, each text once.
func (r *Report) Warnings() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.warnings)
}

func (r *Report) warn(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Who waits for something tries again and again.
	if !slices.Contains(r.warnings, text) {
		r.warnings = append(r.warnings, text)
	}
}

// call is the state of one call of a method, which its context carries: an Engine itself has none, as calls may be
// made concurrently.
type call struct {
	report *Report   // nil: nobody wants to know
	freed  *freed    // not nil during a gc: what was removed, and what that returned
	until  time.Time // removes what was destroyed before for as long; zero: for recoverBound at a time
}

type callKey struct{}

func callOf(ctx context.Context) call {
	c, _ := ctx.Value(callKey{}).(call)
	return c
}

func withCall(ctx context.Context, c call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
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

// warn reports what went wrong and does not fail the call.
func warn(ctx context.Context, format string, args ...any) {
	if r := callOf(ctx).report; r != nil {
		r.warn(fmt.Sprintf(format, args...))
	}
}
