package replicate

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// A model of a map: for each block, which block of which frame it is.
type where struct {
	frame uint32
	block int64
}

const modelBlocks = 600

type modelMap [modelBlocks]where

// blocks is what pieces say, block by block; they must be in order.
func blocks(t *testing.T, pieces []repo.Piece) (m modelMap) {
	t.Helper()
	last := int64(0)
	for _, p := range pieces {
		if p.Offset < last || p.Length <= 0 || p.Offset%repo.BlockBytes != 0 || p.Length%repo.BlockBytes != 0 {
			t.Fatalf("pieces are not in order at %d: %+v", last, p)
		}
		last = p.End()
		for b := range p.Length / repo.BlockBytes {
			m[p.Offset/repo.BlockBytes+b] = where{p.Frame.Index + 1, int64(p.Within)/repo.BlockBytes + b}
		}
	}
	return m
}

// drawPieces draws layers in order, of pieces of new frames and of zeros.
func drawLayers(r *rand.Rand, frame *uint32) (out []layer) {
	for at := int64(r.IntN(40)); at < modelBlocks-64; {
		n := 1 + int64(r.IntN(63))
		l := zeroLayer(at*repo.BlockBytes, n*repo.BlockBytes)
		if r.IntN(4) > 0 {
			*frame++
			within := uint32(r.IntN(4)) * repo.BlockBytes
			l = pieceLayer(repo.Piece{
				Offset: l.Offset, Length: l.Length, Within: within, Sum: repo.Sum{1, byte(*frame), byte(*frame >> 8)},
				Frame: repo.Frame{Index: *frame, Plain: within + uint32(l.Length)},
			})
		}
		out = append(out, l)
		at += n
		if r.IntN(3) > 0 {
			at += int64(r.IntN(50))
		}
	}
	return out
}

// TestOverlayAndChanges: layers are laid over each other as a model does, parts have no
// sum, and the changes between two maps turn one into the other.
func TestOverlayAndChanges(t *testing.T) {
	r := faulttest.Rand(t)
	frame := uint32(0)
	for range 2000 {
		var pieces []repo.Piece
		var model modelMap
		whole := map[uint32]repo.Piece{}
		for range 1 + r.IntN(4) {
			before, was := slices.Clone(pieces), model
			layers := drawLayers(r, &frame)
			pieces = overlayLayers(pieces, layers)
			for _, l := range layers {
				if l.Piece != nil {
					whole[l.Piece.Frame.Index] = *l.Piece
				}
				for b := range l.Length / repo.BlockBytes {
					w := where{}
					if l.Piece != nil {
						w = where{l.Piece.Frame.Index + 1, int64(l.Piece.Within)/repo.BlockBytes + b}
					}
					model[l.Offset/repo.BlockBytes+b] = w
				}
			}
			if got := blocks(t, pieces); got != model {
				t.Fatalf("a map after layers is another than the model's")
			}
			for _, p := range pieces {
				if is := p == whole[p.Frame.Index]; is != (p.Sum != repo.Sum{}) {
					t.Fatalf("a piece that is whole: %v, has a sum: %v: %+v", is, !is, p)
				}
			}
			if blocks(t, before) != was {
				t.Fatal("overlay changed what it was given")
			}
			diff := changedLayers(before, pieces)
			changed := map[int64]bool{}
			last := int64(0)
			for _, l := range diff {
				if l.Offset < last || l.Length <= 0 || l.Piece != nil &&
					(l.Piece.Offset != l.Offset || l.Piece.Length != l.Length) {
					t.Fatalf("changes are not in order at %d: %+v", last, l)
				}
				last = l.end()
				for b := range l.Length / repo.BlockBytes {
					changed[l.Offset/repo.BlockBytes+b] = true
				}
			}
			if got := blocks(t, overlayLayers(before, diff)); got != model {
				t.Fatal("the changes between two maps do not turn one into the other")
			}
			for b := range int64(modelBlocks) {
				if changed[b] != (was[b] != model[b]) {
					t.Fatalf("block %d: changed %v, and is said to be %v", b, was[b] != model[b], changed[b])
				}
			}
		}
	}
}

// TestChangesBySum: whole pieces with the same sum are the same, wherever they lie.
func TestChangesBySum(t *testing.T) {
	a := repo.Piece{Offset: 4096, Length: 8192, Sum: repo.Sum{7}, Frame: repo.Frame{Index: 1, Plain: 8192}}
	b := a
	b.Frame.Index = 2
	if d := changedLayers([]repo.Piece{a}, []repo.Piece{b}); len(d) != 0 {
		t.Errorf("the same content in another frame: %v", d)
	}
	b.Sum = repo.Sum{}
	if d := changedLayers([]repo.Piece{a}, []repo.Piece{b}); len(d) != 1 {
		t.Errorf("content of which nothing is known in another frame: %v", d)
	}
}
