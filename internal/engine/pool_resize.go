package engine

import (
	"context"

	"pando/internal/base/errs"
)

// PoolResized is the result of ResizePool.
type PoolResized struct {
	Dir         string `json:"dir"`
	BeforeBytes int64  `json:"size_before_bytes"`
	SizeBytes   int64  `json:"size_bytes"`
}

// ResizePool enlarges a pool that lies in a file of its own, while it is in use. See pool.Resize.
func (e *Engine) ResizePool(ctx context.Context, size int64) (PoolResized, error) {
	const op = "pool resize"
	if err := e.needRoot(op, e.pool.Dir); err != nil {
		return PoolResized{}, err
	}
	if size <= 0 || size > maxVolumeBytes {
		return PoolResized{}, errs.New(errs.Invalid, op, e.pool.Dir, "the size must be between 1 byte and 1 EiB (got %d)",
			size)
	}

	before, err := e.pool.Resize(ctx, size)
	if err != nil {
		return PoolResized{}, err
	}
	return PoolResized{Dir: e.pool.Dir, BeforeBytes: before, SizeBytes: e.pool.Config.Backing.SizeBytes}, nil
}
