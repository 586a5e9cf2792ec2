package replicate

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/driver/reflink"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

// TestIncrementDoesNotGrow: an increment of 1 MiB reads, writes and asks the same of a
// volume of 1 GiB as of one of 50 GiB.
func TestIncrementDoesNotGrow(t *testing.T) {
	testfs.NotShort(t, "it is about sizes")
	w := worldOn(t, testfs.XFS(t, 6<<30), reflink.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	type cost struct {
		read, up int64
		requests int
	}
	var costs []cost
	for _, gib := range []int64{1, 10, 50} {
		g, v := fmt.Sprintf("g%d", gib), fmt.Sprintf("v%d", gib)
		w.importImage(g, gib<<30, func(f *os.File) { // a hundredth of it is data
			for i := range gib {
				noise(t, f, uint64(i), i<<30+300*mib, 10*mib)
			}
		})
		w.clone(g, v)
		w.push(v)
		var seconds []float64
		var c cost
		for i := range 5 {
			w.edit(v, func(f *os.File) { noise(t, f, uint64(1000+i), 500*mib+int64(i)*mib, mib) })
			before := w.store.Count()
			out := w.push(v)[0]
			c = cost{out.ReadBytes, out.UploadedBytes, w.store.Count() - before}
			seconds = append(seconds, out.Seconds)
		}
		slices.Sort(seconds)
		t.Logf("%2d GiB: %d KiB read, %d KiB uploaded, %d requests, median %.1f ms, best %.1f ms", gib, c.read>>10, c.up>>10,
			c.requests, seconds[2]*1000, seconds[0]*1000)
		costs = append(costs, c)
	}
	for _, c := range costs {
		if c.read != mib || c.up > mib+64<<10 || c.requests > costs[0].requests+6 { // the map is a few levels higher
			t.Errorf("an increment grows with its volume: %+v", costs)
		}
	}
}

// TestOneBlockOverFloor measures pushes of one block beside pushes of nothing, in a volume with scattered writes: what
// is
// over the floor is the cost of the push, and the floor is that of a snapshot and of comparing two extent maps.
func TestOneBlockOverFloor(t *testing.T) {
	const rounds = 5
	size, scattered := int64(100*mib), 4000
	if testfs.Full() {
		size, scattered = 800*mib, 64000
	}
	w := worldOn(t, testfs.XFS(t, 6<<30), reflink.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importImage("g", size, func(f *os.File) { noise(t, f, 1, 0, size) })
	w.clone("g", "v")
	w.push("v")
	rnd := faulttest.Rand(t)
	scatter := func(blocks int) {
		w.edit("v", func(f *os.File) {
			for range blocks {
				noise(t, f, rnd.Uint64(), rnd.Int64N(size/repo.BlockBytes)*repo.BlockBytes, repo.BlockBytes)
			}
		})
	}
	scatter(scattered)
	w.push("v")

	seconds := map[string][]float64{}
	var uploaded int64
	for range rounds {
		seconds["floor"] = append(seconds["floor"], w.push("v")[0].Seconds)
		scatter(1)
		out := w.push("v")[0]
		seconds["block"] = append(seconds["block"], out.Seconds)
		uploaded = max(uploaded, out.UploadedBytes)
	}
	for _, all := range seconds {
		slices.Sort(all)
	}
	t.Logf("a push of nothing: median %.0f ms; of one block: %.0f ms; %d bytes uploaded",
		seconds["floor"][rounds/2]*1000, seconds["block"][rounds/2]*1000, uploaded)
	if uploaded > 64<<10 {
		t.Errorf("one block costs %d bytes", uploaded)
	}
}
