package repo

import (
	"encoding/binary"
	"slices"
)

// checkPieces reports an error unless the pieces are valid, in order, and within [from, to).
func checkPieces(pieces []Piece, from, to int64) error {
	next := from
	for i, p := range pieces {
		switch {
		case p.Offset < next || p.Offset >= MaxVolumeBytes:
			return damaged("a piece at %d comes after one that ends at %d", p.Offset, next)
		case p.Offset%BlockBytes != 0:
			return damaged("a piece at %d is not aligned to %d bytes", p.Offset, BlockBytes)
		case p.Length <= 0 || p.Length > FrameBytes:
			return damaged("the piece at %d has %d bytes", p.Offset, p.Length)
		case p.Length%BlockBytes != 0 && i != len(pieces)-1:
			return damaged("the piece at %d has %d bytes, not a multiple of %d", p.Offset, p.Length, BlockBytes)
		case p.Offset >= to || p.End() > to:
			return damaged("the piece at %d is outside [%d, %d)", p.Offset, from, to)
		case int64(p.Within)+p.Length > int64(p.Frame.Plain):
			return damaged("the piece at %d extends past its frame", p.Offset)
		}

		if err := p.Frame.check(FrameBytes); err != nil {
			return err
		}

		next = p.End()
	}

	return nil
}

// appendPieces encodes the segments and frames that pieces are in, and the pieces, which must have been checked. from
// is the first offset of their range.
func appendPieces(b []byte, from int64, pieces []Piece) ([]byte, error) {
	table := newSegmentTable(func(yield func(Segment)) {
		for _, p := range pieces {
			yield(p.Frame.Segment)
		}
	})

	// Number the frames, in order of place.
	frames := make([]Frame, 0, len(pieces))
	for _, p := range pieces {
		frames = append(frames, p.Frame)
	}

	slices.SortFunc(frames, compareFrames)
	frames = slices.Compact(frames)
	number := make(map[Frame]uint64, len(frames))
	for i, f := range frames {
		if i > 0 && f.Segment == frames[i-1].Segment &&
			(f.Index == frames[i-1].Index || f.Offset < frames[i-1].Offset+frames[i-1].Stored) {
			return nil, badInput("", "", "frames %d and %d of segment %s overlap", frames[i-1].Index, f.Index, f.Segment)
		}
		number[f] = uint64(i)
	}

	b = table.appendTo(b)
	b = table.appendFrames(b, frames)

	// Write the pieces, each relative to the one before.
	b = binary.AppendUvarint(b, uint64(len(pieces)))
	next, expect := from, uint64(0)
	for _, p := range pieces {
		n := number[p.Frame]
		has := uint64(0)
		if p.Sum != (Sum{}) {
			has = 1
		}
		b = binary.AppendUvarint(b, uint64(p.Offset-next)/BlockBytes<<1|has)
		b = binary.AppendUvarint(b, uint64(p.Length))
		b = binary.AppendVarint(b, int64(n)-int64(expect))
		b = binary.AppendUvarint(b, uint64(p.Within))
		if has == 1 {
			b = append(b, p.Sum[:]...)
		}
		next, expect = p.End(), n+1
	}

	return b, nil
}

// pieces decodes the output of appendPieces: at most most pieces, in a range of blocks blocks that begins at from. The
// caller must check that they are in order and within the range.
func (r *reader) pieces(from int64, blocks uint64, most int) []Piece {
	// Decode segments and frames.
	frames := r.frames(r.segmentTable(most), FrameBytes, most)
	count := r.count("pieces", 4)
	if r.err == nil && count > most {
		r.fail("%d pieces are more than allowed", count)
	}
	if r.err != nil {
		return nil
	}

	// Decode the pieces, each relative to the one before.
	pieces := make([]Piece, 0, count)
	used := make([]bool, len(frames))
	next, expect := from, uint64(0)
	for range count {
		gap := r.uvarint("a piece's offset", blocks<<1|1)
		p := Piece{Offset: next + int64(gap>>1)*BlockBytes, Length: int64(r.uvarint("a piece's length", FrameBytes))}
		n := expect + uint64(r.varint("a piece's frame"))
		p.Within = uint32(r.uvarint("a piece's place in its frame", FrameBytes))
		if gap&1 == 1 {
			copy(p.Sum[:], r.nextBytes("a sum", SumBytes))
			if r.err == nil && p.Sum == (Sum{}) {
				r.fail("a sum is zero")
			}
		}
		if r.err == nil && n >= uint64(len(frames)) {
			r.fail("a piece names a frame that is not listed")
		}
		if r.err != nil {
			return nil
		}

		p.Frame = frames[n]
		used[n] = true
		pieces = append(pieces, p)
		next, expect = p.End(), n+1
	}

	if slices.Contains(used, false) {
		r.fail("a listed frame holds no piece")
	}

	return pieces
}
