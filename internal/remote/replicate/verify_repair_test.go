package replicate

import (
	"os"
	"slices"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// largestOf is the largest segment that the newest point of a head needs, and its object.
func (w *world) largestOf(rp *repo.Repo, head string) (key string, data []byte) {
	w.t.Helper()
	for _, s := range w.segmentsOf(rp, head) {
		b, _, err := w.store.Get(w.t.Context(), "segments/"+s.String(), 0, -1)
		if err != nil {
			w.t.Fatal(err)
		}
		if len(b) > len(data) {
			key, data = "segments/"+s.String(), b
		}
	}
	return key, data
}

// TestVerifyRepair: segments are missing, cut, or have flipped bits. All points whose objects are in this pool are
// whole again, in their places; what only another host can bring back is named with that.
func TestVerifyRepair(t *testing.T) {
	for name, damage := range map[string]func(*testing.T, *world, string, []byte){
		"missing": func(t *testing.T, w *world, key string, _ []byte) {
			if err := w.store.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
		},
		"cut": func(t *testing.T, w *world, key string, data []byte) {
			w.putRaw(key, data[:len(data)-1])
		},
		"flipped": func(t *testing.T, w *world, key string, data []byte) {
			bad := slices.Clone(data)
			bad[len(bad)/2] ^= 1
			w.putRaw(key, bad)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			rp := w.open()
			w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 20*mib) })
			w.clone("g", "v")
			w.push("v")
			w.edit("v", func(f *os.File) { noise(t, f, 2, 50*mib, mib) })
			w.push("v")
			first, _, err := rp.Head(t.Context(), "v")
			if err != nil {
				t.Fatal(err)
			}
			key, data := w.largestOf(rp, "g")
			damage(t, w, key, data)

			// The pool has the generation, and the newest snapshot of the volume; the one before is gone.
			q := VerifyRequest{ReadPercent: 100}
			found, err := Verify(t.Context(), nil, w.r, q)
			if err != nil || found.TotalProblems == 0 || found.Repaired != nil {
				t.Fatalf("%+v, %v", found, err)
			}
			out, err := VerifyRepair(t.Context(), w.e, w.r, q)
			if err != nil {
				t.Fatal(err)
			}
			repaired := map[string]RepairedPoint{}
			for _, p := range out.Repaired {
				repaired[p.Volume+"@"+p.Point] = p
			}
			newest, oldest := w.newest(rp, first).Name, first.Recent[0].Name
			if len(repaired) != 3 || !repaired["g@1"].Repaired || !repaired["v@"+newest].Repaired ||
				repaired["v@"+oldest].Repaired {
				t.Fatalf("%+v", out.Repaired)
			}
			if lost := repaired["v@"+oldest]; lost.Reason == "" || lost.Host != "" || out.TotalProblems == 0 {
				t.Errorf("%+v, %+v", lost, out.Problems)
			}
			for _, p := range out.Problems {
				if p.Point != oldest {
					t.Errorf("there is still %s", p)
				}
			}
			w.checkPoint(rp, "g", w.image("g"))
			after := w.checkPoint(rp, "v", w.image("v"))
			if len(after.Recent) != len(first.Recent) || w.newest(rp, after).Name != newest {
				t.Errorf("%+v, was %+v", after.Recent, first.Recent)
			}
			w.noSessions(rp)

			// Without what cannot be brought back all is well, and nothing is sent.
			if _, err := RemoveVolume(t.Context(), w.r, ref.Ref{Name: "v", At: oldest}); err != nil {
				t.Fatal(err)
			}
			if out, err = VerifyRepair(t.Context(), w.e, w.r, q); err != nil || out.TotalProblems != 0 || out.Repaired != nil {
				t.Errorf("%+v, %v", out, err)
			}
		})
	}
}

// TestVerifyRepairOfOthers: what another pool has written is not touched, and that is named.
func TestVerifyRepairOfOthers(t *testing.T) {
	w := newWorld(t)
	rp := w.open()
	w.importImage("g", 8*mib, func(f *os.File) { noise(t, f, 1, 0, 4*mib) })
	w.push("g")
	h, _, err := rp.Head(t.Context(), "g")
	if err != nil {
		t.Fatal(err)
	}
	h.Name, h.Writer = "theirs", repo.Writer{Pool: "another", Host: "host-2"}
	for i := range h.Recent {
		h.Recent[i].Source = "theirs"
	}
	if _, err := rp.PutHead(t.Context(), h, ""); err != nil {
		t.Fatal(err)
	}
	key, _ := w.largestOf(rp, "g")
	if err := w.store.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	out, err := VerifyRepair(t.Context(), w.e, w.r, VerifyRequest{})
	if err != nil || out.TotalProblems == 0 {
		t.Fatalf("%+v, %v", out, err)
	}
	for _, p := range out.Repaired {
		if p.Repaired != (p.Volume == "g") || !p.Repaired && p.Host != "host-2" {
			t.Errorf("%+v", p)
		}
	}
}

// putRaw writes over an object, whatever is there.
func (w *world) putRaw(key string, data []byte) {
	w.t.Helper()
	if _, err := w.store.Put(w.t.Context(), key, data, objstore.Always); err != nil {
		w.t.Fatal(err)
	}
}

// TestVerifyRepairOfTables: what a lost table of moved segments hides is found again, and nothing is sent for it.
func TestVerifyRepairOfTables(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	for i := range uint64(20) {
		w.edit("v", func(f *os.File) { noise(t, f, 2+i, int64(i)*mib, 64<<10) })
		w.push("v")
	}
	out, err := Prune(t.Context(), nil, w.r, PruneRequest{MaxRepack: -1})
	if err != nil || out.Packs == 0 {
		t.Fatalf("nothing was repacked: %+v, %v", out, err)
	}
	for o, err := range w.store.List(t.Context(), "moved/") {
		if err == nil {
			err = w.store.Delete(t.Context(), o.Key)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	found, err := Verify(t.Context(), nil, w.r, VerifyRequest{})
	if err != nil || found.TotalProblems != 1 || found.Problems[0].Points < 20 {
		t.Fatalf("verify: %v, %+v", err, found.Problems)
	}
	found, err = VerifyRepair(t.Context(), w.e, w.r, VerifyRequest{ReadPercent: 100})
	if err != nil || found.TotalProblems != 0 || len(found.Repaired) < 20 {
		t.Fatalf("repair: %v, %+v, %+v", err, found.Problems, found.Repaired)
	}
	for _, p := range found.Repaired {
		if !p.Repaired || p.UploadedBytes != 0 {
			t.Errorf("%+v", p)
		}
	}
}
