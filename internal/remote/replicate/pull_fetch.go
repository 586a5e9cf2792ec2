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

// These constants bound how much is fetched at once. Memory holds at most fetchers times (fetchSpan + fetchPlain), and
// two windows of placements.
const (
	fetchers         = 8         // concurrent requests
	fetchSpan        = 4 << 20   // maximum bytes of a segment in a request for more than one frame
	fetchPlain       = 8 << 20   // maximum bytes of content in a request for more than one frame
	fetchGap         = 128 << 10 // maximum bytes between two frames in one request, which are read and dropped
	windowPlacements = 128 << 10 // maximum number of placements planned before fetching them begins
	windowBytes      = 1 << 30   // maximum bytes of these placements
)

// zeroRun is the minimum length of a run of zeros to become a hole.
const zeroRun = 64 << 10

// sink receives a volume's content. Its methods may be called concurrently for different ranges.
type sink interface {
	io.WriterAt
	Zero(offset, length int64) error
}

// placement is a range of a volume, and the part of a frame to write there.
type placement struct {
	frame  repo.Frame
	within uint32
	offset int64
	length int64
}

// fetchBatch is what one request fetches: frames of one segment, in order of offset, and their placements, in order of
// frame. span is the number of bytes from the first frame to the end of the last.
type fetchBatch struct {
	frames     []repo.Frame
	placements []placement
	span       int64
}

// restore turns the content of a target into that of a manifest.
type restore struct {
	repo    *repo.Repo
	remote  string         // name of the remote, for hints
	base    *repo.Manifest // of the target's content; nil: the target is empty
	now     *repo.Manifest
	to      sink
	tracker *progress.Tracker

	read, written atomic.Int64 // bytes read from the remote, written to the target
}

// restoreImage reads the maps of both manifests, part by part, and fetches and writes the differences. Within a
// window of parts it fetches every frame once. Errors: Damaged (with the range of the volume), NotFound (an object
// does not exist).
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

// planFetches finds what to fetch and sends it in batches. It writes zeros at once.
func (x *restore) planFetches(ctx context.Context, send func(fetchBatch) error) error {
	var window []placement
	bytes := int64(0)
	flush := func() error {
		err := groupFetches(window, send)
		window, bytes = window[:0], 0
		return err
	}

	err := x.eachChangedPart(ctx, func(m part) error {
		// Write zeros, and add data to the window.
		for _, l := range changedLayers(m.old, m.now) {
			if l.Piece == nil {
				if err := x.to.Zero(l.Offset, l.Length); err != nil {
					return err
				}
				continue
			}
			if l.end() > x.now.SizeBytes {
				return x.rangeError(l.Offset, l.Length,
					errs.New(errs.Damaged, "", "", "the map extends beyond the end of the volume"))
			}
			window = append(window, placement{l.Piece.Frame, l.Piece.Within, l.Offset, l.Length})
			bytes += l.Length
		}

		// Send the window when it is full.
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

// eachChangedPart calls fn for each part of the volume in which the maps may differ, in order of offset.
func (x *restore) eachChangedPart(ctx context.Context, fn func(part) error) error {
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

// unknownPieces returns pieces for a range of a base whose map cannot be read: a base is only an optimization, and
// nothing keeps a prune from removing it. The pieces differ from all others, so that the whole range is written.
func unknownPieces(from, to int64) []repo.Piece {
	if from >= to {
		return nil
	}
	return []repo.Piece{{Offset: from, Length: to - from}}
}

// groupFetches groups placements whose frames are near each other in one segment, and sends each group. It sorts the
// placements.
func groupFetches(wants []placement, send func(fetchBatch) error) error {
	slices.SortFunc(wants, func(a, b placement) int {
		if c := slices.Compare(a.frame.Segment.Session[:], b.frame.Segment.Session[:]); c != 0 {
			return c
		}
		return cmp.Or(cmp.Compare(a.frame.Segment.N, b.frame.Segment.N), cmp.Compare(a.frame.Offset, b.frame.Offset),
			cmp.Compare(a.offset, b.offset))
	})

	for len(wants) > 0 {
		// Extend the group as long as it fits into one request.
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
		b.placements = slices.Clone(wants[:n]) // the caller reuses the window
		wants = wants[n:]
		if err := send(b); err != nil {
			return err
		}
	}

	return nil
}

// fetchAndWrite reads a batch and writes its placements.
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

// writeContent writes content. In an empty target it skips zeros; otherwise it turns long runs of them into holes.
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

// leadingZeros returns how many bytes at the beginning of b are zero, in whole blocks except at the end of b.
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

// findDamagedRange finds the range of the volume that cannot be restored because a batch cannot be read.
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

	return err // each frame alone could be read, so the error was temporary
}

// rangeError adds the range of the volume to an error about damaged or missing data. The kind stays, so that the caller
// can check whether missing data was removed on purpose.
func (x *restore) rangeError(offset, length int64, err error) error {
	k := errs.KindOf(err)
	if k != errs.Damaged && k != errs.NotFound {
		return err
	}
	return errs.New(k, opPull, x.now.Volume+"@"+x.now.Point, "cannot read bytes %d to %d: %w",
		offset, offset+length-1, err).
		WithHint("find intact points with %s, and pull an older one", errs.Run("verify", x.remote))
}

// frameStream reads the content of frames, one after the other, and fetches ahead of its reader. The caller closes it.
type frameStream struct {
	ctx    context.Context
	cancel context.CancelFunc
	queue  chan chan chunk
	parts  [][]byte
	err    error

	read, given *atomic.Int64 // bytes read from the remote, bytes of content returned
	tracker     *progress.Tracker
}

// chunk is the result of one request: the content of consecutive frames.
type chunk struct {
	parts [][]byte
	err   error
	span  int64
}

// openFrameStream returns a stream of the frames' content, in order.
func openFrameStream(
	ctx context.Context, r *repo.Repo, frames []repo.Frame, read, given *atomic.Int64, tracker *progress.Tracker,
) *frameStream {
	ctx, cancel := context.WithCancel(ctx)
	s := &frameStream{ctx: ctx, cancel: cancel, queue: make(chan chan chunk, fetchers-1), read: read, given: given,
		tracker: tracker}
	go func() {
		defer close(s.queue)

		for len(frames) > 0 {
			// Choose frames that fit into one request.
			n, plain := 1, int64(frames[0].Plain)
			for ; n < len(frames); n++ {
				a, f := frames[n-1], frames[n]
				plain += int64(f.Plain)
				if f.Segment != a.Segment || f.Offset < a.Offset+a.Stored || int64(f.Offset-a.Offset-a.Stored) > fetchGap ||
					int64(f.Offset+f.Stored-frames[0].Offset) > fetchSpan || plain > fetchPlain {
					break
				}
			}

			// Fetch them as soon as the queue has room.
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

// Read reads content. It returns the error of a frame before any content after that frame.
func (s *frameStream) Read(b []byte) (int, error) {
	for s.err == nil && len(s.parts) == 0 {
		c, ok := <-s.queue
		if !ok {
			if s.err = context.Cause(s.ctx); s.err == nil {
				s.err = io.EOF // the end of the content; a cancelled stream has an error instead
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

// Close stops fetching ahead.
func (s *frameStream) Close() error {
	s.cancel()
	return nil
}
