package repo

import (
	"context"
	"crypto/cipher"
	"encoding/binary"
	"iter"
	"slices"

	"pando/internal/base/errs"
)

// A pack holds frames that were moved out of segments of which little was still needed. Maps and manifests still name
// the segments; tables of moved frames (see moved.go) tell which pack contains the frames of a segment. All needed
// frames of one segment are in one pack.
//
// A frame is moved as it is, under the key of its segment. A frame of which only some blocks are needed becomes
// *partial*: these blocks, one after the other, sealed under the key of the pack. Dropped blocks cannot be read any
// more: reading them returns an error, never zeros.

// Limits of packs.
const (
	maxPackIndex  = 8 << 20 // content of an index, before compression
	maxPackFrames = 1 << 18

	packSegmentLeast = 16 + 1 + 16 + saltSize + 2 // bytes of a segment's entry, without its frames
	packFootMagic    = "PNDOPEND"

	// A frame is moved as it is if at least 7 of 8 blocks are needed.
	verbatimShare = 8
)

// Pack names an object that holds moved frames: the N-th pack that a session wrote.
type Pack struct {
	Session ID
	N       uint32
}

// String returns "<session>/<n>".
func (p Pack) String() string { return Segment(p).String() }

func (p Pack) key() string { return packPrefix + p.String() }

// Compare orders packs by session and number.
func (p Pack) Compare(o Pack) int { return compareSegments(Segment(p), Segment(o)) }

// movedFrame is a frame in a pack.
type movedFrame struct {
	Frame           // as maps refer to it
	at     uint32   // offset in the pack
	stored uint32   // bytes in the pack
	number uint32   // position among all frames of the pack, from 0
	part   bool     // partial: the fields below apply
	codec  Codec    // of the stored bytes
	blocks BlockSet // blocks that were kept
}

// kept returns how many bytes of content a partial frame still has.
func (f *movedFrame) kept() (n int) {
	f.blocks.eachRun(int(f.Plain), func(from, to int) { n += to - from })
	return n
}

// movedSegment holds the frames of one segment in a pack.
type movedSegment struct {
	Segment
	header header // of the segment, which determines its key
	bytes  uint32 // size of the segment's original object
	frames []movedFrame
}

// findFrame returns the frame with an index; nil if the pack does not have it.
func (s *movedSegment) findFrame(index uint32) *movedFrame {
	i, ok := slices.BinarySearchFunc(s.frames, index, func(f movedFrame, i uint32) int { return int(f.Index) - int(i) })
	if !ok {
		return nil
	}
	return &s.frames[i]
}

// span returns the range of the pack that contains the frames.
func (s *movedSegment) span() (start, end uint32) {
	last := s.frames[len(s.frames)-1]
	return s.frames[0].at, last.at + last.stored
}

// packIndex is the index of a pack.
type packIndex struct {
	aead       cipher.AEAD // of partial frames
	generation uint64      // as in its table
	segments   []movedSegment
	object     []byte // the whole pack if it is small, otherwise nil
}

func (s movedSegment) compareSegment(to Segment) int { return compareSegments(s.Segment, to) }

func (x *packIndex) findSegment(s Segment) *movedSegment {
	i, ok := slices.BinarySearchFunc(x.segments, s, movedSegment.compareSegment)
	if !ok {
		return nil
	}
	return &x.segments[i]
}

// encode encodes the content of the index. The segments are in the order of their frames in the pack.
func (x *packIndex) encode() []byte {
	b := binary.AppendUvarint(nil, x.generation)
	b = binary.AppendUvarint(b, uint64(len(x.segments)))
	for _, s := range x.segments {
		b = append(b, s.Session[:]...)
		b = binary.AppendUvarint(b, uint64(s.N))
		b = append(b, s.header.key[:]...)
		b = append(b, s.header.salt[:]...)
		b = binary.AppendUvarint(b, uint64(s.bytes))
		b = binary.AppendUvarint(b, uint64(len(s.frames)))
		index, offset := uint64(0), uint64(headerSize)
		for _, f := range s.frames {
			b = binary.AppendUvarint(b, uint64(f.Index)-index)
			b = binary.AppendUvarint(b, uint64(f.Offset)-offset)
			b = appendLength(b, f.Plain, f.Stored, f.Codec)
			index, offset = uint64(f.Index)+1, uint64(f.Offset)+uint64(f.Stored)
			if !f.part {
				b = append(b, 0)
				continue
			}

			b = append(b, 1)
			for _, w := range f.blocks {
				b = binary.LittleEndian.AppendUint64(b, w)
			}

			b = append(b, byte(f.codec))
			if f.codec == Zstd {
				b = binary.AppendUvarint(b, uint64(f.kept()+tagSize-int(f.stored)))
			}
		}
	}

	return b
}

// appendLength encodes the length of a frame's content, and its stored length.
func appendLength(b []byte, plain, stored uint32, codec Codec) []byte {
	b = binary.AppendUvarint(b, uint64(plain)<<1|uint64(codec))
	if codec == Zstd {
		b = binary.AppendUvarint(b, uint64(plain+tagSize-stored))
	}
	return b
}

// decodePackIndex decodes the output of encode, for a pack whose frames end at end.
func decodePackIndex(b []byte, end uint32) (*packIndex, error) {
	r := &reader{b: b}
	generation := r.uvarint("a generation", maxGeneration)
	if r.err == nil && generation == 0 {
		r.fail("generation number is 0")
	}

	segments := r.count("segments", packSegmentLeast)
	if r.err == nil && segments == 0 {
		r.fail("the pack lists no segments")
	}
	if r.err != nil {
		return nil, r.err
	}

	out := make([]movedSegment, 0, segments)
	at, number := uint32(headerSize), uint32(0)
	for range segments {
		// Decode the segment: its name, key and size.
		s := Segment{Session: r.id("a session"), N: uint32(r.uvarint("a segment", 1<<32-1))}
		m := movedSegment{Segment: s}
		m.header.key = r.id("a key")
		copy(m.header.salt[:], r.nextBytes("a salt", saltSize))
		m.bytes = uint32(r.uvarint("the bytes of a segment", MaxSegment))
		count := r.count("frames", 4)
		if r.err == nil && (count == 0 || count > maxPackFrames-int(number)) {
			r.fail("a segment declares %d frames", count)
		}
		if r.err != nil {
			return nil, r.err
		}

		// Decode its frames, which follow each other in the pack.
		m.frames = make([]movedFrame, 0, count)
		index, offset := uint64(0), uint64(headerSize)
		for range count {
			f := r.movedFrame(s, index, offset)
			f.at, f.number = at, number
			if r.err == nil && (f.stored > end || at > end-f.stored) {
				r.fail("the frames extend past offset %d", end)
			}
			if r.err != nil {
				return nil, r.err
			}
			m.frames = append(m.frames, f)
			index, offset = uint64(f.Index)+1, uint64(f.Offset)+uint64(f.Stored)
			at, number = at+f.stored, number+1
		}

		out = append(out, m)
	}

	if at != end {
		r.fail("the frames end at offset %d, expected %d", at, end)
	}

	// Order the segments for findSegment, and check that none is listed twice.
	slices.SortFunc(out, func(a, b movedSegment) int { return compareSegments(a.Segment, b.Segment) })
	for i := range out {
		if i > 0 && out[i].Segment == out[i-1].Segment {
			r.fail("segment %s is listed twice", out[i].Segment)
		}
	}

	return &packIndex{generation: generation, segments: out}, r.finish()
}

// movedFrame decodes one frame, whose index and offset are at least index and offset.
func (r *reader) movedFrame(s Segment, index, offset uint64) (f movedFrame) {
	// Decode the frame as maps refer to it.
	index += r.uvarint("a frame's index", maxFrames)
	offset += r.uvarint("a frame's offset", MaxSegment)
	f.Frame = Frame{Segment: s, Index: uint32(index), Offset: uint32(offset)}
	f.Plain, f.Stored, f.Codec = r.length(FrameBytes)
	f.stored, f.codec, f.blocks = f.Stored, f.Codec, AllBlocks
	if r.err == nil {
		if err := f.check(FrameBytes); err != nil {
			r.fail("%v", err)
		}
	}

	switch r.uvarint("whether a frame is partial", 1) {
	case 0:
		return f
	case 1:
		f.part = true
	}

	// Decode the blocks that a partial frame kept, and the length that they take.
	for i := range f.blocks {
		if w := r.nextBytes("the blocks of a frame", 8); w != nil {
			f.blocks[i] = binary.LittleEndian.Uint64(w)
		}
	}

	f.codec = Codec(r.uvarint("a codec", uint64(Zstd)))
	if r.err != nil {
		return f
	}

	total := f.Blocks()
	if n := f.blocks.Count(total); n == 0 || n == total || f.blocks.Count(frameBlocks) != n {
		r.fail("a partial frame declares %d of %d blocks", n, total)
		return f
	}

	kept, saved := f.kept(), 0
	if f.codec == Zstd {
		saved = int(r.uvarint("a frame's stored length", uint64(kept-1)))
		if saved == 0 {
			r.fail("a frame is compressed although that saves no space")
		}
	}

	f.stored = uint32(kept + tagSize - saved)
	return f
}

// length decodes the output of appendLength.
func (r *reader) length(limit uint32) (plain, stored uint32, codec Codec) {
	packed := r.uvarint("a frame's length", uint64(limit)<<1|1)
	plain, codec = uint32(packed>>1), Codec(packed&1)
	saved := uint64(0)
	if codec == Zstd {
		saved = r.uvarint("a frame's stored length", uint64(plain))
	}
	return plain, uint32(uint64(plain) + tagSize - saved), codec
}

// partAAD returns the associated data of a partial frame: the frame, and the blocks that were kept.
func partAAD(repository ID, f *movedFrame) []byte {
	b := frameAAD(repository, f.Segment, f.Index, f.Plain, f.Codec)
	for _, w := range f.blocks {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return append(b, byte(f.codec))
}

// openContent decrypts a moved frame. aead is the cipher of its segment, or of the pack if the frame is partial. It
// overwrites stored.
func (f *movedFrame) openContent(aead cipher.AEAD, repository ID, stored []byte) (FrameContent, error) {
	if !f.part {
		b, err := openFrame(aead, repository, f.Frame, stored)
		return FrameContent{Frame: f.Frame, bytes: b, blocks: AllBlocks}, err
	}

	packed, err := aead.Open(stored[:0], frameNonce(f.number), stored, partAAD(repository, f))
	if err != nil {
		return FrameContent{}, damaged("frame %d failed authentication: the content is not what was written", f.Index)
	}

	kept, err := unpack(f.codec, packed, uint32(f.kept()))
	if err != nil {
		return FrameContent{}, damaged("frame %d: %v", f.Index, err)
	}

	b := make([]byte, f.Plain)
	f.blocks.eachRun(len(b), func(from, to int) {
		copy(b[from:to], kept)
		kept = kept[to-from:]
	})
	return FrameContent{Frame: f.Frame, bytes: b, blocks: f.blocks}, nil
}

// FrameContent is the content of a frame, from which a prune may have dropped blocks.
type FrameContent struct {
	Frame  Frame
	bytes  []byte   // Frame.Plain bytes, with zeros in place of dropped blocks
	blocks BlockSet // blocks that were kept
}

// Part returns a part of the content. Damaged: the frame is too short, or a prune dropped blocks of that part, because
// nothing needed them.
func (c FrameContent) Part(within uint32, length int64) ([]byte, error) {
	end := int64(within) + length
	switch {
	case length < 0 || end > int64(len(c.bytes)):
		return nil, damaged("cannot read %d bytes at offset %d of frame %d, which has %d bytes",
			length, within, c.Frame.Index, len(c.bytes))
	case !c.blocks.covers(int64(within), end):
		return nil, damaged("a prune dropped %d bytes at offset %d of frame %d", length, within, c.Frame.Index)
	}
	return c.bytes[within:end:end], nil
}

// Whole returns the whole content. Damaged: a prune dropped some of it.
func (c FrameContent) Whole() ([]byte, error) {
	if !c.blocks.covers(0, int64(min(len(c.bytes), FrameBytes))) {
		return nil, damaged("a prune dropped a part of frame %d", c.Frame.Index)
	}
	return c.bytes, nil
}

// parsePack decodes the footer and the index of a pack of size bytes. head is the beginning of the object and tail its
// end; each may be the whole object. need > 0: tail must have at least need bytes.
func (r *Repo) parsePack(ctx context.Context, p Pack, head, tail []byte, size int) (x *packIndex, need int, err error) {
	h, err := parseHeader(head, typePack)
	if err != nil {
		return nil, 0, err
	}
	if size > MaxSegment || len(tail) < footerSize || string(tail[len(tail)-8:]) != packFootMagic {
		return nil, 0, damaged("the footer is not that of a pack")
	}

	// Decode the footer.
	foot := tail[len(tail)-footerSize:]
	at, length := uint64(binary.LittleEndian.Uint32(foot)), uint64(binary.LittleEndian.Uint32(foot[4:]))
	if at < headerSize || length < tagSize+metaSize || length > maxPackIndex+tagSize+metaSize ||
		at+length+footerSize != uint64(size) {
		return nil, 0, damaged("the footer places the index at offset %d, length %d, in an object of %d bytes",
			at, length, size)
	}

	if n := int(length) + footerSize; n > len(tail) {
		return nil, n, nil
	}

	aead, err := r.cipherFor(ctx, h, infoPack)
	if err != nil {
		return nil, 0, err
	}

	// Decrypt and decode the index.
	sealed := tail[len(tail)-footerSize-int(length) : len(tail)-footerSize]
	plain, err := aead.Open(nil, indexNonce, sealed, metaAAD(head[:headerSize], r.id, p.key()))
	if err != nil {
		return nil, 0, damaged("the index failed authentication: it is not what was written")
	}

	content, err := openContent(plain, maxPackIndex)
	if err != nil {
		return nil, 0, err
	}

	if x, err = decodePackIndex(content, uint32(at)); err != nil {
		return nil, 0, err
	}

	x.aead = aead
	return x, 0, nil
}

// PackState is an entry of a listing of packs.
type PackState struct {
	Pack
	Bytes int64
}

// Packs yields all packs in the order of their keys. An error ends it.
func (r *Repo) Packs(ctx context.Context) iter.Seq2[PackState, error] {
	return listSegments(ctx, r, "list the packs in", packPrefix, func(s Segment, bytes int64) PackState {
		return PackState{Pack(s), bytes}
	})
}

// PutPack writes the object that [PackWriter.Finish] returned. Exists: a pack with this number exists. Durable on
// return.
func (r *Repo) PutPack(ctx context.Context, p Pack, object []byte) error {
	if len(object) <= headerSize+footerSize || len(object) > MaxSegment {
		return badInput("write pack", p.String(), "size of %d bytes is out of range", len(object))
	}
	return errs.Wrap("write pack", p.String(), r.putIfAbsent(ctx, p.key(), object))
}

// CheckPack checks that a pack exists with the size that its table records. NotFound otherwise.
func (r *Repo) CheckPack(ctx context.Context, m MovedPack) error {
	const op = "check pack"
	o, err := r.store.Stat(ctx, m.Pack.key())
	if err == nil && o.Bytes != m.Bytes {
		err = errs.New(errs.NotFound, "", "", "found %d bytes, expected %d", o.Bytes, m.Bytes)
	}
	return errs.Wrap(op, m.Pack.String(), err)
}

// DeletePack removes a pack that nothing reads any more. Absent is success. Durable on return.
func (r *Repo) DeletePack(ctx context.Context, p Pack) error {
	r.moves.forgetPack(p)
	return errs.Wrap("delete pack", p.String(), r.store.Delete(ctx, p.key()))
}

// errPackFull is the error for a frame that does not fit into a pack.
var errPackFull = errs.New(errs.Invalid, "add to pack", "", "the pack is full")
