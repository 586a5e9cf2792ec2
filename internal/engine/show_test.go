package engine_test

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// TestShowMeasuresSnapshots: the figures of a volume and of its snapshots are those of now. Those of a snapshot that is
// too dear to measure say that they never were.
func TestShowMeasuresSnapshots(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		const written = 4 << 20
		data := make([]byte, written)
		rng := rand.NewChaCha8([32]byte{1})
		v := clone(t, e, "g", "v", true)
		write := func(name string) {
			t.Helper()
			_, _ = rng.Read(data)
			must(t, os.WriteFile(filepath.Join(v.Mountpoint, name), data, 0o600))
		}
		write("first")
		snapshot(t, e, "v", "first")
		write("second")
		snapshot(t, e, "v", "second")

		// Nothing waits for what has just been written to become part of the figures.
		for i := range int64(3) {
			d, err := e.Show(t.Context(), ref.Ref{Name: "v"})
			must(t, err)
			if d.LogicalBytes < (2+i)*written || len(d.Snapshots) != 2 {
				t.Errorf("%d bytes of %d, snapshots %+v", d.LogicalBytes, (2+i)*written, d.Snapshots)
			}
			for n, s := range d.Snapshots {
				dear := s.FS == driver.Native && e.Caps().Name != "zfs"
				if measured := s.MeasuredAt != nil; measured == dear || measured && s.LogicalBytes < int64(n+1)*written {
					t.Errorf("%s: %d bytes, measured %v", s.Ref, s.LogicalBytes, s.MeasuredAt)
				}
			}
			write("later-" + string('a'+rune(i)))
		}
	})
}
