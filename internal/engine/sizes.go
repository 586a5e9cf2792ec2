package engine

import (
	"context"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/fsprobe"
)

const (
	// maxVolumeBytes is the size of the largest ext4, 1 EiB.
	maxVolumeBytes = 1 << 60

	// mostPools is how many times as large as its pool a volume may be made. A volume cannot shrink again, and the
	// tables of a larger one would take a noticeable part of a pool that can never hold the data for them.
	mostPools = 64
)

// wantedSize is a size that a user has asked for.
type wantedSize struct {
	op, name string
	bytes    int64 // size of each volume, a multiple of 4096
	copies   int64 // how many volumes get it
	growth   fsprobe.Growth
}

// admitSize refuses a size that the pool or the filesystem cannot have, before anything changes. Its error says which
// size is possible. Invalid, NoSpace.
func (e *Engine) admitSize(ctx context.Context, w wantedSize) error {
	s, err := e.pool.Space(ctx)
	if err != nil {
		return err
	}

	limit, why := int64(maxVolumeBytes), "the largest size of a volume"
	if n := s.TotalBytes * mostPools; n < limit {
		limit, why = n, errs.Plural(mostPools, "time")+" the size of the pool"
	}
	if w.growth.LimitBytes < limit {
		limit, why = w.growth.LimitBytes, "the most that its filesystem can grow to"
	}

	if w.bytes > limit {
		return errs.New(errs.Invalid, w.op, w.name, "a size of %s is too large: at most %s, %s", errs.FormatBytes(w.bytes),
			errs.FormatBytes(limit), why).
			WithHint("%s", w.sizeHint(w.largest(e.pool.Spare(s), limit)))
	}

	// Its tables must fit into the pool.
	err = e.pool.Admit(ctx, w.op, w.name, w.copies*w.growth.Cost(w.bytes))
	if errs.Is(err, errs.NoSpace) && w.growth.Cost(w.bytes) > 0 {
		if n := w.largest(e.pool.Spare(s), limit); n > w.growth.Bytes {
			return errs.New(errs.NoSpace, w.op, w.name, "the tables of a filesystem of %s do not fit: %s",
				errs.FormatBytes(w.bytes), errs.Reason(err)).
				WithHint("%s, or free space with %s", w.sizeHint(n), errs.Run("gc"))
		}
	}

	return err
}

// largest is the largest size that admitSize accepts if the pool can spare so many bytes, rounded down to a unit that
// users would type.
func (w wantedSize) largest(spareBytes, limit int64) int64 {
	n, _ := errs.TypedSize(w.growth.Largest(limit, spareBytes/w.copies) / 4096 * 4096)
	return n
}

// sizeHint tells which size to use.
func (w wantedSize) sizeHint(largest int64) errs.Message {
	_, text := errs.TypedSize(largest)
	if w.op == opResize {
		return errs.Messagef("use at most %s", errs.Run("resize", w.name, text))
	}
	return errs.Messagef("use at most %s", errs.Param("size", text))
}

// growthOf reads how far the filesystem in an object's image can grow.
func (e *Engine) growthOf(ctx context.Context, row catalog.Row) (g fsprobe.Growth, err error) {
	if !row.FS.IsImage() || row.FS == driver.None {
		return fsprobe.NewGrowth(""), nil
	}

	err = e.content.WithPath(ctx, row.ID, func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		g, err = fsprobe.ReadGrowth(f)
		return err
	})
	return g, err
}
