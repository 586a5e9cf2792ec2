package replicate

import (
	"fmt"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/storetest"
)

// pageOut adds points before the newest one of a head, which have nothing to do with it, until all that are older are
// in
// pages.
func pageOut(t *testing.T, rp *repo.Repo, name string) {
	t.Helper()
	h, v, err := rp.Head(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	newest := h.Recent[len(h.Recent)-1]
	h.Recent = h.Recent[:len(h.Recent)-1]
	for i := range 1000 {
		pt := newest
		pt.Seq, pt.Name, pt.Source = newest.Seq+uint64(i), fmt.Sprint("other", i), repo.NewID().String()
		pt.Manifest, pt.Parent = repo.NewID(), repo.ID{}
		h.Recent = append(h.Recent, pt)
	}
	newest.Seq += 1000
	h.Recent, h.NextSeq = append(h.Recent, newest), newest.Seq+1

	pages := newPageWriter(rp, name)
	defer pages.endSession(t.Context())
	if err := pages.pagePutter().Shrink(t.Context(), &h); err != nil {
		t.Fatal(err)
	}
	if _, err := rp.PutHead(t.Context(), h, v); err != nil {
		t.Fatal(err)
	}
}

// head reads a head.
func (w *world) head(rp *repo.Repo, name string) repo.Head {
	w.t.Helper()
	h, _, err := rp.Head(w.t.Context(), name)
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

// publish makes a volume the next generation of a golden.
func (w *world) publish(golden, volume string) {
	w.t.Helper()
	q := engine.PublishRequest{Golden: ref.MustName(golden), Volume: ref.MustName(volume)}
	if _, err := w.e.Publish(w.t.Context(), q); err != nil {
		w.t.Fatal(err)
	}
}

// difference wants the newest push of v to have sent little, on top of a point.
func (w *world) difference(what, base string, out []Pushed) {
	w.t.Helper()
	last := out[len(out)-1]
	if last.Full || last.Base != base || last.UploadedBytes > mib/4 {
		w.t.Errorf("%s: %+v", what, last)
	}
}

// TestChainInPages: a difference builds upon a chain whose points are in pages of the head.
func TestChainInPages(t *testing.T) {
	w := worldOn(t, t.TempDir(), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	w.write("v", "new", 1, 8192)
	w.push("v")
	w.write("v", "new", 2, 8192)
	w.push("v")

	rp := w.open()
	pageOut(t, rp, "v")
	h := w.head(rp, "v")
	w.write("v", "new", 3, 8192)
	w.difference("pages", "v@"+w.newest(rp, h).Name, w.push("v"))
}

// TestChainInPagesOfGolden: as TestChainInPages, where the beginning of the chain is an old generation.
func TestChainInPagesOfGolden(t *testing.T) {
	w := worldOn(t, t.TempDir(), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	w.write("v", "new", 1, 8192)
	w.publish("g", "v")
	w.push("g@1", "g@2")
	rp := w.open()
	pageOut(t, rp, "g")

	w.clone("g", "late")
	w.write("late", "new", 2, 8192)
	w.difference("an old generation", "g@2", w.push("late"))
}

// TestChainDeleted: a difference builds upon a chain of which points were deleted: what they need stays.
func TestChainDeleted(t *testing.T) {
	w := worldOn(t, t.TempDir(), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	for i := range uint64(3) {
		w.write("v", "new", i, 8192)
		w.push("v")
	}
	rp := w.open()
	h := w.head(rp, "v")
	for _, gone := range []string{"v@" + h.Recent[0].Name, "v@" + h.Recent[1].Name, "g"} {
		if _, err := RemoveVolume(t.Context(), w.r, refs(t, gone)); err != nil {
			t.Fatal(err)
		}
	}
	w.write("v", "new", 9, 8192)
	w.difference("deleted", "v@"+h.Recent[2].Name, w.push("v"))
	w.whole()
}

// TestChainCost: a push to a long chain reads no manifest more than once to learn how long it is.
func TestChainCost(t *testing.T) {
	w := worldOn(t, t.TempDir(), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	for i := range uint64(6) {
		w.write("v", "new", i, 8192)
		w.push("v")
	}
	pageOut(t, w.open(), "v")
	w.write("v", "new", 9, 8192)
	before := len(w.store.Calls())
	w.push("v")
	read := map[string]int{}
	for _, c := range w.store.Calls()[before:] {
		if c.Op == storetest.Get {
			read[c.Key]++
		}
	}
	for key, n := range read {
		if n > 1 && filepath.Dir(key) == "manifests" {
			t.Errorf("%s is read %d times", key, n)
		}
	}
}
