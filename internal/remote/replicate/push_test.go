package replicate

import (
	"os"
	"testing"

	"pando/internal/api"
	"pando/internal/testing/storetest"
)

// TestPushIncrement: a clone of a golden is pushed after it and costs its own changes,
// the next push what was changed since; what a manifest says is exactly the image.
func TestPushIncrement(t *testing.T) {
	w := newWorld(t)
	const size = 2500 * mib
	w.importImage("g", size, func(f *os.File) {
		noise(t, f, 1, 0, 20*mib)
		text(t, f, 2, 100*mib, 30*mib)
		noise(t, f, 3, 1020*mib, 10*mib) // over the border of a region
		noise(t, f, 4, size-4096, 4096)
	})
	w.clone("g", "v")
	w.edit("v", func(f *os.File) {
		noise(t, f, 5, 5*mib+4096, 8192)
		punch(t, f, 110*mib, mib)
	})
	out := w.push("v")
	if len(out) != 2 || out[0].Ref != "g@1" || out[0].Kind != api.KindGeneration || !out[0].Full {
		t.Fatalf("pushed %+v", out)
	}
	out = out[1:]
	rp := w.open()
	g := w.checkPoint(rp, "g", w.image("g"))
	h := w.checkPoint(rp, "v", w.image("v"))
	if out[0].Origin != "g@1" || h.Recent[0].OriginID != g.Recent[0].Manifest || out[0].Base != "g@1" || out[0].Full {
		t.Errorf("the clone does not build upon its golden: %+v", out[0])
	}
	if out[0].ReadBytes > 64<<10 || out[0].UploadedBytes > 64<<10 {
		t.Errorf("the clone's push read %d and uploaded %d bytes; it changed 8 KiB", out[0].ReadBytes, out[0].UploadedBytes)
	}
	w.edit("v", func(f *os.File) {
		noise(t, f, 6, 2000*mib, mib)
		punch(t, f, 0, 10*mib)
	})
	before := w.store.Count()
	out = w.push("v")
	calls := w.store.Calls()[before:]
	w.checkPoint(rp, "v", w.image("v"))
	if out[0].ReadBytes != mib || out[0].UploadedBytes < mib || out[0].UploadedBytes > mib+64<<10 {
		t.Errorf("1 MiB was changed; the push read %d and uploaded %d bytes", out[0].ReadBytes, out[0].UploadedBytes)
	}
	t.Logf("an increment of 1 MiB: %d requests, %.0f ms", len(calls), out[0].Seconds*1000)
	for _, c := range calls {
		t.Log(c)
	}
	if n := len(calls); n > 14 {
		t.Errorf("a small push made %d requests", n)
	}
	if s := w.pushSnapshots("v"); len(s) != 1 {
		t.Errorf("snapshots of pushes: %v, wanted the newest only", s)
	}
	// Nothing changed.
	puts := w.store.Count(storetest.Put)
	out = w.push("v")
	if !out[0].Unchanged || w.store.Count(storetest.Put) != puts || len(w.pushSnapshots("v")) != 1 {
		t.Errorf("a volume that did not change: %+v, %d writes, snapshots %v", out[0], w.store.Count(storetest.Put)-puts,
			w.pushSnapshots("v"))
	}
	w.noSessions(rp)
}
