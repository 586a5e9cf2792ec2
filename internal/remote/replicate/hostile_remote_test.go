package replicate

import (
	"maps"
	"slices"
	"testing"

	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// TestPruneKeepsWhatADamagedPackHas: a prune that was killed before it deleted what it had moved leaves both. If the
// pack is damaged since, the next prune keeps what it was copied from.
func TestPruneKeepsWhatADamagedPackHas(t *testing.T) {
	b, q := wastefulBench(t, faulttest.Rand(t))
	before := map[string][]byte{}
	for o, err := range b.store.List(t.Context(), "segments/") {
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := b.store.Get(t.Context(), o.Key, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		before[o.Key] = object
	}
	b.prune(q)
	now, err := listObjects(t.Context(), b.repo)
	if err != nil || len(now.places) == 0 {
		t.Fatalf("nothing was moved: %v", err)
	}

	for s := range now.places {
		key := "segments/" + s.String()
		if _, err := b.store.Put(t.Context(), key, before[key], objstore.Always); err != nil {
			t.Fatal(err)
		}
	}
	packs := slices.SortedFunc(maps.Keys(now.moved.Packs), repo.Pack.Compare)
	b.flip("packs/"+packs[0].String(), now.moved.Packs[packs[0]]/3)
	for range 2 {
		r, _ := b.faulty() // as another process
		if _, err := prune(t.Context(), r, q); err != nil {
			t.Fatal(err)
		}
		for _, m := range []*made{b.truth["v"]["p2"], b.truth["w"]["q1"]} {
			to, _, err := b.restored(r, m, nil)
			if err != nil {
				t.Fatalf("%s@%s: %v", m.volume, m.point, err)
			}
			to.same(t, m.volume, m.content)
		}
	}
}
