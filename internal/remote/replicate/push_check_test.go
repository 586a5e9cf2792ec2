package replicate

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/storetest"
)

// segmentsOf lists the segments of the newest point of a head.
func (w *world) segmentsOf(rp *repo.Repo, head string) []repo.Segment {
	w.t.Helper()
	h, _, err := rp.Head(w.t.Context(), head)
	if err != nil {
		w.t.Fatal(err)
	}
	m, err := rp.Manifest(w.t.Context(), w.newest(rp, h).Manifest)
	if err != nil {
		w.t.Fatal(err)
	}
	needed, err := needsOf(w.t.Context(), rp, &m)
	if err != nil {
		w.t.Fatal(err)
	}
	out := slices.Collect(maps.Keys(needed))
	return out
}

// TestPushNoticesWhatIsLost: a segment that a push builds upon is missing, or too short. What is pushed is whole, and
// only what is missing is sent again; a point that is there but not whole is replaced.
func TestPushNoticesWhatIsLost(t *testing.T) {
	w := newWorld(t)
	rp := w.open()
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 40*mib) })
	w.clone("g", "v")
	w.push("v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 50*mib, mib) })
	w.push("v")
	sizes := map[repo.Segment]int64{}
	for s, err := range rp.Segments(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		sizes[s.Segment] = s.Bytes
	}
	biggest := slices.MaxFunc(w.segmentsOf(rp, "v"), func(a, b repo.Segment) int { return int(sizes[a] - sizes[b]) })
	key := "segments/" + biggest.String()
	data, _, err := w.store.Get(t.Context(), key, 0, -1)
	if err != nil {
		t.Fatal(err)
	}

	// It is cut by one byte, which only its exact size shows.
	if _, err := w.store.Put(t.Context(), key, data[:len(data)-1], objstore.Always); err != nil {
		t.Fatal(err)
	}
	w.edit("v", func(f *os.File) { noise(t, f, 3, 52*mib, mib) })
	out := w.push("v")[0]
	if out.LostSegments != 1 || !strings.Contains(out.Note, "damaged and stays incomplete") ||
		out.UploadedBytes > int64(len(data))+4*mib || out.UploadedBytes < int64(len(data))/2 {
		t.Errorf("one segment of %d bytes was cut: %+v", len(data), out)
	}
	w.checkPoint(rp, "v", w.image("v"))
	if slices.Contains(w.segmentsOf(rp, "v"), biggest) {
		t.Error("the new point builds upon what is damaged")
	}

	// It is gone. The generation is here, so its point is made whole, in its place.
	if err := w.store.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	before, _, err := rp.Head(t.Context(), "g")
	if err != nil {
		t.Fatal(err)
	}
	out = w.push("g")[0]
	after := w.checkPoint(rp, "g", w.image("g"))
	if out.Unchanged || len(after.Recent) != len(before.Recent) || after.Recent[0].Seq != before.Recent[0].Seq {
		t.Errorf("%+v: %+v, was %+v", out, after.Recent, before.Recent)
	}
	if out := w.push("g")[0]; !out.Unchanged {
		t.Errorf("it is whole now: %+v", out)
	}

	// A map that cannot be read is as good as none.
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	m, err := rp.Manifest(t.Context(), w.newest(rp, h).Manifest)
	if err != nil {
		t.Fatal(err)
	}
	frame := m.Map.Frame
	b := &bench{t: t, store: w.store, repo: rp}
	b.flip("segments/"+frame.Segment.String(), int64(frame.Offset)+int64(frame.Stored)/2)
	w.edit("v", func(f *os.File) { noise(t, f, 4, 54*mib, mib) })
	if out := w.push("v")[0]; !strings.Contains(out.Note, "damaged") {
		t.Errorf("%+v", out)
	}
	w.checkPoint(w.open(), "v", w.image("v"))
	w.noSessions(rp)
}

// TestPushLeavesLostNodes: a push wrote a part of the map only, and its segment is damaged behind that. The next push
// does not take that part over, although it can still read it.
func TestPushLeavesLostNodes(t *testing.T) {
	w := newWorld(t)
	rp := w.open()
	w.importImage("g", 300*mib, func(f *os.File) {
		for i := range int64(290) {
			noise(t, f, uint64(i), i*mib, 4096)
		}
	})
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { punch(t, f, 5*mib, mib) })
	w.push("v")
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	m, err := rp.Manifest(t.Context(), w.newest(rp, h).Manifest)
	if err != nil || m.Map.IsLeaf() {
		t.Fatalf("the map is one leaf, or %v", err)
	}
	lost := m.Map.Frame.Segment
	key := "segments/" + lost.String()
	data, _, err := w.store.Get(t.Context(), key, 0, -1)
	if err == nil {
		_, err = w.store.Put(t.Context(), key, data[:len(data)-1], objstore.Always)
	}
	if err != nil {
		t.Fatal(err)
	}

	w.edit("v", func(f *os.File) { noise(t, f, 1000, 200*mib, 4096) })
	if out := w.push("v")[0]; out.LostSegments != 1 {
		t.Errorf("one segment was cut: %+v", out)
	}
	if w.checkPoint(rp, "v", w.image("v")); slices.Contains(w.segmentsOf(rp, "v"), lost) {
		t.Error("the new point builds upon what is damaged")
	}
}

// TestPushFull sends everything again, into the place of what is there.
func TestPushFull(t *testing.T) {
	w := newWorld(t)
	rp := w.open()
	w.importImage("g", 8*mib, func(f *os.File) { noise(t, f, 1, 0, 4*mib) })
	w.push("g")
	out, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{{Name: "g"}}, Full: true})
	if err != nil || out[0].Unchanged || !out[0].Full || out[0].UploadedBytes < 4*mib {
		t.Errorf("%+v, %v", out, err)
	}
	if h := w.checkPoint(rp, "g", w.image("g")); len(h.Recent) != 1 {
		t.Errorf("%+v", h.Recent)
	}
	w.noSessions(rp)
}

// TestChecksAreAmortised: pushes in a row look once in a while only, and none lists the bucket twice.
func TestChecksAreAmortised(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 8*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "a")
	w.clone("g", "b")
	ctx := CheckEvery(t.Context(), time.Hour)
	lists := func() int {
		before := w.store.Count(storetest.List)
		if _, err := Push(ctx, w.e, w.r, PushRequest{All: true}); err != nil {
			t.Fatal(err)
		}
		return w.store.Count(storetest.List) - before
	}
	if n := lists(); n != 2 { // segments, and tables of what was moved
		t.Errorf("the first push lists %d times", n)
	}
	if n := lists(); n != 0 {
		t.Errorf("the next push lists %d times", n)
	}
	before := time.Now().Add(-2 * time.Hour)
	checksOf(ctx).last.Store(&before)
	if n := lists(); n != 2 {
		t.Errorf("a later push lists %d times", n)
	}
}

// TestIdlePushNoticesDamagedManifest: nothing has changed in a volume, but what describes its newest point cannot be
// read. It is pushed again, and not called up to date.
func TestIdlePushNoticesDamagedManifest(t *testing.T) {
	w := newWorld(t)
	rp := w.open()
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 4*mib) })
	w.clone("g", "v")
	w.push("v")
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	key := "manifests/" + w.newest(rp, h).Manifest.String()
	if _, err := w.store.Put(t.Context(), key, []byte("cut"), objstore.Always); err != nil {
		t.Fatal(err)
	}
	if out := w.push("v"); len(out) != 1 || out[0].Unchanged {
		t.Errorf("it is taken for unchanged: %+v", out)
	}
	w.checkPoint(rp, "v", w.image("v"))
	w.noSessions(rp)
}
