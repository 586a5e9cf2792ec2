package replicate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

// lengthen puts n points before those of a head, h1 to hn, a minute apart, like its newest one. They share so many
// manifests; 0: each has its own.
func lengthen(t testing.TB, rp *repo.Repo, name string, n, manifests int) {
	t.Helper()
	ctx := t.Context()
	h, v, err := rp.Head(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	like := h.Recent[len(h.Recent)-1]
	m, err := rp.Manifest(ctx, like.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	if manifests == 0 {
		manifests = n
	}
	begun := like.CreatedAt.Add(-time.Duration(n+1) * time.Minute)
	points := make([]repo.Point, n)
	for i := range points {
		at := like
		at.Seq, at.Name, at.CreatedAt = uint64(i+1), fmt.Sprint("h", i+1), begun.Add(time.Duration(i)*time.Minute)
		at.Source, at.Order = repo.NewID().String(), at.CreatedAt.UnixNano()
		if at.Manifest = repo.NewID(); i >= manifests {
			at.Manifest = points[i%manifests].Manifest
		}
		points[i] = at
	}
	err = eachOf(ctx, points[:manifests], func(ctx context.Context, pt repo.Point) error {
		c := m
		c.ID, c.Point, c.CreatedAt, c.Source, c.StateOrder = pt.Manifest, pt.Name, pt.CreatedAt, pt.Source, pt.StateOrder
		return rp.PutManifest(ctx, c)
	})
	if err != nil {
		t.Fatal(err)
	}

	recent := h.Recent
	h.Recent = points
	for i, pt := range recent {
		pt.Seq = uint64(n + i + 1)
		h.Recent = append(h.Recent, pt)
	}
	h.NextSeq, h.Latest = uint64(len(h.Recent)+1), 0
	pages := newPageWriter(rp, name)
	defer pages.endSession(ctx)
	if err := pages.pagePutter().Shrink(ctx, &h); err != nil {
		t.Fatal(err)
	}
	if _, err := rp.PutHead(ctx, h, v); err != nil {
		t.Fatal(err)
	}
}

// pagesOf are the keys of the pages of a head.
func (b *bench) pagesOf(volume string) (out []string) {
	b.t.Helper()
	h, _, err := b.repo.Head(b.t.Context(), volume)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, p := range h.Pages {
		out = append(out, p.Object())
	}
	return out
}

// namesOf are the names of all points of a head.
func (b *bench) namesOf(volume string) (out []string) {
	b.t.Helper()
	h, _, err := b.repo.Head(b.t.Context(), volume)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, p := range pointsOf(b.t, b.repo, h) {
		out = append(out, p.Name)
	}
	if len(out) != h.Count() {
		b.t.Errorf("%s says that it has %d points, and has %d", volume, h.Count(), len(out))
	}
	return out
}

// TestPagedPoints: a volume with more points than its head lists itself can be listed, verified, pruned, and points
// can be removed from anywhere; what is rewritten are the pages concerned.
func TestPagedPoints(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "fork", b.history(rnd, "v", nil, 2), 1)
	lengthen(t, b.repo, "v", 5500, 0)
	pages := b.pagesOf("v")
	if len(pages) != 2 || b.count("points/") != 2 {
		t.Fatalf("pages %q", pages)
	}
	if v := b.verified(0); v.Points != 5503 || v.GarbageCount != 0 {
		t.Errorf("verified %+v", v)
	}

	// A point in the middle.
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "h3000"}); err != nil {
		t.Fatal(err)
	}
	now := b.pagesOf("v")
	if len(now) != 2 || now[0] == pages[0] || now[1] != pages[1] || b.count("points/") != 3 {
		t.Errorf("pages %q were %q", now, pages)
	}
	if all := b.namesOf("v"); len(all) != 5501 || slices.Contains(all, "h3000") {
		t.Errorf("%d points", len(all))
	}
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "h3000"}); !errs.Is(err, errs.NotFound) {
		t.Errorf("a point that is gone: %v", err)
	}

	// What the head does not name any more is garbage; and then a policy.
	out := b.prune(PruneRequest{})
	if out.Kept != 5502 || len(out.Points) != 0 || out.Manifests != 1 || b.count("points/") != 2 {
		t.Errorf("prune of garbage: %d kept, %d manifests", out.Kept, out.Manifests)
	}
	policy := Policy{Last: 1, Within: 24 * time.Hour}
	if dry := b.prune(PruneRequest{Policy: policy, DryRun: true}); len(dry.Points) != 5502-1-1441 {
		t.Errorf("a dry run would remove %d", len(dry.Points))
	}
	out = b.prune(PruneRequest{Policy: policy})
	if len(out.Points) != 5502-1-1441 || out.Manifests != len(out.Points) || b.count("manifests/") != 1442 {
		t.Errorf("%d points went with %d manifests; %d are left", len(out.Points), out.Manifests, b.count("manifests/"))
	}
	if all := b.namesOf("v"); len(all) != 1441 || all[0] != "h4062" || all[len(all)-1] != "p2" {
		t.Errorf("%d points from %s to %s", len(all), all[0], all[len(all)-1])
	}
	if len(b.pagesOf("v")) != 1 || b.count("points/") != 1 {
		t.Errorf("pages %q of %d", b.pagesOf("v"), b.count("points/"))
	}
	b.whole()

	// All of it.
	gone, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v"})
	if err != nil || len(gone.Points) != 1441 {
		t.Errorf("removed %d points, %v", len(gone.Points), err)
	}
	if b.prune(PruneRequest{}); b.count("points/") != 0 || b.count("manifests/") != 1 {
		t.Errorf("%d pages and %d manifests are left", b.count("points/"), b.count("manifests/"))
	}
	b.whole()
}

// TestPagedPointsDamaged: a page that is damaged or lost hides its points, no others, nothing that they need is pruned,
// and it can be made anew.
func TestPagedPointsDamaged(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "w", nil, 1)
	b.history(rnd, "v", nil, 2)
	lengthen(t, b.repo, "v", 5000, 0)
	points := 5002
	for _, how := range []string{"damaged", "lost"} {
		t.Run(how, func(t *testing.T) {
			b.t = t
			before, pages := b.namesOf("v"), b.pagesOf("v")
			if how == "damaged" {
				b.flip(pages[1], 100)
			} else if err := b.store.Delete(t.Context(), pages[1]); err != nil {
				t.Fatal(err)
			}

			found, err := verify(t.Context(), b.repo, VerifyRequest{})
			if err != nil || found.TotalProblems != 1 {
				t.Fatalf("verify: %v, %+v", err, found.Problems)
			}
			if p := found.Problems[0]; p.Object != pages[1] || p.Volume != "v" || p.Points != 650 {
				t.Errorf("verify: %+v", p)
			}
			if hint := errs.HintOf(found.Err()); !strings.Contains(hint, "repair") {
				t.Errorf("hint %q", hint)
			}
			_, err = removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "h4500"})
			if !errs.Is(err, errs.Damaged) || !strings.Contains(errs.HintOf(err), "repair") {
				t.Errorf("remove what is in the page: %v", err)
			}
			inHead := before[points-4]
			if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: inHead}); err != nil {
				t.Errorf("remove what is in the head: %v", err)
			}
			points--
			manifests, segments := b.count("manifests/"), b.count("segments/")
			out := b.prune(PruneRequest{Policy: Policy{Last: 1}})
			if len(out.Damaged) != 1 || out.Damaged[0].Volume != "v" || out.Damaged[0].Object != pages[1] {
				t.Errorf("prune: %+v", out.Damaged)
			}
			if out.Kept != points+1 {
				t.Errorf("prune kept %d points, want %d", out.Kept, points+1)
			}
			if b.count("manifests/") != manifests || b.count("segments/") != segments {
				t.Errorf("prune left %d of %d manifests, %d of %d segments",
					b.count("manifests/"), manifests, b.count("segments/"), segments)
			}
			h, _, err := b.repo.Head(t.Context(), "v")
			if err != nil {
				t.Fatal(err)
			}
			for name, kind := range map[string]errs.Kind{"": "", "h1": "", "h4500": errs.Damaged} {
				_, err := resolvePoint(t.Context(), b.repo, h, "", ref.Ref{Name: "v", At: name})
				if errs.KindOf(err) != kind && (err != nil || kind != "") {
					t.Errorf("point %q: %v", name, err)
				}
			}

			for _, dry := range []bool{true, false} {
				done := b.repair(dry)
				if len(done.Volumes) != 1 {
					t.Fatalf("repair: %+v", done)
				}
				if v := done.Volumes[0]; v.Volume != "v" || !v.Part || len(v.Points) != 650 || !v.Repaired {
					t.Errorf("repair: %+v", v)
				}
			}
			before = slices.DeleteFunc(before, func(n string) bool { return n == inHead })
			if now := b.namesOf("v"); !slices.Equal(now, before) {
				t.Errorf("%d points instead of %d", len(now), len(before))
			}
			if again := b.repair(false); len(again.Volumes) != 0 {
				t.Errorf("repaired twice: %+v", again.Volumes)
			}
			b.verified(0)
		})
	}

	// Nothing of the head is left: all comes back.
	b.t = t
	if err := b.store.Delete(t.Context(), b.headKey("v")); err != nil {
		t.Fatal(err)
	}
	if done := b.repair(false); len(done.Volumes) != 1 || len(done.Volumes[0].Points) != 5002 {
		t.Errorf("repair of the head: %+v", len(done.Volumes[0].Points))
	}
	if now := b.namesOf("v"); len(now) != 5002 || now[0] != "h1" || now[5001] != "p2" {
		t.Errorf("%d points", len(now))
	}
	b.prune(PruneRequest{})
	b.verified(0)
}

// TestPagedPush: a push asks the same of a remote however many points a volume has, and one request more when it closes
// a page. It reads no page.
func TestPagedPush(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.push("v")
	change := uint64(0)
	next := func() (calls []storetest.Call) {
		t.Helper()
		w.edit("v", func(f *os.File) { change++; noise(t, f, 100+change, 8*mib, 4096) })
		before := len(w.store.Calls())
		w.push("v")
		return w.store.Calls()[before:]
	}
	next()
	usual := len(next())

	rp := w.open()
	lengthen(t, rp, "v", 20000, 100)
	for range 2 {
		calls := next()
		if len(calls) > usual || slices.ContainsFunc(calls, isPage) {
			t.Errorf("a push to a long history makes %d calls instead of %d: %v", len(calls), usual, calls)
		}
	}

	// So many that the next one is too much.
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	lengthenRecent(t, rp, "v", 768-len(h.Recent))
	calls := next()
	closed := slices.DeleteFunc(slices.Clone(calls), func(c storetest.Call) bool { return !isPage(c) })
	if len(calls) > usual+1 || len(closed) != 1 || closed[0].Op != storetest.Put {
		t.Errorf("closing a page takes %d calls instead of %d: %v", len(calls), usual, closed)
	}
	now := w.checkPoint(rp, "v", w.image("v"))
	if n := len(now.Recent); n != 256 || len(now.Pages) != len(h.Pages)+1 {
		t.Errorf("the head lists %d points and %d pages", n, len(now.Pages))
	}
	if v := w.verified(t); v.TotalProblems != 0 || v.Points != now.Count()+1 {
		t.Errorf("%d points, problems %v", v.Points, v.Problems)
	}

	// Names that people give are looked for in pages as well.
	w.snapshot("v", "h17")
	if _, err := w.tryPush("v@h17"); !errs.Is(err, errs.Exists) {
		t.Errorf("a name that is taken: %v", err)
	}
	w.snapshot("v", "free")
	w.push("v@free")
}

// isPage reports whether a call is about a page of points.
func isPage(c storetest.Call) bool { return strings.HasPrefix(c.Key, "points/") }

// lengthenRecent adds n points before the newest of those that a head lists itself.
func lengthenRecent(t testing.TB, rp *repo.Repo, name string, n int) {
	t.Helper()
	h, v, err := rp.Head(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	last := h.Recent[len(h.Recent)-1]
	h.Recent = h.Recent[:len(h.Recent)-1]
	for i := range n {
		pt := h.Recent[len(h.Recent)-1]
		pt.Seq, pt.Name, pt.Source = pt.Seq+1, fmt.Sprint("r", i), repo.NewID().String()
		h.Recent = append(h.Recent, pt)
	}
	last.Seq = h.Recent[len(h.Recent)-1].Seq + 1
	h.Recent, h.NextSeq = append(h.Recent, last), last.Seq+1
	if _, err := rp.PutHead(t.Context(), h, v); err != nil {
		t.Fatal(err)
	}
}

// TestPagedPointsInFlight: a prune between a page and the head that names it leaves the page.
func TestPagedPointsInFlight(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 2)
	lengthen(t, b.repo, "v", 5000, 10)
	var pruned *Pruned
	put := func(c storetest.Call) bool { return c.Op == storetest.Put && isPage(c) }
	rp, _ := b.faulty(storetest.Fault{Match: put, When: storetest.After, Do: func(storetest.Call) {
		pruned = b.prune(PruneRequest{})
	}})
	if _, err := removeVolume(t.Context(), rp, ref.Ref{Name: "v", At: "h100"}); err != nil {
		t.Fatal(err)
	}
	if pruned == nil || len(b.namesOf("v")) != 5001 {
		t.Errorf("pruned %+v", pruned)
	}
	b.verified(0)
	if b.prune(PruneRequest{}); b.count("points/") != len(b.pagesOf("v")) || b.count("sessions/") != 0 {
		t.Errorf("%d pages and %d sessions are left", b.count("points/"), b.count("sessions/"))
	}

	// One that has ended the session in the meantime: nothing is committed.
	rp, _ = b.faulty(storetest.Fault{Match: put, When: storetest.After, Do: func(storetest.Call) {
		b.prune(PruneRequest{Patience: -1})
		b.prune(PruneRequest{Patience: -1})
	}})
	if _, err := removeVolume(t.Context(), rp, ref.Ref{Name: "v", At: "h200"}); !errors.Is(err, errEnded) {
		t.Errorf("a session that was ended: %v", err)
	}
	if len(b.namesOf("v")) != 5001 {
		t.Errorf("%d points", len(b.namesOf("v")))
	}
	b.verified(0)
}

// lateHead is a store that does the first write of a head late, long after it has answered that it does not know.
type lateHead struct {
	objstore.Store
	write func() error
}

func (s *lateHead) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	if s.write != nil || !strings.HasPrefix(key, "heads/") {
		return s.Store.Put(ctx, key, data, c)
	}
	s.write = func() error {
		_, err := s.Store.Put(context.WithoutCancel(ctx), key, data, c)
		return err
	}
	return "", objstore.Transient(errs.New(errs.IO, "write object", key, "the connection was lost"))
}

// TestPagedPointsLateHead: pages stay until the head that names them cannot be written any more, though the write of it
// has failed as far as its process knows, and though its session was deleted.
func TestPagedPointsLateHead(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 2)
	lengthen(t, b.repo, "v", 5000, 10)
	for i, beside := range []bool{true, false} {
		at := ref.Ref{Name: "v", At: fmt.Sprint("h", 100+i)}
		late := &lateHead{Store: b.store}
		rp, err := repo.Open(t.Context(), late, b.secret)
		if err != nil {
			t.Fatal(err)
		}
		defer rp.Close()
		if _, err := removeVolume(t.Context(), rp, at); !objstore.Temporary(err) {
			t.Fatalf("a head whose write nobody knows of: %v", err)
		}
		// It arrives while a prune runs, which has listed the pages, or after that.
		written := false
		during, _ := b.faulty(storetest.Fault{Times: -1, Match: func(c storetest.Call) bool {
			if beside && !written && c.Op == storetest.Put && strings.HasPrefix(c.Key, "heads/") {
				written = true
				if err := late.write(); err != nil {
					t.Errorf("the late write: %v", err)
				}
			}
			return false
		}})
		sessions, err := b.repo.Sessions(t.Context())
		if err != nil || len(sessions) != 1 {
			t.Fatal(sessions, err)
		}
		if err := b.repo.DropSession(t.Context(), sessions[0]); err != nil { // it does not protect the pages
			t.Fatal(err)
		}
		if _, err := prune(t.Context(), during, PruneRequest{}); err != nil || written != beside {
			t.Fatalf("the prune: %v", err)
		}
		if err := late.write(); !errs.Is(err, errs.Conflict) {
			t.Fatalf("the late write after a prune: %v", err)
		}
		b.verified(0)
	}
}

// TestPagedReadersFollow: who reads pages while a prune replaces and removes them goes on with the new ones.
func TestPagedReadersFollow(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 2)
	lengthen(t, b.repo, "v", 9000, 10)
	h, _, err := b.repo.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "h1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "h8000"}); err != nil {
		t.Fatal(err)
	}
	b.prune(PruneRequest{})
	var bad []*pageFault
	n := 0
	for _, err := range allPoints(t.Context(), b.repo, h, &bad) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	back := 0
	for _, err := range newestFirst(t.Context(), b.repo, h, nil, &bad) {
		if err != nil {
			t.Fatal(err)
		}
		back++
	}
	if n != 9000 || back != 9000 || len(bad) != 0 {
		t.Errorf("%d points, %d backwards, faults %v", n, back, bad)
	}
}

// TestMillionPoints: what works on all points of a volume does so in bounded memory. Points share manifests, so that
// it is about lists of points.
func TestMillionPoints(t *testing.T) {
	points, budget := 20000, int64(128<<20)
	if testfs.Full() {
		points, budget = 1000000, 512<<20
	}
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 2)
	lengthen(t, b.repo, "v", points, 1000)

	within := func(what string, do func()) {
		t.Helper()
		begun := time.Now()
		if peak := memoryWhile(t, do); peak > budget {
			t.Errorf("%s takes %d MiB of memory", what, peak>>20)
		} else {
			t.Logf("%s: %d MiB, %.1f s", what, peak>>20, time.Since(begun).Seconds())
		}
	}
	within("ls", func() {
		l, err := listVolumes(t.Context(), b.repo)
		if err != nil || l.Volumes[0].Count != points+2 {
			t.Fatalf("%+v, %v", l, err)
		}
		n := 0
		for _, err := range l.Points(t.Context(), &l.Volumes[0]) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		if n != points+2 {
			t.Errorf("%d points are listed", n)
		}
	})
	within("verify", func() {
		if v := b.verified(0); v.Points != points+2 {
			t.Errorf("%d points were verified", v.Points)
		}
	})
	within("prune", func() {
		out := b.prune(PruneRequest{Policy: Policy{Last: 10000, Monthly: 100}})
		if len(out.Points)+out.Kept != points+2 || len(out.Points) < points-11000 {
			t.Errorf("%d points went, %d are left", len(out.Points), out.Kept)
		}
	})
	b.verified(0)
}

// memoryWhile is by how many bytes the memory of this process grows while do runs, at most.
func memoryWhile(t testing.TB, do func()) int64 {
	t.Helper()
	defer debug.SetGCPercent(debug.SetGCPercent(100)) // as users have it
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // the most begins anew
		t.Fatal(err)
	}
	before, err := peakMemory()
	if err != nil {
		t.Fatal(err)
	}
	do()
	after, err := peakMemory()
	if err != nil {
		t.Fatal(err)
	}
	return after - before
}

func (w *world) snapshot(volume, name string) {
	w.t.Helper()
	q := engine.SnapshotRequest{Volume: ref.MustName(volume), Name: ref.MustName(name)}
	if _, err := w.e.Snapshot(w.t.Context(), q); err != nil {
		w.t.Fatal(err)
	}
}
