package replicate

import (
	"context"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// nodeStore keeps nodes as a remote does, encoded.
type nodeStore struct {
	t     testing.TB
	nodes map[repo.Frame][]byte
	known map[repo.Frame]bool // that may be read: what was written before the last call of upload
	reads int
	bytes int
}

func newNodeStore(t testing.TB) *nodeStore {
	return &nodeStore{t: t, nodes: map[repo.Frame][]byte{}, known: map[repo.Frame]bool{}}
}

func (s *nodeStore) add(_ context.Context, content []byte, codec repo.Codec, plain int) (repo.Frame, error) {
	f := repo.Frame{
		Segment: repo.Segment{
			N: uint32(len(s.nodes)),
		}, Offset: 56, Stored: uint32(len(content) + 16), Plain: uint32(plain), Codec: codec,
	}
	s.bytes += len(content)
	// What it was before it was packed is not given: pack it again as the tree did.
	s.nodes[f] = slices.Clone(content)
	return f, nil
}

func (s *nodeStore) upload() {
	for f := range s.nodes {
		s.known[f] = true
	}
}

func (s *nodeStore) read(_ context.Context, all []repo.NodeAt) ([]repo.ReadNode, error) {
	out := make([]repo.ReadNode, len(all))
	for i, at := range all {
		s.reads++
		if !s.known[at.Frame] {
			s.t.Fatalf("node %d of level %d is read before it is on the remote", at.Index, at.Level)
		}
		b, err := repo.Unpack(at.Frame.Codec, s.nodes[at.Frame], at.Frame.Plain)
		if err != nil {
			s.t.Fatal(err)
		}
		n, err := repo.DecodeNode(b)
		if err != nil {
			s.t.Fatal(err)
		}
		if pieces, bytes := n.Count(); n.Level != at.Level || n.Index != at.Index || pieces != at.Pieces ||
			bytes != at.Bytes {
			s.t.Fatalf("node %+v is not what was said of it: %+v", n, at)
		}
		out[i].Node = n
	}
	return out, nil
}

// shape is all of a tree: its nodes by level and index, without where they are.
type shape map[[2]int64][]repo.Piece

func (s *nodeStore) shape(m *repo.Manifest) shape {
	s.t.Helper()
	out := shape{}
	var walk func(at repo.NodeAt)
	walk = func(at repo.NodeAt) {
		if at.IsZero() {
			return
		}
		got, _ := s.read(s.t.Context(), []repo.NodeAt{at})
		out[[2]int64{int64(at.Level), at.Index}] = got[0].Pieces
		if got[0].Children != nil {
			for slot, ref := range got[0].Children {
				walk(at.Child(slot, ref))
			}
		}
	}
	walk(m.Root())
	return out
}

// drawCell draws what a cell has.
func drawCell(r *rand.Rand, cell int64, mark *uint32) (out []repo.Piece) {
	if r.IntN(3) == 0 {
		return nil
	}
	step := int64(1) << r.IntN(8)
	for b := r.Int64N(4); b+step <= 128; b += step {
		*mark++
		n := step * repo.BlockBytes
		out = append(out, repo.Piece{
			Offset: cell*repo.CellBytes + b*repo.BlockBytes, Length: n,
			Frame: repo.Frame{Segment: repo.Segment{N: *mark}, Offset: 56, Stored: uint32(n) + 16, Plain: uint32(n)},
		})
	}
	return out
}

// TestTreeIsCanonical: however a map has come about, it has the same nodes as if it had been made at once; what is not
// changed is not written again, and nothing is read that is not on the remote yet.
func TestTreeIsCanonical(t *testing.T) {
	rnd := faulttest.Rand(t)
	ctx := t.Context()
	for range 60 {
		s := newNodeStore(t)
		cells := map[int64][]repo.Piece{}
		mark := uint32(0)
		m := &repo.Manifest{Content: repo.Block, SizeBytes: repo.CellBytes << (5 * rnd.IntN(4))}
		for range 8 {
			before := *m
			m = &repo.Manifest{Content: repo.Block, SizeBytes: before.SizeBytes}
			if rnd.IntN(3) == 0 {
				m.SizeBytes = repo.CellBytes * (1 + rnd.Int64N(40_000))
			}
			tr, err := newTree(ctx, s.read, &before, m.SizeBytes)
			if err != nil {
				t.Fatal(err)
			}
			last := m.SizeBytes / repo.CellBytes
			var at []int64
			for range rnd.IntN(60) {
				at = append(at, rnd.Int64N(max(1, last>>(5*rnd.IntN(3)))))
			}
			slices.Sort(at)
			for _, cell := range slices.Compact(at) {
				to := cell + 1
				var pieces []repo.Piece
				if rnd.IntN(6) == 0 {
					to = min(last, cell+rnd.Int64N(max(1, last)))
				} else {
					pieces = drawCell(rnd, cell, &mark)
				}
				if err := tr.replace(ctx, cell*repo.CellBytes, to*repo.CellBytes, pieces); err != nil {
					t.Fatal(err)
				}
				for c := range cells {
					if c >= cell && c < to {
						delete(cells, c)
					}
				}
				if len(pieces) > 0 {
					cells[cell] = pieces
				}
				if got, err := tr.cellPieces(ctx, cell); err != nil || !slices.Equal(got, cells[cell]) {
					t.Fatalf("cell %d: %+v, %v, want %+v", cell, got, err, cells[cell])
				}
				if rnd.IntN(3) == 0 {
					if err := tr.flushNodes(ctx, cell*repo.CellBytes, s.add); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := tr.replace(ctx, m.SizeBytes, repo.MaxVolumeBytes, nil); err != nil {
				t.Fatal(err)
			}
			for c := range cells {
				if c >= last {
					delete(cells, c)
				}
			}
			if m.Map, err = tr.finishTree(ctx, s.add); err != nil {
				t.Fatal(err)
			}
			s.upload()

			fresh := &repo.Manifest{SizeBytes: m.SizeBytes}
			again := newNodeStore(t)
			all, err := newTree(ctx, again.read, nil, m.SizeBytes)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range slices.Sorted(maps.Keys(cells)) {
				if err := all.replace(ctx, c*repo.CellBytes, (c+1)*repo.CellBytes, cells[c]); err != nil {
					t.Fatal(err)
				}
			}
			if fresh.Map, err = all.finishTree(ctx, again.add); err != nil {
				t.Fatal(err)
			}
			again.upload()
			if got, want := s.shape(m), again.shape(fresh); !reflect.DeepEqual(got, want) {
				t.Fatalf("a tree of %d bytes has %d nodes, and %d if it is made at once", m.SizeBytes, len(got), len(want))
			}
			sameDifference(t, s, &before, m)
		}
	}
}

// sameDifference: the differences between two trees turn what one describes into what the other does.
func sameDifference(t *testing.T, s *nodeStore, old, now *repo.Manifest) {
	t.Helper()
	all := func(m *repo.Manifest) (out []repo.Piece) {
		pieces, err := piecesBetween(t.Context(), s.read, m, 0, repo.MaxVolumeBytes)
		if err != nil {
			t.Fatal(err)
		}
		return pieces
	}
	var layers []layer
	last := int64(0)
	d := &treeDiff{nodes: s.read, old: old, now: now}
	err := d.eachPart(t.Context(), func(p part) error {
		if p.from < last || p.to <= p.from {
			t.Errorf("[%d, %d) comes after %d", p.from, p.to, last)
		}
		last = p.to
		layers = append(layers, changedLayers(p.old, p.now)...)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := overlayLayers(all(old), layers), all(now); !slices.Equal(got, want) {
		t.Fatalf("%d layers make %d pieces, not %d", len(layers), len(got), len(want))
	}
}

// TestTreeChangesLittle: one cell that changes in a large tree is one path of nodes, read and written.
func TestTreeChangesLittle(t *testing.T) {
	ctx := t.Context()
	s := newNodeStore(t)
	rnd := faulttest.Rand(t)
	m := &repo.Manifest{SizeBytes: 16 << 40}
	tr, err := newTree(ctx, s.read, nil, m.SizeBytes)
	if err != nil {
		t.Fatal(err)
	}
	mark := uint32(0)
	for c := int64(0); c < m.SizeBytes/repo.CellBytes; c += 1 + rnd.Int64N(20_000) {
		if err := tr.replace(ctx, c*repo.CellBytes, (c+1)*repo.CellBytes, drawCell(rnd, c, &mark)); err != nil {
			t.Fatal(err)
		}
		if tr.held > heldInTree {
			if err := tr.flushNodes(ctx, c*repo.CellBytes, s.add); err != nil {
				t.Fatal(err)
			}
		}
	}
	if m.Map, err = tr.finishTree(ctx, s.add); err != nil {
		t.Fatal(err)
	}
	s.upload()
	s.reads, s.bytes = 0, 0
	before := len(s.nodes)
	now := &repo.Manifest{SizeBytes: m.SizeBytes}
	if tr, err = newTree(ctx, s.read, m, m.SizeBytes); err != nil {
		t.Fatal(err)
	}
	at := int64(7<<40) / repo.CellBytes
	one := []repo.Piece{
		{Offset: at * repo.CellBytes, Length: 4096, Frame: repo.Frame{Offset: 56, Stored: 4112, Plain: 4096}},
	}
	if err := tr.replace(ctx, at*repo.CellBytes, (at+1)*repo.CellBytes, one); err != nil {
		t.Fatal(err)
	}
	if now.Map, err = tr.finishTree(ctx, s.add); err != nil {
		t.Fatal(err)
	}
	if n := len(s.nodes) - before; n > 6 || s.reads > 6 || s.bytes > 32<<10 {
		t.Errorf("%d nodes were read, %d written, %d bytes", s.reads, n, s.bytes)
	}
	s.upload()
	s.reads = 0
	sum := 0
	d := &treeDiff{nodes: s.read, old: m, now: now}
	if err := d.eachPart(ctx, func(p part) error { sum += len(p.old) + len(p.now); return nil }); err != nil ||
		s.reads > 12 ||
		sum > 4*repo.LeafPieces {
		t.Errorf("the difference is in %d pieces, %d nodes were read, %v", sum, s.reads, err)
	}
}
