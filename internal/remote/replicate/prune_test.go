package replicate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

const small = 64 << 20 // of volumes in tests of pruning

// history makes points p1 to pn of a volume.
func (b *bench) history(rnd *rand.Rand, volume string, base *made, n int) *made {
	b.t.Helper()
	for i := range n {
		origin := i == 0 && base != nil
		base = b.must(volume, fmt.Sprint("p", i+1), small, base, randomChange(rnd, small, 20), origin)
	}
	return base
}

// prune is Prune in a repository that is open.
func prune(ctx context.Context, r *repo.Repo, q PruneRequest) (*Pruned, error) {
	return (&pruner{repo: r, PruneRequest: q}).prune(ctx)
}

func (b *bench) prune(q PruneRequest) *Pruned {
	b.t.Helper()
	out, err := prune(b.t.Context(), b.repo, q)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

func (b *bench) points(volume string) string {
	b.t.Helper()
	h, _, err := b.repo.Head(b.t.Context(), volume)
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	for _, p := range h.Recent {
		out = append(out, p.Name)
	}
	return strings.Join(out, " ")
}

func TestPrune(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	last := b.history(rnd, "v", nil, 4)
	anew := randomChange(rnd, small, 20) // and nothing of the old
	for at := range last.content {
		anew[at] = block(rnd.Uint64())
	}
	b.must("v", "p5", small, last, anew, false)
	b.history(rnd, "fork", b.truth["v"]["p3"], 3)
	before := b.verified(0)
	if before.GarbageCount != 0 || before.Points != 8 {
		t.Fatalf("verify says %+v", before)
	}
	dry := b.prune(PruneRequest{Policy: Policy{Last: 1}, DryRun: true})
	if b.points("v") != "p1 p2 p3 p4 p5" || dry.FreedBytes == 0 || len(dry.Points) != 6 || dry.Kept != 2 {
		t.Fatalf("a dry run left %s and says %+v", b.points("v"), dry)
	}
	if after := b.verified(0); after.SegmentBytes != before.SegmentBytes {
		t.Error("a dry run has removed something")
	}
	out := b.prune(PruneRequest{Policy: Policy{Last: 2}, Names: []string{"v"}})
	if b.points("v") != "p4 p5" || b.points("fork") != "p1 p2 p3" || len(out.Points) != 3 || out.Kept != 5 {
		t.Fatalf("left %s and %s: %+v", b.points("v"), b.points("fork"), out)
	}
	b.whole()
	out = b.prune(PruneRequest{Policy: Policy{Last: 1}})
	if b.points("v") != "p5" || b.points("fork") != "p3" {
		t.Fatalf("left %s and %s", b.points("v"), b.points("fork"))
	}
	if after := b.verified(100); after.GarbageCount != 0 || after.SegmentBytes != out.UsedBytes ||
		len(after.Warnings) == 0 {
		t.Errorf("verify says %+v after %+v", after, out)
	}
	b.whole()
	// What it frees is what a dry run had said: nothing was pushed.
	if again := b.prune(PruneRequest{Policy: Policy{Last: 1}}); again.FreedBytes != 0 || again.Manifests != 0 ||
		len(again.Points) != 0 {
		t.Errorf("a second prune removed %+v", again)
	}
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v"}); err != nil {
		t.Fatal(err)
	}
	b.prune(PruneRequest{})
	b.whole()
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v"}); !errs.Is(err, errs.NotFound) {
		t.Errorf("a volume was removed twice: %v", err)
	}
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "fork", At: "p3"}); err != nil {
		t.Fatal(err)
	}
	b.prune(PruneRequest{})
	if last := b.verified(0); last.Points != 0 || last.Segments != 0 || last.GarbageBytes != 0 {
		t.Errorf("after everything was removed: %+v", last)
	}
	if n := b.count("segments/") + b.count("manifests/"); n != 0 {
		t.Errorf("%d objects are left", n)
	}
}

// TestPruneNeverTakesTheLast: somebody removes the newest point while a prune is about
// to remove the others.
func TestPruneNeverTakesTheLast(t *testing.T) {
	b := newBench(t)
	b.history(faulttest.Rand(t), "v", nil, 3)
	done := false
	r, _ := b.faulty(storetest.Fault{Times: -1, Match: func(c storetest.Call) bool {
		if !done && c.Op == storetest.Put && strings.HasPrefix(c.Key, "heads/") {
			done = true
			if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "p3"}); err != nil {
				t.Error(err)
			}
		}
		return false
	}})
	out, err := prune(t.Context(), r, PruneRequest{Policy: Policy{Last: 1}})
	if err != nil || !done {
		t.Fatal(err)
	}
	if got := b.points("v"); got != "p2" || len(out.Points) != 1 || out.Points[0].Name != "p1" || out.Kept != 1 {
		t.Errorf("left %q: %+v", got, out)
	}
	b.whole()
}

func (b *bench) count(prefix string) int {
	b.t.Helper()
	n := 0
	for _, err := range b.store.List(b.t.Context(), prefix) {
		if err != nil {
			b.t.Fatal(err)
		}
		n++
	}
	return n
}

func TestPruneInput(t *testing.T) {
	b := newBench(t)
	b.history(faulttest.Rand(t), "v", nil, 2)
	for _, c := range []struct {
		q    PruneRequest
		kind errs.Kind
	}{
		{PruneRequest{Policy: Policy{Last: -1}}, errs.Invalid},
		{PruneRequest{Policy: Policy{Last: 1}, Names: []string{"v", "none"}}, errs.NotFound},
		{PruneRequest{Policy: Policy{Last: 1}, Names: []string{"v", "a/b"}}, errs.Invalid},
	} {
		_, err := prune(t.Context(), b.repo, c.q)
		if !errs.Is(err, c.kind) || c.kind == errs.NotFound && errs.HintOf(err) == "" {
			t.Errorf("%+v: %v, want %s with a hint", c.q, err, c.kind)
		}
	}
	if got := b.points("v"); got != "p1 p2" {
		t.Errorf("bad input left %s", got)
	}
}

// TestPruneKeepsWhatSessionsNeed: what a living session pins or has written stays,
// and a dead one is ended, after which it can never commit.
func TestPruneKeepsWhatSessionsNeed(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	last := b.history(rnd, "v", nil, 3)
	first := b.truth["v"]["p1"]
	ctx := t.Context()
	_, l, err := beginSession(ctx, b.repo, repo.Push, []string{"v", "new"}, repo.Writer{Pool: "pool", Host: "host"},
		first.manifest.ID)
	if err != nil {
		t.Fatal(err)
	}
	// A push that has got as far as its manifest.
	slow := &made{volume: "v", point: "slow", content: map[int64][]byte{}, manifest: last.manifest}
	slow.manifest.ID, slow.manifest.Session, slow.manifest.Map, slow.manifest.Uses = repo.NewID(), l.id, repo.NodeRef{},
		nil
	if err := b.write(ctx, b.repo, l.id, slow, last, randomChange(rnd, small, 20)); err != nil {
		t.Fatal(err)
	}
	objects := b.count("segments/") + b.count("manifests/")
	out := b.prune(PruneRequest{Policy: Policy{Last: 1}})
	if out.HeldBytes == 0 || out.Working != 1 {
		t.Errorf("nothing is held: %+v", out)
	}
	for _, m := range []*made{first, slow} {
		if _, _, err := b.restored(b.repo, m, nil); err != nil {
			t.Errorf("a session needs %s: %v", m.point, err)
		}
	}
	if v := b.verified(0); v.WorkingBytes != out.HeldBytes || v.GarbageCount != 0 {
		t.Errorf("verify says %+v, and %d bytes are held", v, out.HeldBytes)
	}
	// It is patient with one that it has seen just now.
	if out := b.prune(PruneRequest{}); len(out.Ended) != 0 {
		t.Fatalf("a session was ended at once: %+v", out)
	}
	// It gives no sign of life, and patience has an end.
	h, v, err := b.repo.Head(ctx, "v")
	if err != nil {
		t.Fatal(err)
	}
	out = b.prune(PruneRequest{Patience: -1})
	if len(out.Ended) != 1 || out.Manifests == 0 || b.count("segments/")+b.count("manifests/") >= objects {
		t.Fatalf("a dead session was not ended: %+v", out)
	}
	b.whole()
	// What the writer had read is no longer there to be written over.
	h.Recent = append(
		h.Recent,
		repo.Point{Seq: h.NextSeq, Name: "slow", Manifest: slow.manifest.ID, Content: repo.Block, SizeBytes: small},
	)
	h.NextSeq++
	if _, err := b.repo.PutHead(ctx, h, v); !errs.Is(err, errs.Conflict) {
		t.Errorf("a fenced writer has committed: %v", err)
	}
	if now, _, err := b.repo.Head(ctx, "v"); err != nil || !slices.Contains(now.Fenced, l.id) {
		t.Errorf("the head does not say that the session is fenced: %v", err)
	}
	if now, v, err := b.repo.Head(ctx, "new"); err != nil || v == "" || !slices.Contains(now.Fenced, l.id) {
		t.Errorf("a volume that is not there yet can be made by a fenced session: %v", err)
	}
	if err := l.pinManifests(ctx, last.manifest.ID); !errors.Is(err, errEnded) {
		t.Errorf("the session goes on: %v", err)
	}
	_ = l.endSession(ctx)
	b.whole()
}

// TestPruneFailsClosed: whatever cannot be read, nothing is deleted.
func TestPruneFailsClosed(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 3)
	b.history(rnd, "w", b.truth["v"]["p2"], 2)
	_, l, err := beginSession(t.Context(), b.repo, repo.Pull, nil, repo.Writer{}, b.truth["v"]["p1"].manifest.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.endSession(context.Background()) }()
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "p3"}); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		r, f := b.faulty(storetest.Fault{Match: storetest.Ops(storetest.Get, storetest.List), At: i, Change: nil,
			Err: storetest.Permanent(errs.IO)})
		before := b.count("")
		_, err := prune(t.Context(), r, PruneRequest{DryRun: i%2 == 1})
		if f.Fired() == 0 {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		if err == nil {
			t.Errorf("read %d failed, and prune did not say so", i)
		}
		if n := b.count(""); n < before {
			t.Fatalf("read %d failed, and %d objects are gone", i, before-n)
		}
	}
	b.whole()
	// The same of objects that were changed.
	m := b.truth["w"]["p2"].manifest.ID
	r, _ := b.faulty(storetest.Fault{Match: func(c storetest.Call) bool {
		return c.Op == storetest.Get && c.Key == "manifests/"+m.String()
	}, Times: -1, Change: storetest.Flip(90, 1)})
	_, err = prune(t.Context(), r, PruneRequest{Policy: Policy{Last: 1}})
	if !errs.Is(err, errs.Damaged) || !strings.Contains(err.Error(), "w@p2") || errs.HintOf(err) == "" {
		t.Errorf("a damaged manifest: %v", err)
	}
	b.whole()
}

// TestPruneEveryFault fails every operation of the store, before and after its
// effect. What is there afterwards is whole, and a second prune does the rest.
func TestPruneEveryFault(t *testing.T) {
	rnd := faulttest.Rand(t)
	for i := 0; ; i++ {
		b := newBench(t)
		b.history(rnd, "v", nil, 2)
		b.history(rnd, "w", b.truth["v"]["p1"], 2)
		if _, err := b.repo.PutSeen(t.Context(), repo.Seen{}, ""); err != nil {
			t.Fatal(err)
		}
		when := storetest.Before
		if i%2 == 1 {
			when = storetest.After
		}
		r, f := b.faulty(storetest.Fault{At: i / 2, When: when})
		q := PruneRequest{Policy: Policy{Last: 1}}
		_, err := prune(t.Context(), r, q)
		if f.Fired() == 0 {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		b.whole()
		if b.prune(q); b.points("v") != "p2" || b.points("w") != "p2" {
			t.Fatalf("after fault %d: %s, %s", i, b.points("v"), b.points("w"))
		}
		if v := b.verified(0); v.GarbageCount != 0 {
			t.Errorf("after fault %d and another prune there is garbage: %+v", i, v)
		}
		if t.Failed() {
			t.Fatalf("at fault %d (%v)", i, when)
		}
	}
}

// TestPruneRaces: pushes, pulls, prunes with and without patience, removals and
// verifies, all at once, over a slow store. Whatever was acknowledged and not
// removed must be whole.
func TestPruneRaces(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v0", nil, 2)
	b.history(rnd, "v1", nil, 2)
	slow := func(n uint64) *repo.Repo {
		var mu sync.Mutex
		r := rand.New(rand.NewPCG(n, 7))
		rp, _ := b.faulty(storetest.Fault{Times: -1, Match: func(storetest.Call) bool {
			mu.Lock()
			d := time.Duration(r.IntN(300)) * time.Microsecond
			mu.Unlock()
			time.Sleep(d)
			return false
		}})
		return rp
	}
	long := raceFor(t)
	ctx, cancel := context.WithTimeout(t.Context(), 40*long) // it needs luck for a pack to be removed
	defer cancel()
	var g sync.WaitGroup
	var pushes, pulls, prunes, fenced, broken, packs atomic.Int64
	begun := time.Now()
	enough := func() bool { // a machine that is busy takes longer
		return time.Since(begun) > long && pushes.Load() >= 5 && pulls.Load() >= 5 && prunes.Load() >= 5 && packs.Load() > 0
	}
	run := func(name string, fn func(*rand.Rand, *repo.Repo) error) {
		n := rnd.Uint64()
		r := slow(n)
		g.Go(func() {
			rnd := rand.New(rand.NewPCG(n, 1))
			for ctx.Err() == nil {
				if err := fn(rnd, r); err != nil && ctx.Err() == nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				if enough() {
					cancel()
				}
			}
		})
	}
	newest := func(r *repo.Repo, volume string) *made {
		h, _, err := r.Head(ctx, volume)
		if err != nil || len(h.Recent) == 0 {
			return nil
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if m := b.truth[volume][h.Recent[len(h.Recent)-1].Name]; m != nil &&
			m.manifest.ID == h.Recent[len(h.Recent)-1].Manifest {
			return m
		}
		return nil
	}
	for w := range 3 { // each writes a volume of its own, from any
		i := 0
		run("push", func(rnd *rand.Rand, r *repo.Repo) error {
			i++
			name := fmt.Sprint("v", w)
			base := newest(r, fmt.Sprint("v", rnd.IntN(3)))
			_, err := b.push(ctx, r, name, fmt.Sprint("w", i), small, base, randomChange(rnd, small, 5), base != nil &&
				base.volume != name)
			switch {
			case err == nil:
				pushes.Add(1)
			case errs.Is(err, errs.Conflict), errs.Is(err, errs.Canceled), errs.Is(err, errs.NotFound):
				fenced.Add(1)
				err = nil
			}
			return err
		})
	}
	for range 2 {
		run("prune", func(rnd *rand.Rand, r *repo.Repo) error {
			q := PruneRequest{Policy: Policy{Last: 2}, MaxRepack: -int64(rnd.IntN(2))}
			if rnd.IntN(8) == 0 {
				q.Patience = -1 // ends whoever was slow
			}
			out, err := prune(ctx, r, q)
			if errs.Is(err, errs.Conflict) { // too busy
				return nil
			}
			if err == nil {
				prunes.Add(1)
				packs.Add(int64(out.Packs))
			}
			return err
		})
	}
	run("remove", func(rnd *rand.Rand, r *repo.Repo) error {
		time.Sleep(20 * time.Millisecond)
		q := ref.Ref{Name: fmt.Sprint("v", rnd.IntN(3))}
		if m := newest(r, q.Name); m != nil && rnd.IntN(3) > 0 {
			q.At = m.point
		}
		_, err := removeVolume(ctx, r, q)
		if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Conflict) {
			err = nil
		}
		return err
	})
	run("verify", func(rnd *rand.Rand, r *repo.Repo) error {
		v, err := verify(ctx, r, VerifyRequest{ReadPercent: float64(rnd.IntN(3) * 10)})
		if err == nil {
			err = v.Err()
		}
		return err
	})
	run("pull", func(rnd *rand.Rand, r *repo.Repo) error {
		m := newest(r, fmt.Sprint("v", rnd.IntN(3)))
		if m == nil {
			return nil
		}
		sctx, l, err := beginSession(ctx, r, repo.Pull, nil, repo.Writer{}, m.manifest.ID)
		if err != nil {
			return err
		}
		defer func() { _ = l.endSession(ctx) }()
		if h, _, err := r.Head(sctx, m.volume); err != nil ||
			!slices.ContainsFunc(h.Recent, func(x repo.Point) bool { return x.Manifest == m.manifest.ID }) {
			return err
		}
		to, _, err := b.restored(r, m, nil)
		if err != nil {
			// Only who was ended may find something gone.
			if _, serr := r.Session(ctx, l.id); errs.Is(serr, errs.NotFound) {
				broken.Add(1)
				return nil
			}
			return err
		}
		to.same(t, m.volume+"@"+m.point, m.content)
		pulls.Add(1)
		return nil
	})
	g.Wait()
	t.Logf(
		"%d pushes (%d refused), %d pulls (%d ended), %d prunes (%d packs)",
		pushes.Load(),
		fenced.Load(),
		pulls.Load(),
		broken.Load(),
		prunes.Load(),
		packs.Load(),
	)
	if pushes.Load() < 5 || pulls.Load() < 5 || prunes.Load() < 5 || packs.Load() == 0 {
		t.Error("too little happened for this to tell anything")
	}
	b.whole()
	b.prune(PruneRequest{Patience: -1})
	b.prune(PruneRequest{Patience: -1})
	b.whole()
	if v := b.verified(0); v.GarbageCount != 0 || v.WorkingBytes != 0 {
		t.Errorf("something is left: %+v", v)
	}
}

// TestPruneBesideRemoval: what another prune or removal takes away between two steps of this
// one is no damage, and neither is what sessions have pinned too late.
func TestPruneBesideRemoval(t *testing.T) {
	b := newBench(t)
	b.history(faulttest.Rand(t), "v", nil, 3)
	b.history(faulttest.Rand(t), "w", nil, 2)
	first := b.truth["v"]["p1"].manifest.ID

	// Another prune removes a point just before this one reads its manifest.
	done := false
	r, _ := b.faulty(storetest.Fault{Times: -1, Match: func(c storetest.Call) bool {
		if !done && c.Op == storetest.Get && strings.HasPrefix(c.Key, "manifests/") {
			done = true
			b.prune(PruneRequest{Policy: Policy{Last: 1}, Names: []string{"v"}})
		}
		return false
	}})
	if _, err := prune(t.Context(), r, PruneRequest{}); err != nil || !done {
		t.Errorf("beside another prune: %v", err)
	}

	// Two sessions have pinned what is gone.
	for range 2 {
		w := repo.Writer{Pool: "pool", Host: "host"}
		_, l, err := beginSession(t.Context(), b.repo, repo.Push, []string{"v"}, w, first)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.endSession(context.Background()) }()
	}
	if _, err := prune(t.Context(), b.repo, PruneRequest{}); err != nil {
		t.Errorf("beside two sessions that pin what is gone: %v", err)
	}

	// What is gone and still listed is damage.
	if err := b.repo.DeleteManifest(t.Context(), b.truth["w"]["p1"].manifest.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := prune(t.Context(), b.repo, PruneRequest{}); !errs.Is(err, errs.Damaged) {
		t.Errorf("a manifest that is missing: %v", err)
	}
}

// TestPruneNamesWhatItCannotRead: while a node of a map is lost nothing is deleted, and it is said once whose map it
// is.
// Sessions of the dead end, and points go out of lists.
func TestPruneNamesWhatItCannotRead(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 3)
	last := b.history(rnd, "w", nil, 3)
	root := last.manifest.Root().Frame.Segment
	if root == (repo.Segment{}) {
		t.Fatal("the map has no root")
	}
	if err := b.repo.DeleteSegment(t.Context(), root); err != nil {
		t.Fatal(err)
	}
	b.repo = b.reopened()
	if _, _, err := beginSession(t.Context(), b.repo, repo.Pull, nil, repo.Writer{Host: "dead"}); err != nil {
		t.Fatal(err)
	}
	b.prune(PruneRequest{Patience: -1})
	segments := b.count("segments/")
	out := b.prune(PruneRequest{Policy: Policy{Last: 1}, MaxRepack: -1, Patience: -1})
	if out.FreedBytes != 0 || b.count("segments/") != segments || len(out.Points) == 0 || len(out.Ended) != 1 {
		t.Errorf("%d of %d segments are left: %+v", b.count("segments/"), segments, out)
	}
	if len(out.Unreadable) != 1 || strings.Count(out.KeptAll, "w@"+last.point) != 1 {
		t.Fatalf("%q, %+v", out.KeptAll, out.Unreadable)
	}
	x := out.Unreadable[0]
	if x.Volume != "w" || x.Point != last.point || x.Object != "segments/"+root.String() || x.Reason == "" {
		t.Errorf("%+v", x)
	}

	// Without that point it goes on.
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "w"}); err != nil {
		t.Fatal(err)
	}
	delete(b.truth, "w")
	if out := b.prune(PruneRequest{MaxRepack: -1}); out.KeptAll != "" || out.FreedBytes == 0 {
		t.Errorf("%q, %+v", out.KeptAll, out)
	}
	b.whole()
}
