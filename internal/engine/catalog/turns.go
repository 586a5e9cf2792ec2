package catalog

import (
	"context"
	"slices"
	"sync"
)

// turns gives calls the connection for writing one at a time, in the order in which they come. A call that has it can
// hand its transaction on to the next one.
type turns struct {
	mu      sync.Mutex
	taken   bool
	waiting []*turn
}

// turn is a call that needs the connection.
type turn struct {
	joins   bool // it may be part of another call's transaction
	durable bool
	given   chan *group // what it joins, when its turn comes; nil: it has the connection for itself
}

// try takes the connection if it is free.
func (t *turns) try() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	free := !t.taken
	t.taken = true
	return free
}

// take waits for the connection, and returns the group to join; nil: there is none.
func (t *turns) take(ctx context.Context, w *turn) (*group, error) {
	t.mu.Lock()
	if !t.taken {
		t.taken = true
		t.mu.Unlock()
		return nil, nil
	}
	w.given = make(chan *group, 1)
	t.waiting = append(t.waiting, w)
	t.mu.Unlock()

	select {
	case g := <-w.given:
		return g, nil
	case <-ctx.Done():
	}

	// Its turn may have come at this moment: then the caller must hand it on.
	if t.forget(w) {
		return nil, ctx.Err()
	}
	return <-w.given, nil
}

// forget removes a call that waits, and reports whether it still did.
func (t *turns) forget(w *turn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.waiting, w)
	if i >= 0 {
		t.waiting = slices.Delete(t.waiting, i, i+1)
	}
	return i >= 0
}

// handOn gives the connection, with the open transaction of a group, to the next call if that may join. If not, it
// reports false, and the caller keeps both.
func (t *turns) handOn(g *group) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.waiting) == 0 || !g.admits(t.waiting[0]) {
		return false
	}
	t.next() <- g
	return true
}

// release gives the connection to the next call, for itself.
func (t *turns) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.taken = len(t.waiting) > 0; t.taken {
		t.next() <- nil
	}
}

// next removes the call that has waited longest. The mutex is held.
func (t *turns) next() chan<- *group {
	w := t.waiting[0]
	t.waiting = slices.Delete(t.waiting, 0, 1)
	return w.given
}
