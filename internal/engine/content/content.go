// Package content makes the content of a pool's objects reachable, whatever they are: image files, block devices,
// filesystems that are mounted by name, directories. It opens, mounts and unmounts them, and asks the kernel where they
// are mounted or attached and what holds them. It knows the contract of drivers, not which one it has, and keeps no
// records: the caller keeps them.
package content

import (
	"context"
	"errors"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"

	"golang.org/x/sys/unix"
)

// Access makes the content of one pool's objects reachable. Its methods may be called concurrently. The caller marks
// objects: no method here keeps another command from working on the same object.
type Access struct {
	drv  driver.Driver
	caps driver.Caps
	pool *pool.Pool

	records Records
	tables  tablesCache
	idMaps  idMaps
}

// Records stores what must be known after this process has ended. The catalogue implements it.
type Records interface {
	// RecordRemount records that a volume, which has a mount record, is mounted in another way now.
	RecordRemount(ctx context.Context, a catalog.MountRecord) error

	// LostWrites returns what is known of writes that were lost while a volume was mounted as a says.
	LostWrites(ctx context.Context, a catalog.MountRecord) (l catalog.Lost, known bool, err error)

	// LowerLoop returns the loop device that a lower layer was last attached to. It may have another file by now.
	LowerLoop(ctx context.Context, id driver.ObjectID) (index int, known bool, err error)

	// SetLowerLoop records the loop device that a lower layer is attached to.
	SetLowerLoop(ctx context.Context, id driver.ObjectID, index int) error

	// NoteLostWrites records that writes were lost now. It may spend the pool's reserve.
	NoteLostWrites(ctx context.Context, a catalog.MountRecord, l catalog.Loss) error
}

// New returns an Access to the objects that drv keeps in a pool.
func New(p *pool.Pool, drv driver.Driver, records Records) *Access {
	return &Access{drv: drv, caps: drv.Caps(), pool: p, records: records}
}

// nearlyFull is the free space, in bytes, below which a failed write is blamed on a full pool: a filesystem in an image
// may only know that it cannot write. It is more than the pool's reserve, which a command that finds the pool full has
// just given up.
const nearlyFull = 64 << 20

// BlameFull turns an error of writing into an image into NoSpace, with a hint, if the pool is full: a process that
// mounts a filesystem only learns that its device cannot be written, or that ext4 has given up writing (EROFS).
func (acc *Access) BlameFull(ctx context.Context, err error) error {
	if !errs.Is(err, errs.IO) && !errors.Is(err, unix.EROFS) {
		return err
	}
	if s, serr := acc.pool.Space(context.WithoutCancel(ctx)); serr != nil || s.FreeBytes >= nearlyFull {
		return err
	}
	return (&errs.Error{Kind: errs.NoSpace, Err: fmt.Errorf("the pool is full: %w", err)}).
		WithHint("free space with %s and %s, or use a larger pool", errs.Run("destroy"), errs.Run("gc"))
}
