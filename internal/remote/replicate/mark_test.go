package replicate

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// TestMarkerIsExact compares what a marker finds with what the pieces of all points say, block by block.
func TestMarkerIsExact(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 5)
	b.history(rnd, "fork", b.truth["v"]["p2"], 3)

	k := newMarker(b.repo)
	type place struct {
		segment repo.Segment
		index   uint32
		block   int
	}
	want := map[place]bool{}
	for _, points := range b.truth {
		for _, m := range points {
			k.addManifest(&m.manifest)
			d := &treeDiff{nodes: b.repo.ReadNodes, now: &m.manifest, onRead: func(n repo.NodeAt, _ bool) {
				want[place{n.Frame.Segment, n.Frame.Index, -1}] = true
			}}
			if err := d.eachPart(t.Context(), func(part) error { return nil }); err != nil {
				t.Fatal(err)
			}
			for _, x := range b.pieces(m) {
				for at := int64(x.Within) / repo.BlockBytes; at*repo.BlockBytes < int64(x.Within)+x.Length; at++ {
					want[place{x.Frame.Segment, x.Frame.Index, int(at)}] = true
				}
			}
		}
	}
	if err := k.walkMaps(t.Context()); err != nil || k.checkComplete() != nil {
		t.Fatal(err, k.checkComplete())
	}

	for s, m := range k.segments {
		last := -1
		for _, f := range m.frames {
			if int(f.index) <= last {
				t.Fatalf("the frames of segment %s are not in order", s)
			}
			last = int(f.index)
			if want[place{s, f.index, -1}] {
				if delete(want, place{s, f.index, -1}); f.blocks.Count(int(f.total)) != int(f.total) {
					t.Errorf("not all of the node %s#%d is marked", s, f.index)
				}
				continue
			}
			for i := range int(f.total) {
				at := place{s, f.index, i}
				if f.blocks.Has(i) != want[at] {
					t.Errorf("block %d of frame %s#%d: marked %v, needed %v", i, s, f.index, f.blocks.Has(i), want[at])
				}
				delete(want, at)
			}
		}
	}
	if len(want) > 0 {
		t.Errorf("%d blocks are needed and not marked", len(want))
	}
}

// TestMarkerReadsNodesOnce: a node that many points share is read once.
func TestMarkerReadsNodesOnce(t *testing.T) {
	b := newBench(t)
	rnd := faulttest.Rand(t)
	c := change{}
	for i := range int64(900) { // three parts, of several nodes each
		c[i%3<<30+i*repo.BlockBytes*2] = block(rnd.Uint64())
	}
	base := b.must("v", "p", 3<<30, nil, c, false)
	for i := range 20 { // each changes one part, and shares two
		base = b.must("v", string(rune('a'+i)), 3<<30, base, change{int64(i%3) << 30: block(rnd.Uint64())}, false)
	}
	k := newMarker(b.repo)
	for _, m := range b.truth["v"] {
		k.addManifest(&m.manifest)
	}
	reads := map[repo.Frame]int{}
	for len(k.nodes) > 0 {
		todo := k.nodes
		k.nodes = nil
		for _, n := range todo {
			got, err := b.repo.ReadNodes(t.Context(), []repo.NodeAt{n.NodeAt})
			if err != nil {
				t.Fatal(err)
			}
			reads[n.Frame]++
			k.markNode(n, got[0])
		}
	}
	if len(reads) < 3*21 || slices.Max(slices.Collect(maps.Values(reads))) > 1 {
		t.Errorf("%d nodes were read, how often: %v", len(reads), slices.Collect(maps.Values(reads)))
	}
}

// TestPruneCountsWaste: what overwritten blocks leave in frames of which others are needed is counted.
func TestPruneCountsWaste(t *testing.T) {
	b := newBench(t)
	c := change{}
	for i := range int64(64) {
		c[i*repo.BlockBytes] = noiseBlock(uint64(i))
	}
	b.blocks = 64
	base := b.must("v", "p1", small, nil, c, false)
	for at := range c {
		if at%(4*repo.BlockBytes) == 0 {
			delete(c, at) // stays
		}
	}
	for at := range c {
		c[at] = noiseBlock(uint64(1000 + at))
	}
	b.must("v", "p2", small, base, c, false)
	out := b.prune(PruneRequest{Policy: Policy{Last: 1}})
	want := int64(48 * repo.BlockBytes) // and the map of p1
	if out.PartlyUsedBytes < want || out.PartlyUsedBytes > want+8192 {
		t.Errorf("%d bytes of %d are said to be of no use, want about %d", out.PartlyUsedBytes, out.UsedBytes, want)
	}
}

// noiseBlock is a block that cannot be compressed.
func noiseBlock(seed uint64) []byte {
	out := make([]byte, repo.BlockBytes)
	r := rand.New(rand.NewPCG(seed, 2))
	for i := range out {
		out[i] = byte(r.Uint32())
	}
	return out
}
