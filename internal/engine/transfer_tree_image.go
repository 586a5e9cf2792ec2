package engine

import (
	"context"
	"errors"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/pool"

	"golang.org/x/sys/unix"
)

// A pool that holds only images puts a received tree into an image, with the filesystem that an import would create.
// The differences from a base that is in an image are applied in a clone of that image.

// planInside decides the filesystem and size of the image for a tree.
func (r *receive) planInside(room pool.Space) {
	p := &r.point
	p.SizeBytes = imageBytes(room, r.base.Usage.LogicalBytes+r.q.NeedBytes)
	if r.base.ID != "" {
		p.FS, p.SizeBytes = r.base.FS, max(p.SizeBytes, r.base.SizeBytes)
	}
}

// makeTreeImagePoint makes the point, an image, from a stream that SendTree has written.
func (r *receive) makeTreeImagePoint(ctx context.Context) error {
	e, q := r.e, r.q
	d := r.draft
	d = d.WithContentOf(r.point)
	d.Ephemeral, d.Soon = true, true // until it is the point, it is worthless after a power loss
	var err error
	if q.Base != "" {
		err = e.drv.Clone(ctx, q.Base, d)
	} else {
		err = e.drv.Create(ctx, d)
	}
	if err != nil {
		return err
	}

	if r.base.ID != "" && d.SizeBytes > r.base.SizeBytes {
		if err := e.growInside(ctx, catalog.Row{Identity: d}); err != nil {
			return err
		}
	}

	if err := e.content.WithImage(ctx, d.ID, content.ImageOptions{}, r.fillMounted(ctx)); err != nil {
		return r.blameImage(err)
	}

	if err := e.content.WithPath(ctx, d.ID, syncPath); err != nil {
		return errs.Wrap(opPull, r.ref, e.content.BlameFull(ctx, err))
	}

	return r.finishImage(ctx)
}

// fillMounted returns a function that applies the stream to the filesystem of an image.
func (r *receive) fillMounted(ctx context.Context) func(root *os.File) error {
	return func(root *os.File) error {
		if r.q.Base == "" { // a new filesystem contains lost+found
			err := unix.Unlinkat(int(root.Fd()), "lost+found", unix.AT_REMOVEDIR)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return errs.Wrap(opPull, "lost+found", err)
			}
		}
		return r.fillTree(ctx, root)
	}
}

// blameImage changes an error so that it says that the image is full, and not the pool.
func (r *receive) blameImage(err error) error {
	var known *errs.Error
	if !errors.As(err, &known) || known.Kind != errs.NoSpace || known.Hint != "" {
		return err
	}
	return errs.New(errs.NoSpace, opPull, r.ref, "the %s image that this pool creates for the tree is too small: %w",
		errs.FormatBytes(r.point.SizeBytes), err).
		WithHint("pull it into a pool of the plain, btrfs or zfs driver")
}

// syncPath makes an image or block device durable.
func syncPath(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// treeFS returns the filesystem in which a pool stores a tree received in the portable format: "" if it cannot store
// trees.
func treeFS(c driver.Caps) driver.FS {
	for _, fs := range append([]driver.FS{driver.Native}, c.FS...) {
		if fs != driver.None && c.Supports(fs) {
			return fs
		}
	}
	return ""
}

// checkHolds checks that the pool can store content with a filesystem. It returns Unsupported.
func (e *Transfer) checkHolds(what string, fs driver.FS) error {
	if fs.IsImage() && !e.caps.Supports(fs) {
		return errs.New(errs.Unsupported, opPull, what,
			"it is an image (%s), but pools of the %s driver hold only trees of files", fs, e.caps.Name).
			WithHint("pull it into a pool of the reflink or zfs driver; to have its files here, mount it there and import "+
				"the directory with %s", errs.Run("golden import"))
	}
	return e.caps.Check(context.Background(), opPull, driver.Identity{ID: driver.NewID(), Name: what, FS: fs})
}
