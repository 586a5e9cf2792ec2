package engine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/qcow2"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// withImageFile calls fn with the image of the object, opened for reading, and its size.
func (x *export) withImageFile(ctx context.Context, fn func(src *os.File, size int64) error) error {
	size := x.side.row().SizeBytes
	return x.e.content.WithPath(ctx, x.side.id(), func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()

		progress.From(ctx).Start(progress.Exporting, 0, imageDataBytes(f, size))
		return fn(f, size)
	})
}

// imageDataBytes returns how much of an image has to be read.
func imageDataBytes(f *os.File, size int64) int64 {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return size
	}
	return min(st.Blocks*512, size)
}

// writeSparse writes the image into an empty file, which gets the same holes.
func (x *export) writeSparse(ctx context.Context, dst *os.File) error {
	return x.withImageFile(ctx, func(src *os.File, size int64) (err error) {
		if err := dst.Truncate(size); err != nil {
			return err
		}
		x.out.FileBytes = size
		x.out.Bytes, err = copyData(ctx, dst, src, size)
		return err
	})
}

// exportChunk is how much of an image is read at once.
const exportChunk = 1 << 20

// writeRaw writes the image to a pipe, with zeros for its holes.
func (x *export) writeRaw(ctx context.Context, w io.Writer) error {
	return x.withImageFile(ctx, func(src *os.File, size int64) error {
		buf, zeros := make([]byte, exportChunk), make([]byte, exportChunk)
		for off := int64(0); off < size; {
			from, to, err := treecopy.NextData(src, off, size)
			if err != nil {
				return err
			}

			for ; off < from; off += min(exportChunk, from-off) {
				if _, err := w.Write(zeros[:min(exportChunk, from-off)]); err != nil {
					return err
				}
			}

			if err := x.copyRange(ctx, w, src, buf, from, to); err != nil {
				return err
			}

			off = max(from, to)
		}
		return nil
	})
}

// copyRange writes a range of an image to w.
func (x *export) copyRange(ctx context.Context, w io.Writer, src *os.File, buf []byte, from, to int64) error {
	for off := from; off < to; {
		p := buf[:min(int64(len(buf)), to-off)]
		if n, err := src.ReadAt(p, off); n < len(p) {
			return fmt.Errorf("reading %s at byte %d: %w", src.Name(), off, err)
		}
		if _, err := w.Write(p); err != nil {
			return err
		}
		progress.From(ctx).Add(0, int64(len(p)))
		x.out.Bytes += int64(len(p))
		off += int64(len(p))
	}
	return nil
}

// writeQcow2 writes the image in the format qcow2.
func (x *export) writeQcow2(ctx context.Context, w io.Writer) error {
	return x.withImageFile(ctx, func(src *os.File, size int64) error {
		ranges, err := x.clusters(ctx, src, size)
		if err != nil {
			return err
		}

		layout, err := qcow2.Plan(size, ranges)
		if err != nil {
			return errs.New(errs.Unsupported, opExport, x.out.Ref, "%w", err).
				WithHint("export it with %s", errs.Param("format", "raw"))
		}

		out := bufio.NewWriterSize(w, 1<<20)
		if err := layout.WriteMetadata(out); err != nil {
			return err
		}

		buf := make([]byte, exportChunk)
		for _, r := range ranges {
			from, to := r.From*qcow2.ClusterBytes, r.To*qcow2.ClusterBytes
			if err := x.copyRange(ctx, out, src, buf, from, min(to, size)); err != nil {
				return err
			}
			if _, err := out.Write(make([]byte, max(to-size, 0))); err != nil {
				return err
			}
		}

		return out.Flush()
	})
}

// clusters returns the clusters of an image that have data. A block device does not tell, so it is read.
func (x *export) clusters(ctx context.Context, src *os.File, size int64) ([]qcow2.Range, error) {
	const unit = qcow2.ClusterBytes
	st, err := src.Stat()
	if err != nil {
		return nil, err
	}

	device := st.Mode()&os.ModeDevice != 0
	var out []qcow2.Range
	add := func(from, to int64) {
		if n := len(out); n > 0 && out[n-1].To >= from {
			out[n-1].To = max(out[n-1].To, to)
			return
		}
		out = append(out, qcow2.Range{From: from, To: to})
	}

	for off := int64(0); off < size; {
		from, to, err := off, min(off+unit, size), ctx.Err()
		if err == nil && !device {
			from, to, err = treecopy.NextData(src, off, size)
		}
		if err != nil {
			return nil, err
		}

		zero := from >= to
		if device {
			if zero, err = zeroRange(src, from, to); err != nil {
				return nil, err
			}
		}

		if !zero {
			add(from/unit, (to+unit-1)/unit)
		}
		off = max(from, to)
	}

	return out, nil
}

// zeroRange reports whether a short range contains only zeros.
func zeroRange(src *os.File, from, to int64) (bool, error) {
	b := make([]byte, to-from)
	if n, err := src.ReadAt(b, from); n < len(b) {
		return false, errors.Join(err, io.ErrUnexpectedEOF)
	}
	return allZero(b), nil
}
