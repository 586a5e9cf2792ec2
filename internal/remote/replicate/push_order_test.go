package replicate

import (
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"
)

// snapshotAhead takes a snapshot as a host does whose clock is ahead. Tests do not set the clock of their host.
func (w *world) snapshotAhead(volume, name string, by time.Duration) {
	w.t.Helper()
	if _, err := w.e.Snapshot(w.t.Context(), engine.SnapshotRequest{Volume: ref.MustName(volume),
		Name: ref.MustName(name)}); err != nil {
		w.t.Fatal(err)
	}
	w.setAhead(name, by)
}

// setAhead makes the newest snapshot what it would be if the clock had been ahead, or behind.
func (w *world) setAhead(name string, by time.Duration) {
	w.t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(w.dir, "catalog.db"))
	if err != nil {
		w.t.Fatal(err)
	}
	defer db.Close()
	changes := []string{"UPDATE objects SET created_at = created_at + ?1 WHERE name = ?2"}
	if by > 0 { // places never go back
		changes = append(changes, "UPDATE objects SET ord = ord + ?1 WHERE name = ?2",
			"UPDATE meta SET value = value + ?1 WHERE key = 'place' AND ?2 <> ''")
	}
	for _, change := range changes {
		if done, err := db.Exec(change, by, name); err != nil {
			w.t.Fatal(err)
		} else if n, _ := done.RowsAffected(); n != 1 {
			w.t.Fatalf("%d rows changed by %q", n, change)
		}
	}
}

// TestStatesOfTwoHosts: which state of a volume is the newest does not depend on clocks: not when a host whose clock is
// ahead and another take turns, not when an old state is pushed late or again, not after a repair, and not when the
// newest is removed.
func TestStatesOfTwoHosts(t *testing.T) {
	a := newWorld(t)
	b := a.other(testfs.XFS(t, 1<<30), reflink.Name)
	rp := a.open()
	newest := func(want string) (points []string) {
		t.Helper()
		h, _, err := rp.Head(t.Context(), "v")
		if err != nil {
			t.Fatal(err)
		}
		if p, err := resolvePoint(t.Context(), rp, h, "", ref.Ref{Name: "v"}); err != nil || p.Name != want {
			t.Errorf("the newest is %q, not %q: %v", p.Name, want, err)
		}
		for _, p := range pointsOf(t, rp, h) {
			points = append(points, p.Name)
		}
		return points
	}
	push := func(w *world, ref string) string {
		t.Helper()
		out := w.push(ref)
		return strings.TrimPrefix(out[len(out)-1].Ref, "v@")
	}
	edit := func(w *world, seed uint64) { w.edit("v", func(f *os.File) { noise(t, f, seed, mib, mib) }) }

	// A is ahead, B takes over.
	a.importImage("g", 16*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.snapshotAhead("v", "old", time.Hour)
	edit(a, 2)
	a.snapshotAhead("v", "ahead", time.Hour)
	a.push("v@ahead")
	b.pull("v", PullRequest{TakeOver: true})
	edit(b, 3)
	ofB := push(b, "v")
	newest(ofB)

	// A takes it back, pushes what it had before, and goes on.
	edit(a, 6)
	a.pull("v", PullRequest{TakeOver: true, Update: true})
	names, err := pooltest.SnapshotNames(t.Context(), a.e, "v")
	if err != nil || len(names) != 4 || names[0]+names[1] != "oldahead" || names[3] != ofB ||
		!strings.HasPrefix(names[2], "before-pull-") {
		t.Errorf("the pool that took it back has %v: %v", names, err)
	}
	a.push("v@old")
	newest(ofB)
	edit(a, 4)
	ofA := push(a, "v")
	if _, err := Push(t.Context(), a.e, a.r, PushRequest{Refs: []ref.Ref{refs(t, "v@ahead")}, Full: true}); err != nil {
		t.Fatal(err)
	}
	if got := newest(ofA); !slices.Equal(got, []string{"ahead", ofB, "old", ofA}) {
		t.Errorf("points in the order of their commits: %v", got)
	}

	// Without the newest, the one before it is the newest, although an older one was pushed later.
	remove := func(name, then string) {
		t.Helper()
		if _, err := removeVolume(t.Context(), rp, refs(t, "v@"+name)); err != nil {
			t.Fatal(err)
		}
		newest(then)
	}
	remove(ofA, ofB)

	// The list is lost, and rebuilt, also with what was only removed. Nobody uses an epoch again, whatever clocks say.
	repair := func(by *engine.Engine) []string {
		t.Helper()
		before, _, err := rp.Head(t.Context(), "v")
		if err != nil {
			t.Fatal(err)
		}
		damage := &bench{t: t, store: a.store, repo: rp}
		damage.flip(damage.headKey("v"), 80)
		if done, err := Repair(t.Context(), by, a.r, RepairRequest{}); err != nil || len(done.Volumes) != 1 {
			t.Fatalf("%+v, %v", done, err)
		}
		after, _, err := rp.Head(t.Context(), "v")
		if err != nil || after.Epoch <= before.Epoch {
			t.Errorf("after epoch %d came %d: %v", before.Epoch, after.Epoch, err)
		}
		return newest(ofA)
	}
	if got := repair(a.e); !slices.Equal(got, []string{"old", "ahead", ofB, ofA}) {
		t.Errorf("points in the order of their states: %v", got)
	}
	edit(a, 5)
	was := ofA
	ofA = push(a, "v")
	if got := repair(nil); !slices.Equal(got, []string{"old", "ahead", ofB, was, ofA}) {
		t.Errorf("points in the order of their states: %v", got)
	}
	remove(ofA, was)
	remove("ahead", was)
}

// TestPushSnapshotsOfClockAhead: the snapshot of a push goes with the next push, even if the clock was ahead.
func TestPushSnapshotsOfClockAhead(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 16*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.push("v")
	w.setAhead(w.pushSnapshots("v")[0], time.Hour)
	w.edit("v", func(f *os.File) { noise(t, f, 2, 0, mib) })
	out := w.push("v")
	if left := w.pushSnapshots("v"); len(left) != 1 || "v@"+left[0] != out[0].Ref {
		t.Errorf("after %s there are %v", out[0].Ref, left)
	}
}

// TestRepairedPageWithNewest: the newest state is in a page that is lost, and a point before it in there was pruned.
// When the page has been repaired, it is the newest state again, although it has another number.
func TestRepairedPageWithNewest(t *testing.T) {
	b := newBench(t)
	b.history(faulttest.Rand(t), "v", nil, 4)
	h, v, err := b.repo.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	all := h.Recent
	m, err := b.repo.Manifest(t.Context(), all[2].Manifest)
	if err != nil {
		t.Fatal(err)
	}
	m.ID, m.StateOrder = repo.NewID(), repo.StateOrder{Epoch: 2, Order: 9}
	pages := newPageWriter(b.repo, "v")
	defer pages.endSession(t.Context())
	h.Pages, err = pages.pagePutter().PutPages(t.Context(), "v", []repo.Point{all[0], pointFrom(&m, 3)})
	h.Recent, h.Latest = all[3:], 3
	if err := errors.Join(err, b.repo.PutManifest(t.Context(), m), b.repo.DeleteManifest(t.Context(), all[1].Manifest),
		b.repo.DeleteManifest(t.Context(), all[2].Manifest), b.store.Delete(t.Context(), h.Pages[0].Object())); err != nil {
		t.Fatal(err)
	}
	if _, err := b.repo.PutHead(t.Context(), h, v); err != nil {
		t.Fatal(err)
	}

	if done := b.repair(false); len(done.Volumes) != 1 || len(done.Volumes[0].Points) != 2 {
		t.Fatalf("%+v", done)
	}
	if h, _, err = b.repo.Head(t.Context(), "v"); err != nil {
		t.Fatal(err)
	}
	if p, _, err := newestOf(t.Context(), b.repo, h); err != nil || p.Manifest != m.ID || p.Seq != 2 {
		t.Errorf("the newest is %s with number %d: %v", p.Name, p.Seq, err)
	}
}

// TestRemoveNewestOfPages: the newest state is removed when all points are in pages. The newest of the rest is not the
// last of them.
func TestRemoveNewestOfPages(t *testing.T) {
	b := newBench(t)
	b.history(faulttest.Rand(t), "v", nil, 4)
	h, v, err := b.repo.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	for i, order := range []int64{1, 3, 2, 4} {
		h.Recent[i].Order = order
	}
	last := h.Recent[3].Name
	pages := newPageWriter(b.repo, "v")
	defer pages.endSession(t.Context())
	h.Pages, err = pages.pagePutter().PutPages(t.Context(), "v", h.Recent)
	h.Recent = nil
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.repo.PutHead(t.Context(), h, v); err != nil {
		t.Fatal(err)
	}

	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: last}); err != nil {
		t.Fatal(err)
	}
	if h, _, err = b.repo.Head(t.Context(), "v"); err != nil {
		t.Fatal(err)
	}
	if p, _, err := newestOf(t.Context(), b.repo, h); err != nil || p.Seq != 2 {
		t.Errorf("the newest is %s with number %d: %v", p.Name, p.Seq, err)
	}
}

// TestVerifyWithClockSetBack: points whose dates go back are checked each against the one before it.
func TestVerifyWithClockSetBack(t *testing.T) {
	b := grown(t, 40)
	_, before := b.verifyCounted(VerifyRequest{})
	h, v, err := b.repo.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	r := faulttest.Rand(t)
	for i := range h.Recent {
		h.Recent[i].CreatedAt = time.Unix(r.Int64N(1<<30), 0).UTC()
	}
	if _, err := b.repo.PutHead(t.Context(), h, v); err != nil {
		t.Fatal(err)
	}
	if _, now := b.verifyCounted(VerifyRequest{}); now.parts > before.parts {
		t.Errorf("maps were read %d times, and %d times before", now.parts, before.parts)
	}
}

// TestStatesAfterRebuild: a pool that has lost its catalogue still knows which states are older than those that it took
// over, even if it has destroyed these, and what it pushes now is the newest, even if its clock was ahead before.
func TestStatesAfterRebuild(t *testing.T) {
	a := newWorld(t)
	b := a.other(testfs.XFS(t, 1<<30), reflink.Name)
	rp := a.open()
	newest := func(want string) {
		t.Helper()
		h, _, err := rp.Head(t.Context(), "v")
		if err != nil {
			t.Fatal(err)
		}
		if p, err := resolvePoint(t.Context(), rp, h, "", ref.Ref{Name: "v"}); err != nil || "v@"+p.Name != want {
			t.Errorf("the newest is %q, not %q: %v", p.Name, want, err)
		}
	}
	rebuild := func() {
		t.Helper()
		a.e.Close()
		if _, err := engine.Rebuild(t.Context(), a.dir, testDrivers); err != nil {
			t.Fatal(err)
		}
		a.e = openEngine(t, a.dir)
		t.Cleanup(a.e.Close)
		a.load()
	}
	destroy := func(snapshot string) {
		t.Helper()
		what, err := ref.ParsePatterns("", snapshot)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := a.e.Destroy(t.Context(), engine.DestroyRequest{What: what}); err != nil || len(out.Failed) > 0 {
			t.Fatal(out, err)
		}
	}
	push := func(w *world, ref string) string {
		t.Helper()
		out := w.push(ref)
		return out[len(out)-1].Ref
	}
	edit := func(w *world, seed uint64) { w.edit("v", func(f *os.File) { noise(t, f, seed, mib, mib) }) }

	a.importImage("g", 16*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.snapshotAhead("v", "first", 0)
	a.snapshotAhead("v", "second", 0)
	edit(a, 2)
	push(a, "v")
	b.pull("v", PullRequest{TakeOver: true})
	edit(b, 3)
	b.snapshotAhead("v", "behind", -time.Hour)
	push(b, "v@behind")
	a.pull("v", PullRequest{TakeOver: true, Update: true})
	rebuild()
	push(a, "v@first")
	newest("v@behind")
	b.pull("v", PullRequest{TakeOver: true, Update: true})
	edit(b, 4)
	ofB := push(b, "v")
	a.pull("v", PullRequest{TakeOver: true, Update: true})
	rebuild()
	destroy(ofB)
	push(a, "v@second")
	newest(ofB)

	a.snapshotAhead("v", "ahead", 24*time.Hour)
	push(a, "v@ahead")
	newest("v@ahead")
	destroy("v@ahead")
	rebuild()
	for i := range uint64(2) {
		edit(a, 5+i)
		newest(push(a, "v"))
	}
}
