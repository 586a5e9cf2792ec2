package engine

import (
	"context"
	"slices"
	"sync"
	"time"

	"pando/internal/catalog"
	"pando/internal/errs"
)

// Report collects what calls have to say besides their results. It may be used concurrently.
type Report struct {
	mu       sync.Mutex
	warnings []warning
	seen     map[errs.Message]bool // texts, also of those that are only counted
}

// warning is one line.
type warning struct {
	kind string       // "": it stands alone
	text errs.Message // of the first of its kind
	more int          // of its kind, with other texts
}

// WithReport returns a context with which the methods of an Engine report to r. Warnings of calls whose context
// has no report are dropped: calls of one Engine at the same time share nothing that one could find them in.
func WithReport(ctx context.Context, r *Report) context.Context {
	c := callOf(ctx)
	c.report = r
	return withCall(ctx, c)
}

// Warnings lists what went wrong without failing a call, the oldest first, each text once. Where many things went
// wrong in the same way, one line says so: the first, and how many more there are.
func (r *Report) Warnings() []errs.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []errs.Message
	for _, w := range r.warnings {
		if w.more > 0 {
			w.text = errs.Messagef("%s (and %d more like this)", w.text, w.more)
		}
		out = append(out, w.text)
	}
	return out
}

func (r *Report) warn(kind string, text errs.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Who waits for something tries again and again.
	if r.seen[text] {
		return
	}
	if r.seen == nil {
		r.seen = map[errs.Message]bool{}
	}
	r.seen[text] = true
	at := slices.IndexFunc(r.warnings, func(w warning) bool { return kind != "" && w.kind == kind })
	if at < 0 {
		r.warnings = append(r.warnings, warning{kind: kind, text: text})
		return
	}
	r.warnings[at].more++
}

// call is the state of one call of a method, which its context carries: an Engine itself has none, as calls may be
// made concurrently.
type call struct {
	op     *catalog.Operation // that its marks belong to; nil outside of begin
	cat    *catalog.Catalog   // of op
	report *Report            // nil: nobody wants to know
	freed  *freed             // not nil during a gc: what was removed, and what that returned
	frees  bool               // it frees space, and may spend the pool's reserve for that
	until  time.Time          // removes what was destroyed before for as long; zero: for recoverBound at a time
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

// warn reports what went wrong and does not fail the call. Of warnings with the same format only the first is told
// in full: on a full disk all that there is goes wrong in the same way.
func warn(ctx context.Context, format string, args ...any) {
	if r := callOf(ctx).report; r != nil {
		r.warn(format, errs.Messagef(format, args...))
	}
}

// warnEach is warn where each thing counts, such as data that was lost.
func warnEach(ctx context.Context, format string, args ...any) {
	if r := callOf(ctx).report; r != nil {
		r.warn("", errs.Messagef(format, args...))
	}
}
