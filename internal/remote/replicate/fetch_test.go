package replicate

import (
	"fmt"
	"testing"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// TestRestoreAnyBase restores random volumes from nothing and from every other point.
func TestRestoreAnyBase(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	const size = 3<<30 + 12288 // four regions, the last one small
	sizes := []int64{size, size, size, size + 1<<30}
	var all []*made
	for v := range 3 {
		var last *made
		for p := range len(sizes) {
			if p == 2 && v == 1 {
				last = all[1] // a fork of another
			}
			c := randomChange(rnd, sizes[p], 300)
			c[sizes[p]-repo.BlockBytes] = block(rnd.Uint64())
			last = b.must(fmt.Sprint("v", v), fmt.Sprint("p", p), sizes[p], last, c, last != nil &&
				last.volume != fmt.Sprint("v", v))
			all = append(all, last)
		}
	}
	for _, m := range all {
		for _, base := range append([]*made{nil}, all...) {
			if base != nil && base.manifest.SizeBytes > m.manifest.SizeBytes {
				continue
			}
			to, x, err := b.restored(b.repo, m, base)
			if err != nil {
				t.Fatal(err)
			}
			what := m.volume + "@" + m.point
			if base != nil {
				what += " over " + base.volume + "@" + base.point
			}
			to.same(t, what, m.content)
			for at, n := range to.touched {
				if n > 1 {
					t.Fatalf("%s: the block at %d was written %d times", what, at, n)
				}
				if base != nil && string(base.content[at]) == string(m.content[at]) {
					t.Fatalf("%s: the block at %d was written although it had not changed", what, at)
				}
			}
			if base == m && (x.read.Load() != 0 || len(to.touched) != 0) {
				t.Errorf("%s: %d bytes were read of what is the same", what, x.read.Load())
			}
		}
	}
}

// TestRestoreReadsOnce: each frame is fetched once, and neighbours together.
func TestRestoreReadsOnce(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.blocks = 16
	const size = 8 << 30
	c := change{}
	for range 4000 { // scattered, so that each frame serves several regions
		c[rnd.Int64N(size/repo.BlockBytes)*repo.BlockBytes] = block(rnd.Uint64())
	}
	m := b.must("v", "p", size, nil, c, false)
	r, f := b.faulty()
	to, x, err := b.restored(r, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	to.same(t, "v@p", m.content)
	stored := int64(0)
	for _, u := range m.manifest.Uses {
		s, err := b.repo.StatSegment(t.Context(), u.Segment)
		if err != nil {
			t.Fatal(err)
		}
		stored += s.Bytes
	}
	if n := x.read.Load(); n > stored {
		t.Errorf("%d bytes were read of segments that have %d", n, stored)
	}
	if n, most := f.Count(storetest.Get), len(m.manifest.Uses)*6+8+4; n > most {
		t.Errorf("%d requests for %d segments", n, len(m.manifest.Uses))
	}
}

// TestRestoreLeavesZerosOut: zeros are not written into what is empty, and become
// holes in what is not.
func TestRestoreLeavesZerosOut(t *testing.T) {
	b := newBench(t)
	b.blocks = 128
	const size = 4 << 20
	zero := make([]byte, repo.BlockBytes)
	full, mixed := change{}, change{}
	for at := int64(0); at < size; at += repo.BlockBytes {
		full[at] = block(uint64(at))
		mixed[at] = zero
	}
	mixed[0], mixed[256<<10], mixed[size-repo.BlockBytes] = block(1), block(2), block(3)
	base := b.must("v", "full", size, nil, full, false)
	m := b.must("v", "mixed", size, base, mixed, false)
	to, x, err := b.restored(b.repo, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	to.same(t, "from nothing", m.content)
	if n := x.written.Load(); n != 3*repo.BlockBytes {
		t.Errorf("%d bytes were written, and three blocks are not zero", n)
	}
	to, x, err = b.restored(b.repo, m, base)
	if err != nil {
		t.Fatal(err)
	}
	to.same(t, "over a full one", m.content)
	if n := x.written.Load(); n > 3*repo.BlockBytes+3*2*zeroRun {
		t.Errorf("%d bytes were written, and three blocks are not zero", n)
	}
	if len(to.blocks) > 100 {
		t.Errorf("%d blocks are allocated, and three are not zero", len(to.blocks))
	}
}

// TestScatteredChanges: a few small changes in each of many parts of a volume, which lie close together in the remote.
func TestScatteredChanges(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.blocks, b.frames = 128, 1000
	const size = 400 << 30
	c := change{}
	for i := range int64(size / repo.BlockBytes / 20000) {
		c[(i*20000+rnd.Int64N(20000))*repo.BlockBytes] = block(rnd.Uint64())
	}
	m := b.must("v", "p", size, nil, c, false)
	to, x, err := b.restored(b.repo, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	to.same(t, "v@p", m.content)
	if n, most := x.read.Load(), 3*int64(len(c))*repo.BlockBytes; n > most {
		t.Errorf("%d bytes were read for %d", n, len(c)*repo.BlockBytes)
	}
	b.verified(100)
}
