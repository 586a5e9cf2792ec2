package engine

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
)

// Amounts of the reserve that are given up at a time, in bytes: for a transaction that no
// longer fits into the log, and for the index of the log.
const (
	reservePiece = 1 << 20
	openPiece    = 128 << 10
)

// hostLow is the amount of free space, in bytes, on the filesystem that contains a loop-backed
// pool. With less, operations that free space in the pool return it to the host at once.
const hostLow = 256 << 20

// mayUseReserve marks a call that frees space, or records that writes were lost. Only such calls may spend the pool's
// reserve, so that other calls leave it to them.
func mayUseReserve(ctx context.Context) context.Context {
	c := callOf(ctx)
	c.frees = true
	return withCall(ctx, c)
}

// records is what package content records in the catalogue.
type records struct{ *catalog.Catalog }

// NoteLostWrites may spend the reserve: writes are lost because the pool is full, and the kernel does not report it
// again.
func (r records) NoteLostWrites(ctx context.Context, a catalog.MountRecord, l catalog.Loss) error {
	return r.Catalog.NoteLostWrites(mayUseReserve(ctx), a, l)
}

// spendReserve frees a part of the reserve for a call that frees space, and reports whether
// it is worth retrying.
func (e *Engine) spendReserve(ctx context.Context) bool {
	if !callOf(ctx).frees || ctx.Err() != nil {
		return false
	}
	spent := e.pool.SpendReserve(reservePiece)
	e.refilled.Store(nil) // after spending, or a concurrent refill could overlook it
	return spent
}

// refillEvery is how often an engine checks whether other processes have spent the reserve.
const refillEvery = time.Second

// refillReserveIfSpent is refillReserve, unless this engine found the reserve complete a moment ago and has spent
// nothing since.
func (e *Engine) refillReserveIfSpent() {
	if at := e.refilled.Load(); at != nil && time.Since(*at) < refillEvery {
		e.returnIfLow()
		return
	}
	e.refillReserve()
}

// refillReserve restores the reserve after space was freed. Parts that do not fit now are
// restored the next time.
func (e *Engine) refillReserve() {
	e.returnIfLow()
	begun := time.Now()
	e.refilled.Store(&begun) // before refilling, so that spending in the meantime is noticed the next time
	reserved := e.pool.MakeReserve()
	spares := catalog.MakeSpares(e.pool.Dir)
	catalog.Preallocate(e.pool.Dir)
	if reserved != nil || spares != nil || !e.pool.HasReserve() {
		e.refilled.Store(nil)
	}
}

// returnIfLow returns the free space of a loop-backed pool to the host if the host has little left.
func (e *Engine) returnIfLow() {
	if e.pool.Config.Backing == nil {
		return
	}
	if free, err := e.pool.HostFree(); err == nil && free < hostLow {
		e.returnToHost()
	}
}

// destroyObject makes the driver remove an object, and spends the reserve if that lacks space.
func (e *Engine) destroyObject(ctx context.Context, destroy func() error) error {
	for {
		err := destroy()
		if !errs.Is(err, errs.NoSpace) || !e.spendReserve(ctx) {
			return err
		}
	}
}

// openCatalog opens the catalogue. Every command does this, so on a full disk it must need
// almost no space: only the index of the log, 32 KiB, which SQLite recreates if nobody has it
// open.
func openCatalog(ctx context.Context, p *pool.Pool) (*catalog.Catalog, error) {
	cat, err := catalog.Open(ctx, p.Dir, p.Config.ID)
	if errs.Is(err, errs.NoSpace) && p.SpendReserve(openPiece) {
		cat, err = catalog.Open(ctx, p.Dir, p.Config.ID)
	}
	if errs.Is(err, errs.NoSpace) {
		// Open it without an index. This is the last resort, as it locks out all other processes.
		cat, err = catalog.OpenAlone(ctx, p.Dir, p.Config.ID)
	}
	return cat, err
}

// bytesToCopy is about how many bytes of the pool a copy of an object takes, measured now: 0 where clones share blocks
// with their origin, or if there is no object.
func bytesToCopy(ctx context.Context, e *Engine, row catalog.Row) (int64, error) {
	if e.caps.Sharing || row.ID == "" {
		return 0, nil
	}
	u, err := e.drv.Usage(ctx, row.ID)
	return u.LogicalBytes, err
}
