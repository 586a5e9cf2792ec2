package repo

import (
	"context"
	"crypto/cipher"
	"encoding/binary"
	"slices"

	"pando/internal/base/errs"
)

// Source is a segment or a pack that was read whole, to move frames out of it. Each frame is authenticated when it is
// moved.
type Source struct {
	repo     *Repo
	object   []byte
	pack     cipher.AEAD // of partial frames; nil for a segment
	segments []movedSegment
}

// SourceSegment lists the frames of one segment in a source.
type SourceSegment struct {
	Segment Segment
	Bytes   uint32  // size of the segment's original object
	Frames  []Frame // ordered by index
}

// Segments returns the segments that the source has frames of, in order.
func (s *Source) Segments() []SourceSegment {
	out := make([]SourceSegment, 0, len(s.segments))
	for _, m := range s.segments {
		x := SourceSegment{Segment: m.Segment, Bytes: m.bytes}
		for _, f := range m.frames {
			x.Frames = append(x.Frames, f.Frame)
		}
		out = append(out, x)
	}
	return out
}

// OpenSegment reads a segment whole. NotFound, Damaged, TooNew.
func (r *Repo) OpenSegment(ctx context.Context, s Segment) (*Source, error) {
	x, err := r.openSegment(ctx, s)
	return x, errs.Wrap("read segment", s.String(), err)
}

// openSegment reads a segment, as a source of frames to move.
func (r *Repo) openSegment(ctx context.Context, s Segment) (*Source, error) {
	object, _, err := r.store.Get(ctx, s.key(), 0, MaxSegment+1)
	if err != nil {
		return nil, err
	}

	h, _, frames, err := r.openFrames(ctx, s, object)
	if err != nil {
		return nil, err
	}

	m := movedSegment{Segment: s, header: h, bytes: uint32(len(object))}
	for _, f := range frames {
		m.frames = append(m.frames, movedFrame{Frame: f, at: f.Offset, stored: f.Stored, codec: f.Codec, blocks: AllBlocks})
	}

	return &Source{repo: r, object: object, segments: []movedSegment{m}}, nil
}

// OpenPack reads a pack whole. NotFound, Damaged, TooNew.
func (r *Repo) OpenPack(ctx context.Context, p Pack) (*Source, error) {
	object, _, err := r.store.Get(ctx, p.key(), 0, MaxSegment+1)
	if err != nil {
		return nil, errs.Wrap("read pack", p.String(), err)
	}
	x, _, err := r.parsePack(ctx, p, object, object, len(object))
	if err != nil {
		return nil, errs.Wrap("read pack", p.String(), err)
	}
	return &Source{repo: r, object: object, pack: x.aead, segments: x.segments}, nil
}

// storedBytes returns a copy of the stored bytes of a frame.
func (s *Source) storedBytes(f *movedFrame) []byte {
	return slices.Clone(s.object[f.at : f.at+f.stored])
}

// PackWriter collects moved frames into one pack, in memory. It is for one goroutine.
type PackWriter struct {
	repo  *Repo
	pack  Pack
	aead  cipher.AEAD
	b     []byte
	index packIndex
	room  int // upper bound of the size of the index, before compression
	n     uint32
	added map[Segment]bool
}

// NewPack begins the n-th pack of a session.
func (r *Repo) NewPack(session ID, n uint32) (*PackWriter, error) {
	h, aead, err := r.newSealingCipher(infoPack)
	if err != nil {
		return nil, err
	}
	w := &PackWriter{repo: r, pack: Pack{session, n}, aead: aead, added: map[Segment]bool{}}
	w.b = h.appendTo(make([]byte, 0, firstRoom), typePack)
	return w, nil
}

// Pack returns the name of the pack.
func (w *PackWriter) Pack() Pack { return w.pack }

// Bytes returns an upper bound of the size of the object if it were finished now.
func (w *PackWriter) Bytes() int { return len(w.b) + w.room + metaSize + tagSize + footerSize }

// Upper bounds of the sizes of entries in the index.
const (
	packSegmentRoom = 16 + 16 + saltSize + 20
	packFrameRoom   = 25 + 1 + 16 + 6
)

// Add copies the needed frames of one segment from a source. keep returns the blocks of a frame that are needed; frames
// without any are skipped. Every frame is authenticated first. False: nothing was copied, because the frames do not fit
// or none is needed. Damaged: a frame fails authentication, or a prune dropped blocks that are needed.
func (w *PackWriter) Add(src *Source, s Segment, keep func(Frame) BlockSet) (bool, error) {
	const op = "move frames of segment"

	// Find the segment in the source.
	i, ok := slices.BinarySearchFunc(src.segments, s, movedSegment.compareSegment)
	if !ok {
		return false, badInput(op, s.String(), "the source has no frames of this segment")
	}

	from := src.segments[i]
	if w.added[s] {
		return false, badInput(op, s.String(), "the segment was already added")
	}

	aead, err := w.repo.cipherFor(context.Background(), from.header, infoSegment)
	if err != nil {
		return false, errs.Wrap(op, s.String(), err)
	}

	// Copy its frames. If they do not all fit, take back those that were copied.
	was, room, n := len(w.b), w.room, w.n
	to := movedSegment{Segment: s, header: from.header, bytes: from.bytes}
	w.room += packSegmentRoom
	for j := range from.frames {
		f := &from.frames[j]
		blocks := keep(f.Frame)
		if blocks.Count(f.Blocks()) == 0 {
			continue
		}

		moved, err := w.moveFrame(src, f, aead, blocks)
		if err != nil {
			w.b, w.room, w.n = w.b[:was], room, n
			if errs.Is(err, errs.Invalid) {
				return false, nil
			}
			return false, errs.Wrap(op, s.String(), err)
		}

		to.frames = append(to.frames, moved)
	}

	if len(to.frames) == 0 {
		w.room = room
		return false, nil
	}

	// Record the segment in the index.
	w.index.segments = append(w.index.segments, to)
	w.added[s] = true
	return true, nil
}

// moveFrame copies one frame. errPackFull: it does not fit.
func (w *PackWriter) moveFrame(src *Source, f *movedFrame, aead cipher.AEAD, blocks BlockSet) (movedFrame, error) {
	total := f.Blocks()
	if !blocks.isSubsetOf(&f.blocks, total) {
		return movedFrame{}, damaged("frame %d is incomplete: a prune dropped blocks that are still needed", f.Index)
	}
	if f.part {
		aead = src.pack
	}

	// Authenticate and decrypt the frame.
	to := *f
	to.at, to.number = uint32(len(w.b)), w.n
	stored := src.storedBytes(f)
	c, err := f.openContent(aead, w.repo.id, slices.Clone(stored))
	if err != nil {
		return movedFrame{}, err
	}

	// Copy it as it is if nearly all blocks are needed, otherwise only the blocks that are.
	verbatim := !f.part && blocks.Count(total)*verbatimShare >= total*(verbatimShare-1)
	if !verbatim {
		to.part = true
		for i := range to.blocks {
			to.blocks[i] = blocks.maskedWord(i, total)
		}
		var kept []byte
		to.blocks.eachRun(len(c.bytes), func(from, end int) { kept = append(kept, c.bytes[from:end]...) })
		packed, codec := w.repo.env.pack(nil, kept)
		to.codec, to.stored = codec, uint32(len(packed)+tagSize)
		stored = packed
	}

	// Append it, if it fits.
	if w.n >= maxPackFrames || w.room+packFrameRoom > maxPackIndex || w.Bytes()+int(to.stored)+packFrameRoom > MaxSegment {
		return movedFrame{}, errPackFull
	}

	if verbatim {
		w.b = append(w.b, stored...)
	} else {
		w.b = w.aead.Seal(w.b, frameNonce(to.number), stored, partAAD(w.repo.id, &to))
	}

	w.n++
	w.room += packFrameRoom
	return to, nil
}

// Segments returns the segments that have frames in the pack, with the sizes of their original objects.
func (w *PackWriter) Segments() []SegmentState {
	var out []SegmentState
	for _, s := range w.index.segments {
		out = append(out, SegmentState{Segment: s.Segment, Bytes: int64(s.bytes)})
	}
	slices.SortFunc(out, func(a, b SegmentState) int { return compareSegments(a.Segment, b.Segment) })
	return out
}

// Finish returns the object of the pack, with a generation, for [Repo.PutPack]. Nil if nothing was added.
func (w *PackWriter) Finish(generation uint64) ([]byte, error) {
	const op = "finish pack"
	if generation == 0 || generation > maxGeneration {
		return nil, badInput(op, w.pack.String(), "generation %d is out of range", generation)
	}
	if len(w.index.segments) == 0 {
		return nil, nil
	}

	w.index.generation = generation
	content := w.index.encode()
	if len(content) > maxPackIndex {
		return nil, badInput(op, w.pack.String(), "the index takes %d bytes, which is too large", len(content))
	}

	// Seal the index.
	packed, codec := w.repo.env.pack(nil, content)
	plain := make([]byte, 0, metaSize+len(packed))
	plain = append(plain, byte(codec))
	plain = binary.LittleEndian.AppendUint32(plain, uint32(len(content)))
	plain = append(plain, packed...)
	at := len(w.b)
	b := w.aead.Seal(w.b, indexNonce, plain, metaAAD(w.b[:headerSize], w.repo.id, w.pack.key()))

	// Write the footer.
	sealed := len(b) - at
	b = binary.LittleEndian.AppendUint32(b, uint32(at))
	b = binary.LittleEndian.AppendUint32(b, uint32(sealed))
	b = append(b, packFootMagic...)
	w.b = nil
	return b, nil
}
