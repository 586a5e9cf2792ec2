package replicate

import (
	"cmp"
	"context"
	"io"
	"slices"
	"sync/atomic"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/remote/repo"

	"golang.org/x/sync/errgroup"
)

// How much is fetched at once. What is in memory is at most fetchers times
// (fetchSpan + fetchPlain), and two windows of wants.
const (
	fetchers         = 8         // requests under way
	fetchSpan        = 4 << 20   // bytes of a segment in one request, at most, if it is for more than one frame
	fetchPlain       = 8 << 20   // bytes of content that one request is for, likewise
	fetchGap         = 128 << 10 // bytes between two frames that are read along rather than asked for twice
	windowPlacements = 128 << 10 // places to write to that are planned before fetching begins, at most
	windowBytes      = 1 << 30   // and bytes
	pagesPlain       = 8 << 20   // of encoded pages that are read at once
)

// zeroRun is how many zeros in a row are worth a hole.
const zeroRun = 64 << 10

// sink is what a volume's content is written into. Its methods may be called
// concurrently, for different ranges.
type sink interface {
	io.WriterAt
	Zero(offset, length int64) error
}

// want is a place in a volume, and what is to be there.
type placement struct {
	frame  repo.Frame
	within uint32
	offset int64
	length int64
}

// haul is what one request fetches: frames of one segment, in order, and where
// their content goes, in order of frame.
type fetchBatch struct {
	frames     []repo.Frame
	placements []placement
	span       int64
}

// restore writes into a target what makes it the content of a manifest.
type restore struct {
	repo    *repo.Repo
	base    *repo.Manifest // whose content the target has; nil: it is empty
	now     *repo.Manifest
	to      sink
	tracker *progress.Tracker

	read, written atomic.Int64 // bytes of the remote, of the target
}

// run reads the maps of both, region by region, and fetches and writes what is
// different. Every frame is fetched once in a window of regions. Damaged (with the
// range of the volume), NotFound (an object is gone).
func (x *restore) restoreImage(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	hauls := make(chan fetchBatch)
	g.Go(func() error {
		defer close(hauls)
		return x.planFetches(ctx, func(b fetchBatch) error {
			select {
			case hauls <- b:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	})

	for range fetchers {
		g.Go(func() error {
			for b := range hauls {
				if err := x.fetchAndWrite(ctx, b); err != nil {
					return err
				}
			}
			return nil
		})
	}

	return g.Wait()
}

// plan finds what is to be fetched and sends it in hauls; what is zero now it
// writes at once.
func (x *restore) planFetches(ctx context.Context, send func(fetchBatch) error) error {
	var window []placement
	bytes := int64(0)
	flush := func() error {
		err := groupFetches(window, send)
		window, bytes = window[:0], 0
		return err
	}

	err := x.eachChangedPart(ctx, func(m part) error {
		for _, l := range changedLayers(m.old, m.now) {
			if l.Piece == nil {
				if err := x.to.Zero(l.Offset, l.Length); err != nil {
					return err
				}
				continue
			}
			if l.end() > x.now.SizeBytes {
				return x.rangeError(l.Offset, l.Length, errs.New(errs.Damaged, "", "", "the map extends beyond the end of the volume"))
			}
			window = append(window, placement{l.Piece.Frame, l.Piece.Within, l.Offset, l.Length})
			bytes += l.Length
		}

		if len(window) >= windowPlacements || bytes >= windowBytes {
			return flush()
		}

		return nil
	})
	if err != nil {
		return err
	}

	return flush()
}

// parts calls fn for each part of the volume in which the maps may differ, in order.
func (x *restore) eachChangedPart(ctx context.Context, fn func(part) error) error {
	was := x.now.Version == 2 // of nothing, as it suits
	if x.base != nil {
		was = x.base.Version == 2
	}
	switch {
	case was && x.now.Version == 2:
		return x.treeParts(ctx, fn)
	case was || x.now.Version == 2:
		return x.mixedParts(ctx, fn)
	}
	return x.pageParts(ctx, fn)
}

// treeParts is parts of two maps of version 2.
func (x *restore) treeParts(ctx context.Context, fn func(part) error) error {
	d := &treeDiff{
		nodes: x.repo.ReadNodes, old: x.base, now: x.now,
		onRead: func(n repo.NodeAt, _ bool) { x.read.Add(int64(n.Frame.Stored)) },
		onBroken: func(n repo.NodeAt, old bool, err error) error {
			if old {
				return nil
			}
			return x.rangeError(n.From(), min(n.To(), x.now.SizeBytes)-n.From(), err)
		},
		lostDiffers: true,
	}

	return d.eachPart(ctx, fn)
}

// mixedParts is parts of maps of which one is of version 1.
func (x *restore) mixedParts(ctx context.Context, fn func(part) error) error {
	cache := x.repo.NewNodeCache(cachedNodes)
	for region := uint32(0); regionStart(region) < x.now.SizeBytes; region++ {
		m := part{from: regionStart(region), to: regionEnd(region, x.now.SizeBytes)}
		for _, y := range []struct {
			m  *repo.Manifest
			to *[]repo.Piece
		}{{x.base, &m.old}, {x.now, &m.now}} {
			var err error
			*y.to, err = regionPieces(ctx, x.repo, cache.Read, y.m, region)
			switch {
			case y.m == x.base && isUnreadable(err):
				*y.to = unknownPieces(m.from, min(m.to, x.base.SizeBytes))
			case err != nil:
				return x.rangeError(m.from, m.to-m.from, err)
			}
			if p, ok := findPage(y.m, region); ok {
				x.read.Add(int64(p.Frame.Stored))
			}
		}

		if len(m.old) == 0 && len(m.now) == 0 {
			continue
		}

		if err := fn(m); err != nil {
			return err
		}
	}

	x.read.Add(cache.BytesRead())
	return nil
}

// pageParts is parts of two maps of version 1.
func (x *restore) pageParts(ctx context.Context, fn func(part) error) error {
	regions := differentRegions(x.base, x.now)
	for len(regions) > 0 {
		n, plain := 0, uint32(0)
		for n < len(regions) && n < requests {
			plain += pagePlain(x.base, regions[n]) + pagePlain(x.now, regions[n])
			if n > 0 && plain > pagesPlain {
				break
			}
			n++
		}

		parts, err := x.readPages(ctx, regions[:n])
		if err != nil {
			return err
		}

		regions = regions[n:]
		for _, m := range parts {
			if err := fn(m); err != nil {
				return err
			}
		}
	}

	return nil
}

// pagePlain is how large the page of a region is, encoded.
func pagePlain(m *repo.Manifest, region uint32) uint32 {
	if m == nil {
		return 0
	}
	p, _ := findPage(m, region)
	return p.Frame.Plain
}

// pages reads the pieces of regions in both manifests.
func (x *restore) readPages(ctx context.Context, regions []uint32) ([]part, error) {
	out := make([]part, len(regions))
	g, ctx := errgroup.WithContext(ctx)
	for i, region := range regions {
		for _, m := range []*repo.Manifest{x.base, x.now} {
			if m == nil {
				continue
			}

			g.Go(func() error {
				pieces, err := readRegion(ctx, x.repo, m, region)
				if m == x.base && m != x.now && isUnreadable(err) {
					pieces, err = unknownPieces(regionStart(region), regionEnd(region, m.SizeBytes)), nil
				}
				if err != nil {
					return x.rangeError(regionStart(region), regionEnd(region, m.SizeBytes)-regionStart(region), err)
				}

				if p, ok := findPage(m, region); ok {
					x.read.Add(int64(p.Frame.Stored))
				}

				if m == x.now {
					out[i].now = pieces
				} else {
					out[i].old = pieces
				}

				return nil
			})
		}
	}

	return out, g.Wait()
}

// unknownPieces stand for a range of a base of which the map cannot be read: a base is only a help, and nothing keeps a
// prune from removing it. They are like nothing else, so that all of the range is written.
func unknownPieces(from, to int64) []repo.Piece {
	if from >= to {
		return nil
	}
	return []repo.Piece{{Offset: from, Length: to - from}}
}

// eachHaul groups wants by the segment that they are in, and by how near each
// other their frames are. It sorts them.
func groupFetches(wants []placement, send func(fetchBatch) error) error {
	slices.SortFunc(wants, func(a, b placement) int {
		if c := slices.Compare(a.frame.Segment.Session[:], b.frame.Segment.Session[:]); c != 0 {
			return c
		}
		return cmp.Or(cmp.Compare(a.frame.Segment.N, b.frame.Segment.N), cmp.Compare(a.frame.Offset, b.frame.Offset),
			cmp.Compare(a.offset, b.offset))
	})

	for len(wants) > 0 {
		first := wants[0].frame
		b := fetchBatch{frames: []repo.Frame{first}}
		plain, end := int64(first.Plain), int64(first.Offset)+int64(first.Stored)
		n := 1
		for ; n < len(wants); n++ {
			f := wants[n].frame
			if f == b.frames[len(b.frames)-1] {
				continue
			}
			last := int64(f.Offset) + int64(f.Stored)
			if f.Segment != first.Segment || int64(f.Offset)-end > fetchGap || last-int64(first.Offset) > fetchSpan ||
				plain+int64(f.Plain) > fetchPlain {
				break
			}
			b.frames = append(b.frames, f)
			plain, end = plain+int64(f.Plain), max(end, last)
		}

		b.span = end - int64(first.Offset)
		b.placements = slices.Clone(wants[:n]) // the window is used again
		wants = wants[n:]
		if err := send(b); err != nil {
			return err
		}
	}

	return nil
}

// fetch reads a haul and writes what it is for.
func (x *restore) fetchAndWrite(ctx context.Context, b fetchBatch) error {
	contents, err := x.repo.ReadContents(ctx, b.frames)
	if err != nil {
		return x.findDamagedRange(ctx, b, err)
	}

	x.read.Add(b.span)
	i := 0
	for _, w := range b.placements {
		for b.frames[i] != w.frame {
			i++
		}
		part, err := contents[i].Part(w.within, w.length)
		if err != nil {
			return x.rangeError(w.offset, w.length, errs.Wrap("read segment", w.frame.Segment.String(), err))
		}
		if err := x.writeContent(part, w.offset); err != nil {
			return err
		}
		x.tracker.Add(0, w.length)
	}

	return nil
}

// write writes content but for its zeros: where there is nothing, they need not be
// written, and elsewhere long runs of them become holes.
func (x *restore) writeContent(b []byte, offset int64) error {
	put := func(from, to int) error {
		if from == to {
			return nil
		}
		x.written.Add(int64(to - from))
		_, err := x.to.WriteAt(b[from:to], offset+int64(from))
		return err
	}

	from := 0 // of what is to be written
	for at := 0; at < len(b); {
		n := leadingZeros(b[at:])
		if n == 0 || n < zeroRun && x.base != nil {
			at += max(n, min(repo.BlockBytes, len(b)-at))
			continue
		}

		if err := put(from, at); err != nil {
			return err
		}

		if x.base != nil {
			if err := x.to.Zero(offset+int64(at), int64(n)); err != nil {
				return err
			}
		}

		at += n
		from = at
	}

	return put(from, len(b))
}

// zeros is how many bytes at the beginning of b are zero, in whole blocks but for
// its end.
func leadingZeros(b []byte) int {
	n := 0
	for n < len(b) {
		m := min(repo.BlockBytes, len(b)-n)
		if string(b[n:n+m]) != string(zeroBlock[:m]) {
			break
		}
		n += m
	}
	return n
}

// blame finds out which part of the volume a haul that cannot be read is for.
func (x *restore) findDamagedRange(ctx context.Context, b fetchBatch, err error) error {
	if k := errs.KindOf(err); k != errs.Damaged && k != errs.NotFound || ctx.Err() != nil {
		return err
	}

	for _, f := range b.frames {
		_, ferr := x.repo.ReadContents(ctx, []repo.Frame{f})
		if ferr == nil {
			continue
		}
		for _, w := range b.placements {
			if w.frame == f {
				return x.rangeError(w.offset, w.length, ferr)
			}
		}
	}

	return err // it could be read one by one: not for long, then
}

// damaged says which range of the volume err is about. What is not there is damage,
// too; the kind stays, so that the caller can tell whether somebody removed it.
func (x *restore) rangeError(offset, length int64, err error) error {
	k := errs.KindOf(err)
	if k != errs.Damaged && k != errs.NotFound {
		return err
	}
	return errs.New(k, opPull, x.now.Volume+"@"+x.now.Point, "cannot read bytes %d to %d: %w", offset, offset+length-1,
		err).
		WithHint("find intact points with %s, and pull an older one", errs.Run("verify", "REMOTE"))
}

// stream is the content of frames, one after the other, read ahead of its reader. It
// is to be closed.
type frameStream struct {
	ctx    context.Context
	cancel context.CancelFunc
	queue  chan chan chunk
	parts  [][]byte
	err    error

	read, given *atomic.Int64 // bytes of the remote, of content
	tracker     *progress.Tracker
}

type chunk struct {
	parts [][]byte
	err   error
	span  int64
}

// openStream reads the frames in order.
func openFrameStream(
	ctx context.Context, r *repo.Repo, frames []repo.Frame, read, given *atomic.Int64, tracker *progress.Tracker,
) *frameStream {
	ctx, cancel := context.WithCancel(ctx)
	s := &frameStream{ctx: ctx, cancel: cancel, queue: make(chan chan chunk, fetchers-1), read: read, given: given,
		tracker: tracker}
	go func() {
		defer close(s.queue)
		for len(frames) > 0 {
			n, plain := 1, int64(frames[0].Plain)
			for ; n < len(frames); n++ {
				a, f := frames[n-1], frames[n]
				plain += int64(f.Plain)
				if f.Segment != a.Segment || f.Offset < a.Offset+a.Stored || int64(f.Offset-a.Offset-a.Stored) > fetchGap ||
					int64(f.Offset+f.Stored-frames[0].Offset) > fetchSpan || plain > fetchPlain {
					break
				}
			}

			some := frames[:n]
			frames = frames[n:]
			c := make(chan chunk, 1)
			select {
			case s.queue <- c: // its place in the queue bounds the memory
			case <-ctx.Done():
				return
			}

			go func() {
				parts, err := r.ReadFrames(ctx, some)
				c <- chunk{parts, err, int64(some[n-1].Offset+some[n-1].Stored) - int64(some[0].Offset)}
			}()
		}
	}()

	return s
}

// Read returns an error of a frame before anything behind it.
func (s *frameStream) Read(b []byte) (int, error) {
	for s.err == nil && len(s.parts) == 0 {
		c, ok := <-s.queue
		if !ok {
			if s.err = context.Cause(s.ctx); s.err == nil {
				s.err = io.EOF // all of it, and not what was read until somebody ended it
			}
			break
		}
		got := <-c
		s.parts, s.err = got.parts, got.err
		s.read.Add(got.span)
	}
	if s.err != nil {
		return 0, s.err
	}

	n := copy(b, s.parts[0])
	s.given.Add(int64(n))
	s.tracker.Add(0, int64(n))
	if s.parts[0] = s.parts[0][n:]; len(s.parts[0]) == 0 {
		s.parts = s.parts[1:]
	}

	return n, nil
}

// Close ends reading ahead.
func (s *frameStream) Close() error {
	s.cancel()
	return nil
}
