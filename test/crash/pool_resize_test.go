package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"
)

// TestPoolResizeAtEveryStep: whatever interrupts it, the pool works afterwards with its old size or the new one, the
// next command records which, and the same command does the rest.
func TestPoolResizeAtEveryStep(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}

	w := newWorld(t, kinds[0])
	w.initPool()
	w.importGolden("g")
	w.pando("clone", "g", "v", "--mount")
	before := w.sizes().filesystem
	size := before
	op := operation{name: "pool-resize", all: true,
		command: func(*world) []string { return []string{"pool", "resize", fmt.Sprint(size)} },
		prepare: func(w *world) { before = w.sizes().filesystem; size = before>>20<<20 + 16<<20 },
		want:    func(before string) string { return before },
		always: func(w *world) {
			// Only what interrupts it between a growth and its record may leave a record that is behind.
			s := w.sizes()
			if s.filesystem != before && s.filesystem != size || s.file < s.filesystem || s.recorded > s.filesystem {
				w.t.Errorf("%+v; from %d to %d", s, before, size)
			}

			w.pando("ls", "-q")
			if s := w.sizes(); s.growing || s.recorded != s.filesystem {
				w.t.Errorf("after the next command: %+v", s)
			}
			w.pando("pool", "resize", fmt.Sprint(size))
			if s := w.sizes(); s.growing || s.recorded != size || s.filesystem != size || s.file != size {
				w.t.Errorf("after the next resize to %d: %+v", size, s)
			}
		}}
	w.sweepFaults(t, op, "")
	w.gone("*")
	w.pando("deinit", "--force")
	w.nothingLeft()
}

// poolSizes is how large a loop-backed pool is, in bytes.
type poolSizes struct {
	file, filesystem, recorded int64
	growing                    bool
}

// sizes measures a loop-backed pool.
func (w *world) sizes() (s poolSizes) {
	w.t.Helper()
	p, err := pool.Read(w.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	s.recorded, s.growing = p.Config.Backing.SizeBytes, p.Config.Backing.Growing

	st, err := os.Stat(p.BackingFile())
	if err != nil {
		w.t.Fatal(err)
	}
	s.file = st.Size()

	data, err := os.Open(filepath.Join(w.dir, "data"))
	if err != nil {
		w.t.Fatal(err)
	}
	defer data.Close()
	if s.filesystem, err = kernel.XFSBytes(data); err != nil {
		w.t.Fatal(err)
	}
	return s
}
