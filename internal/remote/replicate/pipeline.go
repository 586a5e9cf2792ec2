package replicate

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"

	"golang.org/x/sync/errgroup"
)

// The pipeline has four stages. One reader reads the content in order of offset and packs it into batches of at most
// one frame of data. Workers compress and hash the batches. A sealer takes them in their original order, puts frames
// into segments, and puts the items into the map of the volume. Several uploads write segments at once.
//
// Its memory is bounded, however large the volume: by the number of buffers (batchBuffers), of uploads, and of cells
// of the base that are read ahead.
const (
	uploads    = 4                   // segments uploaded at once
	cellAhead  = 64                  // cells of the base that are read ahead
	batchItems = 4096                // maximum in one batch
	minHole    = 4 * repo.BlockBytes // shorter runs of zeros between data are stored as data
)

// batchBuffers returns how many frames may be between reader and sealer.
func batchBuffers() int { return 2*runtime.GOMAXPROCS(0) + 4 }

// item describes one range of the volume in a batch.
type item struct {
	kind   itemKind
	offset int64
	length int64
	within uint32     // of a freshItem: offset in the batch's data
	sum    repo.Sum   // of a freshItem: computed by a worker
	piece  repo.Piece // of a placedItem
}

type itemKind uint8

const (
	zeroItem   itemKind = iota // reads as zero
	freshItem                  // data that goes into the batch's frame
	placedItem                 // data that is already on the remote
)

// batch is the unit of work: the items and data of the volume in [from, to).
type batch struct {
	from, to int64
	items    []item
	buf      *buffer // nil: no data
	plain    []byte  // the data, in buf
	replayed bool    // from the journal, so it is not recorded there again

	packed []byte // by a worker
	codec  repo.Codec
	done   chan struct{}
}

// buffer has room for one frame, plain and compressed.
type buffer struct {
	plain  []byte
	packed []byte
}

// stats counts what a push has read and uploaded.
type stats struct {
	mu    sync.Mutex
	sizes map[repo.Segment]uint32 // of segments that were uploaded

	read     atomic.Int64 // bytes of the volume
	uploaded atomic.Int64 // bytes of objects
	segments atomic.Int64
}

// setSize records the size of an uploaded segment.
func (s *stats) setSize(seg repo.Segment, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sizes == nil {
		s.sizes = map[repo.Segment]uint32{}
	}
	s.sizes[seg] = uint32(n)
}

// toldSizes is the maximum number of older segments whose sizes a manifest records.
const toldSizes = 128

// listUses lists the segments whose sizes a manifest records: the uploaded ones, the one with the root,
// and up to toldSizes of the base's.
func (s *stats) listUses(root repo.NodeRef, was []repo.Use) []repo.Use {
	s.mu.Lock()
	defer s.mu.Unlock()

	// List the uploaded segments.
	out := make([]repo.Use, 0, len(s.sizes)+1)
	for seg, n := range s.sizes {
		out = append(out, repo.Use{Segment: seg, Size: n})
	}

	// Add the base's segments, and the root's if it is not among them.
	older, rooted := 0, root.IsZero() || s.sizes[root.Frame.Segment] != 0
	for _, u := range was {
		if s.sizes[u.Segment] == 0 && u.Size != 0 && older < toldSizes {
			older++
			rooted = rooted || u.Segment == root.Frame.Segment
			out = append(out, repo.Use{Segment: u.Segment, Size: u.Size})
		}
	}

	if !rooted {
		out = append(out, repo.Use{Segment: root.Frame.Segment})
	}

	slices.SortFunc(out, func(a, b repo.Use) int { return compareSegment(a.Segment, b.Segment) })
	return out
}

// pipeline stores one point of a volume. It is used once.
type pipeline struct {
	repo    *repo.Repo
	session repo.ID
	first   uint32 // number of the first segment
	ready   func(context.Context) error
	journal *journal // nil: none
	mapper  *mapper  // nil: of a stream
	stats   *stats

	frames []repo.Frame // of a stream, in order
	root   repo.NodeRef // of the map of a block image

	free    chan *buffer
	work    chan *batch
	ordered chan *batch
	uploads *errgroup.Group

	complete bool // the reader has passed on everything; set before ordered is closed

	n   uint32 // number of the open segment
	seg *repo.SegmentWriter
	rec segmentRecord // what the open segment finishes
}

// storeAll stores what produce reads, and returns when all segments are on the remote. Before it uploads the first
// segment it waits for ready, because the session must exist.
func (p *pipeline) storeAll(ctx context.Context, produce func(context.Context, *batcher) error) error {
	n := batchBuffers()
	p.free, p.work, p.ordered = make(chan *buffer, n), make(chan *batch, n), make(chan *batch, n)
	for range n {
		p.free <- &buffer{plain: make([]byte, 0, repo.FrameBytes)}
	}

	p.n = p.first
	g, ctx := errgroup.WithContext(ctx)

	up, uctx := errgroup.WithContext(ctx)
	up.SetLimit(uploads)
	p.uploads = up

	// Read.
	g.Go(func() error {
		defer close(p.work)
		defer close(p.ordered)
		b := &batcher{p: p}
		err := produce(ctx, b)
		if err == nil {
			err = b.flushBatch(ctx, b.pos)
		}
		p.complete = err == nil
		return err
	})

	// Compress and hash.
	for range runtime.GOMAXPROCS(0) {
		g.Go(func() error {
			for b := range p.work {
				p.packBatch(b)
			}
			return nil
		})
	}

	// Seal and upload.
	g.Go(func() error {
		err := p.sealBatches(uctx)
		if uerr := up.Wait(); uerr != nil { // it is why the sealer's context ended
			err = uerr
		}
		return err
	})

	return g.Wait()
}

// packBatch compresses the data of a batch and hashes its pieces.
func (p *pipeline) packBatch(b *batch) {
	defer close(b.done)
	if p.mapper != nil {
		for i, it := range b.items {
			if it.kind == freshItem {
				b.items[i].sum = p.repo.Sum(b.plain[it.within : int64(it.within)+it.length])
			}
		}
	}

	b.packed, b.codec = repo.Compress(b.buf.packed[:0], b.plain)
	if b.codec != repo.Raw {
		b.buf.packed = b.packed[:0] // it may have grown
	}
}

// sealBatches seals batches in order, then finishes the map and closes the last segment.
func (p *pipeline) sealBatches(ctx context.Context) error {
	for {
		var b *batch
		select {
		case b = <-p.ordered:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if b == nil {
			break
		}
		if err := p.sealBatch(ctx, b); err != nil {
			return err
		}
	}

	if !p.complete {
		return nil // the reader returns the error
	}

	if p.mapper != nil {
		var err error
		if p.root, err = p.mapper.finishMap(ctx, p.addFrame); err != nil {
			return err
		}
	}

	return p.closeSegment(ctx, true)
}

// sealBatch puts the data of a batch into the open segment, and its items into the journal's record and the map.
func (p *pipeline) sealBatch(ctx context.Context, b *batch) error {
	// Store the frame when a worker has packed it, and free the buffer.
	var f repo.Frame
	if b.buf != nil {
		select {
		case <-b.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}

		if len(b.plain) > 0 { // else the batch has nothing but zeros
			var err error
			if f, err = p.addFrame(ctx, b.packed, b.codec, len(b.plain)); err != nil {
				return err
			}
		}

		b.buf.plain = b.buf.plain[:0]
		p.free <- b.buf // never blocks: the channel has room for all buffers
		if p.mapper == nil {
			p.frames = append(p.frames, f)
			return nil
		}
	}

	// Fresh items are in the frame now.
	for i := range b.items {
		it := &b.items[i]
		if it.kind == freshItem {
			it.kind = placedItem
			it.piece = repo.Piece{Offset: it.offset, Length: it.length, Frame: f, Within: it.within, Sum: it.sum}
		}
	}

	// Record what the segment finishes.
	if b.replayed {
		p.rec.markGap()
	} else {
		p.rec.addBatch(b)
	}

	// Put the items into the map.
	for _, it := range b.items {
		l := zeroLayer(it.offset, it.length)
		if it.kind == placedItem {
			l = pieceLayer(it.piece)
		}
		if err := p.mapper.putLayer(ctx, l, p.addFrame); err != nil {
			return err
		}
	}

	return nil
}

// addFrame puts a frame into the open segment, or into a new one if that is full.
func (p *pipeline) addFrame(ctx context.Context, content []byte, codec repo.Codec, plain int) (repo.Frame, error) {
	if p.seg != nil && (p.seg.Bytes()+len(content) > repo.SegmentBytes || !p.seg.Fits(len(content))) {
		if err := p.closeSegment(ctx, false); err != nil {
			return repo.Frame{}, err
		}
	}

	if p.seg == nil {
		var err error
		if p.seg, err = p.repo.NewSegment(p.session, p.n); err != nil {
			return repo.Frame{}, err
		}
	}

	return p.seg.Add(content, codec, plain)
}

// closeSegment passes the open segment to an upload. It waits while the maximum number of uploads is running.
func (p *pipeline) closeSegment(ctx context.Context, last bool) error {
	if p.seg == nil {
		return nil
	}

	seg := repo.Segment{Session: p.session, N: p.n}
	data, rec := p.seg.Finish(), p.rec
	p.seg, p.rec = nil, segmentRecord{}
	if p.n++; p.n == 0 {
		return errs.New(errs.Internal, "push", "", "the session has too many segments")
	}

	rec.n, rec.bytes = seg.N, int64(len(data))
	p.uploads.Go(func() error {
		if err := p.ready(ctx); err != nil {
			return err
		}

		if err := p.repo.PutSegment(ctx, seg, data); err != nil {
			return err
		}

		p.stats.uploaded.Add(int64(len(data)))
		p.stats.segments.Add(1)
		p.stats.setSize(seg, len(data))
		if p.journal == nil {
			return nil
		}

		// The last record need not be durable. Only two small writes follow the last segment; if the power fails
		// between them, the segment is uploaded again.
		return p.journal.appendSegment(rec, !last)
	})

	return nil
}

// batcher builds the batches of the reader.
type batcher struct {
	p   *pipeline
	pos int64 // everything before it is in batches
	n   int   // items so far
	cur *batch
}

// reserveRoom makes sure that the current batch has room for n more bytes of data, and returns that room.
func (b *batcher) reserveRoom(ctx context.Context, n int) ([]byte, error) {
	if b.cur != nil && (len(b.cur.items) >= batchItems || b.cur.buf != nil && len(b.cur.plain)+n > repo.FrameBytes) {
		if err := b.flushBatch(ctx, b.pos); err != nil {
			return nil, err
		}
	}

	b.openBatch()
	if n == 0 {
		return nil, nil
	}

	if b.cur.buf == nil {
		select {
		case b.cur.buf = <-b.p.free:
			b.cur.plain = b.cur.buf.plain[:0]
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}

	have := len(b.cur.plain)
	return b.cur.plain[have : have+n : have+n], nil
}

// openBatch begins a batch if there is none.
func (b *batcher) openBatch() {
	if b.cur == nil {
		b.cur = &batch{from: b.pos, done: make(chan struct{})}
	}
}

// addFresh adds data. Its parts lie one after the other in the room that reserveRoom returned.
func (b *batcher) addFresh(parts ...item) {
	for _, it := range parts {
		it.kind, it.within = freshItem, uint32(len(b.cur.plain))
		b.cur.plain = b.cur.plain[:len(b.cur.plain)+int(it.length)]
		b.cur.items = append(b.cur.items, it)
		b.n++
		b.pos = it.offset + it.length
	}
}

// addZero adds a range that reads as zero.
func (b *batcher) addZero(ctx context.Context, offset, length int64) error {
	if _, err := b.reserveRoom(ctx, 0); err != nil {
		return err
	}
	b.addHole(offset, length)
	return nil
}

// addRaw adds n bytes of a stream, which were copied into the room that reserveRoom returned.
func (b *batcher) addRaw(n int) { b.cur.plain = b.cur.plain[:len(b.cur.plain)+n] }

// pendingBytes returns how much data the current batch has.
func (b *batcher) pendingBytes() int {
	if b.cur == nil {
		return 0
	}
	return len(b.cur.plain)
}

// addHole adds a range of zeros to the current batch, in which reserveRoom made room.
func (b *batcher) addHole(offset, length int64) {
	items := b.cur.items
	b.n++
	if n := len(items); n > 0 && items[n-1].kind == zeroItem && items[n-1].offset+items[n-1].length == offset {
		items[n-1].length += length
	} else {
		b.cur.items = append(items, item{kind: zeroItem, offset: offset, length: length})
	}
	b.pos = offset + length
}

// addPlaced adds a piece that is already on the remote.
func (b *batcher) addPlaced(ctx context.Context, p repo.Piece) error {
	if _, err := b.reserveRoom(ctx, 0); err != nil {
		return err
	}
	b.cur.items = append(b.cur.items, item{kind: placedItem, offset: p.Offset, length: p.Length, piece: p})
	b.n++
	b.pos = p.End()
	return nil
}

// passReplayed passes on the items that the journal has of [from, to).
func (b *batcher) passReplayed(ctx context.Context, from, to int64, items []item) error {
	if err := b.flushBatch(ctx, from); err != nil {
		return err
	}
	b.pos = to
	return b.passBatch(ctx, &batch{from: from, to: to, items: items, replayed: true})
}

// flushBatch passes the current batch on. Everything before to is in batches then.
func (b *batcher) flushBatch(ctx context.Context, to int64) error {
	c := b.cur
	if c == nil {
		b.pos = max(b.pos, to)
		return nil
	}
	b.cur, b.pos = nil, max(b.pos, to)
	c.to = b.pos
	return b.passBatch(ctx, c)
}

// passBatch sends a batch to the workers, if it has data, and to the sealer.
func (b *batcher) passBatch(ctx context.Context, c *batch) error {
	queues := []chan *batch{b.p.ordered}
	if c.buf != nil {
		queues = []chan *batch{b.p.work, b.p.ordered}
	}

	for _, q := range queues {
		select {
		case q <- c:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}

	return nil
}
