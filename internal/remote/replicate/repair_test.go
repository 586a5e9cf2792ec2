package replicate

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// flip changes a bit of an object in the store, for good.
func (b *bench) flip(key string, at int64) {
	b.t.Helper()
	data, _, err := b.store.Get(b.t.Context(), key, 0, -1)
	if err != nil {
		b.t.Fatal(err)
	}
	data[at] ^= 4
	if _, err := b.store.Put(b.t.Context(), key, data, objstore.Always); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) headKey(volume string) string {
	b.t.Helper()
	id, err := b.repo.HeadID(volume)
	if err != nil {
		b.t.Fatal(err)
	}
	return "heads/" + id.String()
}

func (b *bench) repair(dry bool) *Repaired {
	b.t.Helper()
	copies := filepath.Join(b.t.TempDir(), "copies")
	x := &repairer{RepairRequest: RepairRequest{DryRun: dry}, repo: b.repo, copyDir: copies}
	out, err := x.runRepair(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

// TestOneDamagedHead damages the head of one volume: all that concerns other volumes goes on, a prune deletes nothing
// that the damaged one needs, and a repair brings all of its points back.
func TestOneDamagedHead(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	v := b.history(rnd, "v", nil, 3)
	b.history(rnd, "fork", v, 2)
	w := b.history(rnd, "w", nil, 3)
	anew := randomChange(rnd, small, 20) // so that older points of w have segments of their own
	for at := range w.content {
		anew[at] = block(rnd.Uint64())
	}
	b.must("w", "p4", small, w, anew, false)
	before := b.points("v")
	b.flip(b.headKey("v"), 80)

	// Every command names what is damaged, and goes on without it.
	listing, err := listVolumes(t.Context(), b.repo)
	if err != nil {
		t.Fatal(err)
	}
	listed := listing.Volumes
	if i := slices.IndexFunc(listed, func(l Listed) bool {
		return l.Problem != ""
	}); len(listed) != 3 || i < 0 || listed[i].Object != b.headKey("v") {
		t.Errorf("listed %+v", listed)
	}
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "fork", At: "p1"}); err != nil {
		t.Errorf("delete of another volume: %v", err)
	}
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v"}); !errs.Is(err, errs.Damaged) ||
		!strings.Contains(errs.HintOf(err), "repair") {
		t.Errorf("delete of the damaged volume: %v, hint %q", err, errs.HintOf(err))
	}
	checked, err := verify(t.Context(), b.repo, VerifyRequest{})
	if err != nil || checked.TotalProblems != 1 || checked.Points != 5 {
		t.Errorf("verify: %+v, %v", checked, err)
	}
	pruned := b.prune(PruneRequest{Policy: Policy{Last: 1}})
	if len(pruned.Damaged) != 1 || pruned.Damaged[0].Volume != "v" || pruned.FreedBytes == 0 || b.points("w") != "p4" {
		t.Errorf("prune: %+v, w has %s", pruned, b.points("w"))
	}

	// A manifest that cannot be read either may be of that volume.
	data, _, err := b.store.Get(t.Context(), "manifests/"+v.manifest.ID.String(), 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	b.flip("manifests/"+v.manifest.ID.String(), 90)
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "w"}); err != nil {
		t.Fatal(err)
	}
	if pruned := b.prune(PruneRequest{}); pruned.KeptAll == "" || pruned.FreedBytes != 0 {
		t.Errorf("prune with an unreadable manifest: %+v", pruned)
	}
	if _, err := b.store.Put(t.Context(), "manifests/"+v.manifest.ID.String(), data, objstore.Always); err != nil {
		t.Fatal(err)
	}
	delete(b.truth, "w")

	// All points come back, as they were.
	dry := b.repair(true)
	if len(dry.Volumes) != 1 || dry.Volumes[0].Volume != "v" || len(dry.Volumes[0].Points) != 3 {
		t.Fatalf("a dry run says %+v", dry)
	}
	if _, _, err := b.repo.Head(t.Context(), "v"); !errs.Is(err, errs.Damaged) {
		t.Fatalf("after a dry run: %v", err)
	}
	done := b.repair(false)
	if len(done.Volumes) != 1 || !done.Volumes[0].Repaired || done.Volumes[0].Copy == "" || b.points("v") != before {
		t.Fatalf("%+v, v has %s", done, b.points("v"))
	}
	b.prune(PruneRequest{})
	if again := b.repair(false); len(again.Volumes) != 0 {
		t.Errorf("a second repair: %+v", again)
	}
	if after := b.verified(100); after.TotalProblems != 0 || after.Points != 4 {
		t.Errorf("%+v", after)
	}
	for _, p := range []string{"p1", "p2", "p3"} {
		m := b.truth["v"][p]
		to, _, err := b.restored(b.repo, m, nil)
		if err != nil {
			t.Fatal(err)
		}
		to.same(t, "v@"+p, m.content)
	}
}

// TestRepairOfWhatIsGone: a head is gone, and so is a segment of its newest point. What is whole comes back and is the
// newest; the rest is listed, so that no prune takes what is left of it.
func TestRepairOfWhatIsGone(t *testing.T) {
	t.Run("stream", testRepairOfStreams)
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 3)
	for _, key := range []string{b.headKey("v"), "segments/" + b.truth["v"]["p3"].manifest.Map.Frame.Segment.String()} {
		if err := b.store.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}

	// A session that has just written a manifest is about to make the head of a new volume.
	_, l, err := beginSession(t.Context(), b.repo, repo.Push, []string{"new"}, repo.Writer{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.endSession(context.Background()) }()
	m := &made{volume: "new", point: "p1", content: map[int64][]byte{}}
	m.manifest = b.truth["v"]["p1"].manifest
	m.manifest.ID, m.manifest.Volume, m.manifest.Session = repo.NewID(), "new", l.id
	if err := b.repo.PutManifest(t.Context(), m.manifest); err != nil {
		t.Fatal(err)
	}

	done := b.repair(false)
	if len(done.Volumes) != 1 || !slices.Equal(done.Volumes[0].Points, []string{"p1", "p2"}) ||
		!slices.Equal(done.Volumes[0].Broken, []string{"p3"}) {
		t.Fatalf("%+v", done)
	}
	h, _, err := b.repo.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	if p, err := resolvePoint(t.Context(), b.repo, h, "", ref.Ref{Name: "v"}); err != nil || p.Name != "p2" {
		t.Errorf("the newest point is %s, %v", p.Name, err)
	}
	b.prune(PruneRequest{})
	if b.points("v") != "p1 p2 p3" {
		t.Errorf("left %s", b.points("v"))
	}
}

// testRepairOfStreams: the same, of streams.
func testRepairOfStreams(t *testing.T) {
	b := newBench(t)
	h := repo.Head{Name: "v", NextSeq: 1}
	var last repo.Segment
	for _, name := range []string{"p1", "p2", "p3"} {
		w, err := b.repo.NewSegment(repo.NewID(), 0)
		if err != nil {
			t.Fatal(err)
		}
		f, err := w.Add([]byte(name), repo.Raw, len(name))
		if err != nil {
			t.Fatal(err)
		}
		last = w.Segment()
		m := repo.Manifest{ID: repo.NewID(), Volume: "v", Point: name, Content: repo.Tree, FS: "native",
			Session: last.Session, CreatedAt: time.Now(), Source: name, Stream: []repo.Frame{f},
			Uses: []repo.Use{{Segment: last}}, StateOrder: repo.StateOrder{Epoch: 1, Order: int64(h.NextSeq)}}
		err = errors.Join(b.repo.PutSegment(t.Context(), last, w.Finish()), b.repo.PutManifest(t.Context(), m))
		if err != nil {
			t.Fatal(err)
		}
		h.Recent, h.NextSeq = append(h.Recent, pointFrom(&m, h.NextSeq)), h.NextSeq+1
	}
	if _, err := b.repo.PutHead(t.Context(), h, ""); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{b.headKey("v"), "segments/" + last.String()} {
		if err := b.store.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}

	done := b.repair(false)
	if len(done.Volumes) != 1 || !slices.Equal(done.Volumes[0].Points, []string{"p1", "p2"}) ||
		!slices.Equal(done.Volumes[0].Broken, []string{"p3"}) {
		t.Fatalf("%+v", done)
	}
}

// TestDamagedSession: one that cannot be read keeps all, until two prunes have seen that nobody renews it.
func TestDamagedSession(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 1)
	b.must("v", "p2", small, nil, randomChange(rand.New(rand.NewPCG(1, 2)), small, 20), false)
	_, l, err := beginSession(t.Context(), b.repo, repo.Push, []string{"v"}, repo.Writer{})
	if err != nil {
		t.Fatal(err)
	}
	l.abandon()
	b.flip("sessions/"+l.id.String(), 70)
	if _, err := listVolumes(t.Context(), b.repo); err != nil {
		t.Errorf("list: %v", err)
	}
	first := b.prune(PruneRequest{Policy: Policy{Last: 1}})
	if first.KeptAll == "" || first.FreedBytes != 0 {
		t.Errorf("%+v", first)
	}
	second := b.prune(PruneRequest{Policy: Policy{Last: 1}, Patience: -1})
	if second.KeptAll != "" || second.FreedBytes == 0 {
		t.Errorf("%+v", second)
	}
	if want := []api.Operation{{Unreadable: true}}; !slices.Equal(second.Ended, want) {
		t.Errorf("ended are %+v, want one of which nothing is known", second.Ended)
	}
	h, _, err := b.repo.Head(t.Context(), "v")
	if err != nil || !slices.Contains(h.Fenced, l.id) {
		t.Errorf("the session may still commit: %+v, %v", h.Fenced, err)
	}
}

// TestPushAfterRepair: the head of a volume is damaged. Other volumes are pushed, also clones of what is damaged, and
// after a repair the pool that pushed it goes on, with what is there; another one has to take it over.
func TestPushAfterRepair(t *testing.T) {
	w := newWorld(t)
	rp := w.open()
	b := &bench{t: t, store: w.store, repo: rp}
	w.importImage("web", 8*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("web", "job")
	w.push("job")
	w.edit("job", func(f *os.File) { noise(t, f, 2, mib, mib) })
	w.push("job")
	b.flip(b.headKey("web"), 80)
	b.flip(b.headKey("job"), 80)

	w.clone("web", "other")
	out := w.push("other")
	if len(out) != 1 || !strings.Contains(out[0].Note, "web") {
		t.Errorf("pushed %+v", out)
	}
	if _, err := w.tryPush("job"); !errs.Is(err, errs.Damaged) || !strings.Contains(errs.HintOf(err), "repair") {
		t.Errorf("push of the damaged volume: %v, hint %q", err, errs.HintOf(err))
	}
	stranger, err := Repair(t.Context(), nil, w.r, RepairRequest{DryRun: true})
	if err != nil || len(stranger.Volumes) != 2 || stranger.Volumes[0].Writer {
		t.Errorf("without a pool: %+v, %v", stranger, err)
	}
	done, err := Repair(t.Context(), w.e, w.r, RepairRequest{})
	if err != nil || len(done.Volumes) != 2 || len(done.Volumes[0].Points) != 2 || !done.Volumes[0].Writer ||
		!done.Volumes[1].Writer {
		t.Fatalf("%+v, %v", done, err)
	}
	h, _, err := rp.Head(t.Context(), "web")
	if err != nil || !h.Golden {
		t.Errorf("%+v, %v", h, err)
	}
	w.edit("job", func(f *os.File) { noise(t, f, 3, 3*mib, mib) })
	if out := w.push("job"); out[0].Base == "" || out[0].UploadedBytes > 2*mib {
		t.Errorf("the push after the repair: %+v", out[0])
	}
	if h := w.checkPoint(rp, "job", w.image(w.push("job")[0].Ref)); len(h.Recent) != 3 {
		t.Errorf("%d points", len(h.Recent))
	}
	names, err := NamesOf(t.Context(), w.e, w.r)
	if err != nil || !slices.Contains(names, "job") || !slices.Contains(names, "web") {
		t.Errorf("the pool knows %v, %v", names, err)
	}
}

// TestLostHead: the head of a volume is gone. A verify says so, no prune removes what its points need, and a repair
// brings them back. The first push of a volume, which has no head yet, is none that is lost.
func TestLostHead(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 3)
	b.history(rnd, "w", nil, 2)
	if err := b.store.Delete(t.Context(), b.headKey("v")); err != nil {
		t.Fatal(err)
	}
	_, l, err := beginSession(t.Context(), b.repo, repo.Push, []string{"new"}, repo.Writer{})
	if err != nil {
		t.Fatal(err)
	}
	m := b.truth["w"]["p1"].manifest
	m.ID, m.Volume, m.Session = repo.NewID(), "new", l.id
	if err := b.repo.PutManifest(t.Context(), m); err != nil {
		t.Fatal(err)
	}

	checked, err := verify(t.Context(), b.repo, VerifyRequest{})
	if err != nil || checked.TotalProblems != 1 || checked.Problems[0].Volume != "v" ||
		checked.Problems[0].Object != b.headKey("v") {
		t.Errorf("verify: %+v, %v", checked, err)
	}
	for _, policy := range []Policy{{}, {Last: 1}} {
		pruned := b.prune(PruneRequest{Policy: policy})
		if len(pruned.Damaged) != 1 || pruned.Damaged[0].Volume != "v" || pruned.Damaged[0].Object != b.headKey("v") {
			t.Errorf("prune: %+v", pruned)
		}
	}
	if err := l.endSession(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.repo.DeleteManifest(t.Context(), m.ID); err != nil {
		t.Fatal(err)
	}
	delete(b.truth["w"], "p1")

	b.repair(false)
	if b.points("v") != "p1 p2 p3" {
		t.Errorf("v has %s", b.points("v"))
	}
	if after := b.verified(100); after.TotalProblems != 0 {
		t.Errorf("%+v", after)
	}
	b.whole()
}

// TestRepairBesideFirstPush: the first push of a volume begins when the repair has listed heads and sessions. Whether
// it ends before the repair looks at the head again or after, nothing is repaired, and the pool stays the volume's
// writer.
func TestRepairBesideFirstPush(t *testing.T) {
	for name, slow := range map[string]bool{"done": false, "under way": true} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.must("v", "p1", small, nil, randomChange(faulttest.Rand(t), small, 5), false)
			reached, goOn, pushed := make(chan struct{}), make(chan struct{}), make(chan error)
			slowly, _ := b.faulty(storetest.Fault{
				Match: func(c storetest.Call) bool { return c.Op == storetest.Put && strings.HasPrefix(c.Key, "heads/") },
				Do:    func(storetest.Call) { close(reached); <-goOn },
			})
			begin := func(storetest.Call) {
				go func() {
					_, err := b.push(t.Context(), slowly, "w", "p1", small, nil, randomChange(faulttest.Rand(t), small, 5), false)
					pushed <- err
				}()
				<-reached
				if !slow {
					close(goOn)
					if err := <-pushed; err != nil {
						t.Error(err)
					}
				}
			}
			watched, _ := b.faulty(storetest.Fault{
				Match: func(c storetest.Call) bool { return c.Op == storetest.List && strings.HasPrefix(c.Key, "segments") },
				Do:    begin,
			})
			x := &repairer{repo: watched}
			out, err := x.runRepair(t.Context())
			if err != nil || len(out.Volumes) > 0 {
				t.Errorf("it repaired %+v, %v", out.Volumes, err)
			}
			if slow {
				close(goOn)
				if err := <-pushed; err != nil {
					t.Error(err)
				}
			}
			if h, _, err := b.repo.Head(t.Context(), "w"); err != nil || h.Writer.Pool == repairedPool || len(h.Recent) != 1 {
				t.Errorf("the head is %+v, %v", h, err)
			}
		})
	}
}
