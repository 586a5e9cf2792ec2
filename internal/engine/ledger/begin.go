package ledger

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/logs"
)

type begunKey struct{}

// Begin starts an operation named op, and must be the first thing that a call does which writes marks or events. The
// marks belong to the operation and end with it: the next call or command cleans up those that are left because their
// work could not be undone. A call within another call is part of the outer one's operation.
//
// The operation lasts until end is called, with the error of the call, or nil if it cannot fail any more. The context
// is of no use after that. After Stop, it is of no use from the beginning.
func (l *Ledger) Begin(ctx context.Context, op string) (_ context.Context, end func(*error)) {
	if ctx.Value(begunKey{}) == l.cat {
		return ctx, func(*error) {}
	}

	ctx, leave := l.open.enter(ctx)
	o, begun, log := l.cat.Begin(op), time.Now(), logs.From(ctx)
	log.DebugContext(ctx, "begun", "op", op)
	var once sync.Once
	return context.WithValue(o.In(ctx), begunKey{}, l.cat), func(failed *error) {
		once.Do(func() {
			o.End()
			logEnd(ctx, log.With("op", op, "took", time.Since(begun)), failed)
			leave()
		})
	}
}

// logEnd logs that an operation has ended. That it could not do what was asked is not worth a warning.
func logEnd(ctx context.Context, log *slog.Logger, failed *error) {
	if failed == nil || *failed == nil {
		log.InfoContext(ctx, "done")
		return
	}

	level, kind := slog.LevelInfo, errs.KindOf(*failed)
	switch kind {
	case errs.Internal, errs.Damaged, errs.IO:
		level = slog.LevelError
	case errs.NoSpace:
		level = slog.LevelWarn
	}
	log.Log(ctx, level, "failed", "kind", kind, "error", errs.MaskURLs((*failed).Error()))
}

// gate counts the operations that have begun and not ended.
type gate struct {
	mu      sync.Mutex
	closed  bool               // whether no more operations may begin
	inside  sync.WaitGroup     // operations that have not ended
	hurry   context.Context    // context that ends when the operations inside are to stop
	hurryUp context.CancelFunc // cancel function of hurry
}

func newGate() *gate {
	g := &gate{}
	g.hurry, g.hurryUp = context.WithCancel(context.Background())
	return g
}

// errClosed is why operations stop, or do not begin.
var errClosed = errs.New(errs.Canceled, "", "", "the pool is being closed")

// enter returns the context of an operation, which has ended already if the gate is closed. Call leave when the
// operation has ended.
func (g *gate) enter(ctx context.Context) (_ context.Context, leave func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		cancel(errClosed)
		return ctx, func() {}
	}

	g.inside.Add(1)
	stop := context.AfterFunc(g.hurry, func() { cancel(errClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
		g.inside.Done()
	}
}

// Stop lets no more operations begin, and waits for those that have begun. When ctx ends, they are cancelled: they undo
// what they have done, as far as they can, and Stop waits for that as well. It returns Canceled if any was cancelled.
func (l *Ledger) Stop(ctx context.Context) error {
	g := l.open
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()

	ended := make(chan struct{})
	go func() {
		g.inside.Wait()
		close(ended)
	}()

	select {
	case <-ended:
		return nil
	case <-ctx.Done():
	}

	g.hurryUp()
	<-ended
	return errs.New(errs.Canceled, "close pool", "", "calls were still at work, and were cancelled")
}
