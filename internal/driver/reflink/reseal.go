package reflink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"pando/internal/base/errs"
	"pando/internal/driver"

	"golang.org/x/sys/unix"
)

// dedupeBytes is how much is given to the kernel at once: filesystems take no more than 16 MiB.
const dedupeBytes = 16 << 20

// Reseal implements driver.Resealer. It copies the fragmented parts into few extents of another file, and then asks the
// kernel to let the image share those: that compares the content, and so can never change it. The other file has no
// name, and is gone when this process is.
func (d *Driver) Reseal(ctx context.Context, id driver.ObjectID, progress func(done, total int64)) (bool, error) {
	image, err := d.openOrigin(id)
	if err != nil {
		return false, errs.Wrap("seal", string(id), err)
	}
	defer image.Close()

	plan, err := sealPlan(image.File, image.size)
	if err != nil {
		return false, errs.Wrap("seal", string(id), err)
	}

	var total, done int64
	for _, p := range plan {
		if !p.share {
			total += p.len()
		}
	}
	if total == 0 {
		return false, nil
	}

	copied, err := os.OpenFile(d.dir.Path(), unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err != nil {
		return false, errs.Wrap("seal", string(id), err)
	}
	defer copied.Close()

	buf := make([]byte, copyBufferSize)
	for _, p := range plan {
		if p.share {
			continue
		}
		err := unix.Fallocate(int(copied.Fd()), 0, p.off, p.len())
		if err == nil {
			err = copyRange(ctx, copied, image.File, p.span, buf, func(int64) {})
		}
		if err == nil {
			err = dedupeRange(ctx, image.File, copied, p.span)
		}
		if err != nil {
			return done > 0, errs.Wrap("seal", string(id), err)
		}
		if done += p.len(); progress != nil {
			progress(done, total)
		}
	}

	return true, nil
}

// dedupeRange makes dst share the blocks that src has in a range, where both have the same content.
func dedupeRange(ctx context.Context, dst, src *os.File, s span) error {
	for off := s.off; off < s.end; {
		if err := ctx.Err(); err != nil {
			return err
		}

		n := min(dedupeBytes, s.end-off)
		r := unix.FileDedupeRange{Src_offset: uint64(off), Src_length: uint64(n),
			Info: []unix.FileDedupeRangeInfo{{Dest_fd: int64(dst.Fd()), Dest_offset: uint64(off)}}}
		if err := unix.IoctlFileDedupeRange(int(src.Fd()), &r); err != nil {
			return fmt.Errorf("FIDEDUPERANGE: %w", err)
		}

		switch got := r.Info[0]; {
		case got.Status == unix.FILE_DEDUPE_RANGE_DIFFERS:
			return errors.New("the image changed while it was sealed")
		case got.Status < 0:
			return fmt.Errorf("FIDEDUPERANGE: %w", syscall.Errno(-got.Status))
		case got.Bytes_deduped == 0:
			return errors.New("FIDEDUPERANGE: no progress")
		default:
			off += int64(got.Bytes_deduped)
		}
	}
	return nil
}
