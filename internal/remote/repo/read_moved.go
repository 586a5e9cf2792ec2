package repo

import (
	"cmp"
	"context"
	"crypto/cipher"
	"maps"
	"slices"
	"sync"

	"pando/internal/base/errs"
)

// moves caches tables, which never change, and indexes of packs. The zero value is empty.
type moves struct {
	mu             sync.Mutex
	tables         map[Table][]MovedPack
	places         map[Segment][]Place // the greatest first
	failed         error               // why one of the tables could not be read
	packs          map[Pack]*packIndex
	order          []Pack           // keys of packs in the order they were read
	damagedObjects map[string]error // damaged objects, though another copy had the requested data
}

// maxPackIndexes is the number of indexes of packs that are cached.
const maxPackIndexes = 32

// knownTable returns a table that was read before.
func (c *moves) knownTable(t Table) ([]MovedPack, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p, known := c.tables[t]
	return p, known
}

// setTables replaces the cached tables with those that exist now.
func (c *moves) setTables(m Moved) {
	places := map[Segment][]Place{}
	for _, packs := range m.Tables {
		for _, p := range packs {
			for _, s := range p.Segments {
				at := Place{p.Pack, p.Generation, p.Bytes, s.Bytes}
				if !slices.Contains(places[s.Segment], at) { // someone may have copied a table
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

// placesOf returns the packs that may hold the frames of a segment, the best first, and the error of a table that could
// not be read.
func (c *moves) placesOf(s Segment) ([]Place, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.places[s], c.failed
}

func (c *moves) knownIndex(p Pack) *packIndex {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.packs[p]
}

// keepIndex adds the index of a pack to the cache. It forgets the oldest one if there are too many.
func (c *moves) keepIndex(p Pack, x *packIndex) {
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

func (c *moves) forgetPack(p Pack) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.packs, p)
	c.order = slices.DeleteFunc(c.order, func(o Pack) bool { return o == p })
}

func (c *moves) forgetAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tables, c.places, c.packs, c.order = nil, nil, nil, nil
}

// noteDamage records damaged objects whose requested data was read from another copy.
func (c *moves) noteDamage(all map[string]error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.damagedObjects == nil {
		c.damagedObjects = map[string]error{}
	}
	maps.Copy(c.damagedObjects, all)
}

// Spoilt returns the segments and packs that were found to be damaged, with the error of each. All data requested from
// them could be read from another copy.
func (r *Repo) Spoilt() map[string]error {
	r.moves.mu.Lock()
	defer r.moves.mu.Unlock()
	return maps.Clone(r.moves.damagedObjects)
}

// isOriginal reports whether the place is the segment's own object, the least of its places.
func (p Place) isOriginal() bool { return p.Generation == 0 }

// objectKey returns the key of the object at a place of a segment.
func (p Place) objectKey(s Segment) string {
	if p.isOriginal() {
		return s.key()
	}
	return p.Pack.key()
}

// findFrames calls read with the places that may have frames of a segment, until one has them: the known packs, the
// greatest first, then the segment's own object. A missing pack was replaced by one that a table named first, so it
// reads the tables again as long as they name a place that was not tried. It continues after a damaged place, because
// there may be an older copy, and records the damage: see Spoilt.
//
// Damaged: no place has the frames, and one of them is damaged. NotFound: no place exists.
func (r *Repo) findFrames(ctx context.Context, s Segment, read func(Place) error) error {
	// Try the known places.
	x := &placeSearch{read: read, segment: s, bad: map[string]error{}}
	places, _ := r.moves.placesOf(s)
	if x.tryPlaces(places) || x.tryPlaces([]Place{{}}) {
		return x.finishSearch(r)
	}

	// Read the tables again, until they name nothing new.
	for {
		if _, err := r.readTables(ctx); err != nil {
			return err
		}

		places, failed := r.moves.placesOf(s)
		before := len(x.tried)
		switch {
		case x.tryPlaces(places):
			return x.finishSearch(r)
		case len(x.tried) > before:
		case x.damage != nil:
			return x.damage
		case failed != nil:
			return damaged("the segment is missing, or the table that says where it was moved is damaged: %v", failed)
		case before > 1:
			return errs.New(errs.NotFound, "", "", "pack %s, which holds its moved frames, is missing", x.pack)
		default:
			return x.missing
		}
	}
}

// placeSearch tries to read frames from one place after the other.
type placeSearch struct {
	read    func(Place) error
	segment Segment
	tried   []Place
	bad     map[string]error // damaged objects, by key
	damage  error            // the first error of these
	missing error            // the error about the segment's own object
	pack    Pack             // the first missing pack
	err     error            // an error that ends the search
}

// tryPlaces reads from the places that were not tried yet, and reports whether the search is over: one has the frames,
// or an error ended it.
func (x *placeSearch) tryPlaces(places []Place) bool {
	for _, p := range places {
		if slices.Contains(x.tried, p) {
			continue
		}

		x.tried = append(x.tried, p)
		err := x.read(p)
		switch {
		case errs.Is(err, errs.NotFound):
			if p.isOriginal() {
				x.missing = err
			} else if x.pack == (Pack{}) {
				x.pack = p.Pack
			}
		case unreadable(err):
			x.damage = cmp.Or(x.damage, err)
			x.bad[p.objectKey(x.segment)] = err
		default:
			x.err = err
			return true
		}
	}

	return false
}

// finishSearch returns the error that ended the search. If frames were found, it records the damaged objects.
func (x *placeSearch) finishSearch(r *Repo) error {
	if x.err == nil && len(x.bad) > 0 {
		r.moves.noteDamage(x.bad)
	}
	return x.err
}

// packIndex returns the index of a pack of size bytes, from the cache or the store.
func (r *Repo) packIndex(ctx context.Context, p Pack, size int64) (*packIndex, error) {
	if x := r.moves.knownIndex(p); x != nil {
		return x, nil
	}

	// Read a small pack whole, and keep it.
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
		r.moves.keepIndex(p, x)
		return x, nil
	}

	// Otherwise read the header and the end, and more of the end if the index is larger.
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

	r.moves.keepIndex(p, x)
	return x, nil
}

// smallPack is the size up to which a pack is read whole and cached: it may hold the frames of many segments, and
// reading those of each would take a request.
const smallPack = 1 << 20

// readStored reads [start, end) of a pack. The caller owns the bytes.
func (x *packIndex) readStored(ctx context.Context, r *Repo, p Pack, start, end uint32) ([]byte, error) {
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
		return nil, damaged("the object has %d bytes, so [%d, %d) cannot be read", info.Bytes, start, end)
	}
	return b, nil
}

// readPackTwice calls fn, which reads a pack, and calls it again if the pack is damaged. It adds the name of the pack
// to errors.
func (r *Repo) readPackTwice(p Place, fn func() error) error {
	err := fn()
	if errs.Is(err, errs.Damaged) {
		r.moves.forgetPack(p.Pack)
		err = fn()
	}
	return errs.Wrap("read pack", p.Pack.String(), err)
}

// readPacked reads frames of a segment that were moved to a pack, in the order of frames. Damaged: a prune dropped one
// of them.
func (r *Repo) readPacked(ctx context.Context, p Place, s Segment, frames []Frame) ([]FrameContent, error) {
	// Find the segment in the pack.
	x, err := r.packIndex(ctx, p.Pack, p.PackBytes)
	if err != nil {
		return nil, err
	}

	m := x.findSegment(s)
	if m == nil {
		return nil, damaged("the pack has no frames of segment %s", s)
	}

	// Find the frames, and the range that contains them.
	found := make([]*movedFrame, len(frames))
	start, end := uint32(MaxSegment), uint32(0)
	for i, f := range frames {
		at := m.findFrame(f.Index)
		switch {
		case f.Segment != s:
			return nil, badInput("read frames", s.String(), "a requested frame is in segment %s", f.Segment)
		case at == nil:
			return nil, damaged("a prune dropped frame %d of segment %s", f.Index, s)
		case at.Frame != f:
			return nil, damaged("frame %d of segment %s does not match its reference", f.Index, s)
		}
		found[i] = at
		start, end = min(start, at.at), max(end, at.at+at.stored)
	}

	// Read and decrypt them.
	b, err := x.readStored(ctx, r, p.Pack, start, end)
	if err != nil {
		return nil, err
	}

	aead, err := r.cipherFor(ctx, m.header, infoSegment)
	if err != nil {
		return nil, err
	}

	done := map[uint32]FrameContent{}
	out := make([]FrameContent, len(frames))
	for i, f := range found {
		c, again := done[f.Index] // decrypting in place has overwritten its bytes
		if !again {
			if c, err = openMoved(aead, x, r.id, f, b[f.at-start:][:f.stored:f.stored]); err != nil {
				return nil, err
			}
			done[f.Index] = c
		}
		out[i] = c
	}

	return out, ctx.Err()
}

// openMoved decrypts a frame with the key of its segment, or of the pack if it is partial.
func openMoved(segment cipher.AEAD, x *packIndex, repository ID, f *movedFrame, stored []byte) (FrameContent, error) {
	if f.part {
		segment = x.aead
	}
	return f.openContent(segment, repository, stored)
}

// ScanSegment reads a whole segment, checks its header and index, and calls fn for
// every frame, in order, with its content or an error (Damaged). The content is valid
// until fn returns; an error of fn ends the scan. Damaged: the segment cannot be read
// at all. NotFound, TooNew. A segment that was moved has only the frames that were
// needed then. A frame that is damaged in one copy is read from another, if there is
// one: see Spoilt.
func (r *Repo) ScanSegment(
	ctx context.Context,
	s Segment,
	fn func(f Frame, content FrameContent, err error) error,
) error {
	const op = "check segment"

	// Read the best copy.
	var scan *frameScan
	var at Place
	err := r.findFrames(ctx, s, func(p Place) (err error) {
		at = p
		if p.isOriginal() {
			scan, err = r.scanOwn(ctx, s)
		} else {
			scan, err = r.scanPacked(ctx, s, p)
		}
		return err
	})
	if err != nil {
		return errs.Wrap(op, s.String(), err)
	}

	// Decrypt its frames, damaged ones from other copies.
	for i := range scan.frames {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(op, s.String(), err)
		}

		f := &scan.frames[i]
		c, err := scan.open(f)
		if errs.Is(err, errs.Damaged) {
			c, err = r.readElsewhere(ctx, s, at, f.Frame, err)
		}
		if err != nil && !unreadable(err) {
			return errs.Wrap(op, s.String(), err)
		}

		if err := fn(f.Frame, c, errs.Wrap(op, s.String(), err)); err != nil {
			return err
		}
	}

	return nil
}

// frameScan holds the frames of a segment at one place.
type frameScan struct {
	frames []movedFrame
	open   func(*movedFrame) (FrameContent, error)
}

// scanOwn reads a segment's own object.
func (r *Repo) scanOwn(ctx context.Context, s Segment) (*frameScan, error) {
	x, err := r.openSegment(ctx, s)
	if err != nil {
		return nil, err
	}

	m := &x.segments[0]
	aead, err := r.cipherFor(ctx, m.header, infoSegment)
	if err != nil {
		return nil, err
	}

	return &frameScan{m.frames, func(f *movedFrame) (FrameContent, error) {
		return f.openContent(aead, r.id, x.object[f.at:f.at+f.stored:f.at+f.stored])
	}}, nil
}

// scanPacked reads the frames of a segment in a pack.
func (r *Repo) scanPacked(ctx context.Context, s Segment, p Place) (out *frameScan, err error) {
	err = r.readPackTwice(p, func() error {
		x, err := r.packIndex(ctx, p.Pack, p.PackBytes)
		if err != nil {
			return err
		}

		m := x.findSegment(s)
		if m == nil {
			return damaged("the pack has no frames of segment %s", s)
		}

		start, end := m.span()
		b, err := x.readStored(ctx, r, p.Pack, start, end)
		if err != nil {
			return err
		}

		aead, err := r.cipherFor(ctx, m.header, infoSegment)
		if err != nil {
			return err
		}

		out = &frameScan{m.frames, func(f *movedFrame) (FrameContent, error) {
			c, err := openMoved(aead, x, r.id, f, b[f.at-start:][:f.stored:f.stored])
			return c, errs.Wrap("read pack", p.Pack.String(), err)
		}}
		return nil
	})

	return out, err
}

// CheckPlace reads and authenticates all frames of a segment in a pack. NotFound, Damaged, TooNew.
func (r *Repo) CheckPlace(ctx context.Context, s Segment, p Place) error {
	const op = "check segment"
	scan, err := r.scanPacked(ctx, s, p)
	if err != nil {
		return errs.Wrap(op, s.String(), err)
	}
	for i := range scan.frames {
		if _, err := scan.open(&scan.frames[i]); err != nil {
			return errs.Wrap(op, s.String(), err)
		}
	}
	return nil
}

// readElsewhere reads a frame that is damaged at place not from another place. It returns damage if no other place has
// the frame.
func (r *Repo) readElsewhere(ctx context.Context, s Segment, not Place, f Frame, damage error) (FrameContent, error) {
	var out []FrameContent
	err := r.findFrames(ctx, s, func(p Place) (err error) {
		if p == not {
			return damage
		}
		out, err = r.readAt(ctx, p, s, []Frame{f})
		return err
	})

	switch {
	case unreadable(err):
		return FrameContent{}, damage
	case err != nil:
		return FrameContent{}, err
	}

	return out[0], nil
}

// PackShare returns how many bytes of a pack are needed. keep returns the blocks of a frame that are needed. NotFound,
// Damaged, TooNew.
func (r *Repo) PackShare(ctx context.Context, p PackState, keep func(Frame) BlockSet) (n int64, err error) {
	err = r.readPackTwice(Place{Pack: p.Pack}, func() error {
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
