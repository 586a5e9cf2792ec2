package replicate

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// TestPushFaults: whichever operation of the store fails, before its effect or after,
// for a moment or for good, the push or the next one succeeds, what is then there is
// the volume, and nothing is left over. By default every third operation fails.
func TestPushFaults(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 3*mib) })
	w.clone("g", "v")
	w.push("v")
	rp := w.open()
	kinds := []struct {
		name  string
		fault storetest.Fault
		fails bool // the push
	}{
		{"lost once", storetest.Fault{When: storetest.After}, false},
		{"failed once", storetest.Fault{When: storetest.Before}, false},
		{"refused", storetest.Fault{When: storetest.Before, Err: storetest.Permanent(errs.Permission)}, true},
		{"done and refused", storetest.Fault{When: storetest.After, Err: storetest.Permanent(errs.IO)}, true},
		{"vanished", storetest.Fault{When: storetest.Before, Times: -1}, true},
		{"vanished after it", storetest.Fault{When: storetest.After, Times: -1}, true},
	}
	n := 0
	for _, k := range kinds {
		// The first push, of golden and clone, and an increment.
		for _, first := range []bool{true, false} {
			for at := faulttest.Draw(t, 3, k.name, first); ; at += faulttest.DrawStep(3) {
				n++
				name, golden := "v", ""
				if first {
					name, golden = fmt.Sprintf("v%d", n), fmt.Sprintf("g%d", n)
					w.importImage(golden, 64*mib, func(f *os.File) { noise(t, f, uint64(n), 0, mib) })
					w.clone(golden, name)
				}
				w.edit(name, func(f *os.File) { noise(t, f, uint64(1000+n), 32*mib, 256<<10) })
				f := k.fault
				f.At = at
				w.store.Add(f)
				w.load()
				_, err := w.tryPush(name)
				fired := w.store.Fired() > 0
				w.store.Heal()
				switch {
				case !fired && err != nil:
					t.Fatalf("%s: nothing failed, and the push did: %v", k.name, err)
				case err != nil && !k.fails:
					t.Fatalf("%s, operation %d: %v", k.name, at, err)
				case err != nil && errs.KindOf(err) == errs.Internal:
					t.Fatalf("%s, operation %d: not a good error: %v", k.name, at, err)
				}
				if err != nil {
					w.push(name)
				}
				w.checkPoint(rp, name, w.image(name))
				if golden != "" {
					w.checkPoint(rp, golden, w.image(golden))
				}
				if s := w.pushSnapshots(name); len(s) != 1 {
					t.Fatalf("%s, operation %d: snapshots of pushes: %v", k.name, at, s)
				}
				if left, _ := os.ReadDir(filepath.Join(w.r.dir, journalDir)); len(left) > 0 {
					t.Fatalf("%s, operation %d: a journal is left: %v", k.name, at, left)
				}
				if !fired {
					break
				}
			}
		}
	}
	t.Logf("%d pushes", n)
	w.clearLost(rp)
	w.noSessions(rp)
}

// TestPushAfterHalfAPrune: a prune gives up the session of an interrupted push, and dies before it removes it. The next
// push begins anew, and succeeds.
func TestPushAfterHalfAPrune(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 3*mib) })
	w.clone("g", "v")
	w.push("v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 32*mib, mib) })
	manifest := func(c storetest.Call) bool { return c.Op == storetest.Put && strings.HasPrefix(c.Key, "manifests/") }
	w.store.Add(storetest.Fault{Match: manifest, Times: -1})
	w.load()
	if _, err := w.tryPush("v"); err == nil {
		t.Fatal("the push did not fail")
	}
	w.store.Heal()

	rp := w.open()
	sessions, err := rp.Sessions(t.Context())
	if err != nil || len(sessions) != 1 {
		t.Fatal(sessions, err)
	}
	_, err = changeHead(t.Context(), rp, opRemotePrune, "v", func(h *repo.Head) (bool, error) {
		h.Fenced = append(h.Fenced, sessions[0].ID)
		return true, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	w.load()
	w.push("v")
	w.checkPoint(rp, "v", w.image("v"))
	w.noSessions(rp)
}

// TestFirstPushesNeverCommit: the first pushes of a volume write their manifests, and die before there is a head.
// Nothing is lost by that, so nothing says so, and prunes leave nothing of it.
func TestFirstPushesNeverCommit(t *testing.T) {
	for name, failed := range map[string]error{"temporary": nil, "refused": storetest.Permanent(errs.Permission)} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 3*mib) })
			w.push("g")
			w.clone("g", "v")
			rp := w.open()
			head := func(c storetest.Call) bool {
				return c.Op == storetest.Put && strings.HasPrefix(c.Key, "heads/")
			}
			for i := range 3 {
				snapshot := fmt.Sprintf("s%d", i)
				q := engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName(snapshot)}
				if _, err := w.e.Snapshot(t.Context(), q); err != nil {
					t.Fatal(err)
				}
				w.store.Add(storetest.Fault{Match: head, Times: -1, Err: failed})
				w.load()
				if _, err := w.tryPush("v@" + snapshot); err == nil {
					t.Fatal("the push did not fail")
				}
				w.store.Heal()
				out, err := verify(t.Context(), rp, VerifyRequest{})
				if err != nil || len(out.Problems) > 0 {
					t.Fatalf("after %d pushes: %+v, %v", i+1, out.Problems, err)
				}
			}
			for range 2 {
				if _, err := prune(t.Context(), rp, PruneRequest{Patience: 1}); err != nil {
					t.Fatal(err)
				}
			}
			w.noSessions(rp)
			out, err := verify(t.Context(), rp, VerifyRequest{})
			if err != nil || len(out.Problems) > 0 || out.GarbageCount > 0 {
				t.Errorf("after prunes: %+v, %v", out, err)
			}
		})
	}
}

// TestPruneOfLostHeadWithDeadSession: the head of a volume is lost, and a push of it has died. A prune that ends that
// session makes no head that would say that the volume has no points: they all come back.
func TestPruneOfLostHeadWithDeadSession(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 3*mib) })
	w.clone("g", "v")
	w.push("v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 32*mib, mib) })
	manifest := func(c storetest.Call) bool { return c.Op == storetest.Put && strings.HasPrefix(c.Key, "manifests/") }
	w.store.Add(storetest.Fault{Match: manifest, Times: -1})
	w.load()
	if _, err := w.tryPush("v"); err == nil {
		t.Fatal("the push did not fail")
	}
	w.store.Heal()
	rp := w.open()
	id, err := rp.HeadID("v")
	if err != nil {
		t.Fatal(err)
	}
	if err := w.store.Delete(t.Context(), "heads/"+id.String()); err != nil {
		t.Fatal(err)
	}

	for range 3 {
		if _, err := prune(t.Context(), rp, PruneRequest{Patience: 1}); err != nil {
			t.Fatal(err)
		}
	}
	out, err := Repair(t.Context(), nil, w.r, RepairRequest{})
	if err != nil || len(out.Volumes) != 1 || len(out.Volumes[0].Points) != 1 || len(out.Volumes[0].Broken) != 0 {
		t.Fatalf("repaired %+v, %v", out, err)
	}
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	checkWhole(t, rp, w.newest(rp, h).Manifest)
}
