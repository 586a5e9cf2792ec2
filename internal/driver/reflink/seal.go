package reflink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/objdir"
	"pando/internal/linux/extent"

	"golang.org/x/sys/unix"
)

// A clone costs 10-40 us per extent, so this many cost about a millisecond.
// Larger images may have proportionally more.
const (
	sealedExtents  = 32
	bytesAnExtent  = 1 << 30 // one more allowed for each
	maxFillPart    = 16      // holes filled with zeros take at most 1/16 of the data ...
	minFillBytes   = 16 << 20
	copyBufferSize = 4 << 20
)

// span is a range of bytes of the image.
type span struct{ off, end int64 }

func (s span) len() int64 { return s.end - s.off }

// piece is a step of a sealing plan: share the origin's blocks, or copy the
// range, including holes, into new contiguous space.
type piece struct {
	span
	share bool
}

// Seal implements driver.Sealer. Long extents stay shared with from, which
// keeps generations that differ little small; the parts between them that are
// fragmented are copied in order into preallocated space. Holes between pieces
// that lie close together are filled with zeros, at most 1/16 of the data or
// 16 MiB, whichever is more. If the pool has no room for these copies, everything
// that can be shared stays shared, in as many extents as it has.
func (d *Driver) Seal(
	ctx context.Context, from driver.ObjectID, id driver.Identity, progress func(done, total int64),
) error {
	origin, err := d.openOrigin(from)
	if err != nil {
		return errs.Wrap("seal", id.Name, err)
	}

	defer origin.Close()

	origin.completeIdentity(&id)
	src, size := origin.File, origin.size
	if id.SizeBytes != size {
		return errs.New(errs.Invalid, "seal", id.Name, "%d bytes, but its origin has %d", id.SizeBytes, size)
	}

	layout, err := layoutOf(src, size)
	if err != nil {
		return errs.Wrap("seal", id.Name, err)
	}

	return d.makeImage(id, 0o400, objdir.DurabilityOf(id), func(dst *os.File) (bool, error) {
		plan, err := layout.reserve(dst)
		if err != nil {
			return true, err
		}

		var total, done int64
		for _, p := range plan {
			total += p.len()
		}

		report := func(n int64) {
			done += n
			if progress != nil {
				progress(done, total)
			}
		}

		// Share or copy each piece.
		buf := make([]byte, copyBufferSize)
		for _, p := range plan {
			if err := ctx.Err(); err != nil {
				return true, err
			}
			if p.share {
				if err := shareRange(dst, src, p.span); err != nil {
					return true, err
				}
				report(p.len())
				continue
			}
			if err := copyRange(ctx, dst, src, p.span, buf, report); err != nil {
				return true, err
			}
		}

		return true, nil
	})
}

func shareRange(dst, src *os.File, s span) error {
	r := unix.FileCloneRange{Src_fd: int64(src.Fd()), Src_offset: uint64(s.off), Src_length: uint64(s.len()),
		Dest_offset: uint64(s.off)}
	if err := unix.IoctlFileCloneRange(int(dst.Fd()), &r); err != nil {
		return fmt.Errorf("FICLONERANGE: %w", err)
	}
	return nil
}

// copyRange copies a range, and writes zeros for its holes: all of it is then one
// extent, where an unwritten part in the middle would make three. It does not use
// copy_file_range, which would share the blocks.
func copyRange(ctx context.Context, dst, src *os.File, s span, buf []byte, report func(int64)) error {
	for off := s.off; off < s.end; {
		if err := ctx.Err(); err != nil {
			return err
		}

		b := buf[:min(int64(len(buf)), s.end-off)]
		n, err := src.ReadAt(b, off)
		if err == io.EOF && n > 0 {
			err = nil
		}
		if err != nil {
			return err
		}

		if _, err := dst.WriteAt(b[:n], off); err != nil {
			return err
		}

		off += int64(n)
		report(int64(n))
	}

	return nil
}

// layout is how the data of an image lies on disk.
type layout struct {
	data  []span // ranges with data, in order
	fixed []span // extents that have a stable place on disk, in order
	size  int64  // bytes
}

// layoutOf finds out the layout of an image that is not being written.
func layoutOf(src *os.File, size int64) (layout, error) {
	data, err := dataSpans(src, size)
	if err != nil {
		return layout{}, err
	}

	var fixed []span
	err = extent.Scan(src, false, func(x extent.Extent) error {
		const unstable = extent.Delalloc | extent.Unknown | extent.Encoded | extent.Inline | extent.Tail | extent.NotAligned |
			extent.Unwritten
		if x.Flags&unstable == 0 && x.Logical < size {
			fixed = append(fixed, span{x.Logical, min(x.End(), size)})
		}
		return nil
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		fixed, err = nil, nil // no map: copy everything
	}
	if err != nil {
		return layout{}, err
	}

	return layout{data: data, fixed: fixed, size: size}, nil
}

// reserve gives dst the size of the image, and the space for all that a plan copies:
// if the pool is too full, this fails at once, and the allocator sees each piece as a
// whole. It returns the plan of few extents, or, if the pool has no room for that, the
// one that copies least.
func (l layout) reserve(dst *os.File) ([]piece, error) {
	plan := l.plan(l.fewExtents())
	err := l.reservePlan(dst, plan)
	if errors.Is(err, unix.ENOSPC) {
		if err := dst.Truncate(0); err != nil { // returns what the plan has reserved
			return nil, err
		}
		plan = l.plan(math.MaxInt)
		err = l.reservePlan(dst, plan)
	}

	return plan, err
}

func (l layout) reservePlan(dst *os.File, plan []piece) error {
	if err := dst.Truncate(l.size); err != nil {
		return err
	}

	for _, p := range plan {
		if p.share {
			continue
		}
		if err := unix.Fallocate(int(dst.Fd()), 0, p.off, p.len()); err != nil {
			return fmt.Errorf("fallocate: %w", err)
		}
	}

	return nil
}

// dataBytes returns the bytes of data.
func (l layout) dataBytes() (total int64) {
	for _, s := range l.data {
		total += s.len()
	}
	return total
}

// fewExtents returns how many extents a sealed image may have.
func (l layout) fewExtents() int {
	return int(sealedExtents + l.dataBytes()/bytesAnExtent)
}

// plan decides for each range of data whether to share or copy it, so that the result
// has at most limit pieces if filling small holes can bring that about. It shares as much
// as the limit allows.
func (l layout) plan(limit int) []piece {
	total := l.dataBytes()
	pieces := cutAtExtents(l.data, l.fixed)

	// Share only ever longer extents, until few enough pieces are left.
	for shortest := int64(0); ; {
		plan := joinPieces(pieces, shortest, max(minFillBytes, total/maxFillPart), limit)
		if len(plan) <= limit || shortest >= l.size {
			return plan
		}
		shortest = max(64<<10, shortest*4)
	}
}

// cutAtExtents splits the data at the borders of extents. Data in no fixed extent must be copied.
func cutAtExtents(data, fixed []span) []piece {
	var out []piece
	i := 0
	for _, d := range data {
		for off := d.off; off < d.end; {
			for i < len(fixed) && fixed[i].end <= off {
				i++
			}
			end, share := d.end, false
			if i < len(fixed) {
				if fixed[i].off <= off {
					end, share = min(end, fixed[i].end), true
				} else {
					end = min(end, fixed[i].off)
				}
			}
			out = append(out, piece{span{off, end}, share})
			off = end
		}
	}

	return out
}

// joinPieces turns shared pieces shorter than shortest into copies, and merges copies
// that touch. While there are more than limit pieces it also merges copies over
// the shortest holes between them, filling at most fill bytes.
func joinPieces(pieces []piece, shortest, fill int64, limit int) []piece {
	var out []piece
	for _, p := range pieces {
		p.share = p.share && p.len() >= shortest
		if n := len(out); n > 0 && !p.share && !out[n-1].share && out[n-1].end == p.off {
			out[n-1].end = p.end
			continue
		}
		out = append(out, p)
	}

	for gap := int64(64 << 10); len(out) > limit && gap <= fill; gap *= 2 {
		merged := out[:1:1]
		for _, p := range out[1:] {
			last := &merged[len(merged)-1]
			if hole := p.off - last.end; !p.share && !last.share && hole <= gap && hole <= fill {
				fill -= hole
				last.end = p.end
				continue
			}
			merged = append(merged, p)
		}
		out = merged
	}

	return out
}

// dataSpans lists the ranges that hold data, including dirty pages of the page
// cache, which an extent map would not show over preallocated space. It rounds
// ends up to whole filesystem blocks, except at the end of the file.
func dataSpans(f *os.File, size int64) ([]span, error) {
	const block = 4096
	var out []span
	for off := int64(0); off < size; {
		start, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("SEEK_DATA: %w", err)
		}

		end, err := unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("SEEK_HOLE: %w", err)
		}

		start = start / block * block
		end = min((end+block-1)/block*block, size)
		if n := len(out); n > 0 && start <= out[n-1].end {
			out[n-1].end = max(out[n-1].end, end)
		} else {
			out = append(out, span{start, end})
		}

		off = end
	}

	return out, nil
}
