package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestPoolResizeAtEveryStep: whatever interrupts it, the pool works afterwards, and the same command does the rest.
func TestPoolResizeAtEveryStep(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}

	w := newWorld(t, kinds[0])
	w.initPool()
	w.importGolden("g")
	w.pando("clone", "g", "v", "--mount")
	megabytes := int(w.poolBytes()>>20) + 64
	op := operation{name: "pool-resize",
		command: func(*world) []string { return []string{"pool", "resize", fmt.Sprintf("%dM", megabytes)} },
		prepare: func(*world) { megabytes += 16 },
		want:    func(before string) string { return before },
		always: func(w *world) {
			w.pando("pool", "resize", fmt.Sprintf("%dM", megabytes))
			if got := w.poolBytes() >> 20; got < int64(megabytes)*8/10 {
				w.t.Errorf("of %d MiB the filesystem has %d", megabytes, got)
			}
		}}
	for _, f := range drawnFaults(t) {
		t.Run(f.name, func(t *testing.T) { w.sweep(t, op, f.plan) })
	}

	w.t = t
	w.gone("*")
	w.pando("deinit", "--force")
	w.nothingLeft()
}

// poolBytes returns the size of the pool's filesystem.
func (w *world) poolBytes() int64 {
	w.t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs(filepath.Join(w.dir, "data"), &st); err != nil {
		w.t.Fatal(err)
	}
	return int64(st.Blocks) * st.Bsize
}
