package engine_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"
)

// TestPowerLossAfterEachVerb: what a verb has done when it returns is there after a power loss at this moment, with all
// that was there before.
func TestPowerLossAfterEachVerb(t *testing.T) {
	for _, k := range []struct{ host, driver string }{
		{"xfs", reflink.Name}, {"btrfs", btrfs.Name}, {"ext4", plain.Name},
	} {
		t.Run(k.driver, func(t *testing.T) {
			fs := testfs.New(t, k.host, 400<<20)
			e := newPool(t, fs.Dir(), engine.InitRequest{Driver: k.driver, MinFreePercent: 0.01})
			for _, step := range []struct {
				verb string
				do   func()
			}{
				{"import", func() { importTree(t, e, "g", source(t)) }},
				{"clone", func() { clone(t, e, "g", "v", false) }},
				{"snapshot", func() { snapshot(t, e, "v", "s") }},
				{"publish", func() { publish(t, e, "g", "v") }},
				{"rename", func() {
					_, err := e.Rename(t.Context(), engine.RenameRequest{Ref: ref.Ref{Name: "v"}, Name: ref.MustName("w")})
					must(t, err)
				}},
				{"rewind", func() {
					_, err := e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName("w"), Snapshot: ref.MustName("s")})
					must(t, err)
				}},
				{"destroy", func() { destroy(t, e, "w") }},
			} {
				step.do()
				want := namesIn(t, e)
				t.Run(step.verb, func(t *testing.T) {
					copied := open(t, filepath.Join(powerLost(t, fs, k.host), "pool"))
					defer copied.Close()
					if got := namesIn(t, copied); got != want {
						t.Errorf("it has %s, before it had %s", got, want)
					}
					for _, f := range fsck(t, copied.Dir(), false).Findings {
						// What a process has left that has died, the first command after a boot removes.
						if f.Code != "live" && f.Code != "object-half" {
							t.Errorf("fsck: %+v", f)
						}
					}
				})
			}
		})
	}
}

// namesIn lists what is in a pool.
func namesIn(t *testing.T, e *engine.Engine) string {
	t.Helper()
	var out []string
	goldens, err := e.Goldens(t.Context())
	must(t, err)
	for _, g := range goldens {
		out = append(out, fmt.Sprint(g.Name, g.Generations))
	}
	volumes, err := e.Volumes(t.Context(), engine.VolumesRequest{})
	must(t, err)
	for _, v := range volumes {
		snapshots, err := pooltest.SnapshotNames(t.Context(), e, v.Name)
		must(t, err)
		out = append(out, fmt.Sprint(v.Name, snapshots))
	}
	return fmt.Sprint(out)
}
