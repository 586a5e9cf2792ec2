package replicate

import (
	"pando/internal/remote/repo"
)

// A map tells for every byte of a volume where it is on the remote: in a piece, or nowhere, which means zero. It is
// read and written part by part, so that neither memory nor the cost of a change grows with the volume.

// layer is a change of a range of a volume in a map: to a piece, or to zero.
type layer struct {
	Offset int64
	Length int64
	Piece  *repo.Piece // with the offset and length of the layer; nil: zero
}

func (l layer) end() int64 { return l.Offset + l.Length }

func zeroLayer(offset, length int64) layer { return layer{Offset: offset, Length: length} }

func pieceLayer(p repo.Piece) layer { return layer{Offset: p.Offset, Length: p.Length, Piece: &p} }

// cutPiece returns the part of a piece in [from, to), which must not be empty. A part has no Sum: its sum is unknown.
func cutPiece(p repo.Piece, from, to int64) repo.Piece {
	from, to = max(from, p.Offset), min(to, p.End())
	if from == p.Offset && to == p.End() {
		return p
	}
	p.Within += uint32(from - p.Offset)
	p.Offset, p.Length, p.Sum = from, to-from, repo.Sum{}
	return p
}

// overlayLayers applies changes to a map. Each argument is in order of offset and without overlaps, and so is the
// result. Pieces that a change covers in part are cut.
func overlayLayers(base []repo.Piece, over []layer) []repo.Piece {
	out := make([]repo.Piece, 0, len(base)+len(over))
	i := 0
	var rest repo.Piece // of base[i-1], after the last layer
	has := false        // rest is set
	next := func() (repo.Piece, bool) {
		if has {
			has = false
			return rest, true
		}
		if i < len(base) {
			i++
			return base[i-1], true
		}
		return repo.Piece{}, false
	}

	for _, l := range over {
		for {
			p, ok := next()
			if !ok {
				break
			}

			if p.End() <= l.Offset {
				out = append(out, p)
				continue
			}

			if p.Offset < l.Offset {
				out = append(out, cutPiece(p, p.Offset, l.Offset))
			}

			if p.End() > l.end() { // even if it begins after the layer
				rest, has = cutPiece(p, max(p.Offset, l.end()), p.End()), true
				break
			}
		}

		if l.Piece != nil && l.Length > 0 {
			out = append(out, *l.Piece)
		}
	}

	// Keep everything after the last layer.
	for {
		p, ok := next()
		if !ok {
			return out
		}
		out = append(out, p)
	}
}

// sameContent reports whether two pieces place the same bytes of the same frame at the same offset of the volume,
// wherever they begin and end.
func sameContent(a, b repo.Piece) bool {
	return a.Frame.Segment == b.Frame.Segment && a.Frame.Index == b.Frame.Index &&
		a.Offset-int64(a.Within) == b.Offset-int64(b.Within)
}

// changedLayers returns, in order of offset, what must be written to turn the content that old describes into that of
// now: pieces of now that are stored elsewhere in old, and zeros where only old has data. Both maps describe the same
// range of a volume.
//
// Equal content in another frame counts as changed, unless both pieces are whole and have the same sum.
func changedLayers(old, now []repo.Piece) []layer {
	var out []layer
	put := func(l layer) {
		if n := len(out); n > 0 && out[n-1].end() == l.Offset {
			last := &out[n-1]
			switch {
			case last.Piece == nil && l.Piece == nil:
				last.Length += l.Length
				return
			case last.Piece != nil && l.Piece != nil && sameContent(*last.Piece, *l.Piece):
				p := *last.Piece
				p.Length, p.Sum = p.Length+l.Length, repo.Sum{}
				*last = pieceLayer(p)
				return
			}
		}

		out = append(out, l)
	}

	// Walk both maps together.
	i, j := 0, 0
	at := int64(0) // everything before it is compared
	for i < len(old) || j < len(now) {
		var a, b *repo.Piece
		if i < len(old) {
			a = &old[i]
		}
		if j < len(now) {
			b = &now[j]
		}

		switch {
		case a != nil && a.End() <= at:
			i++
		case b != nil && b.End() <= at:
			j++
		case b == nil || a != nil && max(a.Offset, at) < max(b.Offset, at): // only old has data here
			from, to := max(a.Offset, at), a.End()
			if b != nil {
				to = min(to, b.Offset)
			}
			put(zeroLayer(from, to-from))
			at = to
		case a == nil || max(b.Offset, at) < max(a.Offset, at): // only now has data here
			from, to := max(b.Offset, at), b.End()
			if a != nil {
				to = min(to, a.Offset)
			}
			put(pieceLayer(cutPiece(*b, from, to)))
			at = to
		default: // both have data here
			from := max(a.Offset, b.Offset, at)
			to := min(a.End(), b.End())
			same := sameContent(*a, *b) ||
				a.Offset == b.Offset && a.Length == b.Length && a.Sum == b.Sum && a.Sum != repo.Sum{}
			if !same {
				put(pieceLayer(cutPiece(*b, from, to)))
			}
			at = to
		}
	}

	return out
}

// logicalBytes returns how many bytes of a volume pieces describe.
func logicalBytes(pieces []repo.Piece) (n int64) {
	for _, p := range pieces {
		n += p.Length
	}
	return n
}
