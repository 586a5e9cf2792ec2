// Package follow reads the events of a pool as they happen.
package follow

import (
	"context"
	"slices"

	"pando/internal/api"
	"pando/internal/engine"
)

// pageLimit is the largest number of events to read at once, after the first ones.
const pageLimit = 1000

// Follower reads events, those that a request chooses first, and then the events since. The pool may be closed and
// opened between two calls of Next, and must be to notice that its catalogue was rebuilt. A Follower must not be used
// by several goroutines at once.
type Follower struct {
	next  engine.HistoryRequest // request for the next events
	trail *engine.Trail         // trail of the events that are wanted
	begun bool                  // whether the first events have been read
	page  int                   // largest number of events to read at once: pageLimit, and less in tests
}

// New returns a follower. With After, all events since are wanted, whatever the Limit is.
func New(q engine.HistoryRequest) *Follower {
	if q.After > 0 {
		q.Limit = 0
	}
	return &Follower{next: q, trail: engine.NewTrail(q.Ref), page: pageLimit}
}

// Begun reports whether Next has succeeded before.
func (f *Follower) Begun() bool { return f.begun }

// Next returns the events since the last call, the oldest first, which may be none, and whether there are more already.
// After an error, the next call tries again. It returns the kinds of [engine.Engine.History].
func (f *Follower) Next(ctx context.Context, e *engine.Engine) (events []api.Event, more bool, err error) {
	h, err := e.History(ctx, f.next)
	if err != nil {
		return nil, false, err
	}

	// The engine has chosen the first events.
	if f.begun {
		h.Events = slices.DeleteFunc(h.Events, func(v api.Event) bool { return !f.trail.Has(v) })
		more = h.More
	}
	f.begun = true
	f.next = engine.HistoryRequest{After: h.Next, Limit: f.page}
	return h.Events, more, nil
}
