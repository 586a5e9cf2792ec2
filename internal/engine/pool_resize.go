package engine

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/engine/pool"
)

// PoolResized is the result of ResizePool.
type PoolResized struct {
	Dir         string `json:"dir"`
	BeforeBytes int64  `json:"size_before_bytes"`
	SizeBytes   int64  `json:"size_bytes"`
}

// ResizePool enlarges a pool that lies in a file of its own, while it is in use. With add, size is added to the size
// that the pool has. See [pool.Pool.Resize].
func (e *Engine) ResizePool(ctx context.Context, size int64, add bool) (PoolResized, error) {
	const op = "pool resize"
	if err := e.needRoot(op, e.pool.Dir); err != nil {
		return PoolResized{}, err
	}
	if size <= 0 || size > maxVolumeBytes {
		return PoolResized{}, errs.New(errs.Invalid, op, e.pool.Dir, "the size must be between 1 byte and 1 EiB (got %d)",
			size)
	}

	r, err := e.pool.Resize(ctx, size, add)
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
