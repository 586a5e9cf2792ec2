package repo

import (
	"cmp"
	"encoding/binary"
	"slices"
)

// reader decodes a binary structure. After the first error every method returns zero values.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = damaged(format, args...)
	}
}

// uvarint reads a number of at most limit. It rejects longer forms than necessary, so
// that everything has exactly one encoding.
func (r *reader) uvarint(what string, limit uint64) uint64 {
	if r.err != nil {
		return 0
	}

	v, n := binary.Uvarint(r.b)
	switch {
	case n <= 0:
		r.fail("truncated in %s", what)
		return 0
	case n > 1 && r.b[n-1] == 0:
		r.fail("%s is not encoded in its shortest form", what)
		return 0
	case v > limit:
		r.fail("%s is %d, over the limit of %d", what, v, limit)
		return 0
	}

	r.b = r.b[n:]
	return v
}

// varint reads a signed number in its shortest form.
func (r *reader) varint(what string) int64 {
	u := r.uvarint(what, 1<<64-1)
	return int64(u>>1) ^ -int64(u&1)
}

// count reads the number of elements that follow, each of which takes at least size bytes.
func (r *reader) count(what string, size int) int {
	return int(r.uvarint("the number of "+what, uint64(len(r.b)/size)))
}

// nextBytes returns the next n bytes without copying them.
func (r *reader) nextBytes(what string, n int) []byte {
	if r.err == nil && n > len(r.b) {
		r.fail("truncated in %s", what)
	}
	if r.err != nil {
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) id(what string) (id ID) {
	copy(id[:], r.nextBytes(what, len(id)))
	return id
}

// finish returns the first error, or an error if bytes are left over.
func (r *reader) finish() error {
	if len(r.b) > 0 {
		r.fail("%d unexpected bytes at the end", len(r.b))
	}
	return r.err
}

// segmentTable numbers the segments that a structure refers to. Each is listed once,
// ordered by session and number.
type segmentTable struct {
	segments []Segment
	index    map[Segment]uint32
}

func compareSegments(a, b Segment) int {
	return cmp.Or(slices.Compare(a.Session[:], b.Session[:]), cmp.Compare(a.N, b.N))
}

func newSegmentTable(add func(yield func(Segment))) *segmentTable {
	t := &segmentTable{index: map[Segment]uint32{}}
	add(func(s Segment) {
		if _, known := t.index[s]; !known {
			t.index[s] = 0
			t.segments = append(t.segments, s)
		}
	})

	slices.SortFunc(t.segments, compareSegments)
	for i, s := range t.segments {
		t.index[s] = uint32(i)
	}

	return t
}

// appendTo encodes the table: for each session its ID, and the numbers as distances.
func (t *segmentTable) appendTo(b []byte) []byte {
	// Group the segments by session.
	var sessions [][]Segment
	for i := 0; i < len(t.segments); {
		j := i
		for j < len(t.segments) && t.segments[j].Session == t.segments[i].Session {
			j++
		}
		sessions = append(sessions, t.segments[i:j])
		i = j
	}

	b = binary.AppendUvarint(b, uint64(len(sessions)))
	for _, segments := range sessions {
		b = append(b, segments[0].Session[:]...)
		b = binary.AppendUvarint(b, uint64(len(segments)))
		next := uint64(0)
		for _, s := range segments {
			b = binary.AppendUvarint(b, uint64(s.N)-next)
			next = uint64(s.N) + 1
		}
	}

	return b
}

// segmentTable decodes a table of at most this many segments, in order.
func (r *reader) segmentTable(most int) []Segment {
	var all []Segment
	var last ID
	for i := range r.count("sessions", len(ID{})+2) {
		session := r.id("a session")
		if i > 0 && slices.Compare(last[:], session[:]) >= 0 {
			r.fail("the sessions are out of order")
		}

		last = session
		next := uint64(0)
		segments := r.count("segments", 1)
		if r.err == nil && (segments == 0 || segments > most-len(all)) {
			r.fail("a session lists %d segments", segments)
		}

		for range segments {
			n := next + r.uvarint("a segment", 1<<32-1)
			if n > 1<<32-1 {
				r.fail("segment number %d is out of range", n)
			}
			if r.err != nil {
				return nil
			}
			all = append(all, Segment{Session: session, N: uint32(n)})
			next = n + 1
		}
	}
	if r.err != nil {
		return nil
	}

	return all
}

// Limits of a frame.
const (
	maxFrames = 1 << 16 // in a segment
	minStored = tagSize + 1
)

// check reports an error if the fields of a frame, whose content may have up to limit bytes, are inconsistent.
func (f Frame) check(limit uint32) error {
	switch {
	case f.Index >= maxFrames:
		return damaged("frame index %d is out of range", f.Index)
	case f.Offset < headerSize || f.Offset > MaxSegment || f.Stored > MaxSegment || f.Offset+f.Stored > MaxSegment:
		return damaged("a frame lies outside the segment: offset %d, length %d", f.Offset, f.Stored)
	case f.Plain == 0 || f.Plain > limit:
		return damaged("a frame declares %d bytes of content", f.Plain)
	case f.Stored < minStored || f.Stored > f.Plain+tagSize:
		return damaged("a frame with %d bytes of content takes %d stored bytes", f.Plain, f.Stored)
	case f.Codec > Zstd:
		return damaged("a frame uses unknown compression %d", f.Codec)
	case f.Codec == Raw && f.Stored != f.Plain+tagSize:
		return damaged("an uncompressed frame with %d bytes of content takes %d stored bytes", f.Plain, f.Stored)
	case f.Codec == Zstd && f.Stored == f.Plain+tagSize:
		return damaged("a frame is compressed although that saves no space")
	}

	return nil
}

// compareFrames orders frames by segment and index.
func compareFrames(a, b Frame) int {
	return cmp.Or(compareSegments(a.Segment, b.Segment), cmp.Compare(a.Index, b.Index))
}

// appendFrames encodes frames, which must be in order and in segments of the table. Frames
// that follow each other in a segment take few bytes, because their distances are 0.
func (t *segmentTable) appendFrames(b []byte, frames []Frame) []byte {
	b = binary.AppendUvarint(b, uint64(len(frames)))
	segment, index, offset := uint64(0), uint64(0), uint64(headerSize)
	for _, f := range frames {
		s := uint64(t.index[f.Segment])
		b = binary.AppendUvarint(b, s-segment)
		if s != segment {
			segment, index, offset = s, 0, headerSize
		}
		b = binary.AppendUvarint(b, uint64(f.Index)-index)
		b = binary.AppendUvarint(b, uint64(f.Offset)-offset)
		b = binary.AppendUvarint(b, uint64(f.Plain)<<1|uint64(f.Codec))
		if f.Codec == Zstd {
			b = binary.AppendUvarint(b, uint64(f.Plain+tagSize-f.Stored)) // what packing saves
		}
		index, offset = uint64(f.Index)+1, uint64(f.Offset)+uint64(f.Stored)
	}

	return b
}

// frames decodes the output of appendFrames: in order, without overlaps. Each of the
// segments must contain at least one of them.
func (r *reader) frames(segments []Segment, limit uint32, most int) []Frame {
	count := r.count("frames", 4)
	if count > most {
		r.fail("%d frames are more than allowed", count)
	}
	if r.err != nil {
		return nil
	}

	frames := make([]Frame, 0, count)
	segment, index, offset := uint64(0), uint64(0), uint64(headerSize)
	for i := range count {
		// Decode the place: the same segment or the next one, then the distances.
		if step := r.uvarint("a frame's segment", 1); step != 0 {
			if i == 0 {
				r.fail("the first segment has no frames")
			}
			segment, index, offset = segment+step, 0, headerSize
		}

		index += r.uvarint("a frame's index", maxFrames)
		offset += r.uvarint("a frame's offset", MaxSegment)

		// Decode the lengths.
		packed := r.uvarint("a frame's length", 1<<33)
		f := Frame{Index: uint32(index), Offset: uint32(offset), Plain: uint32(packed >> 1), Codec: Codec(packed & 1)}
		if packed>>1 > uint64(limit) {
			r.fail("a frame declares %d bytes of content", packed>>1)
		}

		saved := uint64(0)
		if f.Codec == Zstd {
			saved = r.uvarint("a frame's stored length", uint64(f.Plain))
		}

		// Check what was decoded, before it is used as an index.
		f.Stored = uint32(uint64(f.Plain) + tagSize - saved)
		if r.err == nil && segment >= uint64(len(segments)) {
			r.fail("a frame names a segment that is not listed")
		}
		if r.err != nil {
			return nil
		}

		f.Segment = segments[segment]
		if err := f.check(limit); err != nil {
			r.fail("%v", err)
			return nil
		}

		frames = append(frames, f)
		index, offset = index+1, offset+uint64(f.Stored)
	}
	if r.err == nil && len(segments) > 0 && (count == 0 || segment != uint64(len(segments)-1)) {
		r.fail("a segment has no frames")
	}

	return frames
}
