// Package content makes the content of a pool's objects reachable, whatever they are: image files, block devices,
// filesystems that are mounted by name, directories. It opens, attaches and detaches them, and finds out from the
// kernel where they are attached and who holds them. It knows the contract of drivers, not which one it has, and keeps
// no records: what has to be remembered is the caller's.
package content

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
)

// Access makes the content of one pool's objects reachable. Its methods may be called concurrently. Marks are the
// caller's: none of them keeps another command from working on the same object.
type Access struct {
	drv  driver.Driver
	caps driver.Caps
	pool *pool.Pool

	records Records
	tables  tablesCache
}

// Records is where is kept what must be known when this process is no more. The catalogue has it.
type Records interface {
	// RecordRemount records that a volume, whose attachment is recorded, is attached in another way now.
	RecordRemount(ctx context.Context, a catalog.MountRecord) error

	// LostWrites is what is known of writes that were lost in an attachment.
	LostWrites(ctx context.Context, a catalog.MountRecord) (l catalog.Lost, known bool, err error)

	// TellLostWrites records that somebody has been told of them.
	TellLostWrites(ctx context.Context, a catalog.MountRecord, l catalog.Lost) error

	// NoteLostWrites records that writes were lost now.
	NoteLostWrites(ctx context.Context, a catalog.MountRecord, l catalog.Loss) error
}

// New returns the access to the objects that drv keeps in a pool.
func New(p *pool.Pool, drv driver.Driver, records Records) *Access {
	return &Access{drv: drv, caps: drv.Caps(), pool: p, records: records}
}

// nearlyFull is the free space, in bytes, below which a failed write is put down to a full
// pool: a filesystem in an image may only know that it cannot write. It is more than the
// pool's reserve, which a command that finds the pool full has just given up.
const nearlyFull = 16 << 20

// blameFull makes an error of writing into an image one of a full pool, if that is so: whoever
// mounts a filesystem only gets to know that its device cannot be written.
func (acc *Access) blameFull(ctx context.Context, err error) error {
	if !errs.Is(err, errs.IO) {
		return err
	}
	if s, serr := acc.pool.Space(context.WithoutCancel(ctx)); serr != nil || s.FreeBytes >= nearlyFull {
		return err
	}
	return (&errs.Error{Kind: errs.NoSpace, Err: fmt.Errorf("the pool is full: %w", err)}).
		WithHint("free space with %s and %s, or use a larger pool", errs.Run("destroy"), errs.Run("gc"))
}
