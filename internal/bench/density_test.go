package bench_test

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"pando/internal/bench"
	"pando/internal/testing/testfs"
)

// density runs the benchmark with small numbers.
func (h *host) density(args ...string) *bench.DensityReport {
	h.t.Helper()
	out := h.run(append([]string{"bench", "density", "--json", "--no-progress", "--files", "220", "--runs", "1"},
		args...)...)
	r := &bench.DensityReport{}
	dec := json.NewDecoder(bytes.NewReader(out))
	dec.DisallowUnknownFields()
	if err := dec.Decode(r); err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
	return r
}

// TestDensity measures on each kind of pool, on the first with more than one number of sessions. It looks at figures
// that other programs on this host do not change.
func TestDensity(t *testing.T) {
	needRoot(t)
	notShort(t)
	for _, pool := range []struct {
		driver   string
		dir      func() string
		sessions string
		numbers  int    // count of different numbers of sessions
		absent   string // a variant that such pools do not have
	}{
		{"reflink", func() string { return testfs.XFS(t, 2<<30) }, "4,1,4", 2, ""},
		{"btrfs", func() string { return testfs.Btrfs(t, 2<<30) }, "4", 1, ""},
		{"plain", func() string { return testfs.Ext4(t, 1<<30) }, "4", 1, bench.DensityReflink},
	} {
		t.Run(pool.driver, func(t *testing.T) {
			h := newHost(t, pool.dir(), "--driver", pool.driver)
			h.layers = 1 // overlays begin as a copy of it
			r := h.density("--sessions", pool.sessions)
			h.clean()
			if want := pool.numbers * len(bench.DensityVariants); len(r.Rows) != want || len(r.Targets) != 4 {
				t.Fatalf("%d rows, want %d; %d targets", len(r.Rows), want, len(r.Targets))
			}
			for _, row := range r.Rows {
				if missing := row.NotMeasured != ""; missing != (row.Variant == pool.absent) && row.Variant != bench.DensityDocker {
					t.Errorf("%s, %d sessions: not measured: %q", row.Variant, row.Sessions, row.NotMeasured)
				}
				if row.NotMeasured == "" {
					checkDensity(t, r, row)
				}
			}
		})
	}
}

func checkDensity(t *testing.T, r *bench.DensityReport, row bench.DensityRow) {
	t.Helper()
	for name, seconds := range map[string]float64{"setup": row.Setup, "read": row.Read, "write": row.Write,
		"session": row.Session, "remove": row.Remove} {
		if seconds <= 0 {
			t.Errorf("%s, %d sessions: %s took %v s", row.Variant, row.Sessions, name, seconds)
		}
	}

	// A session reads all its files from the disk, or finds them in memory.
	tree := float64(r.Source.Bytes)
	if row.Resident < tree || row.Resident > 2*tree+float64(r.Source.Files<<12) {
		t.Errorf("%s, %d sessions: %.0f bytes resident of %.0f", row.Variant, row.Sessions, row.Resident, tree)
	}
	if row.Variant == bench.DensityDocker {
		return // its layers may be in memory of others
	}

	// Overlays read the disk once for all, clones that are filesystems for each.
	shared := row.Variant == bench.DensityBare || row.Variant == bench.DensityOverlay
	switch times := row.Disk / tree; {
	case row.NoDisk != "":
		t.Errorf("%s: no reads: %s", row.Variant, row.NoDisk)
	case times < 0.9, shared && times > 3, row.Variant == bench.DensityReflink && times < 0.9*float64(row.Sessions):
		t.Errorf("%s, %d sessions: read the tree %.1f times", row.Variant, row.Sessions, times)
	case r.Pool.Driver == "reflink" && row.Variant == bench.DensityClone && times < 0.9*float64(row.Sessions):
		t.Errorf("clones, %d sessions: read the tree %.1f times", row.Sessions, times)
	}
}

// TestDensityOfGivenTree: directories, sizes, some of the variants, and text.
func TestDensityOfGivenTree(t *testing.T) {
	needRoot(t)
	h := newHost(t, testfs.XFS(t, 2<<30), "--driver", "reflink")
	h.layers = 1

	t.Run("size", func(t *testing.T) {
		h.t = t
		r := h.density("--size", "4M", "--only", "overlay", "--sessions", "2", "--at-once", "1")
		h.clean()
		if r.Source.Bytes < 3<<20 || r.Source.Bytes > 5<<20 || r.Source.Files != 220 || len(r.Rows) != 1 || r.AtOnce != 1 {
			t.Errorf("source %+v, rows %+v, at once %d", r.Source, r.Rows, r.AtOnce)
		}
		for _, g := range r.Targets {
			if g.Verdict != bench.NotMeasured || g.Reason == "" {
				t.Errorf("a verdict without a figure to compare with: %+v", g)
			}
		}
	})

	t.Run("directory", func(t *testing.T) {
		h.t = t
		dir := t.TempDir()
		if err := os.WriteFile(dir+"/file", make([]byte, 100<<10), 0o444); err != nil {
			t.Fatal(err)
		}
		text := string(h.run("bench", "density", dir, "--sessions", "1,2", "--runs", "1", "--only",
			"bare,overlay"))
		h.clean()
		for _, want := range []string{"SESSIONS  VARIANT", "2         overlay", "PASS", "directory " + dir} {
			if !strings.Contains(text, want) {
				t.Errorf("no %q in:\n%s", want, text)
			}
		}
	})

	t.Run("wrong input", func(t *testing.T) {
		h.t = t
		for args, want := range map[string]string{
			"--sessions 0":               "--sessions: must be between 1 and 10000 (got 0)",
			"--sessions 10001":           "must be between 1 and 10000",
			"--runs 0":                   "--runs: must be between 1 and 100",
			"--at-once 0":                "--at-once: must be at least 1 (got 0)",
			"--files -1":                 "--files: must be between 1",
			"--only image":               `there is no variant "image"`,
			"--size 1T":                  "10000 files can have",
			"--size x":                   "not a size",
			"/x --files 5":               "cannot be combined",
			"/x --size 1M":               "cannot be combined",
			"/nonexistent":               "neither a golden nor a directory",
			"--sessions 10000":           "10000 sessions need about",
			"something":                  "neither a golden nor a directory",
			"one two":                    "",
			"--sessions 1,x --only bare": "invalid",
		} {
			out, err := h.command(append([]string{"bench", "density"}, strings.Fields(args)...)...).CombinedOutput()
			if err == nil || !strings.Contains(string(out), want) {
				t.Errorf("%s: %v, want %q: %s", args, err, want, out)
			}
		}
		h.clean()
	})
}

// TestDensityEnds: neither an interrupted nor a killed run leaves anything, the latter once another has begun.
func TestDensityEnds(t *testing.T) {
	needRoot(t)
	notShort(t)
	h := newHost(t, testfs.XFS(t, 2<<30), "--driver", "reflink")
	h.layers = 1
	args := []string{"bench", "density", "--files", "220", "--sessions", "8", "--runs", "50", "--no-progress"}
	for _, stage := range []string{"-empty", "-overlay", "-clone"} {
		cmd := h.startCommandUntil(stage, args...)
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 130 {
			t.Errorf("interrupted at %s: exit code %d (%v): %s", stage, code, err, cmd.Stderr)
		}
		h.clean()
	}

	cmd := h.startCommandUntil("-overlay", args...)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	h.density("--only", "overlay", "--sessions", "1")
	h.run("gc") // the proof of life of a dead process goes with the next clean-up of the whole pool
	h.clean()
}
