package replicate

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/url"
	"os"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/file"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

// scattered overwrites n blocks of a volume of size bytes, anywhere, with what cannot be compressed.
func scattered(rnd *rand.Rand, size int64, n int) change {
	c := change{}
	for range n {
		c[rnd.Int64N(size/repo.BlockBytes)*repo.BlockBytes] = noiseBlock(rnd.Uint64())
	}
	return c
}

// bytesOf is what the objects under some prefixes take.
func (b *bench) bytesOf(prefixes ...string) (n int64) {
	b.t.Helper()
	for _, p := range prefixes {
		for o, err := range b.store.List(b.t.Context(), p) {
			if err != nil {
				b.t.Fatal(err)
			}
			n += o.Bytes
		}
	}
	return n
}

// forget forgets points of a volume but one, which is all that is left of it.
func (b *bench) forget(volume, but string) {
	for p := range b.truth[volume] {
		if p != but {
			delete(b.truth[volume], p)
		}
	}
}

// TestRepackScatteredWrites: after many rounds of random writes, of which only the last is kept, a remote takes at most
// 1.5 times of what that needs, and all of it is there.
func TestRepackScatteredWrites(t *testing.T) {
	size, writes := int64(16<<20), 1000
	switch {
	case testfs.Full():
		size, writes = 64<<20, 4000
	case testing.Short():
		size, writes = 8<<20, 500 // moves half as many units at once
	}
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.blocks, b.frames = 128, 30
	base := b.must("v", "p0", size, nil, scattered(rnd, size, 4*writes), false)
	for i := 1; i <= 60; i++ {
		base = b.must("v", fmt.Sprint("p", i), size, base, scattered(rnd, size, writes), false)
		b.forget("v", base.point)
	}
	plain := b.prune(PruneRequest{Policy: Policy{Last: 1}})
	needs := int64(len(base.content)) * repo.BlockBytes
	if plain.UsedBytes < 4*needs {
		t.Fatalf("%d bytes for %d: this tests nothing", plain.UsedBytes, needs)
	}
	if most := needs + needs/10; plain.NeededBytes < needs || plain.NeededBytes > most {
		t.Errorf("%d bytes are said to be needed, want %d to %d", plain.NeededBytes, needs, most)
	}

	dry := b.prune(PruneRequest{DryRun: true, MaxRepack: -1})
	out := b.prune(PruneRequest{MaxRepack: -1})
	stored := b.bytesOf("segments/", "packs/", "moved/")
	t.Logf("%d bytes are needed, %d were stored, now %d", needs, plain.UsedBytes, stored)
	if stored > needs*3/2 {
		t.Errorf("%d bytes are stored, and %d needed", stored, needs)
	}
	now := b.bytesOf("segments/", "packs/")
	if out.UsedBytes != now || out.Packs == 0 || out.FreedBytes != plain.UsedBytes-now {
		t.Errorf("%d bytes are stored: %+v", now, out)
	}
	if dry.RepackedBytes != out.RepackedBytes ||
		dry.PackedBytes < out.PackedBytes*8/10 || dry.PackedBytes > out.PackedBytes {
		t.Errorf("a dry run says %+v, then it was %+v", dry, out)
	}
	b.whole()

	// The next points build upon it, and it is repacked again.
	for i := range 12 {
		base = b.must("v", fmt.Sprint("q", i), size, base, scattered(rnd, size, writes), false)
		b.forget("v", base.point)
	}
	b.prune(PruneRequest{Policy: Policy{Last: 1}, MaxRepack: -1})
	if stored := b.bytesOf("segments/", "packs/", "moved/"); stored > int64(len(base.content))*repo.BlockBytes*3/2 {
		t.Errorf("%d bytes are stored in the end", stored)
	}
	b.whole()
	if again := b.prune(PruneRequest{MaxRepack: -1}); again.RepackedObjects != 0 || again.FreedBytes != 0 {
		t.Errorf("nothing was to be done: %+v", again)
	}
}

// TestRepackSmallPoints: many small points, of which few are kept, leave few objects.
func TestRepackSmallPoints(t *testing.T) {
	n := 300
	if testfs.Full() {
		n = 2000
	}
	rnd := faulttest.Rand(t)
	b := newBench(t)
	var base *made
	for i := range n {
		base = b.must("v", fmt.Sprint("p", i), small, base, scattered(rnd, small, 2), false)
		if i < n-10 {
			delete(b.truth["v"], base.point)
		}
	}
	if out := b.prune(PruneRequest{Policy: Policy{Last: 10}}); b.count("") < 100 {
		t.Fatalf("%d objects are left without repacking: %+v", b.count(""), out)
	}
	b.prune(PruneRequest{MaxRepack: -1})
	if objects := b.count(""); objects > 50 {
		t.Errorf("%d objects are left", objects)
	}
	b.whole()
}

// TestRepackEndsWithWhatPacksBadly: a block that does not pack, of a frame that did, takes more than its share. It is
// moved once, and not again and again.
func TestRepackEndsWithWhatPacksBadly(t *testing.T) {
	b := newBench(t)
	b.blocks, b.frames = 128, 1000
	first, second := change{}, change{}
	for i := range int64(128 * 20) {
		first[i*repo.BlockBytes] = make([]byte, repo.BlockBytes)
		first[i*repo.BlockBytes][0] = 1 // packs to almost nothing
		if i%128 == 0 {
			first[i*repo.BlockBytes] = noiseBlock(uint64(i))
			continue
		}
		second[i*repo.BlockBytes] = nil
	}
	base := b.must("v", "p1", small, nil, first, false)
	for i := range int64(64) { // what is waste, too
		second[32<<20+i*repo.BlockBytes] = noiseBlock(uint64(5000 + i))
	}
	base = b.must("v", "p2", small, base, second, false)
	third := change{}
	for i := range int64(60) {
		third[32<<20+i*repo.BlockBytes] = nil
	}
	b.must("v", "p3", small, base, third, false)
	out := b.prune(PruneRequest{Policy: Policy{Last: 1}, MaxRepack: -1})
	if out.Packs == 0 {
		t.Fatalf("nothing was repacked: %+v", out)
	}
	b.whole()
	if out := b.prune(PruneRequest{MaxRepack: -1}); out.RepackedObjects != 0 {
		t.Errorf("it is repacked again: %+v", out)
	}
}

// TestRepackIsBounded: no run rewrites more than it may, and runs in a row get there.
func TestRepackIsBounded(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	size := int64(8 << 20)
	b.blocks, b.frames = 64, 8
	base := b.must("v", "p", size, nil, scattered(rnd, size, 2000), false)
	for i := range 20 {
		base = b.must("v", fmt.Sprint("p", i), size, base, scattered(rnd, size, 300), false)
		b.forget("v", base.point)
	}
	b.prune(PruneRequest{Policy: Policy{Last: 1}})
	const most = 4 << 20
	runs := 0
	for ; runs < 50; runs++ {
		out := b.prune(PruneRequest{MaxRepack: most})
		if out.RepackedBytes > most {
			t.Fatalf("a run has rewritten %d bytes", out.RepackedBytes)
		}
		b.whole()
		if out.RepackedObjects == 0 {
			break
		}
	}
	if stored := b.bytesOf("segments/", "packs/"); runs < 3 || stored > int64(len(base.content))*repo.BlockBytes*3/2 {
		t.Errorf("after %d runs %d bytes are stored", runs, stored)
	}
}

// wastefulBench is a bench with volumes of which little is needed, and what a prune with repacking keeps of them.
func wastefulBench(t *testing.T, rnd *rand.Rand) (*bench, PruneRequest) {
	b := newBench(t)
	b.frames = 1
	size := int64(512 << 10)
	var base *made
	for i := range 3 {
		base = b.must("v", fmt.Sprint("p", i), size, base, scattered(rnd, size, 100), false)
	}
	base = b.must("w", "p0", size, base, scattered(rnd, size, 100), true)
	for i := range 2 {
		base = b.must("w", fmt.Sprint("q", i), size, base, scattered(rnd, size, 100), false)
	}
	return b, PruneRequest{Policy: Policy{Last: 1}, MaxRepack: -1}
}

// copied is a bench with a copy of all objects, and points to forget on its own.
func (b *bench) copied(t *testing.T) *bench {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(b.dir)); err != nil {
		t.Fatal(err)
	}
	store, err := file.Open(t.Context(), &url.URL{Scheme: "file", Path: to})
	if err != nil {
		t.Fatal(err)
	}
	r, err := repo.Open(t.Context(), store, b.secret)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	c := &bench{
		t: t, dir: to, store: store, secret: b.secret, repo: r, truth: map[string]map[string]*made{},
		blocks: b.blocks, frames: b.frames,
	}
	for v, points := range b.truth {
		c.truth[v] = maps.Clone(points)
	}
	return c
}

// TestRepackEveryFault fails every operation of the store, before and after its effect. What is there afterwards is
// whole, and a second prune does the rest.
func TestRepackEveryFault(t *testing.T) {
	all, q := wastefulBench(t, faulttest.Rand(t))
	packed := 0
	for i := 0; ; i++ {
		b, q := all.copied(t), q
		when := storetest.Before
		if i%2 == 1 {
			when = storetest.After
		}
		r, f := b.faulty(storetest.Fault{At: i / 2, When: when})
		out, err := prune(t.Context(), r, q)
		if f.Fired() == 0 {
			if err != nil || out.Packs == 0 {
				t.Fatalf("%v, %+v", err, out)
			}
			break
		}
		if b.count("packs/") > 0 {
			packed++
		}
		b.whole()
		q.Patience = -1 // the session of the one that failed
		b.prune(q)
		b.prune(q)
		b.whole()
		if v := b.verified(100); v.GarbageCount != 0 || v.WorkingBytes != 0 {
			t.Errorf("after fault %d and another prune there is garbage: %+v", i, v)
		}
		if t.Failed() {
			t.Fatalf("at fault %d (%v)", i, when)
		}
	}
	if packed < 8 {
		t.Errorf("only %d faults came after a pack was written", packed)
	}
}

// TestRepackKilledAnywhere: a prune dies at each of its operations, with a session that it leaves. Everything can be
// read then, a push builds upon it, and the next prunes finish it.
func TestRepackKilledAnywhere(t *testing.T) {
	rnd := faulttest.Rand(t)
	all, q := wastefulBench(t, rnd)
	for i := 0; ; i++ {
		b, q := all.copied(t), q
		ctx, kill := context.WithCancel(t.Context())
		n := 0
		r, _ := b.faulty(storetest.Fault{Times: -1, Err: storetest.Permanent(errs.IO), Match: func(storetest.Call) bool {
			n++
			return n > i
		}})
		_, err := prune(ctx, r, q)
		kill()
		if err == nil {
			break
		}
		b.whole()
		last := b.truth["w"]["q1"]
		next := b.must("w", "next", 512<<10, last, scattered(rnd, 512<<10, 20), false)
		b.whole()
		q.Patience = -1
		b.prune(q)
		b.prune(q)
		b.whole()
		if to, _, err := b.restored(b.repo, next, nil); err != nil {
			t.Errorf("what was pushed after: %v", err)
		} else {
			to.same(t, "w@next", next.content)
		}
		if v := b.verified(100); v.GarbageCount != 0 || v.WorkingBytes != 0 {
			t.Errorf("there is garbage: %+v", v)
		}
		if t.Failed() {
			t.Fatalf("killed after %d operations", i)
		}
	}
}

// TestRepackTwiceAtOnce: another prune repacks everything at every operation of one.
func TestRepackTwiceAtOnce(t *testing.T) {
	rnd := faulttest.Rand(t)
	all, q := wastefulBench(t, rnd)
	for i := 0; ; i++ {
		b, q := all.copied(t), q
		n := 0
		r, _ := b.faulty(storetest.Fault{Times: -1, Match: func(storetest.Call) bool {
			if n++; n == i+1 {
				other := q
				if i%2 == 1 {
					other.Patience = -1
					if _, err := prune(t.Context(), b.repo, other); err != nil { // which sees the session
						t.Error(err)
					}
				}
				if _, err := prune(t.Context(), b.repo, other); err != nil {
					t.Errorf("the other one: %v", err)
				}
			}
			return false
		}})
		_, err := prune(t.Context(), r, q)
		if err != nil && !errs.Is(err, errs.Conflict) && !errs.Is(err, errs.NotFound) {
			t.Errorf("at operation %d: %v", i, err)
		}
		b.whole()
		q.Patience = -1
		b.prune(q)
		b.prune(q)
		b.whole()
		if t.Failed() {
			t.Fatalf("at operation %d", i)
		}
		if n <= i {
			break
		}
	}
}

// TestRepackDamage: a pack, or a table, that is damaged or lost is reported with the points that it affects, and a
// prune deletes nothing of what is left.
func TestRepackDamage(t *testing.T) {
	all, q := wastefulBench(t, faulttest.Rand(t))
	for _, c := range []struct {
		prefix string
		change func(*bench, string, []byte)
	}{
		{"packs/", func(b *bench, key string, _ []byte) { _ = b.store.Delete(b.t.Context(), key) }},
		{"packs/", func(b *bench, key string, object []byte) { b.overwrite(key, object[:len(object)-1]) }},
		{"packs/", func(b *bench, key string, object []byte) { object[100] ^= 1; b.overwrite(key, object) }},
		{"moved/", func(b *bench, key string, _ []byte) { _ = b.store.Delete(b.t.Context(), key) }},
		{"moved/", func(b *bench, key string, object []byte) { object[80] ^= 1; b.overwrite(key, object) }},
	} {
		b := all.copied(t)
		b.prune(q)
		for o, err := range b.store.List(t.Context(), c.prefix) {
			if err != nil {
				t.Fatal(err)
			}
			object, _, err := b.store.Get(t.Context(), o.Key, 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			c.change(b, o.Key, object)
			break
		}
		r, _ := b.faulty() // as a process that knows nothing of it
		v, err := verify(t.Context(), r, VerifyRequest{ReadPercent: 100})
		if err != nil {
			t.Fatal(err)
		}
		named := false
		for _, p := range v.Problems {
			named = named || p.Volume != "" && strings.HasPrefix(p.Object, "segments/")
		}
		if c.prefix == "moved/" {
			named = b.oneTable(v.Problems)
		}
		if v.Err() == nil || !named {
			t.Errorf("%s: verify says %v", c.prefix, v.Problems)
		}
		failed := 0 // frames of either may be first
		for _, m := range []*made{b.truth["v"]["p2"], b.truth["w"]["q1"]} {
			to, _, err := b.restored(r, m, nil)
			switch {
			case err == nil:
				to.same(t, m.volume, m.content)
			case errs.Is(err, errs.Damaged), errs.Is(err, errs.NotFound):
				failed++
			default:
				t.Error(err)
			}
		}
		if failed == 0 {
			t.Errorf("%s: all can be restored", c.prefix)
		}
		if c.prefix == "moved/" {
			b.repairedTable()
		}
	}
}

// oneTable reports whether the only problem is with a table, which says how many points it affects.
func (b *bench) oneTable(problems []Problem) bool {
	if len(problems) != 1 {
		return false
	}
	p := problems[0]
	hint := errs.HintOf((&Verified{Problems: problems, TotalProblems: 1}).Err())
	return strings.HasPrefix(p.Object, "moved/") && p.Points == 2 && p.Volumes == 2 && len(p.Affected) == 2 &&
		strings.Contains(hint, "repair")
}

// repairedTable makes a table anew that is damaged or lost; before that a prune deletes no pack.
func (b *bench) repairedTable() {
	b.t.Helper()
	r, _ := b.faulty() // as a process that has not read the table
	packs := b.count("packs/")
	_, err := prune(b.t.Context(), r, PruneRequest{MaxRepack: -1, Patience: -1})
	if err != nil && !errs.Is(err, errs.Damaged) {
		b.t.Error(err)
	}
	if n := b.count("packs/"); n < packs {
		b.t.Errorf("%d packs are left of %d", n, packs)
	}
	for _, dry := range []bool{true, false} {
		out, err := (&repairer{RepairRequest: RepairRequest{DryRun: dry}, repo: r}).runRepair(b.t.Context())
		if err != nil || len(out.Tables) != 1 {
			b.t.Fatalf("repair: %+v, %v", out, err)
		}
	}
	b.whole()
	b.prune(PruneRequest{MaxRepack: -1})
	b.whole()
}

// cutPack is a bench in which a prune was killed when it had written packs and their table, and which then lost the end
// of a pack: what it was copied from is still there. It returns the pack's key.
func cutPack(t *testing.T) (*bench, string) {
	b, q := wastefulBench(t, faulttest.Rand(t))
	r, _ := b.faulty(storetest.Fault{
		Times: -1, Err: storetest.Permanent(errs.IO), Match: func(c storetest.Call) bool {
			return c.Op == storetest.Delete && strings.HasPrefix(c.Key, "segments/") && b.count("moved/") > 0
		},
	})
	if _, err := prune(t.Context(), r, q); !errs.Is(err, errs.IO) {
		t.Fatalf("it was to fail: %v", err)
	}
	for o, err := range b.store.List(t.Context(), "packs/") {
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := b.store.Get(t.Context(), o.Key, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		b.overwrite(o.Key, object[:len(object)*3/4])
		return b, o.Key
	}
	t.Fatal("nothing was repacked")
	return nil, ""
}

// TestRepackCutCopy: a pack that was cut, of which what it was copied from is still there, costs nothing: everything
// can
// be read and pushed upon, verify reports it, and a prune removes it.
func TestRepackCutCopy(t *testing.T) {
	b, key := cutPack(t)
	for _, m := range []*made{b.truth["v"]["p2"], b.truth["w"]["q1"]} {
		r, _ := b.faulty()
		if _, err := r.Moved(t.Context()); err != nil { // so that it looks there first
			t.Fatal(err)
		}
		to, _, err := b.restored(r, m, nil)
		if err != nil {
			t.Fatal(err)
		}
		to.same(t, m.volume, m.content)
	}
	for _, percent := range []float64{0, 100} {
		r, _ := b.faulty()
		v, err := verify(t.Context(), r, VerifyRequest{ReadPercent: percent})
		if err != nil {
			t.Fatal(err)
		}
		if len(v.Problems) != 1 || v.Problems[0].Object != key || v.Problems[0].Volume != "" ||
			!strings.Contains(errs.HintOf(v.Err()), "prune") {
			t.Errorf("verify of %v%% says %v", percent, v.Problems)
		}
	}
	b.repo = b.reopened()
	b.prune(PruneRequest{MaxRepack: -1, Patience: -1})
	b.prune(PruneRequest{MaxRepack: -1, Patience: -1})
	if v := b.verified(100); v.GarbageCount != 0 {
		t.Errorf("there is garbage: %+v", v)
	}
	b.whole()
}

// reopened is the repository as a process sees it that has read nothing.
func (b *bench) reopened() *repo.Repo {
	b.t.Helper()
	r, _ := b.faulty()
	return r
}

// overwrite replaces an object.
func (b *bench) overwrite(key string, object []byte) {
	b.t.Helper()
	if err := b.store.Delete(b.t.Context(), key); err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.store.Put(b.t.Context(), key, object, objstore.Always); err != nil {
		b.t.Fatal(err)
	}
}

// TestRestoreOverLostBase: a base whose map is gone, as nothing keeps it on the remote, is no reason to fail: what
// depends on it is written anew.
func TestRestoreOverLostBase(t *testing.T) {
	b := newBench(t)
	size, rnd := int64(2<<30), rand.New(rand.NewPCG(1, 2))
	was := b.must("v", "p1", size, nil, randomChange(rnd, size, 200), false)
	now := b.must("v", "p2", size, was, randomChange(rnd, size, 20), false)
	lost := *was
	lost.manifest.Map.Frame.Segment.Session = repo.NewID()
	to, _, err := b.restored(b.repo, now, &lost)
	if err != nil {
		t.Fatal(err)
	}
	to.same(t, "v@p2", now.content)

	if _, _, err := b.restored(b.repo, &lost, now); !errs.Is(err, errs.NotFound) {
		t.Errorf("the map of the point itself is gone: %v", err)
	}
}

// TestRepackFenceStays: a prune that was taken for dead is kept from naming packs which others have deleted, however
// late it is: one of its packs may be there again, as a request was repeated, and another prune about to delete it.
func TestRepackFenceStays(t *testing.T) {
	b, q := wastefulBench(t, faulttest.Rand(t))
	packs := map[string][]byte{}
	put := func(c storetest.Call) bool { return c.Op == storetest.Put && strings.HasPrefix(c.Key, "moved/") }
	r, _ := b.faulty(storetest.Fault{Match: put, When: storetest.Before, Do: func(storetest.Call) {
		for o, err := range b.store.List(t.Context(), "packs/") {
			if err != nil {
				t.Fatal(err)
			}
			object, _, err := b.store.Get(t.Context(), o.Key, 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			packs[o.Key] = object
		}
		for range 4 { // see the session, end it and delete its packs, and tidy
			b.prune(PruneRequest{Patience: -1})
		}
		if b.count("packs/") != 0 {
			t.Fatalf("%d packs are left", b.count("packs/"))
		}
		for key, object := range packs {
			if _, err := b.store.Put(t.Context(), key, object, objstore.Always); err != nil {
				t.Fatal(err)
			}
		}
	}})
	if _, err := prune(t.Context(), r, q); !errs.Is(err, errs.Conflict) {
		t.Errorf("a prune that was ended: %v", err)
	}
	if len(packs) == 0 {
		t.Fatal("nothing was repacked")
	}
	for key := range packs {
		if err := b.store.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	b.whole()
}

// TestRepackLostPack: the table of packs that are lost stays. It says what is lost, and all is well if they come back.
func TestRepackLostPack(t *testing.T) {
	b, q := wastefulBench(t, faulttest.Rand(t))
	b.prune(q)
	packs := map[string][]byte{}
	for o, err := range b.store.List(t.Context(), "packs/") {
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := b.store.Get(t.Context(), o.Key, 0, -1)
		if err == nil {
			err = b.store.Delete(t.Context(), o.Key)
		}
		if err != nil {
			t.Fatal(err)
		}
		packs[o.Key] = object
	}
	b.repo = b.reopened()
	for range 2 {
		if _, err := prune(t.Context(), b.repo, q); err != nil && !errs.Is(err, errs.Damaged) {
			t.Fatal(err)
		}
	}
	v, err := verify(t.Context(), b.reopened(), VerifyRequest{})
	if err != nil || len(v.Problems) == 0 {
		t.Fatalf("verify: %v, %+v", err, v)
	}
	for _, p := range v.Problems {
		if !strings.Contains(p.Message, "moved to packs/") {
			t.Errorf("verify says %v", p)
		}
	}
	for key, object := range packs {
		if _, err := b.store.Put(t.Context(), key, object, objstore.Always); err != nil {
			t.Fatal(err)
		}
	}
	b.repo = b.reopened()
	b.whole()
	b.prune(q)
	b.whole()
}
