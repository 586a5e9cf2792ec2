package engine

import (
	"context"
	"errors"
	"os"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver"

	"golang.org/x/sys/unix"
)

// makeImagePoint makes the point from the content that Image writes.
func (r *receive) makeImagePoint(ctx context.Context) error {
	e, q := r.e, r.q
	draft := e.newIdentity(ctx, driver.Scratch)
	draft = draft.WithContentOf(r.point)
	draft.ID = r.point.ID

	// Until it is the point, it is worthless after a power loss; and it is written to
	// at once.
	draft.Ephemeral, draft.Soon = true, true
	var err error
	if q.Base != "" {
		err = e.drv.Clone(ctx, q.Base, draft)
	} else {
		draft.FS = driver.None // the content brings its own filesystem
		err = e.drv.Create(ctx, draft)
	}
	if err != nil {
		return err
	}

	fill := func(path string) error { return r.fillImageFile(ctx, path) }
	if err := e.content.WithPath(ctx, draft.ID, fill); err != nil {
		return err
	}

	return r.finishImage(ctx)
}

// finishImage turns a filled, durable image into the point.
func (r *receive) finishImage(ctx context.Context) (err error) {
	if r.point, err = r.e.fillSector(ctx, r.point); err != nil {
		return err
	}
	if sealed, err := r.sealGeneration(ctx); err != nil || sealed {
		return err
	}
	return r.e.writeIdentity(ctx, r.point)
}

// fillImageFile lets Image write, and waits for the disk.
func (r *receive) fillImageFile(ctx context.Context, path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return errs.Wrap(opPull, r.ref, err)
	}

	defer f.Close()
	t := &imageTarget{f: f, ref: r.ref, size: r.q.SizeBytes}
	err = r.content.Image(ctx, t)
	if err == nil {
		err = ctx.Err() // Image may have stopped early without an error
	}
	if err == nil {
		err = f.Sync()
	}

	// Data may fit into the page cache but not into the pool.
	return errs.Wrap(opPull, r.ref, r.e.content.BlameFull(ctx, err))
}

// A golden with more than sealAbove extents, plus one for each bytesAnExtent of size, is
// sealed: cloning costs 10-40 us per extent.
const (
	sealAbove     = 256
	bytesAnExtent = 64 << 20
)

// sealGeneration makes a generation from the draft that is cheap to clone, and reports
// whether it did. It does nothing if the draft has few extents, or if there is no space to
// copy it: in a nearly full pool, a golden that takes some milliseconds to clone is better
// than none.
func (r *receive) sealGeneration(ctx context.Context) (bool, error) {
	e, q := r.e, r.q
	s, ok := e.drv.(driver.Sealer)
	if !ok || !q.Golden {
		return false, nil
	}

	u, err := e.drv.Usage(ctx, r.point.ID)
	if err != nil {
		return false, err
	}
	if u.Extents <= sealAbove+r.point.SizeBytes/bytesAnExtent {
		return false, nil
	}

	if err := e.pool.Admit(ctx, opPull, r.ref, u.LogicalBytes); err != nil {
		if errs.Is(err, errs.NoSpace) {
			return false, nil
		}
		return false, err
	}

	sealed := r.point
	sealed.ID = r.spare.ID
	progress.From(ctx).Start(progress.Sealing, 0, 0)
	err = s.Seal(ctx, r.point.ID, sealed, func(done, total int64) { progress.From(ctx).Set(0, done, total) })
	if errs.Is(err, errs.NoSpace) {
		return false, nil // others have used the space in the meantime
	}
	if err != nil {
		return false, err
	}

	if err := e.drv.Destroy(ctx, r.point.ID); err != nil {
		return false, err
	}

	r.point = sealed
	return true, nil
}

// imageTarget is the Target of an image or block device.
type imageTarget struct {
	f    *os.File
	ref  string
	size int64
}

func (t *imageTarget) SizeBytes() int64 { return t.size }

func (t *imageTarget) checkRange(off, length int64) error {
	if off < 0 || length < 0 || off > t.size-length {
		return errs.New(errs.Invalid, opPull, t.ref, "%d bytes at offset %d are outside of its size of %d bytes", length, off,
			t.size)
	}
	return nil
}

func (t *imageTarget) WriteAt(p []byte, off int64) (int, error) {
	if err := t.checkRange(off, int64(len(p))); err != nil {
		return 0, err
	}
	n, err := t.f.WriteAt(p, off)
	return n, errs.Wrap(opPull, t.ref, err)
}

// zeros is written where a hole cannot be punched.
var zeros [1 << 20]byte

func (t *imageTarget) Zero(off, length int64) error {
	if err := t.checkRange(off, length); err != nil || length == 0 {
		return err
	}

	for {
		err := unix.Fallocate(int(t.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, length)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL): // EINVAL: a device, and not whole sectors
			return errs.Wrap(opPull, t.ref, err)
		}
		break
	}

	for length > 0 {
		n, err := t.f.WriteAt(zeros[:min(length, int64(len(zeros)))], off)
		if err != nil {
			return errs.Wrap(opPull, t.ref, err)
		}
		off, length = off+int64(n), length-int64(n)
	}

	return nil
}

// fillSector adds the sector size that the driver has chosen to the identity of an image, unless it is known.
func (e *Engine) fillSector(ctx context.Context, id driver.Identity) (driver.Identity, error) {
	if !id.FS.IsImage() || id.Sector > 0 {
		return id, nil
	}
	w, err := e.drv.Attachment(ctx, id.ID)
	id.Sector = w.SectorBytes
	return id, err
}
