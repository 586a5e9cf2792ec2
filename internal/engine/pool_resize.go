package engine

import (
	"cmp"
	"context"

	"pando/internal/base/errs"
	"pando/internal/engine/pool"
)

// PoolResized is the result of ResizePool.
type PoolResized struct {
	Dir         string `json:"dir"`               // directory of the pool
	BeforeBytes int64  `json:"size_before_bytes"` // size of the pool before
	SizeBytes   int64  `json:"size_bytes"`        // size of the pool
}

// PoolResizeRequest says how large the pool is to become.
type PoolResizeRequest struct {
	SizeBytes int64
	Add       bool // whether SizeBytes is added to the size that the pool has
}

// ResizePool enlarges a pool that lies in a file of its own, while it is in use. See [pool.Pool.Resize].
func (e *Engine) ResizePool(ctx context.Context, q PoolResizeRequest) (_ PoolResized, err error) {
	const op = "pool resize"
	ctx, end := e.ledger.Begin(ctx, op)
	defer end(&err)

	if err := cmp.Or(e.askForPool(ctx, op), e.needRoot(op, e.pool.Dir)); err != nil {
		return PoolResized{}, err
	}
	if q.SizeBytes <= 0 || q.SizeBytes > maxVolumeBytes {
		return PoolResized{}, errs.New(errs.Invalid, op, e.pool.Dir, "the size must be between 1 byte and 1 EiB (got %d)",
			q.SizeBytes)
	}

	r, err := e.pool.Resize(ctx, q.SizeBytes, q.Add)
	if err != nil {
		return PoolResized{}, err
	}
	return PoolResized{Dir: e.pool.Dir, BeforeBytes: r.BeforeBytes, SizeBytes: r.SizeBytes}, nil
}

// config returns the pool's configuration as it is now: another process may have enlarged the pool.
func (e *Engine) config() pool.Config {
	if now, err := pool.Read(e.pool.Dir); err == nil {
		return now.Config
	}
	return e.pool.Config
}
