package replicate

import (
	"os"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/testing/storetest"
)

// TestCopiesOfOneJournal: a pool is copied while the journal of a push is in it. When one of the two goes on with that
// push, the other neither goes on with its session nor ends it, however it comes to give the push up, so that no prune
// deletes what the first is about to commit.
func TestCopiesOfOneJournal(t *testing.T) {
	manifest := func(c storetest.Call) bool { return c.Op == storetest.Put && strings.HasPrefix(c.Key, "manifests/") }
	for name, q := range map[string]PushRequest{
		"resumes":       {Refs: []ref.Ref{{Name: "v"}}},
		"sends all":     {Refs: []ref.Ref{{Name: "v"}}, Full: true},
		"lost snapshot": {Refs: []ref.Ref{{Name: "v"}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 3*mib) })
			w.clone("g", "v")
			w.push("v")
			before := w.pushSnapshots("v")
			w.edit("v", func(f *os.File) { noise(t, f, 2, 32*mib, 2*mib) })
			w.store.Add(storetest.Fault{Match: manifest, Times: -1})
			w.load()
			if _, err := w.tryPush("v"); err == nil {
				t.Fatal("the push did not fail")
			}
			w.store.Heal()
			o := w.copied(t)
			if name == "lost snapshot" {
				for _, s := range o.pushSnapshots("v") {
					if s == before[0] {
						continue
					}
					if _, err := o.e.Destroy(t.Context(), toDestroy("v@"+s)); err != nil {
						t.Fatal(err)
					}
				}
			}

			// The other does what it can, just before the first writes its manifest, and then a prune.
			o.store.Add(storetest.Fault{Match: manifest, Times: -1, Err: storetest.Permanent(errs.Permission)})
			o.load()
			w.store.Add(storetest.Fault{Match: manifest, Do: func(storetest.Call) {
				if _, err := Push(t.Context(), o.e, o.r, q); !errs.Is(err, errs.Permission) {
					t.Errorf("the other: %v", err)
				}
				if _, err := Prune(t.Context(), o.e, o.r, PruneRequest{}); err != nil {
					t.Errorf("the prune: %v", err)
				}
			}})
			w.load()
			if out, err := w.tryPush("v"); err != nil || !out[0].Resumed {
				t.Errorf("the first: %+v, %v", out, err)
			}
			if v, err := Verify(t.Context(), nil, w.r, VerifyRequest{ReadPercent: 100}); err != nil || v.Err() != nil {
				t.Errorf("%+v, %v", v, err)
			}
			w.checkPoint(w.open(), "v", w.image("v"))

			// It goes on as a copy does.
			o.store.Heal()
			_, err := o.tryPush("v")
			wantKind(t, err, errs.Conflict, "writer")
		})
	}
}
