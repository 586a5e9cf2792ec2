package replicate

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

// wantKind wants an error of a kind, with a hint that says something.
func wantKind(t *testing.T, err error, kind errs.Kind, hint string) {
	t.Helper()
	if errs.KindOf(err) != kind || !strings.Contains(errs.HintOf(err), hint) {
		t.Errorf("%v (%s, hint %q), wanted %s with a hint of %q", err, errs.KindOf(err), errs.HintOf(err), kind, hint)
	}
}

// another is a second pool that knows the same remote.
func (w *world) another(t *testing.T) *world {
	t.Helper()
	key, err := os.ReadFile(w.r.IdentityFile())
	if err != nil {
		t.Fatal(err)
	}
	e := newEngine(t, testfs.XFS(t, 2<<30), reflink.Name)
	if _, err := Add(t.Context(), e, AddRequest{Name: "r", URL: w.r.URL, Identity: string(key)}, Access{}); err != nil {
		t.Fatal(err)
	}
	o := &world{t: t, e: e, dir: e.Dir()}
	o.load()
	return o
}

// TestPushTwoPools: of two pools that push the same name at once exactly one wins; the
// other is told who has it, and keeps all it has but what the push made.
func TestPushTwoPools(t *testing.T) {
	a := newWorld(t)
	b := a.another(t)
	rp := a.open()
	for _, w := range []*world{a, b} {
		w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	}
	for i := range 8 {
		name := fmt.Sprintf("v%d", i)
		var done sync.WaitGroup
		worlds, failed := []*world{a, b}, make([]error, 2)
		var here atomic.Int32       // how many are about to write the head
		both := make(chan struct{}) // closed when both are, or one has failed before
		open := sync.OnceFunc(func() { close(both) })
		for k, w := range worlds {
			w.clone("g", name)
			w.edit(name, func(f *os.File) { noise(t, f, uint64(10+k), 10*mib, mib) })
			w.store.Heal()
			w.store.Add(storetest.Fault{Match: func(c storetest.Call) bool {
				return c.Op == storetest.Put && strings.HasPrefix(c.Key, "heads/")
			}, Do: func(storetest.Call) {
				if here.Add(1) == 2 {
					open()
				}
				<-both
			}})
			done.Go(func() {
				defer open()
				_, failed[k] = Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{{Name: name}}, NoOrigin: true})
			})
		}
		done.Wait()
		a.store.Heal()
		b.store.Heal()
		won := -1
		for k, err := range failed {
			if err == nil {
				if won >= 0 {
					t.Fatalf("%s: both pushes succeeded", name)
				}
				won = k
			} else {
				wantKind(t, err, errs.Conflict, `parameter "as" set to NAME`)
				if s := worlds[k].pushSnapshots(name); len(s) != 0 {
					t.Errorf("%s: the loser keeps %v", name, s)
				}
			}
		}
		if won < 0 {
			t.Fatalf("%s: no push succeeded: %v", name, failed)
		}
		h := worlds[won].checkPoint(rp, name, worlds[won].image(name))
		if h.Epoch != 1 || h.Writer.Pool != worlds[won].e.PoolID() || len(h.Recent) != 1 {
			t.Errorf("%s: head %+v", name, h)
		}
		// The loser pushes it as a fork, of which nothing is lost.
		l := worlds[1-won]
		out, err := Push(t.Context(), l.e, l.r, PushRequest{Refs: []ref.Ref{{Name: name}}, As: ref.MustName(name + "-fork"),
			NoOrigin: true})
		if err != nil || out[0].Volume != name+"-fork" {
			t.Fatalf("%+v, %v", out, err)
		}
		l.checkPoint(rp, name+"-fork", l.image(name))
	}
	a.noSessions(rp)
}

// TestPushFenced: a session that a prune has ended, or is just ending, commits nothing, whenever that happens, and the
// next push succeeds.
func TestPushFenced(t *testing.T) {
	t.Run("ended", func(t *testing.T) { pushFenced(t, true) })
	t.Run("ending", func(t *testing.T) { pushFenced(t, false) })
}

// pushFenced fences the session of a push at each of its operations, and then drops it: at once, or after the push.
func pushFenced(t *testing.T, atOnce bool) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	rp := w.open()
	ctx := context.Background()
	// As a prune does it: first the heads, then the session.
	drop := func(all []repo.SessionState) {
		for _, s := range all {
			if err := rp.DropSession(ctx, s); err != nil {
				t.Error(err)
			}
		}
	}
	var fenced []repo.SessionState
	fence := func() {
		all, err := rp.Sessions(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		fenced = all
		for _, s := range all {
			for _, name := range s.Heads {
				h, v, err := rp.Head(ctx, name)
				if errs.Is(err, errs.NotFound) {
					h, err = repo.Head{Name: name, NextSeq: 1}, nil
				}
				if err == nil {
					h.Fenced = append(h.Fenced, s.ID)
					_, err = rp.PutHead(ctx, h, v)
				}
				if err != nil {
					t.Error(err)
				}
			}
		}
		if atOnce {
			drop(all)
		}
	}
	fences, refused := 0, 0
	for at := 0; ; at++ {
		w.edit("v", func(f *os.File) { noise(t, f, uint64(at), 32*mib, 64<<10) })
		points := func() int {
			h, _, err := rp.Head(ctx, "v")
			if errs.Is(err, errs.NotFound) {
				return 0
			}
			if err != nil {
				t.Fatal(err)
			}
			return len(h.Recent)
		}
		before, had := points(), 0
		fenced = nil
		w.store.Add(storetest.Fault{At: at, When: storetest.Before, Do: func(storetest.Call) { had = points(); fence() }})
		w.load()
		_, err := w.tryPush("v")
		fired := w.store.Fired() > 0
		w.store.Heal()
		if !atOnce {
			drop(fenced)
		}
		if !fired {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		fences++
		if err != nil {
			refused++
			wantKind(t, err, errs.Conflict, "again")
			if n := points(); n != before {
				t.Fatalf("operation %d: refused, and there are %d points, not %d", at, n, before)
			}
		} else if n := points(); n == before || had == before && len(fenced) > 0 {
			t.Fatalf("operation %d: the push succeeded; before there were %d points, when it was fenced %d, then %d", at,
				before, had, n)
		}
		w.push("v")
		w.checkPoint(rp, "v", w.image("v"))
		if s := w.pushSnapshots("v"); len(s) != 1 {
			t.Fatalf("operation %d: snapshots %v", at, s)
		}
	}
	t.Logf("fenced %d times, refused %d times", fences, refused)
	if refused == 0 {
		t.Error("no push was refused: nothing was tested")
	}
	w.noSessions(rp)
}

// TestPushWithoutLinks: what the pool has forgotten costs reading, and no more.
func TestPushWithoutLinks(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 256*mib, func(f *os.File) { noise(t, f, 1, 0, 40*mib); text(t, f, 1, 200*mib, 10*mib) })
	w.push("g")
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 20*mib, mib) })
	w.push("v")
	rp := w.open()
	if err := w.e.Transfer().DropLinks(t.Context(), rp.ID().String()); err != nil {
		t.Fatal(err)
	}
	w.edit("v", func(f *os.File) { noise(t, f, 3, 30*mib, mib); punch(t, f, 5*mib, mib) })
	// Its own points are found by where they came from.
	out := w.push("v")
	if out[0].Full || out[0].ReadBytes > mib || out[0].UploadedBytes > 2*mib {
		t.Errorf("without links: %+v", out[0])
	}
	w.checkPoint(rp, "v", w.image("v"))
	// With nothing here but the volume, it is compared with what is there.
	if err := w.e.Transfer().DropLinks(t.Context(), rp.ID().String()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.e.RemoveGolden(t.Context(), ref.Ref{Name: "g"}); err != nil {
		t.Fatal(err)
	}
	for _, s := range w.pushSnapshots("v") {
		if r, err := w.e.Destroy(t.Context(), toDestroy("v@"+s)); err != nil || len(r.Failed) > 0 {
			t.Fatal(err, r)
		}
	}
	w.edit("v", func(f *os.File) {
		noise(t, f, 4, 100*mib, mib)
		punch(t, f, 201*mib, 2*mib)
		noise(t, f, 4, 8*mib+4096, 4096)
	})
	out = w.push("v")
	w.checkPoint(rp, "v", w.image("v"))
	if !out[0].Full || out[0].UploadedBytes > 3*mib {
		t.Errorf("without a base here: %+v", out[0])
	}
	w.noSessions(rp)
}

// TestPushGenerations: the next generation of a golden, whose image shares nothing with
// the one before, costs what differs; so does a driver that cannot compare.
func TestPushGenerations(t *testing.T) {
	for _, d := range []string{reflink.Name, plain.Name} {
		t.Run(d, func(t *testing.T) {
			w := worldOn(t, testfs.XFS(t, 2<<30), d, "file:"+filepath.Join(t.TempDir(), "remote"))
			if d == plain.Name {
				if !w.e.Caps().Supports(driver.None) {
					t.Skip("does not apply: the plain driver has no images")
				}
			}
			base := func(f *os.File) { noise(t, f, 1, 0, 40*mib); text(t, f, 1, 200*mib, 10*mib) }
			w.importImage("g", 256*mib, base)
			w.push("g")
			w.importImage("g", 256*mib, func(f *os.File) { base(f); noise(t, f, 2, 10*mib, mib); punch(t, f, 30*mib, 2*mib) })
			out := w.push("g")
			rp := w.open()
			h := w.checkPoint(rp, "g", w.image("g"))
			if len(h.Recent) != 2 || h.Recent[1].Name != "2" || out[0].UploadedBytes > 3*mib {
				t.Errorf("a second generation: %+v, %+v", out[0], h.Recent)
			}
			out = w.push("g")
			if !out[0].Unchanged || out[0].Segments > 0 {
				t.Errorf("a generation that is there: %+v", out[0])
			}
			w.noSessions(rp)
		})
	}
}

// TestPushOlder: an older generation or snapshot that is pushed later is not what the
// golden or volume is now, to a pull and to a prune.
func TestPushOlder(t *testing.T) {
	w := newWorld(t)
	snap := func(name string) {
		t.Helper()
		if _, err := w.e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"),
			Name: ref.MustName(name)}); err != nil {
			t.Fatal(err)
		}
	}
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v") // of g@1
	snap("early")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 8*mib, mib) })
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 3, 0, mib) })
	w.push("g")
	w.push("v") // and g@1 first
	w.push("v@early")
	rp := w.open()
	newest := func(head, want string, points int) {
		t.Helper()
		h, _, err := rp.Head(t.Context(), head)
		if err != nil {
			t.Fatal(err)
		}
		p, err := resolvePoint(t.Context(), rp, h, "", ref.Ref{Name: head})
		if err != nil || len(h.Recent) != points || p.Name != want && !(want == "push" && pushNames().MatchString(p.Name)) {
			t.Errorf("the newest of %s is %q, not %q, of %+v (%v)", head, p.Name, want, h.Recent, err)
		}
	}
	newest("g", "2", 2)
	newest("v", "push", 2)
	if _, err := prune(t.Context(), rp, PruneRequest{Policy: Policy{Last: 1}}); err != nil {
		t.Fatal(err)
	}
	newest("g", "2", 1)
	newest("v", "push", 1)
	w.checkPoint(rp, "g", w.image("g"))
	w.checkPoint(rp, "v", w.image("v"))
	// The next ones are.
	w.edit("v", func(f *os.File) { noise(t, f, 4, 8*mib, mib) })
	snap("late")
	w.push("v@late")
	newest("v", "late", 2)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 5, 0, mib) })
	w.push("g")
	newest("g", "3", 2)
}

// TestPushRefused: what cannot be pushed, and that it leaves nothing.
func TestPushRefused(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.push("v")
	rp := w.open()
	push := func(q PushRequest) error {
		_, err := Push(t.Context(), w.e, w.r, q)
		return err
	}
	wantKind(t, push(PushRequest{}), errs.Invalid, `parameter "all"`)
	wantKind(t, push(PushRequest{All: true, Refs: []ref.Ref{{Name: "v"}}}), errs.Invalid, "")
	wantKind(t, push(PushRequest{All: true, As: ref.MustName("x")}), errs.Invalid, "")
	wantKind(t, push(PushRequest{Refs: []ref.Ref{{Name: "none"}}}), errs.NotFound, `operation "ls"`)
	wantKind(t, push(PushRequest{Refs: []ref.Ref{{Name: "v", At: "none"}}}), errs.NotFound, `operation "show"`)
	// Another volume of the name.
	if r, err := w.e.Destroy(t.Context(), toDestroy("v")); err != nil || len(r.Failed) > 0 {
		t.Fatal(err, r)
	}
	w.clone("g", "v")
	wantKind(t, push(PushRequest{Refs: []ref.Ref{{Name: "v"}}}), errs.Conflict, `parameter "as" set to NAME`)
	if s := w.pushSnapshots("v"); len(s) != 0 {
		t.Errorf("a refused push leaves %v", s)
	}
	// A volume over a golden.
	wantKind(t, push(PushRequest{Refs: []ref.Ref{{Name: "v"}}, As: ref.MustName("g")}), errs.Conflict,
		`parameter "as" set to NAME`)
	// Another point of the same name.
	snap := func() {
		if _, err := w.e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"),
			Name: ref.MustName("s")}); err != nil {
			t.Fatal(err)
		}
	}
	snap()
	if err := push(PushRequest{Refs: []ref.Ref{{Name: "v", At: "s"}}, As: ref.MustName("w")}); err != nil {
		t.Fatal(err)
	}
	if r, err := w.e.Destroy(t.Context(), toDestroy("v@s")); err != nil || len(r.Failed) > 0 {
		t.Fatal(err, r)
	}
	snap()
	wantKind(t, push(PushRequest{Refs: []ref.Ref{{Name: "v", At: "s"}}, As: ref.MustName("w")}), errs.Exists,
		`parameter "as" set to NAME`)
	// Taken over by another pool.
	h, ver, err := rp.Head(t.Context(), "w")
	if err != nil {
		t.Fatal(err)
	}
	h.Writer, h.Epoch = repo.Writer{Pool: "other", Host: "elsewhere"}, 2
	if ver, err = rp.PutHead(t.Context(), h, ver); err != nil {
		t.Fatal(err)
	}
	err = push(PushRequest{Refs: []ref.Ref{{Name: "v"}}, As: ref.MustName("w")})
	wantKind(t, err, errs.Conflict, `parameter "take-over"`)
	if !strings.Contains(err.Error(), "elsewhere") {
		t.Errorf("%v does not say who writes it", err)
	}
	// Removed: it begins again, with the next epoch.
	h.Gone, h.Recent = true, nil
	if _, err = rp.PutHead(t.Context(), h, ver); err != nil {
		t.Fatal(err)
	}
	if err := push(PushRequest{Refs: []ref.Ref{{Name: "v"}}, As: ref.MustName("w")}); err != nil {
		t.Fatal(err)
	}
	if h := w.checkPoint(rp, "w", w.image("v")); h.Epoch != 3 || h.Gone || h.Writer.Pool != w.e.PoolID() {
		t.Errorf("a head that was removed and pushed again: %+v", h)
	}
	// All, of which one fails.
	if _, err := w.e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("e"),
		Ephemeral: true}); err != nil {
		t.Fatal(err)
	}
	w.clone("g", "x")
	out, err := Push(t.Context(), w.e, w.r, PushRequest{All: true})
	wantKind(t, err, errs.Conflict, `parameter "as" set to NAME`) // v
	var names []string
	for _, p := range out {
		names = append(names, p.Volume)
	}
	if fmt.Sprint(names) != "[g x]" {
		t.Errorf("all but the one that fails: %v", names)
	}
	left, err := os.ReadDir(filepath.Join(w.r.dir, journalDir))
	if err != nil || len(left) > 0 {
		t.Errorf("journals are left: %v, %v", left, err)
	}
	w.noSessions(rp)
}

// TestPushTwoRemotes: each remote keeps the snapshot that its next push builds upon,
// even when both are pushed to at once.
func TestPushTwoRemotes(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 4*mib) })
	w.clone("g", "v")
	if _, err := Add(t.Context(), w.e, AddRequest{Name: "s",
		URL: "file:" + filepath.Join(t.TempDir(), "second")}, Access{}); err != nil {
		t.Fatal(err)
	}
	var remotes []*Remote
	for _, name := range []string{"r", "s"} {
		r, err := Load(w.dir, name, Access{})
		if err != nil {
			t.Fatal(err)
		}
		remotes = append(remotes, r)
	}
	for round := range 6 {
		w.edit("v", func(f *os.File) { noise(t, f, uint64(round), int64(10+round)*mib, 64<<10) })
		var both sync.WaitGroup
		for i, r := range remotes {
			if round == 3 && i == 1 {
				continue // one falls behind
			}
			both.Go(func() {
				out, err := Push(t.Context(), w.e, r, PushRequest{Refs: []ref.Ref{{Name: "v"}}})
				if err != nil {
					t.Error(err)
					return
				}
				if p := out[len(out)-1]; p.Full || p.ReadBytes > 128<<10 {
					t.Errorf("round %d, remote %s: %+v", round, r.Name, p)
				}
			})
			if round%2 == 0 {
				both.Wait()
			}
		}
		both.Wait()
	}
	if s := w.pushSnapshots("v"); len(s) > 3 {
		t.Errorf("snapshots of pushes: %v", s)
	}
	for _, r := range remotes {
		rp, err := r.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		w.checkPoint(rp, "v", w.image("v"))
		w.noSessions(rp)
		rp.Close()
	}
}

// TestPushRollback: a head that is missing, or older than the pool remembers, is noticed, and an accepted rollback
// uses no epoch twice.
func TestPushRollback(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.push("v")
	rp := w.open()
	h, version, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	old := h
	h.Epoch = 5
	if _, err = rp.PutHead(t.Context(), h, version); err != nil {
		t.Fatal(err)
	}
	change := func(seed uint64) { w.edit("v", func(f *os.File) { noise(t, f, seed, 8*mib, 4096) }) }
	change(2)
	w.push("v") // the pool has seen epoch 5

	accept := func(want uint64) {
		t.Helper()
		before := len(w.pushSnapshots("v"))
		_, err := w.tryPush("v")
		wantKind(t, err, errs.Damaged, `parameter "accept-rollback"`)
		if n := len(w.pushSnapshots("v")); n != before {
			t.Errorf("a refused push leaves %d snapshots, there were %d", n, before)
		}
		if _, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{{Name: "v"}},
			AcceptRollback: true}); err != nil {
			t.Fatal(err)
		}
		if h := w.checkPoint(rp, "v", w.image("v")); h.Epoch != want {
			t.Errorf("the epoch is %d, wanted %d", h.Epoch, want)
		}
		change(want)
		w.push("v")
	}
	_, version, err = rp.Head(t.Context(), "v")
	if err == nil {
		_, err = rp.PutHead(t.Context(), old, version)
	}
	if err != nil {
		t.Fatal(err)
	}
	change(3)
	accept(6)

	id, err := rp.HeadID("v")
	if err != nil {
		t.Fatal(err)
	}
	if err := rp.Store().Delete(t.Context(), "heads/"+id.String()); err != nil {
		t.Fatal(err)
	}
	change(4)
	accept(7)
}
