package reflink

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/objdir"
	"pando/internal/linux/durable"
)

// batch is a driver.Batch.
type batch struct {
	d   *Driver
	src *origin
}

// Batch implements driver.Batcher.
func (d *Driver) Batch(_ context.Context, from driver.ObjectID) (driver.Batch, error) {
	src, err := d.openOrigin(from)
	if err != nil {
		return nil, errs.Wrap("clone", string(from), err)
	}
	return &batch{d: d, src: src}, nil
}

// Clone implements driver.Batch.
func (b *batch) Clone(ctx context.Context, id driver.Identity) error {
	until := objdir.InMemory // Flush writes out all of the filesystem
	if b.d.ordered && !id.Ephemeral {
		until = objdir.InNext
	}
	return b.d.cloneOf(ctx, "clone", b.src, id, cloneOptions{mode: imageMode(id.Kind), until: until})
}

// Flush implements driver.Batch. Where the filesystem's log has everything in order,
// syncing the directory, which changed last, is enough.
func (b *batch) Flush(context.Context) error {
	if b.d.ordered {
		return b.d.dir.Sync()
	}
	return errs.Wrap("clone", b.d.dir.Path(), durable.SyncFS(b.d.dir.Path()))
}

// Close implements driver.Batch.
func (b *batch) Close() error { return b.src.Close() }
