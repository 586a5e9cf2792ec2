package replicate

import (
	"os"
	"slices"
	"testing"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// TestExpectationsSpill: what does not fit into memory comes back from the file as it would from memory: in order,
// and each once, also what lies in several runs. Nothing is left in the directory.
func TestExpectationsSpill(t *testing.T) {
	rnd := faulttest.Rand(t)
	var all []expected
	for range 5000 {
		x := expected{
			segment: rnd.Uint32N(50), index: rnd.Uint32N(100), offset: rnd.Uint32(), stored: rnd.Uint32(), packed: rnd.Uint32(),
			within: rnd.Uint32(), length: rnd.Uint32(), sum: repo.Sum{byte(rnd.Uint32())},
		}
		all = append(all, x)
		for range rnd.IntN(3) { // and one from before again, in this run or another
			all = append(all, all[rnd.IntN(len(all))])
		}
	}
	want := slices.Clone(all)
	slices.SortFunc(want, expected.compare)
	want = slices.Compact(want)

	dir := t.TempDir()
	for _, limit := range []int{64, 1000, len(all) + 1} {
		e := expectations{dir: dir, limit: limit}
		for part := range slices.Chunk(all, 100) {
			if err := e.addExpected(part); err != nil {
				t.Fatal(err)
			}
			if len(e.memory) > limit {
				t.Fatalf("%d are in memory, of at most %d", len(e.memory), limit)
			}
		}
		if spilled := len(e.runs) > 1; spilled != (limit < len(want)/2) {
			t.Errorf("limit %d: %d runs", limit, len(e.runs))
		}
		var got []expected
		for x, err := range e.sorted() {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, x)
		}
		if !slices.Equal(got, want) {
			t.Errorf("limit %d: %d of %d came back, or in another order", limit, len(got), len(want))
		}
		e.close()
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("LEAK: %v, %v", left, err)
	}
}
