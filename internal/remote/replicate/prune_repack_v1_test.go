package replicate

import (
	"fmt"
	"os"
	"testing"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// frozenIdentity opens the frozen repository of version 1 of package repo.
const frozenIdentity = "AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX"

// newBenchOfVersion1 is a bench whose repository an older program made: it has the config of the frozen one.
func newBenchOfVersion1(t *testing.T) *bench {
	t.Helper()
	config, err := os.ReadFile("../repo/testdata/v1/config")
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t)
	b.overwrite("config", config)
	if b.secret, err = repo.Identity(frozenIdentity); err != nil {
		t.Fatal(err)
	}
	b.repo = b.reopened()
	return b
}

// versionOf wants the repository to be of a version, as a process sees it that opens it now.
func (b *bench) versionOf(want int) {
	b.t.Helper()
	if got, err := b.reopened().Version(); err != nil || got != want {
		b.t.Fatalf("the repository is of version %d, want %d (%v)", got, want, err)
	}
}

// restoredAll restores all points of the truth by a process that has read nothing, and compares them.
func (b *bench) restoredAll(volumes ...string) {
	b.t.Helper()
	r := b.reopened()
	for _, v := range volumes {
		for name, m := range b.truth[v] {
			to, _, err := b.restored(r, m, nil)
			if err != nil {
				b.t.Errorf("%s@%s: %v", v, name, err)
				continue
			}
			to.same(b.t, v+"@"+name, m.content)
		}
	}
}

// TestRepackVersion1 repacks a repository of version 1, whose points have flat maps. All that is kept can be restored,
// manifests stay as they are, and points of version 2 build upon them and are repacked with them.
func TestRepackVersion1(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBenchOfVersion1(t)
	b.old, b.blocks, b.frames = true, 32, 8
	size := int64(repo.RegionBytes) + 4<<20 // two pages
	base := b.must("v", "p0", size, nil, scattered(rnd, 4<<20, 1000), false)
	fork := b.must("w", "p0", size, base, scattered(rnd, 4<<20, 50), true)
	for i := 1; i <= 30; i++ {
		base = b.must("v", fmt.Sprint("p", i), size, base, scattered(rnd, 4<<20, 150), false)
		c := scattered(rnd, 2<<20, 20)
		c[repo.RegionBytes+int64(i%4)*repo.BlockBytes] = noiseBlock(uint64(i))
		fork = b.must("w", fmt.Sprint("p", i), size, fork, c, false)
		if i > 3 {
			delete(b.truth["v"], fmt.Sprint("p", i-3))
			delete(b.truth["w"], fmt.Sprint("p", i-3))
		}
	}
	delete(b.truth["v"], "p0")
	delete(b.truth["w"], "p0")
	b.versionOf(1)

	b.prune(PruneRequest{Policy: Policy{Last: 3}})
	b.versionOf(1)
	before := b.bytesOf("segments/")
	out := b.prune(PruneRequest{MaxRepack: -1})
	if after := b.bytesOf("segments/", "packs/"); out.Packs == 0 || after >= before {
		t.Fatalf("%d bytes of %d are left: %+v", after, before, out)
	}
	b.versionOf(2)
	if len(b.truth["v"]) != 3 || len(b.truth["w"]) != 3 || b.count("manifests/") != 6 {
		t.Errorf("%d manifests are left", b.count("manifests/"))
	}
	b.restoredAll("v", "w")
	b.whole()
	for _, m := range b.truth["v"] {
		now, err := b.reopened().Manifest(t.Context(), m.manifest.ID)
		if err != nil || now.Version == 2 || len(now.Pages) == 0 {
			t.Errorf("the manifest of %s is of version %d, with %d pages: %v", m.point, now.Version, len(now.Pages), err)
		}
	}

	b.old = false
	for i := range 6 {
		base = b.must("v", fmt.Sprint("q", i), size, base, scattered(rnd, 4<<20, 300), false)
		b.forget("v", base.point)
	}
	b.forget("w", fork.point)
	if out := b.prune(PruneRequest{Policy: Policy{Last: 1}, MaxRepack: -1}); out.RepackedObjects == 0 {
		t.Errorf("nothing was repacked: %+v", out)
	}
	b.restoredAll("v", "w")
	b.whole()
}
