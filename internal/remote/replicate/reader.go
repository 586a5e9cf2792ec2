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

// imageReader feeds the pipeline with a block image.
type imageReader struct {
	img      engine.Image
	what     string // reference, for errors
	ranges   *readAhead
	held     *engine.Range // of ranges, taken and given back
	base     *repo.Manifest
	unit     int64           // bytes of the regions in which it is read: see unitOf
	merge    bool            // ranges are what differs from base; else base is compared with
	ahead    *pagePrefetcher // of base
	hasSum   func([]byte, repo.Sum) bool
	stats    *stats
	tracker  *progress.Tracker
	finished []finishedPart // what the journal has of it, in order
	replay   func(finishedPart) ([]item, error)

	scratch []byte // what was read last to be compared
	at      int64  // where that is
}

// peek returns the next range without taking it. false: there is none.
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

// take returns what of the next range begins before to, and takes it. false: nothing.
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

// produce reads everything that the journal does not have.
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

	// Behind the end of a volume that was larger there is nothing.
	end := r.img.SizeBytes
	if err := r.readGap(ctx, b, at, end); err != nil {
		return err
	}

	if r.merge && r.base.SizeBytes > end {
		r.prefetch(end, r.base.SizeBytes)
		return b.addZero(ctx, end, r.base.SizeBytes-end)
	}

	return nil
}

// gap reads [from, to).
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
		end := min(to, (from/r.unit+1)*r.unit)
		if err := r.passRegion(ctx, b, from, end); err != nil {
			return err
		}
		from = end
	}

	return b.flushBatch(ctx, to)
}

// want says that the pages of a range will be merged into.
func (r *imageReader) prefetch(from, to int64) {
	if !r.merge {
		return
	}

	first, last := uint32(from/r.unit), uint32((to-1)/r.unit)
	for region := first; region <= last; region++ {
		if r.unit == repo.CellBytes && region > first && region < last {
			region = last // what is between is not merged into: it is zero now
		}
		if r.baseHasRegion(region) {
			r.ahead.prefetchRegion(region)
		}
	}
}

// knows reports whether base may have something in a region.
func (r *imageReader) baseHasRegion(region uint32) bool {
	switch {
	case r.base == nil:
		return false
	case r.base.Version == 2:
		return !r.base.Map.IsZero() && int64(region)*repo.CellBytes < r.base.SizeBytes
	}
	_, has := findPage(r.base, region)
	return has
}

// data reads [from, to) and passes it on, frame by frame, without blocks that are
// zero.
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

// put adds what was read into the room of a batch, leaving zeros out.
func (r *imageReader) putBlocks(b *batcher, buf []byte, at int64) {
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
		holes = nil // nothing is there that they would cover
	}

	// In order of offset.
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

// stretch is a part of a buffer.
type stretch struct {
	from, to int
	zero     bool
}

var zeroBlock [repo.BlockBytes]byte

// split finds what of a buffer is zero, in whole blocks. A few zero blocks between
// data are not worth a piece more.
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

// minCompare is how long a range that differs must be to be compared nevertheless:
// for less it does not pay to wait for the page that says what is there.
const minCompare = 64 << 10

// region passes on what the ranges in [from, to) say, which is within one region. What
// is as base has it is not uploaded again: the ranges may be more than what differs.
func (r *imageReader) passRegion(ctx context.Context, b *batcher, from, to int64) error {
	region := uint32(from / r.unit)
	known := r.baseHasRegion(region)
	before := b.n
	var pieces []repo.Piece
	loaded := !known
	i, at := 0, from // all before at is passed on
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

		if !loaded && r.merge && g.Length < minCompare {
			r.prefetch(g.Offset, g.End())
		} else if !loaded {
			if pieces, err = r.loadPieces(ctx, b, region); err != nil {
				return err
			}
			loaded = true
		}

		for a := g.Offset; a < g.End(); a = at {
			for i < len(pieces) && pieces[i].End() <= a {
				i++ // nothing of it is data now, or it is as it was
			}

			if i == len(pieces) || pieces[i].Offset >= g.End() {
				at = g.End()
				if err := r.readData(ctx, b, a, at); err != nil {
					return err
				}
				continue
			}

			p := pieces[i]
			same := false
			if r.canCompare(p, g, at, to) {
				if same, err = r.isSame(p); err != nil {
					return err
				}
			}

			if !same {
				at = min(p.End(), g.End())
				if err := r.readData(ctx, b, a, at); err != nil {
					return err
				}
				continue
			}

			if p.Offset > a {
				if err := r.readData(ctx, b, a, p.Offset); err != nil {
					return err
				}
			}

			if err := b.addPlaced(ctx, p); err != nil {
				return err
			}

			r.tracker.Add(0, p.Length)
			at = max(p.End(), a)
		}
	}

	if known && b.n == before {
		r.ahead.dropRegion(region) // nobody else will
	}

	return nil
}

// load reads the pieces that base has in a region.
func (r *imageReader) loadPieces(ctx context.Context, b *batcher, region uint32) ([]repo.Piece, error) {
	for ahead := region; int(ahead) < int(region)+r.ahead.maxRunning/2 && !r.merge; ahead++ {
		if r.baseHasRegion(ahead) {
			r.ahead.prefetchRegion(ahead)
		}
	}
	// Pages are held until what was passed on is sealed: it must not wait here.
	if err := r.ahead.reserveRegion(ctx, region, func() error { return b.flushBatch(ctx, b.pos) }); err != nil {
		return nil, err
	}
	return r.ahead.waitRegion(ctx, region)
}

// comparable reports whether a piece of base can be compared with what is there now,
// all of it, and once: all before at is passed on, what is behind to is not to be. If
// ranges are what differs, what is in none is known to be the same, and no reason to
// read it.
func (r *imageReader) canCompare(p repo.Piece, g engine.Range, at, to int64) bool {
	if p.Sum == (repo.Sum{}) || p.Offset < at || p.End() > to {
		return false
	}
	return !r.merge || p.Offset >= g.Offset && p.End() <= g.End()
}

// same reads what is now where a piece was, and compares.
func (r *imageReader) isSame(p repo.Piece) (bool, error) {
	if r.scratch == nil {
		r.scratch = make([]byte, repo.FrameBytes)
	}
	buf := r.scratch[:p.Length]
	r.scratch = r.scratch[:0] // nothing, until it is read
	if err := r.readImage(buf, p.Offset); err != nil {
		return false, err
	}
	r.scratch, r.at = buf, p.Offset
	return r.hasSum(buf, p.Sum), nil
}
