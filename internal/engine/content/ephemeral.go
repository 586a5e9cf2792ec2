package content

import (
	"context"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// An ephemeral volume is gone after a reboot, so its syncs need not reach the disk. Its filesystem is mounted with
// driver.Attachment.NoSync, and its loop device writes to the page cache of the image: a sync ends there. Everything
// survives the death of all processes, and umounts.
//
// Copies of it are like those of any volume, because the page cache shows what has been written to the image. But a
// copy that must survive a power loss needs the image on the disk first: see SyncImage.

// dropsSyncs reports whether a volume is mounted so that its syncs do not wait for the disk.
func dropsSyncs(row catalog.Row, w driver.Attachment) bool { return row.Ephemeral && len(w.NoSync) > 0 }

// SyncImage waits until everything that was written to an object's image file is on the disk. What a mounted filesystem
// still has in memory is not part of that. It does nothing for an object of another shape: drivers without image files
// make copies durable with all that the kernel has. NoSpace or IO if the pool could not store what was written before.
func (acc *Access) SyncImage(ctx context.Context, id driver.ObjectID) error {
	w, err := acc.drv.Attachment(ctx, id)
	if err != nil || w.Image == "" || w.Block {
		return err
	}
	f, err := os.Open(w.Image)
	if err != nil {
		return errs.Wrap("sync", w.Image, err)
	}
	defer f.Close()
	return acc.BlameFull(ctx, errs.Wrap("sync", w.Image, f.Sync()))
}

// SyncEphemeral is SyncImage for an ephemeral object that is about to be copied. Drivers share the blocks of an origin
// without waiting for them, and a copy of dirty pages would stop the writers until they are on the disk.
func (acc *Access) SyncEphemeral(ctx context.Context, row catalog.Row) error {
	if !row.Ephemeral || !row.FS.IsImage() {
		return nil
	}
	return acc.SyncImage(ctx, row.ID)
}

// syncIfNearlyFull is SyncEphemeral where the pool may be too full for what is still in the page cache: nothing else
// would tell of it.
func (acc *Access) syncIfNearlyFull(ctx context.Context, row catalog.Row) error {
	if !row.Ephemeral {
		return nil
	}
	if s, err := acc.pool.Space(ctx); err != nil || s.FreeBytes >= nearlyFull {
		return nil
	}
	return acc.SyncEphemeral(ctx, row)
}
