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

// A pool that keeps no trees, but images, puts a tree that it receives into an image, with the filesystem that an
// import would make there. What differs from a tree that is in an image is done in a clone of that.

// planInside decides which image a tree goes into.
func (r *receive) planInside(room pool.Space) {
	p := &r.point
	p.SizeBytes = imageBytes(room, r.base.Usage.LogicalBytes+r.q.NeedBytes)
	if r.base.ID != "" {
		p.FS, p.SizeBytes = r.base.FS, max(p.SizeBytes, r.base.SizeBytes)
	}
}

// makeTreeImagePoint makes the point, an image, of a stream that SendTree has written.
func (r *receive) makeTreeImagePoint(ctx context.Context) error {
	e, q := r.e, r.q
	d := r.draft
	d.FS, d.SizeBytes, d.Sector = r.point.FS, r.point.SizeBytes, r.point.Sector
	d.Ephemeral, d.Soon = true, true // nobody needs it after a power loss before it is the point
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
		return errs.Wrap(opPull, r.ref, err)
	}

	return r.finishImage(ctx)
}

// fillMounted does what the stream says in the filesystem of an image.
func (r *receive) fillMounted(ctx context.Context) func(root *os.File) error {
	return func(root *os.File) error {
		if r.q.Base == "" { // a new filesystem is not quite empty
			err := unix.Unlinkat(int(root.Fd()), "lost+found", unix.AT_REMOVEDIR)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return errs.Wrap(opPull, "lost+found", err)
			}
		}
		return r.fillTree(ctx, root)
	}
}

// blameImage says of an error that it is the image which is full, and not the pool.
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

// treeFS is what a pool makes of a tree that comes in the form that is no driver's: "" if it can hold none.
func treeFS(c driver.Caps) driver.FS {
	for _, fs := range append([]driver.FS{driver.Native}, c.FS...) {
		if fs != driver.None && c.Supports(fs) {
			return fs
		}
	}
	return ""
}

// checkHolds is nil if the pool can hold what comes with a filesystem. Unsupported.
func (e *Engine) checkHolds(what string, fs driver.FS) error {
	if fs.IsImage() && !e.caps.Supports(fs) {
		return errs.New(errs.Unsupported, opPull, what,
			"it is an image (%s), but pools of the %s driver hold only trees of files", fs, e.caps.Name).
			WithHint("pull it into a pool of the reflink or zfs driver; to have its files here, mount it there and import "+
				"the directory with %s", errs.Run("golden import"))
	}
	return e.caps.Check(context.Background(), opPull, driver.Identity{ID: driver.NewID(), Name: what, FS: fs})
}
