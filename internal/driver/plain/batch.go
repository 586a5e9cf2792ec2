package plain

import (
	"context"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/objdir"

	"golang.org/x/sys/unix"
)

// batch is a driver.Batch. Its clones get their identities in Flush: the content must be on disk before the identity
// makes it whole.
type batch struct {
	d    *Driver
	from driver.ObjectID

	mu    sync.Mutex
	ready []driver.Identity // of clones whose content is there
}

// Batch implements driver.Batcher.
func (d *Driver) Batch(_ context.Context, from driver.ObjectID) (driver.Batch, error) {
	if err := d.checkOrigin(from); err != nil {
		return nil, errs.Wrap("clone", string(from), err)
	}
	return &batch{d: d, from: from}, nil
}

// Clone implements driver.Batch.
func (b *batch) Clone(ctx context.Context, id driver.Identity) error {
	if id.Ephemeral {
		return b.d.Clone(ctx, b.from, id)
	}
	return b.d.copyObject(ctx, "clone", b.from, id, copyOnce, func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.ready = append(b.ready, id)
		return nil
	})
}

// Flush implements driver.Batch. It waits for the disk twice, for content and for identities.
func (b *batch) Flush(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := unix.Syncfs(int(b.d.f.Fd())); err != nil {
		return errs.Wrap("clone", b.d.dir.Path(), err)
	}

	for len(b.ready) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := b.d.dir.Put(b.ready[0], objdir.InMemory); err != nil {
			return errs.Wrap("clone", b.ready[0].Ref(), err)
		}
		b.ready = b.ready[1:]
	}

	return b.d.Sync(ctx)
}

// Close implements driver.Batch.
func (b *batch) Close() error { return nil }
