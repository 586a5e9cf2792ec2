package syncbench

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/kernel"
	"pando/internal/observe/proof"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestRefused: what cannot be measured is refused in words that say why, and nothing is written.
func TestRefused(t *testing.T) {
	need(t, "fio")
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused := func(c Config, kind errs.Kind, says ...string) {
		t.Helper()
		r, err := Measure(t.Context(), c)
		if r != nil {
			t.Error("a report besides the error")
		}
		kindIs(t, err, kind, says...)
	}
	refused(quick(filepath.Join(dir, "none"), "postgres"), errs.NotFound, "directory does not exist")
	refused(quick(file, "postgres"), errs.Invalid, "is not a directory", "use the directory: "+dir)
	refused(quick("/dev/null", "postgres"), errs.Invalid, "is not a directory")
	refused(quick(dir, "oracle"), errs.Invalid, "oracle",
		"postgres, postgres-dsync, innodb, sqlite-full, sqlite-normal, etcd, checkpoint")
	with := func(change func(*Config)) Config {
		c := quick(dir, "postgres")
		change(&c)
		return c
	}
	refused(with(func(c *Config) { c.Duration, c.brief = 999*time.Millisecond, false }), errs.Invalid, "at least 1s")
	refused(with(func(c *Config) { c.Runs = -1 }), errs.Invalid, "got -1")
	refused(with(func(c *Config) { c.Writers = 5000 }), errs.Invalid, "between 1 and 1024")
	refused(with(func(c *Config) { c.SizeBytes = -1 }), errs.Invalid, "size")
	refused(with(func(c *Config) { c.SizeBytes = 1000 }), errs.Invalid, "too few", `parameter "size" set to 131072`)
	refused(with(func(c *Config) { c.P99 = -1 }), errs.Invalid, "p99")
	refused(with(func(c *Config) {
		c.Profile, c.Writers = "etcd", 2
	}), errs.Invalid, "too few", `parameter "size" set to 96000000`)

	if b, err := os.ReadFile(file); err != nil || string(b) != "mine" {
		t.Errorf("%q, %v", b, err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	empty(t, dir)
}

func TestRefusesMemory(t *testing.T) {
	dir := testfs.Tmpfs(t, 64<<20)
	_, err := Measure(t.Context(), quick(dir, "postgres"))
	kindIs(t, err, errs.Unsupported, "tmpfs", "in memory", "use a directory on a disk")
	empty(t, dir)

	// An overlay whose files are there is no better.
	at := overlay(t, testfs.Ext4(t, 32<<20), dir)
	_, err = Measure(t.Context(), quick(at, "postgres"))
	kindIs(t, err, errs.Unsupported, "tmpfs", "in memory")
	empty(t, filepath.Join(dir, "upper"))
}

// overlay mounts an overlay that writes to a directory of upper.
func overlay(t *testing.T, lower, upper string) string {
	t.Helper()
	at := t.TempDir()
	up, work := filepath.Join(upper, "upper"), filepath.Join(upper, "work")
	for _, d := range []string{up, work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("overlay", at, "overlay", 0, "lowerdir="+lower+",upperdir="+up+",workdir="+work); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Error(err)
		}
	})
	return at
}

// TestOverlay: what is measured is the filesystem that the files come to lie on.
func TestOverlay(t *testing.T) {
	need(t, "fio")
	lower, upper := testfs.Ext4(t, 32<<20), testfs.Ext4(t, 64<<20)
	at := overlay(t, lower, upper)
	r := measure(t, quick(at, "postgres"))
	if len(r.Layers) < 3 || r.Layers[0].Kind != "overlay" || !strings.HasSuffix(r.Layers[1].Name, upper) ||
		r.Layers[2].Kind != "loop" {
		t.Errorf("%+v", r.Layers)
	}
	if r.Runs[0].Syncs == 0 {
		t.Error("no syncs")
	}
	empty(t, at)
	empty(t, filepath.Join(upper, "upper"))
}

func TestBlockDevice(t *testing.T) {
	devices, err := filepath.Glob("/dev/loop[0-9]*")
	if err != nil || len(devices) == 0 {
		t.Skipf("SKIPPED: no node of a block device here: %v", err)
	}
	_, err = Measure(t.Context(), quick(devices[0], "postgres"))
	kindIs(t, err, errs.Invalid, "block device", "overwrite", "use a directory")
}

func TestReadOnly(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 32<<20)
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	_, err := Measure(t.Context(), quick(dir, "postgres"))
	kindIs(t, err, errs.Permission, "read-only", dir)
}

func TestNoFio(t *testing.T) {
	if _, err := os.Stat("/usr/sbin/fio"); err == nil {
		t.Skip("does not apply: fio is where it is looked for without PATH")
	}
	t.Setenv("PATH", t.TempDir())
	dir := t.TempDir()
	_, err := Measure(t.Context(), quick(dir, "postgres"))
	kindIs(t, err, errs.Unsupported, "fio", "apt-get install fio")
	empty(t, dir)
}

// TestFioFails: an old fio that does not know an option, one that crashes, and one that says nothing.
func TestFioFails(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 64<<20)
	for _, c := range []struct{ script, says string }{
		{`exec "$FIO" "$@" --no_such_option=1`, "no_such_option"},
		{`"$FIO" "$@" | head -c 3000; kill -SEGV $$`, "segmentation fault"},
		{`exit 0`, "no report"},
		{`echo 'fio: it is Friday' >&2; exit 3`, "fio: it is Friday"},
		{`printf '{\n"jobs":[{"sync":{"lat_ns":{"bins":{"x":1}}}}]\n}\n'; exec sleep 1000`, "is not a latency"},
	} {
		t.Run(c.says, func(t *testing.T) {
			wrapFio(t, c.script)
			_, err := Measure(t.Context(), quick(dir, "sqlite-full"))
			kindIs(t, err, errs.Internal, c.says)
			empty(t, dir)
		})
	}
}

func TestNoRoom(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 32<<20)
	c := quick(dir, "postgres")
	c.SizeBytes = 0
	_, err := Measure(t.Context(), c)
	kindIs(t, err, errs.NoSpace, "needs 1056.0 MiB", `parameter "size"`)
	empty(t, dir)
}

// fillUp takes all space of a filesystem.
func fillUp(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	end := int64(0)
	for _, size := range []int64{1 << 20, 4096} {
		for err == nil {
			if err = unix.Fallocate(int(f.Fd()), 0, end, size); err == nil {
				end += size
			}
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		err = f.Sync()
	}
	if err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// TestFullWhileLaidOut: the filesystem is filled by another program after the room was found.
func TestFullWhileLaidOut(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 256<<20)
	s, err := newScratch(dir)
	if err != nil {
		t.Fatal(err)
	}
	fillUp(t, dir)
	err = s.full(s.create(t.Context(), file{name: "x", bytes: 1 << 20, written: true}), 1<<20)
	kindIs(t, err, errs.NoSpace, "full", "1.0 MiB are needed", `parameter "size"`)
	if err := s.remove(); err != nil {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
		t.Error(err)
	}
	empty(t, dir)
}

// TestFullWhileMeasured: the blocks of the log are shared with a copy, as after a snapshot, so that to
// overwrite needs room; and there is none.
func TestFullWhileMeasured(t *testing.T) {
	need(t, "fio")
	dir := testfs.XFS(t, 320<<20)
	tracker := &progress.Tracker{}
	c := quick(dir, "postgres")
	c.Duration = 15 * time.Second
	done := make(chan error, 1)
	go func() {
		_, err := Measure(progress.With(t.Context(), tracker), c)
		done <- err
	}()
	stage(t, tracker, progress.Measuring)
	logs, err := filepath.Glob(filepath.Join(dir, Prefix+"*", "log.*"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("%v, %v", logs, err)
	}
	// Copies take some room themselves.
	reserve := filepath.Join(dir, "reserve")
	if err := os.WriteFile(reserve, make([]byte, 4<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	fillUp(t, dir)
	if err := os.Remove(reserve); err != nil {
		t.Fatal(err)
	}
	for _, l := range logs {
		share(t, l, filepath.Join(dir, "copy-"+filepath.Base(l)))
	}
	err = <-done
	kindIs(t, err, errs.NoSpace, "ran out of space during the run", "No space left", "free some space")
	left, err := filepath.Glob(filepath.Join(dir, ".pando*"))
	if err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// share makes a copy that has its blocks in common with the file.
func share(t *testing.T, from, to string) {
	t.Helper()
	src, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dst, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	if err := kernel.Reflink(dst, src); err != nil {
		t.Fatal(err)
	}
}

// TestReport: what is in a report, of two runs with a search for a p99.
func TestReport(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 64<<20)
	tracker := &progress.Tracker{}
	c := quick(dir, "postgres")
	c.Runs, c.Volume, c.P99 = 2, "web", time.Hour
	ctx := progress.With(t.Context(), tracker)
	stages := make(chan []string)
	stop := make(chan struct{})
	go func() {
		var seen []string
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			if s := tracker.State().Words(); s != "" && (len(seen) == 0 || seen[len(seen)-1] != s) {
				seen = append(seen, s)
			}
			select {
			case <-stop:
				stages <- seen
				return
			case <-tick.C:
			}
		}
	}()
	// The search is ended by the smallest size of files.
	c.SizeBytes = 1 << 20
	r, err := Measure(ctx, c)
	close(stop)
	seen := <-stages
	if err != nil {
		t.Fatal(err)
	}
	if r.Kind != "pando bench sync" || r.Format != Format || r.Pando != "test" || r.Path != dir || r.Volume != "web" ||
		!r.Quick || r.Seconds != c.Duration.Seconds() || len(r.Runs) != 2 {
		t.Errorf("%+v", r)
	}
	if !strings.HasPrefix(r.Host.Fio, "fio-") || r.Host.Kernel == "" || r.Host.CPUs < 1 || r.Host.MemoryBytes < 1<<20 {
		t.Errorf("%+v", r.Host)
	}
	if len(r.Layers) < 2 || r.Layers[0].Kind != "filesystem" || r.Layers[1].Kind != "loop" ||
		!strings.Contains(r.Layers[1].Details, "direct I/O") {
		t.Errorf("%+v", r.Layers)
	}
	want := Pass
	for _, run := range r.Runs {
		// What of it can be shown, while others sync to the same disk, is package proof's to say.
		if run.Proof.Result != proof.OK {
			want = Failed
		}
		if run.Proof.Layers[1].Result != proof.OK || run.Proof.Calls.Reported != run.Syncs ||
			len(run.Proof.Layers) != len(r.Layers) {
			t.Errorf("%+v", run.Proof)
		}
		if run.Syncs < 1 || len(run.Timeline) == 0 || run.Write == nil || run.Write.P50 <= 0 ||
			run.Write.P50 >= run.Sync.P50 {
			t.Errorf("%+v", run)
		}
	}
	said := strings.Join(r.Verdict.Words, "\n")
	if r.Verdict.Result != want || !strings.Contains(said, "shorter than a writeback cycle, does not measure speed") {
		t.Errorf("%+v", r.Verdict)
	}
	if t1 := r.Target; t1 == nil || len(t1.Steps) != 4 || t1.Steps[3].Writers != 8 || !t1.Steps[3].Keeps || t1.Best <= 0 ||
		!strings.Contains(said, "ended at 8 writers") {
		t.Errorf("%+v, %s", r.Target, said)
	}
	if s := strings.Join(seen, "; "); !strings.Contains(s, "measuring run 2 of 2") ||
		!strings.Contains(s, "measuring with 1 writer") || !strings.Contains(s,
		"measuring with 8 writers") {
		t.Errorf("stages: %s", s)
	}
	empty(t, dir)

	// A p99 that nothing keeps ends the search at its first step.
	c.P99, c.Runs = time.Nanosecond, 1
	if r = measure(t, c); len(r.Target.Steps) != 1 || r.Target.Best != 0 || r.Target.Steps[0].Keeps {
		t.Errorf("%+v", r.Target)
	}
	if _, err := exec.Command(r.Profile.Command[0], r.Profile.Command[1:]...).Output(); err != nil {
		t.Errorf("the profile's command: %v: %v", r.Profile.Command, err)
	}
	empty(t, dir)
}

// TestVerdict: one run whose syncs did not arrive is enough to fail.
func TestVerdict(t *testing.T) {
	good := Run{Syncs: 20000, Proof: proof.Proof{Result: proof.OK, Reasons: []string{"all arrived"}}}
	bad := Run{Syncs: 20000, Proof: proof.Proof{Result: proof.Fail, Layer: "loop3",
		Reasons: []string{"none arrived", "ask the disk"}}}
	unknown := Run{Syncs: 20000, Proof: proof.Proof{Result: proof.Unknown}}
	for _, c := range []struct {
		name    string
		runs    []Run
		seconds float64
		want    Verdict
	}{
		{"good", []Run{good, good}, 60, Verdict{Result: Pass, Words: []string{"all arrived"}}},
		{"bad", []Run{bad}, 60, Verdict{Result: Failed, Layer: "loop3", Words: []string{"none arrived", "ask the disk"}}},
		{"one of three", []Run{good, bad, unknown}, 60,
			Verdict{Result: Failed, Layer: "loop3", Words: []string{"run 2: none arrived", "run 2: ask the disk",
				"run 3: could not prove that synced data reached the disk"}}},
		{"unknown", []Run{unknown}, 30, Verdict{Result: Failed, Words: []string{
			"could not prove that synced data reached the disk",
			"runs of 30.0 s, shorter than two writeback cycles of 30.0 s, do not measure speed"}}},
		{"few", []Run{{Syncs: 500, Stalls: make([]Stall, 2), Proof: good.Proof}}, 60,
			Verdict{Result: Pass, Words: []string{"all arrived",
				"p99 and above are indicative: fewer than 10 of 500 syncs in a run took longer",
				"2 stalls: see the time line"}}},
	} {
		report := &Report{Runs: c.runs, Seconds: c.seconds}
		got := verdict(report, "", "")
		if got.Result != c.want.Result || got.Layer != c.want.Layer ||
			strings.Join(got.Words, "|") != strings.Join(c.want.Words, "|") {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}

		// Nothing passes that is not to be durable.
		d := verdict(report, "", "it is ephemeral")
		if d.Result != Failed || d.ByDesign != "it is ephemeral" || d.Layer != got.Layer ||
			slices.Contains(d.Words, "ask the disk") {
			t.Errorf("%s: by design: %+v", c.name, d)
		}
		if arrived := strings.Contains(d.Words[0], "reached the disk, but"); arrived != (got.Result == Pass) {
			t.Errorf("%s: by design: %+v", c.name, d)
		}
	}
}
