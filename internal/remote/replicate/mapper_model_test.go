package replicate

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// mapModel says of each block of a volume which block of which frame it is. Blocks that it does not have are zero.
type mapModel map[int64]where

// mapperModel is a volume whose map changes, in memory.
type mapperModel struct {
	t     *testing.T
	rnd   *rand.Rand
	nodes *nodeStore
	mark  uint32
	now   *repo.Manifest // nil: nothing yet
	model mapModel
}

// TestMapperModel: whatever is written, discarded, grown and cut, merged into a map or compared with it, the
// new map says of each block what was said last.
func TestMapperModel(t *testing.T) {
	rnd := faulttest.Rand(t)
	for range 150 {
		x := &mapperModel{t: t, rnd: rnd, nodes: newNodeStore(t), model: mapModel{}}
		for range 6 {
			x.round()
		}
	}
}

// sizes are in blocks: of some blocks, of some cells, beside 1 GiB, and large.
func (x *mapperModel) size() int64 {
	all := []int64{1, 3, 127, 128, 129, 4096, 20_000, 1 << 18, 1<<18 + 1, 600_000, 16 << 40 / repo.BlockBytes}
	n := all[x.rnd.IntN(len(all))]
	return n + x.rnd.Int64N(min(n, 300))
}

// place draws a block of a volume of so many: beside a border, or one that was drawn before, more often than not.
func (x *mapperModel) place(size int64) int64 {
	var n int64
	switch x.rnd.IntN(4) {
	case 0:
		n = size - 1 - x.rnd.Int64N(min(size, 200))
	case 1:
		n = x.rnd.Int64N(1+size>>18)<<18 + x.rnd.Int64N(400) - 200
	case 2:
		n = x.rnd.Int64N(min(size, 6000))
	default:
		n = x.rnd.Int64N(size)
	}
	return min(max(n, 0), size-1)
}

// piece is one of a new frame, of which it may be a part.
func (x *mapperModel) piece(at, n int64) repo.Piece {
	x.mark++
	within := x.rnd.Int64N(repo.FrameBytes/repo.BlockBytes - n + 1)
	plain := uint32(within+n) * repo.BlockBytes
	return repo.Piece{
		Offset: at * repo.BlockBytes, Length: n * repo.BlockBytes, Within: uint32(within) * repo.BlockBytes,
		Sum: repo.Sum{byte(x.mark), byte(x.mark >> 8), 1},
		Frame: repo.Frame{
			Segment: repo.Segment{Session: repo.ID{9}, N: x.mark}, Offset: 56, Stored: plain + 16, Plain: plain,
		},
	}
}

// set says in the model what a layer says.
func (x *mapperModel) set(m mapModel, l layer) {
	first, last := l.Offset/repo.BlockBytes, l.end()/repo.BlockBytes
	if l.Piece == nil {
		maps.DeleteFunc(m, func(b int64, _ where) bool { return b >= first && b < last })
		return
	}
	for b := first; b < last; b++ {
		m[b] = where{l.Piece.Frame.Segment.N, int64(l.Piece.Within)/repo.BlockBytes + b - first}
	}
}

// layers draws what is written and discarded in a volume of so many blocks, in order.
func (x *mapperModel) layers(size int64) (out []layer) {
	var at []int64
	for range x.rnd.IntN(40) {
		at = append(at, x.place(size))
	}
	for b, n := x.place(size), x.rnd.Int64N(400); n > 0 && b < size; b, n = b+2, n-1 { // every other block
		at = append(at, b)
	}
	slices.Sort(at)
	next := int64(0)
	for _, b := range at {
		if b = max(b, next); b >= size {
			break
		}
		n := 1 + x.rnd.Int64N(4)
		if x.rnd.IntN(6) == 0 {
			n = 1 + x.rnd.Int64N(128)
		}
		n = min(n, size-b)
		l := layer{}
		if x.rnd.IntN(5) == 0 {
			if x.rnd.IntN(3) == 0 {
				n = 1 + x.rnd.Int64N(size-b)
			}
			l = zeroLayer(b*repo.BlockBytes, n*repo.BlockBytes)
		} else {
			l = pieceLayer(x.piece(b, n))
		}
		out = append(out, l)
		next = b + n
	}
	return out
}

// round changes the volume once.
func (x *mapperModel) round() {
	base, merge := x.now, x.now != nil && x.rnd.IntN(3) > 0
	size := x.size()
	if base != nil && x.rnd.IntN(3) > 0 {
		size = base.SizeBytes / repo.BlockBytes
	}
	layers := x.layers(size)
	model := maps.Clone(x.model)
	x.set(model, zeroLayer(size*repo.BlockBytes, repo.MaxVolumeBytes))
	for _, l := range layers {
		x.set(model, l)
	}
	switch {
	case merge && base.SizeBytes > size*repo.BlockBytes:
		layers = append(layers, zeroLayer(size*repo.BlockBytes, base.SizeBytes-size*repo.BlockBytes))
	case !merge: // all that is to stay is said again
		var kept []repo.Piece
		if base != nil {
			kept = overlayLayers(x.pieces(), []layer{zeroLayer(size*repo.BlockBytes, repo.MaxVolumeBytes)})
		}
		all := overlayLayers(kept, layers)
		layers = nil
		for _, p := range all {
			layers = append(layers, pieceLayer(p))
		}
	}

	x.now = &repo.Manifest{Content: repo.Block, SizeBytes: size * repo.BlockBytes}
	x.now.Map = x.mapped(base, merge, size*repo.BlockBytes, layers)
	x.nodes.upload()
	before := x.model
	x.model = model
	if base != nil {
		x.sameDifference(base, before)
	}
	x.same()
}

// mapped makes the new map.
func (x *mapperModel) mapped(base *repo.Manifest, merge bool, size int64, layers []layer) repo.NodeRef {
	x.t.Helper()
	ctx := x.t.Context()
	var ahead *cellPrefetcher
	if base != nil {
		ahead = newCellPrefetcher(ctx, x.nodes.read, base)
	}
	m := newMapper(x.nodes.read, base, merge, x.rnd.IntN(8) == 0 && !merge, size, ahead)
	for _, l := range layers {
		if m.tree != nil && x.rnd.IntN(10) == 0 {
			m.tree.held = heldInTree // so that something is written early
		}
		if err := m.putLayer(ctx, l, x.nodes.add); err != nil {
			x.t.Fatal(err)
		}
	}
	root, err := m.finishMap(ctx, x.nodes.add)
	if err != nil {
		x.t.Fatal(err)
	}
	return root
}

// pieces are all pieces of the map as it is.
func (x *mapperModel) pieces() (out []repo.Piece) {
	x.t.Helper()
	out, err := piecesBetween(x.t.Context(), x.nodes.read, x.now, 0, repo.MaxVolumeBytes)
	if err != nil {
		x.t.Fatal(err)
	}
	return out
}

// same compares the map with the model.
func (x *mapperModel) same() {
	x.t.Helper()
	got, last := mapModel{}, int64(0)
	for _, p := range x.pieces() {
		if p.Offset < last || p.End() > x.now.SizeBytes {
			x.t.Fatalf("a piece at %d, after %d, in %d bytes", p.Offset, last, x.now.SizeBytes)
		}
		last = p.End()
		x.set(got, pieceLayer(p))
	}
	if !maps.Equal(got, x.model) {
		x.t.Fatalf("the map has %d blocks, and not as they were written, which are %d", len(got), len(x.model))
	}
	pieces, bytes := int64(len(x.pieces())), int64(len(got))*repo.BlockBytes
	if x.now.Map.Pieces != pieces || x.now.Map.Bytes != bytes {
		x.t.Fatalf("the map says %d pieces of %d bytes, not %d of %d", x.now.Map.Pieces, x.now.Map.Bytes, pieces, bytes)
	}
	for range 3 {
		b := x.place(x.now.SizeBytes / repo.BlockBytes)
		cell, err := readCell(x.t.Context(), x.nodes.read, x.now, uint32(b*repo.BlockBytes/repo.CellBytes))
		if err != nil {
			x.t.Fatal(err)
		}
		part := mapModel{}
		for _, p := range cell {
			x.set(part, pieceLayer(p))
		}
		if part[b] != x.model[b] {
			x.t.Fatalf("block %d is %+v in its cell, not %+v", b, part[b], x.model[b])
		}
	}
}

// sameDifference: what differs between the map before, which the model was, and that of now, makes this of that.
func (x *mapperModel) sameDifference(base *repo.Manifest, before mapModel) {
	x.t.Helper()
	got, touched := maps.Clone(before), int64(0)
	d := &treeDiff{nodes: x.nodes.read, old: base, now: x.now}
	err := d.eachPart(x.t.Context(), func(p part) error {
		for _, l := range changedLayers(p.old, p.now) {
			if l.Offset < touched {
				x.t.Errorf("a change at %d comes after %d", l.Offset, touched)
			}
			touched = l.end()
			x.set(got, l)
		}
		return nil
	})
	if err != nil {
		x.t.Fatal(err)
	}
	if !maps.Equal(got, x.model) {
		x.t.Fatalf("the changes make %d blocks, not %d as they are", len(got), len(x.model))
	}
}
