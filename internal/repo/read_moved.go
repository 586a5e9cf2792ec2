package repo

import (
	"context"
	"crypto/cipher"
	"slices"
	"sync"

	"pando/internal/errs"
)

// moves remembers tables, which are never replaced, and indexes of packs. The zero value is empty.
type moves struct {
	mu     sync.Mutex
	tables map[Table][]MovedPack
	places map[Segment][]Place // the greatest first
	failed error               // why a table could not be read
	packs  map[Pack]*packIndex
	order  []Pack // of packs, by when they were read
}

// maxPackIndexes is how many indexes of packs are kept.
const maxPackIndexes = 32

// table is a table that was read before.
func (c *moves) table(t Table) ([]MovedPack, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p, known := c.tables[t]
	return p, known
}

// set remembers the tables that there are now.
func (c *moves) set(m Moved) {
	places := map[Segment][]Place{}
	for _, packs := range m.Tables {
		for _, p := range packs {
			for _, s := range p.Segments {
				at := Place{p.Pack, p.Generation, p.Bytes, s.Bytes}
				if !slices.Contains(places[s.Segment], at) { // a table was copied into another
					places[s.Segment] = append(places[s.Segment], at)
				}
			}
		}
	}
	for _, all := range places {
		slices.SortFunc(all, func(a, b Place) int { return b.Compare(a) })
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tables, c.places, c.failed = m.Tables, places, nil
	for _, err := range m.Damaged {
		c.failed = err
	}
}

// of is where the frames of a segment may be, the best first.
func (c *moves) of(s Segment) ([]Place, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.places[s], c.failed
}

func (c *moves) index(p Pack) *packIndex {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.packs[p]
}

func (c *moves) keep(p Pack, x *packIndex) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.packs == nil {
		c.packs = map[Pack]*packIndex{}
	}
	if c.packs[p] != nil {
		return
	}
	if len(c.order) >= maxPackIndexes {
		delete(c.packs, c.order[0])
		c.order = c.order[1:]
	}
	c.packs[p], c.order = x, append(c.order, p)
}

func (c *moves) forget(p Pack) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.packs, p)
	c.order = slices.DeleteFunc(c.order, func(o Pack) bool { return o == p })
}

func (c *moves) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tables, c.places, c.packs, c.order = nil, nil, nil, nil
}

// findMoved calls read with the places where the frames of a segment may be, until one has them. First it tries the
// places that are known, then it reads the tables again: a pack may have been replaced. NotFound: none has them.
func (r *Repo) findMoved(ctx context.Context, s Segment, read func(Place) error) error {
	var tried []Place
	var failed error
	for _, fresh := range []bool{false, true} {
		if fresh {
			if _, err := r.readTables(ctx); err != nil {
				return err
			}
		}
		places, err := r.moves.of(s)
		failed = err
		for _, p := range places {
			if slices.Contains(tried, p) {
				continue
			}
			tried = append(tried, p)
			if err := read(p); !errs.Is(err, errs.NotFound) {
				return err
			}
		}
	}
	switch {
	case failed != nil:
		return damaged("it was moved, or is missing: %v", failed)
	case len(tried) > 0:
		return errs.New(errs.NotFound, "", "", "pack %s, which its frames were moved to, is missing", tried[0].Pack)
	}
	return errMissing
}

// errMissing is of a segment that is in no table.
var errMissing = errs.New(errs.NotFound, "", "", "it is missing")

// packIndex reads the index of a pack, which has so many bytes.
func (r *Repo) packIndex(ctx context.Context, p Pack, size int64) (*packIndex, error) {
	if x := r.moves.index(p); x != nil {
		return x, nil
	}
	if size <= smallPack {
		object, err := r.packRange(ctx, p, 0, size)
		if err != nil {
			return nil, err
		}
		x, _, err := r.parsePack(ctx, p, object, object, int(size))
		if err != nil {
			return nil, err
		}
		x.object = object
		r.moves.keep(p, x)
		return x, nil
	}
	const tailBytes = 128 << 10
	from := max(0, size-tailBytes)
	head, err := r.packRange(ctx, p, 0, headerSize)
	if err != nil {
		return nil, err
	}
	tail, err := r.packRange(ctx, p, from, size)
	if err != nil {
		return nil, err
	}
	x, need, err := r.parsePack(ctx, p, head, tail, int(size))
	if err == nil && need > 0 {
		if tail, err = r.packRange(ctx, p, size-int64(need), size); err != nil {
			return nil, err
		}
		x, _, err = r.parsePack(ctx, p, head, tail, int(size))
	}
	if err != nil {
		return nil, err
	}
	r.moves.keep(p, x)
	return x, nil
}

// smallPack is up to which size a pack is read whole, and kept, when something of it is wanted: it may hold what many
// segments had, each of which would take a request.
const smallPack = 1 << 20

// stored reads [start, end) of a pack. The caller owns the bytes.
func (x *packIndex) stored(ctx context.Context, r *Repo, p Pack, start, end uint32) ([]byte, error) {
	if x.object != nil {
		return slices.Clone(x.object[start:end]), nil
	}
	return r.packRange(ctx, p, int64(start), int64(end))
}

func (r *Repo) packRange(ctx context.Context, p Pack, start, end int64) ([]byte, error) {
	b, info, err := r.store.Get(ctx, p.key(), start, end-start)
	if err != nil {
		return nil, err
	}
	if int64(len(b)) != end-start {
		return nil, damaged("it has %d bytes; [%d, %d) was to be read", info.Bytes, start, end)
	}
	return b, nil
}

// inPack gives the errors of fn, which reads a pack, its name. What is damaged is read once more.
func (r *Repo) inPack(p Place, fn func() error) error {
	err := fn()
	if errs.Is(err, errs.Damaged) {
		r.moves.forget(p.Pack)
		err = fn()
	}
	return about("read pack", p.Pack.String(), err)
}

// readMoved reads frames of one segment from where they were moved to.
func (r *Repo) readMoved(ctx context.Context, s Segment, frames []Frame) (out []FrameContent, err error) {
	err = r.findMoved(ctx, s, func(p Place) error {
		return r.inPack(p, func() (err error) {
			out, err = r.readPacked(ctx, p, s, frames)
			return err
		})
	})
	return out, err
}

func (r *Repo) readPacked(ctx context.Context, p Place, s Segment, frames []Frame) ([]FrameContent, error) {
	x, err := r.packIndex(ctx, p.Pack, p.PackBytes)
	if err != nil {
		return nil, err
	}
	m := x.find(s)
	if m == nil {
		return nil, damaged("it has nothing of segment %s", s)
	}
	found := make([]*movedFrame, len(frames))
	start, end := uint32(MaxSegment), uint32(0)
	for i, f := range frames {
		at := m.find(f.Index)
		switch {
		case f.Segment != s:
			return nil, badInput("read frames", s.String(), "one is of segment %s", f.Segment)
		case at == nil:
			return nil, damaged("frame %d of segment %s was dropped by a prune", f.Index, s)
		case at.Frame != f:
			return nil, damaged("frame %d of segment %s is another one", f.Index, s)
		}
		found[i] = at
		start, end = min(start, at.at), max(end, at.at+at.stored)
	}
	b, err := x.stored(ctx, r, p.Pack, start, end)
	if err != nil {
		return nil, err
	}
	aead, err := r.cipher(ctx, m.header, infoSegment)
	if err != nil {
		return nil, err
	}
	done := map[uint32]FrameContent{}
	out := make([]FrameContent, len(frames))
	for i, f := range found {
		c, is := done[f.Index] // opening it in place has used it up
		if !is {
			if c, err = openMoved(aead, x, r.id, f, b[f.at-start:][:f.stored:f.stored]); err != nil {
				return nil, err
			}
			done[f.Index] = c
		}
		out[i] = c
	}
	return out, ctx.Err()
}

// openMoved opens a frame with the key of its segment, or of the pack.
func openMoved(segment cipher.AEAD, x *packIndex, repository ID, f *movedFrame, stored []byte) (FrameContent, error) {
	if f.part {
		segment = x.aead
	}
	return f.content(segment, repository, stored)
}

// statMoved describes a segment that was moved, as it was. A pack that is not as it was written does not count.
func (r *Repo) statMoved(ctx context.Context, s Segment) (SegmentState, error) {
	state := SegmentState{Segment: s}
	err := r.findMoved(ctx, s, func(p Place) error {
		o, err := r.store.Stat(ctx, p.Pack.key())
		if err == nil && o.Bytes != p.PackBytes {
			err = errs.New(errs.NotFound, "", "", "pack %s has %d bytes and should have %d", p.Pack, o.Bytes, p.PackBytes)
		}
		state.Bytes = p.Bytes
		return err
	})
	return state, err
}

// scanMoved is ScanSegment of a segment that was moved.
func (r *Repo) scanMoved(ctx context.Context, s Segment, fn func(Frame, FrameContent, error) error) error {
	var m *movedSegment
	var x *packIndex
	var b []byte
	var at Place
	err := r.findMoved(ctx, s, func(p Place) error {
		at = p
		return r.inPack(p, func() (err error) {
			if x, err = r.packIndex(ctx, p.Pack, p.PackBytes); err != nil {
				return err
			}
			if m = x.find(s); m == nil {
				return damaged("it has nothing of segment %s", s)
			}
			start, end := m.span()
			b, err = x.stored(ctx, r, p.Pack, start, end)
			return err
		})
	})
	if err != nil {
		return err
	}
	aead, err := r.cipher(ctx, m.header, infoSegment)
	if err != nil {
		return err
	}
	start, _ := m.span()
	for i := range m.frames {
		f := &m.frames[i]
		if err := ctx.Err(); err != nil {
			return err
		}
		c, err := openMoved(aead, x, r.id, f, b[f.at-start:][:f.stored:f.stored])
		if err != nil && !errs.Is(err, errs.Damaged) {
			return err
		}
		if err := fn(f.Frame, c, about("read pack", at.Pack.String(), err)); err != nil {
			return err
		}
	}
	return nil
}

// PackShare is how many bytes of a pack are needed: keep says which blocks of a frame are. NotFound, Damaged, TooNew.
func (r *Repo) PackShare(ctx context.Context, p PackState, keep func(Frame) BlockSet) (n int64, err error) {
	err = r.inPack(Place{Pack: p.Pack}, func() error {
		x, err := r.packIndex(ctx, p.Pack, p.Bytes)
		if err != nil {
			return err
		}
		n = 0
		for i := range x.segments {
			for j := range x.segments[i].frames {
				f := &x.segments[i].frames[j]
				blocks, total := keep(f.Frame), f.Blocks()
				has, need := int64(f.blocks.Count(total)), int64(blocks.Count(total))
				if need > 0 {
					n += FrameOverhead + (int64(f.stored)*min(need, has)+has-1)/has
				}
			}
		}
		return nil
	})
	return min(n+SegmentOverhead, p.Bytes), err
}
