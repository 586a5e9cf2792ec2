package replicate

import (
	"bytes"
	"os"
	"slices"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver/reflink"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

// TestChangedVersionStopsNothingElse: the byte of a head that says its version is one like any other. If it is changed,
// clones of that volume can be pulled, and the head can be repaired.
func TestChangedVersionStopsNothingElse(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 8*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 4*mib, mib) })
	w.push("v")
	rp := w.open()
	id, err := rp.HeadID("g")
	if err != nil {
		t.Fatal(err)
	}
	key := "heads/" + id.String()
	was, _, err := w.store.Get(t.Context(), key, 0, -1)
	if err != nil {
		t.Fatal(err)
	}

	// A version that is not known, and an object that is longer than any head.
	newer := slices.Clone(was)
	newer[5] = 9
	for _, bad := range [][]byte{newer, bytes.Repeat(was, 1+(24<<20)/len(was))} {
		if _, err := w.store.Put(t.Context(), key, bad, objstore.Always); err != nil {
			t.Fatal(err)
		}
		other := w.other(testfs.XFS(t, 1<<30), reflink.Name)
		if out := other.pull("v", PullRequest{}); len(out.Origins) != 0 || len(out.Notes) == 0 {
			t.Errorf("pulled %+v", out)
		}
		if other.sum("v") != w.sum("v") {
			t.Error("v is another one")
		}

		w.load()
		out, err := Repair(t.Context(), w.e, w.r, RepairRequest{})
		if err != nil || len(out.Volumes) != 1 || !out.Volumes[0].Repaired {
			t.Fatalf("repaired %+v, %v", out, err)
		}
		w.checkPoint(rp, "g", w.image("g@1"))
	}
}

// TestNodesAreWhatEveryPointSays: that two points have the same node does not help the one that says something else of
// it: it cannot be restored, and verify says so, of no other.
func TestNodesAreWhatEveryPointSays(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	ctx := t.Context()
	v := b.history(rnd, "v", nil, 2)
	odd := *v
	odd.manifest.ID = repo.NewID()
	odd.manifest.Map.Pieces--
	if err := b.repo.PutManifest(ctx, odd.manifest); err != nil {
		t.Fatal(err)
	}
	h, ver, err := b.repo.Head(ctx, "v")
	if err != nil {
		t.Fatal(err)
	}
	pt := h.Recent[len(h.Recent)-1]
	pt.Seq, pt.Name, pt.Manifest, h.NextSeq = h.NextSeq, "odd", odd.manifest.ID, h.NextSeq+1
	h.Recent = append(h.Recent, pt)
	if _, err := b.repo.PutHead(ctx, h, ver); err != nil {
		t.Fatal(err)
	}

	for _, base := range []*made{nil, v} {
		if _, _, err := b.restored(b.repo, &odd, base); !errs.Is(err, errs.Damaged) {
			t.Errorf("restored: %v", err)
		}
	}
	for _, percent := range []float64{0, 100} {
		out, err := verify(ctx, b.repo, VerifyRequest{ReadPercent: percent})
		if err != nil || out.TotalProblems == 0 {
			t.Fatalf("verify: %+v, %v", out, err)
		}
		for _, p := range out.Problems {
			if p.Point != "odd" || p.Points != 1 {
				t.Errorf("verify: %v", p)
			}
		}
	}
}
