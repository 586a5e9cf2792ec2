package replicate

import (
	"bytes"
	"context"
	"io"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// imageReader reads a block image into the pipeline.
type imageReader struct {
	img      engine.Image
	what     string // reference, for errors
	ranges   *readAhead
	held     *engine.Range // the next range, if peekRange has taken it from ranges
	base     *repo.Manifest
	merge    bool            // ranges are the differences from base; else the data is compared with base
	ahead    *cellPrefetcher // reads the cells of base; nil without base
	hasSum   func([]byte, repo.Sum) bool
	stats    *stats
	tracker  *progress.Tracker
	finished []finishedPart // parts that the journal has, in order of offset
	replay   func(finishedPart) ([]item, error)

	scratch []byte // the data that was last read to be compared
	at      int64  // its offset
}

// peekRange returns the next range without taking it, or false at the end.
func (r *imageReader) peekRange() (engine.Range, bool, error) {
	if r.held == nil {
		g, err, ok := r.ranges.next()
		if !ok || err != nil {
			return engine.Range{}, false, err
		}
		if g.Offset < 0 || g.Length <= 0 || g.End() > r.img.SizeBytes {
			return g, false, errs.New(errs.Internal, opPush, r.what, "a range is outside the image: %d bytes at offset %d",
				g.Length, g.Offset)
		}
		r.held = &g
	}

	return *r.held, true, nil
}

// takeRange takes the part of the next range that lies in [from, to), or returns false if there is none. It drops
// ranges before from.
func (r *imageReader) takeRange(from, to int64) (engine.Range, bool, error) {
	for {
		g, ok, err := r.peekRange()
		if err != nil || !ok || g.Offset >= to {
			return engine.Range{}, false, err
		}

		if g.End() <= from {
			r.held = nil
			continue
		}

		part := g
		part.Offset = max(g.Offset, from)
		part.Length = min(g.End(), to) - part.Offset
		if g.End() > to {
			r.held = &engine.Range{Offset: to, Length: g.End() - to, Zero: g.Zero}
		} else {
			r.held = nil
		}

		return part, true, nil
	}
}

// produce passes everything on: what the journal has from there, and the rest by reading it.
func (r *imageReader) produce(ctx context.Context, b *batcher) error {
	at := int64(0)
	for _, p := range r.finished {
		if err := r.readGap(ctx, b, at, p.from); err != nil {
			return err
		}

		items, err := r.replay(p)
		if err != nil {
			return err
		}

		for _, it := range items {
			r.prefetch(it.offset, it.offset+it.length)
			if it.kind != zeroItem {
				r.tracker.Add(0, it.length)
			}
		}

		if err := b.passReplayed(ctx, p.from, p.to, items); err != nil {
			return err
		}

		at = p.to
	}

	// Read the rest.
	end := r.img.SizeBytes
	if err := r.readGap(ctx, b, at, end); err != nil {
		return err
	}

	// If base was larger, zero what lies beyond the end.
	if r.merge && r.base.SizeBytes > end {
		r.prefetch(end, r.base.SizeBytes)
		return b.addZero(ctx, end, r.base.SizeBytes-end)
	}

	return nil
}

// readGap reads the ranges in [from, to), cell by cell.
func (r *imageReader) readGap(ctx context.Context, b *batcher, from, to int64) error {
	for from < to {
		g, ok, err := r.peekRange()
		if err != nil {
			return err
		}
		if !ok || g.Offset >= to {
			break
		}
		from = max(from, g.Offset)
		end := min(to, cellStart(cellOf(from)+1))
		if err := r.passCell(ctx, b, from, end); err != nil {
			return err
		}
		from = end
	}

	return b.flushBatch(ctx, to)
}

// prefetch starts to read the cells that layers in [from, to) will be merged into.
func (r *imageReader) prefetch(from, to int64) {
	if !r.merge {
		return
	}

	// The cells in between become zero, without a merge.
	for _, cell := range []uint32{cellOf(from), cellOf(to - 1)} {
		if r.baseHasCell(cell) {
			r.ahead.prefetchCell(cell)
		}
	}
}

// baseHasCell reports whether base may have data in a cell.
func (r *imageReader) baseHasCell(cell uint32) bool {
	return r.base != nil && !r.base.Map.IsZero() && cellStart(cell) < r.base.SizeBytes
}

// readData reads [from, to) and passes it on, frame by frame, without blocks of zeros.
func (r *imageReader) readData(ctx context.Context, b *batcher, from, to int64) error {
	for from < to {
		n := min(to, (from/repo.FrameBytes+1)*repo.FrameBytes) - from
		buf, err := b.reserveRoom(ctx, int(n))
		if err != nil {
			return err
		}
		if err := r.readImage(buf, from); err != nil {
			return err
		}
		r.putBlocks(b, buf, from)
		r.tracker.Add(0, n)
		from += n
	}

	return nil
}

// readImage reads the image at an offset into all of buf, from scratch if that has it.
func (r *imageReader) readImage(buf []byte, at int64) error {
	if from := at - r.at; from >= 0 && from+int64(len(buf)) <= int64(len(r.scratch)) {
		copy(buf, r.scratch[from:])
		return nil
	}

	n, err := r.img.R.ReadAt(buf, at)
	r.ranges.markRead(at + int64(n))
	r.stats.read.Add(int64(n))
	if n == len(buf) {
		return nil
	}
	if err == nil || err == io.EOF {
		err = errs.New(errs.Damaged, opPush, r.what, "the image ends after %d of %d bytes", at+int64(n), r.img.SizeBytes)
	}

	return errs.Wrap(opPush, r.what, err)
}

// putBlocks adds the data in buf, the room of a batch, without zeros. at is its offset in the image.
func (r *imageReader) putBlocks(b *batcher, buf []byte, at int64) {
	// Move the data together.
	to := 0
	var parts []item
	var holes []item
	for _, p := range splitZeros(buf) {
		if p.zero {
			holes = append(holes, item{offset: at + int64(p.from), length: int64(p.to - p.from)})
			continue
		}
		to += copy(buf[to:], buf[p.from:p.to])
		parts = append(parts, item{offset: at + int64(p.from), length: int64(p.to - p.from)})
	}

	if !r.merge {
		holes = nil // there is nothing that they would cover
	}

	// Add data and holes in order of offset.
	for len(parts) > 0 || len(holes) > 0 {
		if len(holes) == 0 || len(parts) > 0 && parts[0].offset < holes[0].offset {
			b.addFresh(parts[0])
			parts = parts[1:]
			continue
		}
		b.addHole(holes[0].offset, holes[0].length)
		holes = holes[1:]
	}
}

// stretch is a part of a buffer that is all zeros, or not.
type stretch struct {
	from, to int
	zero     bool
}

var zeroBlock [repo.BlockBytes]byte

// splitZeros splits a buffer into data and zeros, in whole blocks. A few zero blocks between data count as data,
// because they are not worth another piece.
func splitZeros(buf []byte) []stretch {
	var out []stretch
	for at := 0; at < len(buf); at += repo.BlockBytes {
		end := min(at+repo.BlockBytes, len(buf))
		zero := bytes.Equal(buf[at:end], zeroBlock[:end-at])
		if n := len(out); n > 0 && out[n-1].zero == zero {
			out[n-1].to = end
		} else {
			out = append(out, stretch{at, end, zero})
		}
	}

	for i := 1; i < len(out)-1; i++ {
		if out[i].zero && out[i].to-out[i].from < minHole {
			out[i-1].to = out[i+1].to
			out = slices.Delete(out, i, i+2)
			i--
		}
	}

	return out
}

// minCompare is the minimum length of a range that differs to be compared with base nevertheless. For a shorter range
// it does not pay to wait for the cell that tells what base has there.
const minCompare = 64 << 10

// passCell passes on the ranges in [from, to), which lies within one cell. It does not upload data again that base
// has: the ranges may cover more than the differences.
func (r *imageReader) passCell(ctx context.Context, b *batcher, from, to int64) error {
	cell := cellOf(from)
	known := r.baseHasCell(cell)
	before := b.n
	var pieces []repo.Piece // of base, from the first that the next range may share
	loaded := !known
	at := from // everything before at is passed on
	for {
		g, ok, err := r.takeRange(at, to)
		if err != nil {
			return err
		}
		if !ok {
			break
		}

		if g.Zero {
			if r.merge {
				r.prefetch(g.Offset, g.End())
				if err := b.addZero(ctx, g.Offset, g.Length); err != nil {
					return err
				}
			}
			at = g.End()
			continue
		}

		// Read the pieces of base, unless the range is too short for that.
		if !loaded && r.merge && g.Length < minCompare {
			r.prefetch(g.Offset, g.End())
		} else if !loaded {
			if pieces, err = r.loadPieces(ctx, b, cell); err != nil {
				return err
			}
			loaded = true
		}

		if pieces, at, err = r.passData(ctx, b, g, pieces, at, to); err != nil {
			return err
		}
	}

	if known && b.n == before {
		r.ahead.dropCell(cell) // nothing was passed on, so the sealer does not drop it
	}

	return nil
}

// passData passes on the range g, which has data: the pieces of base that are unchanged as they are stored, and the
// rest as data. Everything before at is passed on, and the cell ends at to. passData returns the remaining pieces and
// the new at.
func (r *imageReader) passData(
	ctx context.Context, b *batcher, g engine.Range, pieces []repo.Piece, at, to int64,
) ([]repo.Piece, int64, error) {
	for a := g.Offset; a < g.End(); a = at {
		for len(pieces) > 0 && pieces[0].End() <= a {
			pieces = pieces[1:] // nothing of it is data now, or it is unchanged
		}

		// Behind the last piece, everything is data.
		if len(pieces) == 0 || pieces[0].Offset >= g.End() {
			at = g.End()
			if err := r.readData(ctx, b, a, at); err != nil {
				return nil, 0, err
			}
			continue
		}

		// Compare the piece with the image.
		p := pieces[0]
		same := false
		if r.canCompare(p, g, at, to) {
			var err error
			if same, err = r.isSame(p); err != nil {
				return nil, 0, err
			}
		}

		if !same {
			at = min(p.End(), g.End())
			if err := r.readData(ctx, b, a, at); err != nil {
				return nil, 0, err
			}
			continue
		}

		// Pass on the data before the piece, and the piece.
		if p.Offset > a {
			if err := r.readData(ctx, b, a, p.Offset); err != nil {
				return nil, 0, err
			}
		}

		if err := b.addPlaced(ctx, p); err != nil {
			return nil, 0, err
		}

		r.tracker.Add(0, p.Length)
		at = max(p.End(), a)
	}

	return pieces, at, nil
}

// loadPieces reads the pieces that base has in a cell.
func (r *imageReader) loadPieces(ctx context.Context, b *batcher, cell uint32) ([]repo.Piece, error) {
	for ahead := cell; int(ahead) < int(cell)+cellAhead/2 && !r.merge; ahead++ {
		if r.baseHasCell(ahead) {
			r.ahead.prefetchCell(ahead)
		}
	}

	// The sealer drops cells once it seals what was passed on, so the current batch must not wait here.
	if err := r.ahead.reserveCell(ctx, cell, func() error { return b.flushBatch(ctx, b.pos) }); err != nil {
		return nil, err
	}
	return r.ahead.waitCell(ctx, cell)
}

// canCompare reports whether the whole of a piece of base can be compared with the image, once: everything before at is
// already passed on, and everything after to is not part of this cell. If ranges are the differences, data outside of
// them is known to be unchanged, so comparing must not read it.
func (r *imageReader) canCompare(p repo.Piece, g engine.Range, at, to int64) bool {
	if p.Sum == (repo.Sum{}) || p.Offset < at || p.End() > to {
		return false
	}
	return !r.merge || p.Offset >= g.Offset && p.End() <= g.End()
}

// isSame reads the image where base has a piece, and reports whether the data is the same.
func (r *imageReader) isSame(p repo.Piece) (bool, error) {
	if r.scratch == nil {
		r.scratch = make([]byte, repo.FrameBytes)
	}
	buf := r.scratch[:p.Length]
	r.scratch = r.scratch[:0] // empty until the read succeeds
	if err := r.readImage(buf, p.Offset); err != nil {
		return false, err
	}
	r.scratch, r.at = buf, p.Offset
	return r.hasSum(buf, p.Sum), nil
}
