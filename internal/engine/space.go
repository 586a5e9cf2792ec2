package engine

import (
	"context"
	"fmt"

	"pando/internal/catalog"
	"pando/internal/errs"
	"pando/internal/pool"
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

// freeing marks a call that frees space: only such may spend the pool's reserve, so that
// something is left of it for them.
func freeing(ctx context.Context) context.Context {
	c := callOf(ctx)
	c.frees = true
	return withCall(ctx, c)
}

// spendReserve makes some room for what frees space. It reports whether trying again makes
// sense.
func (e *Engine) spendReserve(ctx context.Context) bool {
	return callOf(ctx).frees && ctx.Err() == nil && e.pool.SpendReserve(reservePiece)
}

// refill takes again, after space was freed, what freeing it may need. What cannot be taken
// now is taken the next time.
func (e *Engine) refill(ctx context.Context) {
	if s, err := e.pool.Space(ctx); err == nil && e.pool.Config.Backing != nil && s.HostFree < hostLow {
		e.returnToHost() // what was freed in the pool is still taken on the host
	}
	_ = e.pool.MakeReserve()
	_ = catalog.MakeSpares(e.pool.Dir)
	catalog.Preallocate(e.pool.Dir)
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

// blameFull makes an error of writing into an image one of a full pool, if that is so: whoever
// mounts a filesystem only gets to know that its device cannot be written.
func (e *Engine) blameFull(ctx context.Context, err error) error {
	if !errs.Is(err, errs.IO) {
		return err
	}
	if s, serr := e.pool.Space(context.WithoutCancel(ctx)); serr != nil || s.FreeBytes >= nearlyFull {
		return err
	}
	return (&errs.Error{Kind: errs.NoSpace, Err: fmt.Errorf("the pool is full: %w", err)}).
		WithHint("free space with %s and %s, or use a larger pool", errs.Run("destroy"), errs.Run("gc"))
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
