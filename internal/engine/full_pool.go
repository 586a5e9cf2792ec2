package engine

import (
	"context"
	"errors"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// fullPool is the free space, in bytes, below which a write error in an image counts as
// a full pool: the filesystem in the image only knows that it cannot write.
const fullPool = 64 << 20

// blamePool returns NoSpace, with a hint, in the place of an error of writing to an image
// if the pool has run full: of EIO, or of EROFS after ext4 has given up writing for that.
func (e *Engine) blamePool(ctx context.Context, op, object string, err error) error {
	if !errors.Is(err, unix.EIO) && !errors.Is(err, unix.EROFS) {
		return err
	}
	full := e.pool.Admit(context.WithoutCancel(ctx), op, object, fullPool)
	if !errs.Is(full, errs.NoSpace) {
		return err
	}
	return errs.New(errs.NoSpace, op, object, "the pool has run full (%w)", err).WithHint("%s", errs.HintIn(full))
}
