package replicate

import (
	"math/rand/v2"
	"testing"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// TestMarkerIsExact compares what a marker finds with what the pieces of all points say, block by block.
func TestMarkerIsExact(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.mix = rnd
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
			for _, p := range m.manifest.Pages {
				want[place{p.Frame.Segment, p.Frame.Index, -1}] = true
			}
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
	if err := k.walkMaps(t.Context()); err != nil || k.checkExact() != nil {
		t.Fatal(err, k.checkExact())
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
					t.Errorf("not all of the page %s#%d is marked", s, f.index)
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

// TestMarkerReadsPagesOnce: a page that many points share is read once.
func TestMarkerReadsPagesOnce(t *testing.T) {
	b := newBench(t)
	base := b.must("v", "p", 3<<30, nil, change{0: block(1), 1 << 30: block(2), 2 << 30: block(3)}, false)
	rnd := faulttest.Rand(t)
	for i := range 20 { // each changes a page, and shares two
		base = b.must("v", string(rune('a'+i)), 3<<30, base, change{int64(i%3) << 30: block(rnd.Uint64())}, false)
	}
	r, f := b.faulty()
	k := newMarker(r)
	for _, m := range b.truth["v"] {
		k.addManifest(&m.manifest)
	}
	if err := k.walkMaps(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := f.Count(storetest.Get); n > 2*23 { // a page may take a second request, for the key of its segment
		t.Errorf("%d requests for 23 pages", n)
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
	want := int64(48 * repo.BlockBytes) // and the page of p1
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
