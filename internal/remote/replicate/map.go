package replicate

import (
	"cmp"
	"context"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// A map tells for every byte of a volume where it is on the remote: in a piece, or nowhere, which means zero. It is
// read and written region by region, so that neither memory nor the cost of a change grows with the volume.

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

// regionStart returns the offset at which a region begins.
func regionStart(region uint32) int64 { return int64(region) * repo.RegionBytes }

// regionEnd returns the offset at which a region of a volume of size bytes ends.
func regionEnd(region uint32, size int64) int64 {
	return min(regionStart(region)+repo.RegionBytes, size)
}

// findPage returns the page of a region. A region without data has none.
func findPage(m *repo.Manifest, region uint32) (repo.Page, bool) {
	i, ok := slices.BinarySearchFunc(m.Pages, region, func(p repo.Page, r uint32) int { return cmp.Compare(p.Region, r) })
	if !ok {
		return repo.Page{}, false
	}
	return m.Pages[i], true
}

// readRegion reads the pieces of one region, none if it has no data, and checks that they lie within the volume.
// Errors: Damaged, NotFound (the segment does not exist).
func readRegion(ctx context.Context, r *repo.Repo, m *repo.Manifest, region uint32) ([]repo.Piece, error) {
	page, ok := findPage(m, region)
	if !ok {
		return nil, nil
	}

	pieces, err := r.ReadPage(ctx, page)
	if err != nil {
		return nil, err
	}

	if n := len(pieces); n > 0 && (pieces[0].Offset < regionStart(region) ||
		pieces[n-1].End() > regionEnd(region, m.SizeBytes)) {
		return nil, errs.New(errs.Damaged, "read map", m.Volume+"@"+m.Point,
			"the page of region %d describes bytes outside that region", region)
	}

	return pieces, nil
}

// regionPieces reads the pieces of one region of a map of either version; nil is a volume of zeros.
func regionPieces(
	ctx context.Context,
	r *repo.Repo,
	nodes readNodes,
	m *repo.Manifest,
	region uint32,
) ([]repo.Piece, error) {
	switch {
	case m == nil:
		return nil, nil
	case m.Version < 2:
		return readRegion(ctx, r, m, region)
	}
	pieces, err := piecesBetween(ctx, nodes, m, regionStart(region), regionStart(region+1))
	if n := len(pieces); err == nil && n > 0 && pieces[n-1].End() > m.SizeBytes {
		err = errs.New(errs.Damaged, "read map", m.Volume+"@"+m.Point, "the map describes bytes beyond the end of the volume")
	}
	return pieces, err
}

// differentRegions lists, in order, the regions whose pages are stored in different frames in two manifests. In all
// other regions the volumes are equal. A nil manifest is a volume of zeros.
func differentRegions(a, b *repo.Manifest) []uint32 {
	var out []uint32
	pages := func(m *repo.Manifest) []repo.Page {
		if m == nil {
			return nil
		}
		return m.Pages
	}

	x, y := pages(a), pages(b)
	for len(x) > 0 || len(y) > 0 {
		switch {
		case len(y) == 0 || len(x) > 0 && x[0].Region < y[0].Region:
			out, x = append(out, x[0].Region), x[1:]
		case len(x) == 0 || y[0].Region < x[0].Region:
			out, y = append(out, y[0].Region), y[1:]
		default:
			if x[0].Frame != y[0].Frame {
				out = append(out, x[0].Region)
			}
			x, y = x[1:], y[1:]
		}
	}

	return out
}

// A manifest's Uses are additive by page, so that an increment computes them without reading the pages that it keeps.
// Uses[s] is the sum, over all pages of the manifest, of the stored bytes of the page's own frame, if it is in s, and
// of those frames in s that its pieces refer to, each counted once per page; and over the frames of a stream. A segment
// is in Uses if and only if that sum is not 0.

// pageUses adds to uses the bytes that one page with its pieces needs, multiplied by sign.
func pageUses(uses map[repo.Segment]int64, sign int64, page repo.Page, pieces []repo.Piece) {
	uses[page.Frame.Segment] += sign * int64(page.Frame.Stored)
	type frame struct {
		s repo.Segment
		i uint32
	}
	seen := make(map[frame]struct{}, len(pieces))
	for _, p := range pieces {
		f := frame{p.Frame.Segment, p.Frame.Index}
		if _, is := seen[f]; is {
			continue
		}
		seen[f] = struct{}{}
		uses[f.s] += sign * int64(p.Frame.Stored)
	}
}

// pageLogical returns how many bytes the pieces of a page describe.
func pageLogical(pieces []repo.Piece) (n int64) {
	for _, p := range pieces {
		n += p.Length
	}
	return n
}

// usesOf lists uses in order of segment. Errors: Damaged if one is negative, because then the manifest of the base did
// not list everything it needs.
func usesOf(uses map[repo.Segment]int64) ([]repo.Use, error) {
	out := make([]repo.Use, 0, len(uses))
	for s, n := range uses {
		if n < 0 {
			return nil, errs.New(errs.Damaged, "merge maps", "", "the manifest of the base counts segment %s incorrectly", s)
		}
		if n > 0 {
			out = append(out, repo.Use{Segment: s, Bytes: n})
		}
	}

	slices.SortFunc(out, func(a, b repo.Use) int {
		if c := slices.Compare(a.Segment.Session[:], b.Segment.Session[:]); c != 0 {
			return c
		}
		return cmp.Compare(a.Segment.N, b.Segment.N)
	})

	return out, nil
}

// useMap is the inverse of usesOf.
func useMap(uses []repo.Use) map[repo.Segment]int64 {
	out := make(map[repo.Segment]int64, len(uses))
	for _, u := range uses {
		out[u.Segment] += u.Bytes
	}
	return out
}
