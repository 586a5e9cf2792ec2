package bench_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"pando/internal/bench"
	"pando/internal/testing/testfs"
)

// TestReclaim measures small numbers on each kind of pool, and finds that all
// comes back.
func TestReclaim(t *testing.T) {
	notShort(t)
	for name, pool := range map[string]struct {
		dir  func() string
		args []string
	}{
		"reflink": {func() string { return testfs.XFS(t, 2<<30) }, []string{"--driver", "reflink"}},
		"btrfs":   {func() string { return testfs.Btrfs(t, 2<<30) }, []string{"--driver", "btrfs"}},
		"plain":   {func() string { return testfs.Ext4(t, 1<<30) }, []string{"--driver", "plain"}},
	} {
		t.Run(name, func(t *testing.T) {
			if os.Geteuid() != 0 {
				t.Skip("SKIPPED: mounting needs root")
			}
			h := newHost(t, pool.dir(), pool.args...)
			var r bench.ReclaimReport
			out := h.run("bench", "reclaim", "--clones", "12", "--files", "40", "--write", "256K", "--goldens", "3",
				"--generations", "2", "--volumes", "5", "--json")
			if err := json.Unmarshal(out, &r); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			h.clean()
			if taken := r.UsedPeak - r.UsedBefore; taken < 12*256<<10 {
				t.Errorf("12 clones with 256 KiB each took %d bytes", taken)
			}
			if left := r.UsedAfter - r.UsedBefore; left > 1<<20 {
				t.Errorf("LEAK: %d bytes did not come back", left)
			}
			if r.Clones != 12 || r.Files != 40 || len(r.GCDecides) != 3 || r.GCDecides[0] <= 0 || len(r.Targets) != 3 ||
				r.NoSlabs == "" && len(r.Slabs) < 2 {
				t.Errorf("the report lacks something: %+v", r)
			}
			text := string(h.run("bench", "reclaim", "--clones", "2", "--files", "10", "--goldens", "1", "--generations", "1",
				"--volumes", "1"))
			for _, want := range []string{"used space of the pool", "gc decides", "kernel memory"} {
				if !strings.Contains(text, want) {
					t.Errorf("no %q in:\n%s", want, text)
				}
			}
			h.clean()
		})
	}
}
