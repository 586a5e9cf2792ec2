package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/bench"
	"pando/internal/testing/testfs"
)

// program is the path of pando.
var program string

func TestMain(m *testing.M) { os.Exit(testfs.WithProgram(&program, m.Run)) }

// host is a pool and where the benchmark's generated trees go.
type host struct {
	t    *testing.T
	bin  string
	pool string
	tmp  string

	layers int // objects without a name that may stay
}

func newHost(t *testing.T, dir string, init ...string) *host {
	t.Helper()
	h := &host{t: t, bin: program, pool: filepath.Join(dir, "pool"), tmp: t.TempDir()}
	testfs.LeakCheck(t, dir)
	if out, err := h.command(append([]string{"init"}, init...)...).CombinedOutput(); err != nil {
		t.Fatalf("init: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := h.command("deinit", "--force").CombinedOutput(); err != nil {
			t.Errorf("deinit: %v: %s", err, out)
		}
		if _, err := os.Lstat(h.pool); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("deinit leaves %s", h.pool)
		}
	})
	return h
}

func (h *host) command(args ...string) *exec.Cmd {
	cmd := exec.Command(h.bin, append([]string{"--pool", h.pool}, args...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+h.tmp)
	return cmd
}

// run runs a command that must succeed and returns its standard output.
func (h *host) run(args ...string) []byte {
	h.t.Helper()
	cmd := h.command(args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		h.t.Fatalf("pando %s: %v\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return stdout.Bytes()
}

// small numbers: what is measured is worth nothing, but all of it is.
var small = []string{"--clones", "3", "--volumes", "13", "--rounds", "1", "--tail", "100ms", "--idle", "100ms",
	"--no-progress"}

func (h *host) bench(args ...string) *bench.Report {
	h.t.Helper()
	out := h.run(append(append([]string{"bench", "clone", "--json"}, small...), args...)...)
	r := &bench.Report{}
	dec := json.NewDecoder(bytes.NewReader(out))
	dec.DisallowUnknownFields()
	if err := dec.Decode(r); err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
	return r
}

// clean fails the test if anything of a benchmark is left.
func (h *host) clean() {
	h.t.Helper()
	for _, dir := range []string{h.pool, filepath.Join(h.pool, "data"), filepath.Join(h.pool, "mnt"),
		filepath.Join(h.pool, "live"), h.tmp} {
		for _, e := range entries(h.t, dir) {
			if strings.Contains(e, "bench-") || filepath.Base(dir) == "mnt" || filepath.Base(dir) == "live" &&
				!strings.HasPrefix(e, "spare-") {
				h.t.Errorf("left behind: %s in %s", e, dir)
			}
		}
	}
	var vols, goldens []struct{ Name string }
	for args, v := range map[string]any{"ls": &vols, "golden ls": &goldens} {
		if err := json.Unmarshal(h.run(append(strings.Fields(args), "--json")...), v); err != nil {
			h.t.Fatal(err)
		}
	}
	for _, v := range append(vols, goldens...) {
		if strings.HasPrefix(v.Name, bench.Prefix) {
			h.t.Errorf("left behind: %s", v.Name)
		}
	}
	objects := entries(h.t, filepath.Join(h.pool, "data/objects"))
	if len(objects) > 2*(len(vols)+len(goldens)+h.layers) {
		h.t.Errorf("left behind: some of %v", objects)
	}
	// Only the pool itself may be mounted.
	for _, leak := range testfs.Leaks(filepath.Join(h.pool, "mnt"), time.Second) {
		h.t.Errorf("left behind: %s", leak)
	}
	for _, leak := range testfs.Leaks(filepath.Join(h.pool, "data"), time.Second) {
		h.t.Errorf("left behind: %s", leak)
	}
}

func entries(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var out []string
	for _, e := range list {
		out = append(out, e.Name())
	}
	return out
}

// complete fails the test if a row is missing, or has neither figures nor the
// reason for that. missing names rows that must have no figures.
func complete(t *testing.T, r *bench.Report, missing ...string) {
	t.Helper()
	check := func(table string, got, want []string) {
		t.Helper()
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: rows %q, want %q", table, got, want)
		}
	}
	row := func(name string, measured bool, reason string) {
		t.Helper()
		if want := !slices.Contains(missing, name); measured != want || measured == (reason != "") {
			t.Errorf("%s: measured %v, want %v; reason %q", name, measured, want, reason)
		}
	}
	var names []string
	for _, op := range r.Operations {
		names = append(names, op.Name)
		row(op.Name, op.Wall.Count > 0, op.NotMeasured)
		if op.NotMeasured != "" {
			continue
		}
		if len(op.Devices) != len(r.Pool.Devices) || len(op.Devices) == 0 == (op.NoDevices == "") {
			t.Errorf("%s: written to %v, reason %q", op.Name, op.Devices, op.NoDevices)
		}
	}
	check("operations", names, []string{bench.OpCopy, bench.OpReflink, bench.OpImport, bench.OpFloor, bench.OpPando,
		bench.OpFloorDestroy, bench.OpPandoDestroy})
	names = nil
	for _, p := range r.Neighbour {
		names = append(names, p.While)
		if !strings.HasPrefix(p.NotMeasured, "it was over before") { // so few files are copied in no time
			row(p.While, p.Write.Count > 0, p.NotMeasured)
		}
	}
	check("neighbour", names, []string{bench.WhileIdle, bench.WhilePando, bench.WhileSnapped, bench.WhileFrozen,
		bench.WhileThawed, bench.WhileFloor, bench.WhileReflink, bench.WhileCopy})
	names = nil
	for _, c := range r.Commands {
		names = append(names, c.Line)
		if c.Wall.Count == 0 || c.MaxRSS < 1<<20 || c.Volumes < 13 {
			t.Errorf("%s: %+v", c.Line, c)
		}
	}
	clone := "pando clone GOLDEN VOLUME --mount"
	if r.Overlay {
		clone += " --overlay"
	}
	check("commands", names, []string{"pando version", clone, "pando ls", "pando ls --json",
		"pando show VOLUME", "pando destroy VOLUME"})
	if len(r.Series) != 3 || r.Series[0].Volumes != 10 || r.Series[1].Volumes < 13 || r.Series[2].Volumes != 10 {
		t.Errorf("series %+v", r.Series)
	}
	for _, s := range r.Series {
		if s.PandoClone.Count != 3 || s.PandoDestroy.Count != 3 || (s.FloorClone.Count == 3) != (r.NoFloor == "") ||
			(len(s.Steps) > 2) != (r.NoFloor == "") {
			t.Errorf("series %+v", s)
		}
	}
	if len(r.Targets) != 15 {
		t.Errorf("%d targets, want 15", len(r.Targets))
	}
	for _, g := range r.Targets {
		if (g.Verdict == bench.NotMeasured) != (g.Reason != "") || g.Verdict != bench.NotMeasured && g.Measured == nil {
			t.Errorf("target %+v", g)
		}
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a loop-backed pool needs root: run the tests as root")
	}
}

func notShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("SKIPPED: takes long, and -short was asked for")
	}
}

func TestBenchOnLoopBackedPool(t *testing.T) {
	needRoot(t)
	h := newHost(t, t.TempDir(), "--loop", "--size", "2G")
	t.Run("generated tree", func(t *testing.T) {
		h.t = t
		r := h.bench("--files", "60")
		complete(t, r)
		h.clean()
		if r.Source.Kind != "generated" || r.Source.Files != 60 || r.Source.Extents == 0 || !r.Pool.LoopBacked {
			t.Errorf("source %+v, pool %+v", r.Source, r.Pool)
		}
		if d := r.Pool.Devices; len(d) > 0 && (d[0].Role != "pool" || !strings.HasPrefix(d[0].Name, "loop")) {
			t.Errorf("devices %+v", d)
		}
	})
	t.Run("text, keep", func(t *testing.T) {
		h.t = t
		src := oneFile(t)
		h.run("golden", "import", "mine", src)
		out := string(h.run(append([]string{"bench", "clone", src, "--keep"}, small...)...))
		for _, want := range []string{
			"Cost of operations", bench.OpCopy, bench.OpReflink, bench.OpImport, "raw floor: clone + mount", "pando: destroy",
			"Steps of the raw floor, p50", "LOOP_CONFIGURE", "one durable row", "Whole commands", "pando ls --json",
			"A neighbour", "cp -a --reflink runs", "Targets", "47,000", "directory " + src + ": 1 files",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("the text does not show %q:\n%s", want, out)
			}
		}
		if n := strings.Count(out, "PASS") + strings.Count(out, "FAIL"); n < 8 {
			t.Errorf("%d verdicts in the text:\n%s", n, out)
		}
		// What was kept is not taken for a killed run's.
		h.run("bench", "clone", "--clean")
		var goldens []struct{ Name string }
		if err := json.Unmarshal(h.run("golden", "ls", "--json"), &goldens); err != nil || len(goldens) != 2 {
			t.Fatalf("goldens %v, %v: want the one that was kept, and mine", goldens, err)
		}
		h.run("destroy", bench.Prefix+"*")
		for _, g := range goldens {
			h.run("golden", "rm", g.Name)
		}
		h.clean()
	})
	t.Run("errors", func(t *testing.T) {
		h.t = t
		for _, args := range [][]string{{"no-such-golden"}, {"/no/such/directory"}, {""}, {"--clones", "0"},
			{"--clean", "x"}} {
			cmd := h.command(append([]string{"bench", "clone"}, args...)...)
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "pando: ") {
				t.Errorf("bench clone %q: %v, %s", args, err, out)
			}
			h.clean()
		}
	})
	t.Run("interrupted", func(t *testing.T) {
		notShort(t)
		h.t = t
		for _, stage := range []string{"-golden", "-clone", "-neighbour"} {
			cmd := h.startUntil(stage)
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			err := cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != 130 {
				t.Errorf("interrupted at %s: exit code %d (%v): %s", stage, code, err, cmd.Stderr)
			}
			h.clean()
		}
	})
	t.Run("killed", func(t *testing.T) {
		notShort(t)
		h.t = t
		for _, stage := range []string{"-clone", "-neighbour"} {
			cmd := h.startUntil(stage)
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // it was killed
			var got struct{ Removed []string }
			if err := json.Unmarshal(h.run("bench", "clone", "--clean", "--json"), &got); err != nil || len(got.Removed) != 1 {
				t.Errorf("killed at %s: removed %v, %v", stage, got.Removed, err)
			}
			h.run("gc") // the proof of life of a dead process goes with the next clean-up of the whole pool
			h.clean()
		}
	})
	t.Run("a living run is left alone", func(t *testing.T) {
		notShort(t)
		h.t = t
		cmd := h.startUntil("-clone")
		if out := h.run("bench", "clone", "--clean", "--json"); !bytes.Contains(out, []byte("[]")) {
			t.Errorf("removed %s", out)
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // ended by the signal
		h.clean()
	})
}

// startUntil starts a benchmark of clones and returns once it has made something whose
// name begins with that of the run and then part.
func (h *host) startUntil(part string) *exec.Cmd {
	h.t.Helper()
	return h.startCommandUntil(part, append([]string{"bench", "clone", "--files", "60"},
		append(small, "--clones", "20", "--idle", "5s")...)...)
}

func (h *host) startCommandUntil(part string, args ...string) *exec.Cmd {
	h.t.Helper()
	cmd := h.command(args...)
	cmd.Stderr = &bytes.Buffer{}
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	for {
		var names []struct{ Name string }
		if err := json.Unmarshal(h.run("ls", "--json"), &names); err != nil {
			h.t.Fatal(err)
		}
		all := names
		if err := json.Unmarshal(h.run("golden", "ls", "--json"), &names); err != nil {
			h.t.Fatal(err)
		}
		for _, n := range append(all, names...) {
			if strings.HasPrefix(n.Name, bench.Prefix) && strings.Contains(n.Name, part) {
				return cmd
			}
		}
		select {
		case <-ctx.Done():
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			h.t.Fatalf("no %q came: %s", part, cmd.Stderr)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// TestBenchOverlays: overlays have a raw floor, in images and in trees, and volumes that fill the pool can be mounted.
func TestBenchOverlays(t *testing.T) {
	needRoot(t)
	notShort(t)
	for _, pool := range []struct {
		driver string
		dir    func() string
		absent []string // figures that such pools do not have
	}{
		{"reflink", func() string { return testfs.XFS(t, 2<<30) }, nil},
		{"plain", func() string { return testfs.Ext4(t, 1<<30) }, []string{bench.OpReflink, bench.WhileReflink,
			bench.WhileSnapped, bench.WhileFrozen, bench.WhileThawed}},
	} {
		t.Run(pool.driver, func(t *testing.T) {
			h := newHost(t, pool.dir(), "--driver", pool.driver)
			h.layers = 1 // overlays begin as a copy of it
			r := h.bench("--files", "60", "--overlay", "--mounted")
			complete(t, r, pool.absent...)
			h.clean()
			if !r.Overlay || !r.Mounted {
				t.Errorf("overlay %v, mounted %v", r.Overlay, r.Mounted)
			}
		})
	}
}

func TestBenchOnBtrfs(t *testing.T) {
	notShort(t)
	h := newHost(t, testfs.Btrfs(t, 2<<30), "--driver", "btrfs")
	h.run("golden", "import", "mine", oneFile(t))
	complete(t, h.bench("mine"), bench.OpImport, bench.WhileFrozen)
	h.clean()
}

// oneFile returns a directory with a file.
func oneFile(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("a"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestBenchOnPlainPool(t *testing.T) {
	notShort(t)
	dir := t.TempDir()
	if os.Geteuid() == 0 {
		dir = testfs.Ext4(t, 1<<30)
	}
	h := newHost(t, dir, "--driver", "plain")
	r := h.bench("--files", "60", "--rounds", "2")
	complete(t, r, bench.OpReflink, bench.OpFloor, bench.OpFloorDestroy, bench.WhileFloor, bench.WhileReflink,
		bench.WhileSnapped, bench.WhileFrozen, bench.WhileThawed)
	h.clean()
	if r.NoFloor == "" {
		t.Error("a plain pool has a raw floor")
	}
}

// TestReplicate measures little data with all that is installed, and looks whether
// the figures can be, and whether nothing is left.
func TestReplicate(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	cmd := exec.Command(program, "bench", "replicate", "--dir", dir, "--size", "8M+1M", "--appends", "2", "--json",
		"--no-progress")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	var r bench.ReplicateReport
	if err := json.Unmarshal(stdout.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Scenarios) != 1 || len(r.Scenarios[0].Transfers) != 5 {
		t.Fatalf("%+v", r)
	}
	for _, x := range r.Scenarios[0].Transfers {
		if x.Skipped != "" {
			t.Logf("%s: %s", x.Name, x.Skipped)
			continue
		}
		// The records become several times smaller, and a growth much smaller.
		if !x.Verified || x.Push <= 0 || x.RestoreAll <= 0 || len(x.Appends) != 2 || x.PushBytes < 200<<10 ||
			x.PushBytes > 8<<20 || x.AppendBytes < 20<<10 || x.AppendBytes > x.PushBytes {
			t.Errorf("%s: figures that cannot be: %+v", x.Name, x)
		}
		if x.Name == "pando" && len(x.Refreshes) != 2 {
			t.Errorf("pando was not refreshed: %+v", x)
		}
	}
	if x := r.Scenarios[0].Transfers[0]; x.Name != "pando" || x.Skipped != "" {
		t.Errorf("pando was not measured: %+v", x)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("it leaves %v: %v", entries, err)
	}
}
