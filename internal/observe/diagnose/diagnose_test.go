package diagnose

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/observe/stack"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// How long tests watch, at first. watched takes longer if that does not show what it must.
var (
	brief = watchFor(200*time.Millisecond, time.Second) // what settings show
	long  = watchFor(700*time.Millisecond, 2*time.Second)
)

func watchFor(d, full time.Duration) time.Duration {
	if testfs.Full() {
		return full
	}
	return d
}

// sizes of files and filesystems in tests
const (
	mib = 1 << 20
)

func syncLoad(dir string, more ...string) []string {
	return append([]string{"--filename=" + filepath.Join(dir, "log"), "--size=16m", "--bs=8k", "--rw=write",
		"--ioengine=psync", "--overwrite=1", "--fdatasync=1"}, more...)
}

// TestQuiet: a load alone on a healthy filesystem: it is seen for what it is, and none
// of the causes that can be made here is there.
func TestQuiet(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 128*mib, nil)
	l := startFio(t, "", syncLoad(f.dir)...)
	f.writing(t, 50)
	r := watched(t, f.dir, 2*time.Second, someSyncs)
	for _, code := range []string{"barrier-off", "sync-disabled", "cache-lie", "memory-only", "flushes-missing",
		"device-errors", "cgroup-limit", "dirty-throttle",
		"discard", "scrub", "balance", "rebuild", "log-device", "pool-devices", "near-full", "metadata-full", "fragmented",
		"logbias", "crowd"} {
		// Others give space back on the disk.
		if c := cause(r, code); c != nil && (code != "discard" || strings.Contains(c.Title, f.dev.Name)) {
			t.Errorf("%s is there, and was not made: %+v", code, c)
		}
	}
	if r.Syncs.Count < 10 || r.Syncs.Sampled < 10 || r.Syncs.P50 <= 0 || r.Syncs.P99 < r.Syncs.P50 ||
		r.Syncs.Max < r.Syncs.P99*0.95 {
		t.Errorf("syncs %+v", r.Syncs)
	}
	if len(r.Syncs.Processes) == 0 {
		t.Fatal("no process")
	}
	if p := r.Syncs.Processes[0]; p.PID != l.pid() || p.Command != "fio" || p.Call != "fdatasync" || p.Relation != Here ||
		p.File != filepath.Join(f.dir, "log") {
		t.Errorf("process %+v, of pid %d", p, l.pid())
	}
	// A sync of this file is one write and one flush at the loop device.
	d := device0(t, r, f.dev.Name)
	if d.FlushShare <= 0 || d.SyncShare < d.FlushShare || d.FlushesPerSecond <= 0 || d.Errors != 0 {
		t.Errorf("device %+v", d)
	}
	within := 1.4
	if !r.Syncs.Exact {
		within = 2.5 // estimated of what was recorded, which is little where the whole host syncs at the same time
	}
	if ratio := d.FlushesPerSecond / r.Syncs.PerSecond; ratio < 1/within || ratio > within {
		t.Errorf("%.1f flushes and %.1f syncs a second (exact: %t)", d.FlushesPerSecond, r.Syncs.PerSecond, r.Syncs.Exact)
	}
	if !slices.ContainsFunc(r.Writers, func(w Writer) bool { return w.PID == l.pid() && w.Here && w.Syncs > 0 }) {
		t.Errorf("fio is no writer: %+v", r.Writers)
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

// TestNoSync: who writes and never syncs is told so.
func TestNoSync(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 128*mib, nil)
	r := watched(t, f.dir, time.Second)
	if r.Syncs.Count != 0 || !strings.Contains(r.Verdict, "no file here was synced in 1 s") || len(r.Next) == 0 ||
		len(r.Causes) > 0 {
		t.Errorf("%s: %+v, %+v", r.Verdict, r.Syncs, r.Causes)
	}
}

// TestSyncedWrites: writes to a file opened with O_DSYNC are syncs.
func TestSyncedWrites(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 128*mib, nil)
	group := unifiedGroup(t)
	l := startFio(t, group, "--filename="+filepath.Join(f.dir, "log"), "--size=16m", "--bs=8k", "--rw=write",
		"--ioengine=psync", "--overwrite=1", "--sync=dsync")
	f.writing(t, 500)                                // fio lays the file out without O_DSYNC
	r := watched(t, f.dir, 2*time.Second, someSyncs) // the kernel updates the pressure every two seconds
	if len(r.Syncs.Processes) == 0 || r.Syncs.Processes[0].PID != l.pid() ||
		r.Syncs.Processes[0].Call != "pwrite64 (O_DSYNC)" || r.Syncs.Count < 10 {
		t.Fatalf("syncs %+v", r.Syncs)
	}
	// It does nothing but wait for storage, in a control group of its own.
	if p := r.Syncs.Processes[0]; pressureDir(groupsOf(l.pid())) != "" &&
		(p.IOPressure <= 0 || p.CGroup != "/"+filepath.Base(group)) {
		t.Errorf("%+v", p)
	}
}

// TestBarrierOff: a filesystem that drops flushes is the first thing to say.
func TestBarrierOff(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 128*mib, nil, "barrier=0")
	startFio(t, "", syncLoad(f.dir)...)
	f.writing(t, 50)
	r := watched(t, f.dir, long, "barrier-off", someSyncs)
	c := first(t, r, "barrier-off")
	if c.Rank != 1 || c.Confidence != Certain {
		t.Errorf("%+v", c)
	}
	says(t, c, "nobarrier")
	says(t, c, "syncs of files here: 0")
}

// TestCacheLie: a device that hides the volatile cache below it.
func TestCacheLie(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 128*mib, nil)
	bottom := bottomOf(t, f.dir)
	if !bottom.VolatileCache {
		t.Skipf("does not apply: %s has no volatile cache", bottom.Name)
	}
	cache := "/sys/block/" + f.dev.Name + "/queue/write_cache"
	setting(t, cache, "write through")
	t.Cleanup(func() { setting(t, cache, "write back") }) // it stays, for whoever has the device next
	startFio(t, "", syncLoad(f.dir)...)
	f.writing(t, 50)
	c := first(t, watched(t, f.dir, brief), "cache-lie")
	says(t, c, "stays in memory until it is flushed")
}

// TestNeighbour: two on one filesystem, each in a directory and a control group of
// its own; of one it is asked why it is slow.
func TestNeighbour(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 256*mib, nil)
	mine, other := filepath.Join(f.dir, "mine"), filepath.Join(f.dir, "other")
	for _, d := range []string{mine, other} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	group := blkioGroup(t)
	// The kernel counts by group only where there is some limit: one that limits nothing.
	setting(t, group+"/blkio.throttle.read_iops_device", f.dev.ID()+" 1000000000")
	n := startFio(t, group, "--directory="+other, "--size=16m", "--bs=64k", "--rw=write", "--ioengine=psync",
		"--overwrite=1", "--fsync=1", "--numjobs=4")
	startFio(t, "", syncLoad(mine, "--thinktime=2ms")...)
	f.writing(t, 1000)
	r := watched(t, mine, long, "neighbour")
	c := first(t, r, "neighbour")
	says(t, c, "pid "+strconv.Itoa(n.pid()))
	says(t, c, filepath.Base(group))
	if !slices.ContainsFunc(r.Syncs.Processes, func(p Process) bool {
		return p.PID == n.pid() && p.Relation == Filesystem
	}) {
		t.Errorf("processes %+v", r.Syncs.Processes)
	}
	if !slices.ContainsFunc(r.Writers, func(w Writer) bool {
		return w.Kind == "cgroup" && w.Name == "/"+filepath.Base(group) && w.WrittenBytes > 0 && !w.Here
	}) {
		t.Errorf("writers %+v", r.Writers)
	}

	// Asked of both together, none is the neighbour of the other.
	r = watched(t, f.dir, brief, "crowd")
	c = cause(r, "crowd")
	if c == nil {
		t.Fatal(list(r))
	}
	says(t, c, "pid "+strconv.Itoa(n.pid()))
	says(t, c, "2 control groups sync here")
}

// TestCgroupLimit: who syncs is limited, at the uppermost device, and at one below it.
func TestCgroupLimit(t *testing.T) {
	needTraces(t)
	top := t.TempDir()
	dirs := [2]string{filepath.Join(top, "below"), filepath.Join(top, "above")}
	for _, d := range dirs {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	below := makeFresh(t, "ext4", dirs[0], 256*mib, nil)
	f := makeFreshOn(t, direct, "ext4", filepath.Join(below.dir), 128*mib, nil)
	for _, d := range []*fresh{f, below} {
		t.Run(d.dev.Name, func(t *testing.T) {
			group := blkioGroup(t)
			l := startFio(t, group, syncLoad(f.dir)...)
			f.writing(t, 50)
			setting(t, group+"/blkio.throttle.write_iops_device", d.dev.ID()+" 40")
			r := watched(t, f.dir, long, "cgroup-limit")
			got := first(t, r, "cgroup-limit")
			says(t, got, "40 requests per second to "+d.dev.Name)
			says(t, got, filepath.Join(group, "blkio.throttle.write_iops_device"))
			if got.Share < 0.5 {
				t.Errorf("share %.2f:\n%s", got.Share, list(r))
			}
			l.stop()
		})
	}
}

// TestDirtyThrottle: a device that may have only little dirty.
func TestDirtyThrottle(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 600*mib, nil)
	bdi := "/sys/class/bdi/" + f.dev.ID()
	for _, s := range []string{"/strict_limit", "/max_ratio"} {
		if _, err := os.Stat(bdi + s); err != nil {
			skip(t, "%v", err)
		}
		was := strings.TrimSpace(slurp(bdi + s))
		setting(t, bdi+s, "1")
		t.Cleanup(func() { setting(t, bdi+s, was) })
	}
	l := startFio(t, "", "--filename="+filepath.Join(f.dir, "data"), "--size=400m", "--bs=1m", "--rw=write",
		"--ioengine=psync", "--fallocate=none", "--overwrite=0")
	f.writing(t, 100)
	r := watched(t, f.dir, long, "dirty-throttle")
	c := first(t, r, "dirty-throttle")
	says(t, c, "fio (pid "+strconv.Itoa(l.pid())+") was throttled")
	says(t, c, f.dir)
}

// TestBalanceAndScrub: what btrfs does on itself.
func TestBalanceAndScrub(t *testing.T) {
	needTraces(t)
	for _, c := range []struct {
		code string
		args []string
	}{
		{"balance", []string{"balance", "start", "--full-balance"}},
		{"scrub", []string{"scrub", "start", "-B"}},
	} {
		t.Run(c.code, func(t *testing.T) {
			// Room enough that a balance finds a place for each chunk, whatever the load has just allocated.
			f := makeFresh(t, "btrfs", t.TempDir(), 4096*mib, nil)
			fill(t, filepath.Join(f.dir, "data"), 256*mib)
			startFio(t, "", syncLoad(f.dir, "--thinktime=1ms")...)
			repeat(t, "btrfs", append(c.args, f.dir)...)
			f.writing(t, 50)
			got := first(t, watched(t, f.dir, long, c.code), c.code, "neighbour", "fragmented", "discard")
			if got.Confidence != Possible {
				t.Errorf("%+v", got)
			}
		})
	}
	t.Run("neither", func(t *testing.T) {
		f := makeFresh(t, "btrfs", t.TempDir(), 256*mib, nil)
		startFio(t, "", syncLoad(f.dir, "--thinktime=1ms")...)
		f.writing(t, 50)
		r := watched(t, f.dir, brief, someSyncs)
		if cause(r, "balance") != nil || cause(r, "scrub") != nil || r.Syncs.Sampled == 0 {
			t.Error(list(r))
		}
	})
}

// TestDiscard: free space is given back again and again.
func TestDiscard(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "xfs", t.TempDir(), 400*mib, nil)
	startFio(t, "", syncLoad(f.dir)...)
	f.writing(t, 50)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		dir, err := os.Open(f.dir)
		for err == nil && ctx.Err() == nil {
			_, err = kernel.Trim(dir, 0)
		}
		done <- errors.Join(err, dir.Close())
	}()
	r := watched(t, f.dir, long, "discard")
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	c := cause(r, "discard")
	if c == nil {
		t.Fatal(list(r))
	}
	says(t, c, f.dev.Name)
	if d := device0(t, r, f.dev.Name); d.DiscardedBytes == 0 || d.DiscardsPerSecond <= 0 {
		t.Errorf("%+v", d)
	}
}

// TestNearFull: a small filesystem with hardly any room.
func TestNearFull(t *testing.T) {
	f := makeFresh(t, "ext4", t.TempDir(), 64*mib, nil)
	var st unix.Statfs_t
	if err := unix.Statfs(f.dir, &st); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(f.dir, "data"), int64(st.Bavail)*st.Bsize*94/100)
	c := first(t, watched(t, f.dir, brief), "near-full")
	says(t, c, f.dir)
	if c.score < scoreFull || c.score > scoreFullest || c.Confidence != Possible || c.Share != -1 {
		t.Errorf("%+v", c)
	}
	if err := os.Remove(filepath.Join(f.dir, "data")); err != nil {
		t.Fatal(err)
	}
	if c := cause(watched(t, f.dir, brief), "near-full"); c != nil {
		t.Errorf("it is empty: %+v", c)
	}
}

// TestFragmented: a file on btrfs that was overwritten here and there.
func TestFragmented(t *testing.T) {
	f := makeFresh(t, "btrfs", t.TempDir(), 256*mib, nil)
	name := filepath.Join(f.dir, "data")
	fill(t, name, 4*mib)
	if c := cause(watched(t, name, brief), "fragmented"); c != nil {
		t.Errorf("it is in one piece: %+v", c)
	}
	file, err := os.OpenFile(name, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	block := make([]byte, 4096)
	for off := int64(0); off < 4*mib; off += 8192 {
		if _, err := file.WriteAt(block, off); err != nil {
			t.Fatal(err)
		}
	}
	if err := file.Sync(); err != nil {
		t.Fatal(err)
	}
	c := first(t, watched(t, name, brief), "fragmented")
	says(t, c, name)
	says(t, c, "extents, 4 KiB each")
}

// TestDeepQueue: bulk writes keep many requests at the device.
func TestDeepQueue(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 256*mib, nil)
	startFio(t, "", "--filename="+filepath.Join(f.dir, "bulk"), "--size=128m", "--bs=256k", "--rw=randwrite",
		"--ioengine=libaio", "--direct=1", "--iodepth=64", "--overwrite=1")
	startFio(t, "", syncLoad(f.dir)...)
	f.writing(t, 2000)
	r := watched(t, filepath.Join(f.dir, "log"), long, "deep-queue", "neighbour")
	c := cause(r, "deep-queue")
	if c == nil {
		t.Fatal(list(r))
	}
	says(t, c, f.dev.Name)
	if d := device0(t, r, f.dev.Name); d.Queue < deepQueue || d.MostQueued < 8 {
		t.Errorf("%+v", d)
	}
	if n := cause(r, "neighbour"); n == nil {
		t.Errorf("the bulk writer is no neighbour:\n%s", list(r))
	}
}

// TestErrors: the file behind the device cannot be written.
func TestErrors(t *testing.T) {
	needTraces(t)
	small := testfs.Tmpfs(t, 4*mib)
	loop := testfs.Loop(t, filepath.Join(small, "image"), 64*mib, loopdev.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		f, err := os.OpenFile(loop.Path, os.O_WRONLY, 0)
		if err != nil {
			done <- err
			return
		}
		defer f.Close()
		block := make([]byte, mib)
		for i := int64(0); ctx.Err() == nil; i++ {
			_, _ = f.WriteAt(block, i%64*mib)
			_ = f.Sync() // it fails: that is the point
		}
		done <- nil
	}()
	r := watched(t, loop.Path, long, "device-errors", "memory-only")
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	c := cause(r, "device-errors")
	if c == nil {
		t.Fatal(list(r))
	}
	says(t, c, filepath.Base(loop.Path))
	if c := cause(r, "memory-only"); c == nil { // its file is in a tmpfs
		t.Error(list(r))
	}
	if p := r.Syncs.Processes; len(p) == 0 || p[0].Relation != Here || p[0].File != loop.Path {
		t.Errorf("%+v", p)
	}
}

// TestExternalLog: the log of an XFS on a device of its own, that is slow because what
// its file is on is limited.
func TestExternalLog(t *testing.T) {
	needTraces(t)
	blkioGroup(t) // that there are some
	top := t.TempDir()
	below := filepath.Join(top, "below")
	above := filepath.Join(top, "above")
	for _, d := range []string{below, above} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	slow := makeFresh(t, "ext4", below, 256*mib, nil)
	log := testfs.Loop(t, filepath.Join(slow.dir, "log"), 96*mib, loopdev.Options{})
	f := makeFresh(t, "xfs", above, 400*mib, []string{"-l", "logdev=" + log.Path}, "logdev="+log.Path)
	// Only this device: the limit is that of all processes.
	root := groupRoots().blkio + "/blkio.throttle.write_iops_device"
	setting(t, root, slow.dev.ID()+" 200")
	t.Cleanup(func() { setting(t, root, slow.dev.ID()+" 0") })
	startFio(t, "", "--directory="+f.dir, "--size=64m", "--bs=8k", "--rw=write", "--ioengine=psync", "--fallocate=none",
		"--overwrite=0", "--fsync=1")
	f.writing(t, 20)
	r := watched(t, f.dir, long, "log-device", "cgroup-limit")
	if d := device0(t, r, filepath.Base(log.Path)); d.Role != "log" || d.SyncShare < 0.3 {
		t.Errorf("%+v", d)
	}
	c := cause(r, "log-device")
	if c == nil {
		t.Fatal(list(r))
	}
	says(t, c, filepath.Base(log.Path))
	if limit := cause(r, "cgroup-limit"); limit == nil {
		t.Errorf("the limit on %s is not found:\n%s", slow.dev.Name, list(r))
	}
}

// TestOtherPlaces: paths with nothing below that could be watched.
func TestOtherPlaces(t *testing.T) {
	dir := testfs.Tmpfs(t, mib)
	r := watched(t, dir, brief, "memory-only")
	if c := first(t, r, "memory-only"); c.Rank != 1 || r.Hidden == "" {
		t.Errorf("%+v", r)
	}
	if _, err := Watch(t.Context(), Request{Path: filepath.Join(dir, "none"), For: time.Second}); !errs.Is(err,
		errs.NotFound) {
		t.Errorf("no such path: %v", err)
	}
	if _, err := Watch(t.Context(), Request{Path: "/dev/null", For: time.Second}); !errs.Is(err, errs.Unsupported) {
		t.Errorf("a device that is none: %v", err)
	}
}

// TestOverlay: syncs in an overlay are seen as those of what is below it, and one
// that drops them says so.
func TestOverlay(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 128*mib, nil)
	var dirs []string
	for _, n := range []string{"lower", "upper", "work", "merged"} {
		d := filepath.Join(f.dir, n)
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, d)
	}
	m, err := mount.Device("overlay", "overlay",
		[]string{"lowerdir=" + dirs[0], "upperdir=" + dirs[1], "workdir=" + dirs[2], "volatile"}, false)
	if err != nil {
		skip(t, "%v", err)
	}
	defer m.Close()
	if _, err := m.MoveTo(dirs[3]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.Unmount(dirs[3]); err != nil {
			t.Error(err)
		}
	})
	l := startFio(t, "", syncLoad(dirs[3])...)
	await(t, "the load syncs", func() bool { return fileExists(filepath.Join(dirs[1], "log")) })
	r := watched(t, dirs[3], brief, "barrier-off", someSyncs)
	c := first(t, r, "barrier-off")
	says(t, c, "volatile")
	if r.Syncs.Sampled == 0 {
		t.Errorf("no sync seen:\n%s", list(r))
	}
	device0(t, r, f.dev.Name)

	// The same without a look at the settings: that nothing arrives is seen.
	s, err := stack.Of(t.Context(), dirs[3])
	if err != nil {
		t.Fatal(err)
	}
	w := newWatch(Request{Path: dirs[3], For: long}, s)
	defer w.close()
	if err := w.identify(); err != nil {
		t.Fatal(err)
	}
	w.observe(t.Context())
	l.stop()
	c = first(t, w.report, "flushes-missing")
	says(t, c, "flushes that "+f.dev.Name+" received") // maybe one: the filesystem commits by itself every few seconds
}

// TestInterrupted: what was found until then is there.
func TestInterrupted(t *testing.T) {
	needTraces(t)
	f := makeFresh(t, "ext4", t.TempDir(), 128*mib, nil)
	startFio(t, "", syncLoad(f.dir)...)
	f.writing(t, 50)
	ctx, cancel := context.WithCancel(t.Context())
	before, err := f.dev.Stat()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for ctx.Err() == nil {
			if s, err := f.dev.Stat(); err != nil || s.Flushes > before.Flushes+1000 {
				cancel()
			}
		}
	}()
	r, err := Watch(ctx, Request{Path: f.dir, For: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	sane(t, r)
	if !r.Interrupted || r.Seconds <= 0 || r.Seconds > 600 || r.Syncs.Count == 0 ||
		!strings.HasPrefix(r.Verdict, "interrupted after") {
		t.Errorf("%s %+v", r.Verdict, r.Syncs)
	}
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
