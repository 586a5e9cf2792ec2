package engine

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
)

// What is given back of the reserve at once, in bytes: for a transaction that the log has no
// room for any more, and for the index of the log.
const (
	reservePiece = 1 << 20
	openPiece    = 128 << 10
)

// hostLow is the free space, in bytes, on the filesystem below a pool in a file, below which
// whatever frees space in the pool returns it to the host at once.
const hostLow = 256 << 20

// mayUseReserve marks a call that frees space: only such may spend the pool's reserve, so that
// something is left of it for them.
func mayUseReserve(ctx context.Context) context.Context {
	c := callOf(ctx)
	c.frees = true
	return withCall(ctx, c)
}

// spendReserve makes some room for what frees space. It reports whether trying again makes
// sense.
func (e *Engine) spendReserve(ctx context.Context) bool {
	if !callOf(ctx).frees || ctx.Err() != nil {
		return false
	}
	spent := e.pool.SpendReserve(reservePiece)
	e.refilled.Store(nil) // after: a refill in between has not taken it again
	return spent
}

// refillEvery is how often an engine looks whether other processes have spent something.
const refillEvery = time.Second

// refillReserveIfSpent is refillReserve, unless there is nothing to take: this engine found all of it there a moment ago, and
// has spent nothing since.
func (e *Engine) refillReserveIfSpent() {
	if at := e.refilled.Load(); at != nil && time.Since(*at) < refillEvery {
		e.returnIfLow()
		return
	}
	e.refillReserve()
}

// refillReserve takes again, after space was freed, what freeing it may need. What cannot be taken
// now is taken the next time.
func (e *Engine) refillReserve() {
	e.returnIfLow()
	begun := time.Now()
	e.refilled.Store(&begun) // before: what is spent meanwhile is seen the next time
	reserved := e.pool.MakeReserve()
	spares := catalog.MakeSpares(e.pool.Dir)
	catalog.Preallocate(e.pool.Dir)
	if reserved != nil || spares != nil || !e.pool.HasReserve() {
		e.refilled.Store(nil)
	}
}

// returnIfLow returns what was freed in a pool in a file to the host, where it is still taken, if there is little left.
func (e *Engine) returnIfLow() {
	if e.pool.Config.Backing == nil {
		return
	}
	if free, err := e.pool.HostFree(); err == nil && free < hostLow {
		e.returnToHost()
	}
}

// destroyObject makes the driver remove an object, if need be with the reserve.
func (e *Engine) destroyObject(ctx context.Context, destroy func() error) error {
	for {
		err := destroy()
		if !errs.Is(err, errs.NoSpace) || !e.spendReserve(ctx) {
			return err
		}
	}
}

// openCatalog opens the catalogue. Every command does, so on a full disk this must need next
// to nothing: the index of the log, 32 KiB, which SQLite makes anew if nobody has it open.
func openCatalog(ctx context.Context, p *pool.Pool) (*catalog.Catalog, error) {
	cat, err := catalog.Open(ctx, p.Dir, p.Config.ID)
	if errs.Is(err, errs.NoSpace) && p.SpendReserve(openPiece) {
		cat, err = catalog.Open(ctx, p.Dir, p.Config.ID)
	}
	if errs.Is(err, errs.NoSpace) {
		// Without an index. Last, as nobody else can use the catalogue until this ends.
		cat, err = catalog.OpenAlone(ctx, p.Dir, p.Config.ID)
	}
	return cat, err
}
