package iostat

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/durable"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/tracepoint"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

const mib = 1 << 20

// volume makes a filesystem in an image in a directory and mounts it until the test
// ends, as a clone on a pool is.
func volume(t testing.TB, pool, kind, name string) string {
	t.Helper()
	dir, image := filepath.Join(t.TempDir(), name), filepath.Join(pool, name)
	size, args := int64(256*mib), []string{"-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"}
	if kind == "xfs" {
		size, args = 320*mib, []string{"-q", "-K"}
	}
	f, err := os.OpenFile(image, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(f.Truncate(size), os.Mkdir(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	if _, err := run.Program(t.Context(), "mkfs."+kind, append(args, image)...); err != nil {
		t.Fatal(err)
	}
	dev, err := loopdev.Attach(t.Context(), f, loopdev.Options{DirectIO: true})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	m, err := mount.Device(kind, dev.Path, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.Unmount(dir); err != nil && !errs.Is(err, errs.NotFound) {
			t.Error(err)
		}
		if _, err := loopdev.WaitDetached(context.Background(), image, 5*time.Second); err != nil {
			t.Error(err)
		}
	})
	if err := durable.SyncFS(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// traced skips where syncs cannot be seen.
func traced(t testing.TB) {
	t.Helper()
	if err := tracepoint.Available(); err != nil {
		if os.Getenv("PANDO_TEST_REQUIRE_ALL") != "" && os.Getuid() == 0 {
			t.Fatal(err)
		}
		t.Skipf("SKIPPED: %v", err)
	}
}

func write(t testing.TB, file string, size int, sync bool) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, mib)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	for range size / mib {
		if _, err := f.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if sync {
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	}
}

// overwrite writes blocks of a file that is there, each followed by a fdatasync.
func overwrite(t testing.TB, f *os.File, n int) {
	t.Helper()
	b := make([]byte, 8<<10)
	for i := range n {
		b[0] = byte(i)
		if _, err := f.WriteAt(b, int64(i%512)*int64(len(b))); err != nil {
			t.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			t.Fatal(err)
		}
	}
}

func prepared(t testing.TB, dir string) *os.File {
	t.Helper()
	name := filepath.Join(dir, "data")
	write(t, name, 4*mib, true)
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := durable.SyncFS(dir); err != nil {
		t.Fatal(err)
	}
	return f
}

func watcher(t testing.TB, targets ...Target) *Watcher {
	t.Helper()
	w, err := New(context.Background(), targets)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

func target(t testing.TB, s *Sample, name string) TargetSample {
	t.Helper()
	i := slices.IndexFunc(s.Targets, func(x TargetSample) bool { return x.Name == name })
	if i < 0 {
		t.Fatalf("%s is not in the sample: %+v", name, s.Targets)
	}
	return s.Targets[i]
}

// TestKnownBytes: what was written is what is measured, within what a filesystem writes
// besides.
func TestKnownBytes(t *testing.T) {
	pool := testfs.XFS(t, 1<<30)
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := volume(t, pool, kind, kind)
			w := watcher(t, Target{Name: "v", Path: dir})
			const size = 32 * mib
			write(t, filepath.Join(dir, "f"), size, true)
			s := w.Sample()
			v := target(t, s, "v")
			if v.Own == nil || v.Own.WrittenBytes < size || v.Own.WrittenBytes > size+2*mib {
				t.Fatalf("at its device: %+v", v.Own)
			}
			if kind == "xfs" && (v.ApplicationBytes == nil || *v.ApplicationBytes != size) {
				t.Errorf("by programs: %v", v.ApplicationBytes)
			}
			if kind == "ext4" && v.ApplicationBytes != nil {
				t.Errorf("ext4 does not count what programs write: %d", *v.ApplicationBytes)
			}
			if len(v.Steps) < 3 {
				t.Fatalf("steps: %+v", v.Steps)
			}
			pool := v.Steps[1]
			if pool.Amplification == nil || *pool.Amplification < 1 || *pool.Amplification > 1.5 || pool.OthersBytes != 0 {
				t.Errorf("through the pool's filesystem: %+v", pool)
			}
			// What else the host's disk does is not ours: it may be too much to tell.
			if a := v.Amplification; a == nil && !strings.HasPrefix(v.NoAmplification, "other writers passed") || a != nil &&
				(*a < 1 || math.IsInf(*a, 0) || math.IsNaN(*a)) {
				t.Errorf("through to the disk: %v %s", a, v.NoAmplification)
			}
			// Each shared layer once, and its parts are the whole.
			if len(s.Layers) != len(v.Steps)-1 {
				t.Errorf("layers: %+v", s.Layers)
			}
			for _, l := range s.Layers {
				sum := l.RestBytes
				for _, f := range l.From {
					sum += f.WrittenBytes
				}
				if sum != l.WrittenBytes {
					t.Errorf("the parts of %s are %d of %d", l.Name, sum, l.WrittenBytes)
				}
			}
			if from := s.Layers[0].From; !slices.ContainsFunc(from, func(f From) bool {
				return f.Target == "v" && f.Watched && f.WrittenBytes == v.Own.WrittenBytes && filepath.Base(f.File) == kind
			}) {
				t.Errorf("the volume is not among what wrote to the pool: %+v", from)
			}
		})
	}
}

func TestSyncs(t *testing.T) {
	traced(t)
	pool := testfs.XFS(t, 1<<30)
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			dir, other := volume(t, pool, kind, "v"+kind), volume(t, pool, kind, "other"+kind)
			f, g := prepared(t, dir), prepared(t, other)
			w := watcher(t, Target{Name: "v", Path: dir}, Target{Name: "other", Path: other})
			const n = 300
			start := time.Now()
			overwrite(t, f, n)
			took := time.Since(start)
			overwrite(t, g, 10)
			s := w.Sample()
			v, o := target(t, s, "v"), target(t, s, "other")
			if v.Syncs == nil || v.Syncs.Source != "calls" || v.Syncs.Count != n || v.Syncs.Timed != n {
				t.Fatalf("%d syncs: %+v", n, v.Syncs)
			}
			if o.Syncs.Count != 10 {
				t.Errorf("10 syncs of the other: %+v", o.Syncs)
			}
			// A flush for each; commits of the journal, every few seconds, add some.
			if v.Own.Flushes == nil || *v.Own.Flushes < n || *v.Own.Flushes > n+20 {
				t.Errorf("flushes: %v", *v.Own.Flushes)
			}
			l := v.Syncs.Latency
			if l.Mean <= 0 || l.Mean*n > took.Seconds() || *l.P50 > *l.P95 || *l.P95 > *l.P99 || *l.P99 > *l.Max ||
				*l.Max < l.Mean || *l.Max > took.Seconds()*1.04 {
				t.Errorf("latency in %v: %+v", took, l)
			}
			// Writes that sync by themselves.
			d, err := os.OpenFile(f.Name(), os.O_WRONLY|unix.O_DSYNC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			for range 20 {
				if _, err := d.WriteAt(make([]byte, 4096), 0); err != nil {
					t.Fatal(err)
				}
			}
			if v := target(t, w.Sample(), "v"); v.Syncs.Count != 20 {
				t.Errorf("20 writes that sync: %+v", v.Syncs)
			}
		})
	}
}

// TestNeighbour: an idle volume shows zeros while another is written to, and the other's
// writes are named, not attributed.
func TestNeighbour(t *testing.T) {
	pool := testfs.XFS(t, 1<<30)
	a, b := volume(t, pool, "ext4", "a"), volume(t, pool, "ext4", "b")
	w := watcher(t, Target{Name: "a", Path: a})
	write(t, filepath.Join(b, "f"), 64*mib, true)
	s := w.Sample()
	x := target(t, s, "a")
	if *x.Own.Flushes != 0 || x.Own.WrittenBytes != 0 || x.Own.Writes != 0 || x.Syncs.Count != 0 {
		t.Errorf("idle, but %+v %+v", x.Own, x.Syncs)
	}
	if x.Amplification != nil || x.NoAmplification == "" {
		t.Errorf("amplification of nothing: %v %q", x.Amplification, x.NoAmplification)
	}
	if p := x.Steps[1]; p.OthersBytes < 64*mib || p.OthersBytes > p.WrittenBytes {
		t.Errorf("others: %+v", p)
	}
	if !slices.ContainsFunc(s.Layers[0].From, func(f From) bool {
		return !f.Watched && f.Target == "" && f.WrittenBytes >= 64*mib
	}) {
		t.Errorf("the neighbour is not named: %+v", s.Layers[0].From)
	}
	write(t, filepath.Join(b, "g"), 64*mib, true)
	write(t, filepath.Join(a, "g"), 8*mib, true)
	x = target(t, w.Sample(), "a")
	if p := x.Steps[1]; p.Amplification == nil || *p.Amplification < 1 || *p.Amplification > 3 {
		t.Errorf("amplification of 8 MiB beside 64 MiB: %+v", p)
	}
}

// TestSamplesAddUp: the sum of the intervals is what the device has done.
func TestSamplesAddUp(t *testing.T) {
	pool := testfs.XFS(t, 1<<30)
	dir := volume(t, pool, "ext4", "v")
	f := prepared(t, dir)
	w := watcher(t, Target{Name: "v", Path: dir})
	dev := w.layout.targets[0].own.devs[0]
	before, err := dev.Stat()
	if err != nil {
		t.Fatal(err)
	}
	var sum Counts
	var flushes, syncs int64
	for i := range 5 {
		overwrite(t, f, 10*i)
		v := target(t, w.Sample(), "v")
		sum.WrittenBytes += v.Own.WrittenBytes
		sum.Writes += v.Own.Writes
		flushes += *v.Own.Flushes
		syncs += v.Syncs.Count
	}
	after, err := dev.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if d := after.Minus(before); sum.WrittenBytes != d.WrittenBytes || sum.Writes != d.Writes || flushes != d.Flushes ||
		sum.WrittenBytes < 100*8<<10 {
		t.Errorf("%+v and %d flushes in parts, %+v in all", sum, flushes, d)
	}
	if syncs < 100 {
		t.Errorf("%d syncs", syncs)
	}
}

// noticed is a context that calls a function once somebody waits for it to end.
type noticed struct {
	context.Context
	armed  atomic.Bool
	waited func()
}

func (n *noticed) Done() <-chan struct{} {
	if n.armed.CompareAndSwap(true, false) {
		go n.waited()
	}
	return n.Context.Done()
}

// TestTail: what is written without a sync reaches the device after the operation. In
// `make test-all` this is the kernel's own doing, which takes half a minute. Otherwise
// the test lets the kernel begin once Around waits for it.
func TestTail(t *testing.T) {
	pool := testfs.XFS(t, 1<<30)
	dir := volume(t, pool, "ext4", "v")
	w := watcher(t, Target{Name: "v", Path: dir})
	const size = 16 * mib
	failure := errors.New("it failed")
	begun := make(chan error, 1)
	ctx := &noticed{Context: t.Context(), waited: func() { begun <- writeBack(filepath.Join(dir, "f")) }}
	o, err := w.Around(ctx, 2*time.Minute, func() error {
		write(t, filepath.Join(dir, "f"), size, false)
		ctx.armed.Store(!testfs.Full())
		return failure
	})
	least := 1.0
	if !testfs.Full() {
		least = 0
		if ctx.armed.Load() {
			t.Fatal("Around has not waited")
		}
		if err := <-begun; err != nil {
			t.Fatal(err)
		}
	}
	if !errors.Is(err, failure) {
		t.Fatal(err)
	}
	during, after, total := target(t, o.During, "v"), target(t, o.After, "v"), target(t, o.Total, "v")
	if during.Own.WrittenBytes > size/2 || after.Own.WrittenBytes < size/2 || total.Own.WrittenBytes < size ||
		total.Own.WrittenBytes > size+2*mib {
		t.Errorf("during %d, after %d, in all %d", during.Own.WrittenBytes, after.Own.WrittenBytes, total.Own.WrittenBytes)
	}
	if during.Own.WrittenBytes+after.Own.WrittenBytes != total.Own.WrittenBytes {
		t.Error("the parts are not the whole")
	}
	if !o.Tail.Quiet || o.Tail.Seconds <= least || o.Tail.Scope != ofTargets || o.Tail.UnwrittenBytes > 2*mib {
		t.Errorf("tail: %+v", o.Tail)
	}
	if a := total.Steps[1].Amplification; a == nil || *a < 1 || *a > 1.5 {
		t.Errorf("through the pool's filesystem: %+v", total.Steps)
	}
	// A limit that comes first is said.
	write(t, filepath.Join(dir, "g"), mib, true)
	o, err = w.Around(t.Context(), 10*time.Millisecond, func() error {
		write(t, filepath.Join(dir, "g"), size, false)
		return nil
	})
	if err != nil || o.Tail.Quiet || o.Tail.UnwrittenBytes < size/2 {
		t.Errorf("cut short: %v %+v", err, o.Tail)
	}
}

// writeBack lets the kernel begin to write a file to its device. It does not wait for
// the end, nor for the device's cache.
func writeBack(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.SyncFileRange(int(f.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE)
}

func TestBtrfsSubvolumes(t *testing.T) {
	traced(t)
	top := testfs.Btrfs(t, 512*mib)
	d, err := os.Open(top)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	at := map[string]string{}
	for _, name := range []string{"a", "b"} {
		if err := kernel.SubvolCreate(d, name); err != nil {
			t.Fatal(err)
		}
		at[name] = bind(t, filepath.Join(top, name))
	}
	if err := os.Mkdir(filepath.Join(top, "dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	at["dir"] = bind(t, filepath.Join(top, "dir"))
	w := watcher(t, Target{Name: "a", Path: at["a"]}, Target{Name: "b", Path: at["b"]},
		Target{Name: "dir", Path: at["dir"]}, Target{Name: "all", Path: top})
	write(t, filepath.Join(at["a"], "f"), mib, true)
	write(t, filepath.Join(at["a"], "g"), mib, true)
	write(t, filepath.Join(at["b"], "f"), mib, true)
	write(t, filepath.Join(at["dir"], "f"), mib, true)
	s := w.Sample()
	for name, want := range map[string]int64{"a": 2, "b": 1, "all": 4} {
		x := target(t, s, name)
		if x.Syncs == nil || x.Syncs.Count != want || x.Syncs.Timed != want {
			t.Errorf("syncs of %s: %+v, want %d", name, x.Syncs, want)
		}
		if shared := name != "all"; shared != (x.Own == nil) || shared != (x.Shared != "") {
			t.Errorf("%s has %+v of its own; %s", name, x.Own, x.Shared)
		}
	}
	x := target(t, s, "dir")
	if x.Syncs != nil || x.Own != nil || x.Amplification != nil || !strings.Contains(x.NoAmplification, "unknown") {
		t.Errorf("a directory: %+v", x)
	}
	if !slices.ContainsFunc(s.Missing, func(m string) bool { return strings.HasPrefix(m, "dir: its syncs cannot") }) {
		t.Errorf("missing: %q", s.Missing)
	}
	if x := target(t, s, "all"); x.Own.WrittenBytes < 4*mib || x.Steps[0].Amplification == nil {
		t.Errorf("the whole: %+v", x)
	}
}

// bind mounts a directory at another until the test ends.
func bind(t *testing.T, dir string) string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "at")
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(dir, at, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.Unmount(at); err != nil {
			t.Error(err)
		}
	})
	return at
}

func TestMountsComeAndGo(t *testing.T) {
	pool := testfs.XFS(t, 1<<30)
	m, err := WatchMounts()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	a := volume(t, pool, "ext4", "a")
	if !m.Changed() {
		t.Error("a mount was not seen")
	}
	b := volume(t, pool, "ext4", "b")
	w := watcher(t, Target{Name: "a", Path: a}, Target{Name: "b", Path: b})
	if err := mount.Unmount(b); err != nil { // watching has not kept it busy
		t.Fatal(err)
	}
	if !m.Changed() {
		t.Error("an unmount was not seen")
	}
	s := w.Sample()
	if len(s.Targets) != 1 || s.Targets[0].Name != "a" {
		t.Errorf("targets: %+v", s.Targets)
	}
	if all := w.Set(t.Context(), []Target{{Name: "a", Path: a},
		{Name: "gone", Path: filepath.Join(b, "gone")}}); len(all) != 1 || !errs.Is(all[0], errs.NotFound) {
		t.Errorf("set: %v", all)
	}
	write(t, filepath.Join(a, "f"), mib, true)
	if x := target(t, w.Sample(), "a"); x.Own.WrittenBytes < mib {
		t.Errorf("after the change: %+v", x.Own)
	}
}

func TestWhatCannotBeWatched(t *testing.T) {
	tmp := testfs.Tmpfs(t, mib)
	for path, kind := range map[string]errs.Kind{
		tmp: errs.Unsupported, "/proc": errs.Unsupported, filepath.Join(tmp, "not-there"): errs.NotFound,
	} {
		_, err := New(t.Context(), []Target{{Name: path, Path: path}})
		if !errs.Is(err, kind) {
			t.Errorf("%s: %v, want %s", path, err, kind)
		}
		if kind == errs.Unsupported && errs.HintOf(err) == "" {
			t.Errorf("%s: no hint: %v", path, err)
		}
	}
}

func TestHistogram(t *testing.T) {
	if *new(histogram) != nil || (histogram{}).at(0.5) != nil {
		t.Error("an empty histogram has a median")
	}
	for d := time.Duration(1); d < time.Hour; d += 1 + d/97 {
		c := class(d)
		if up := upper(c); up < max(d, 32).Seconds() || d >= 32 && up > d.Seconds()*1.04 {
			t.Fatalf("%v is in a class up to %g s", d, up)
		}
	}
	var h histogram
	for i := 1; i <= 1000; i++ {
		h.add(time.Duration(i) * time.Microsecond)
	}
	for p, want := range map[float64]float64{0.5: 500e-6, 0.99: 990e-6, 1: 1000e-6} {
		if got := *h.at(p); got < want || got > want*1.04 {
			t.Errorf("p%g: %g, want %g", 100*p, got, want)
		}
	}
	before := slices.Clone(h)
	h.add(time.Second)
	if d := h.minus(before); *d.at(0.01) < 1 || *d.at(1) > 1.04 {
		t.Errorf("difference: %g", *d.at(1))
	}
}

func TestParseObjset(t *testing.T) {
	const text = `31 1 0x01 7 2160 8464736921 1246093217187
name                            type data
dataset_name                    7    tank/my home
writes                          4    12
nwritten                        4    98304
reads                           4    1
nread                           4    1
zil_commit_count                4    7
`
	name, o, ok := parseObjset(text)
	if !ok || name != "tank/my home" || o.written != 98304 || o.commits != 7 {
		t.Errorf("%q %+v %v", name, o, ok)
	}
	if _, o, ok := parseObjset("dataset_name 7 a\nnwritten 4 1\n"); !ok || o.commits != -1 {
		t.Errorf("an old one: %+v %v", o, ok)
	}
	for _, bad := range []string{"", "dataset_name 7 a\n", "nwritten 4 1\n", "dataset_name 7 a\nnwritten 4 x\n"} {
		if _, _, ok := parseObjset(bad); ok {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestWithoutTracing: what stands in for the syncs of programs.
func TestWithoutTracing(t *testing.T) {
	pool := testfs.XFS(t, 1<<30)
	dir := volume(t, pool, "ext4", "v")
	f := prepared(t, dir)
	w := watcher(t, Target{Name: "v", Path: dir})
	w.syncs.close()
	w.syncs.err = errs.New(errs.Permission, "trace the kernel", "", "not permitted")
	overwrite(t, f, 50)
	s := w.Sample()
	v := target(t, s, "v")
	if v.Syncs == nil || v.Syncs.Source != "flushes" || v.Syncs.Count != *v.Own.Flushes || v.Syncs.Count < 50 ||
		v.Syncs.Latency == nil || v.Syncs.Latency.P50 != nil {
		t.Errorf("%+v", v.Syncs)
	}
	if !slices.ContainsFunc(s.Missing, func(m string) bool { return strings.Contains(m, "only root") }) {
		t.Errorf("missing: %q", s.Missing)
	}
}

func TestDeviceThatIsOneItself(t *testing.T) {
	pool := testfs.XFS(t, 1<<30)
	dir := volume(t, pool, "ext4", "v")
	dev := watcher(t, Target{Name: "v", Path: dir}).layout.targets[0].own.devs[0]
	w := watcher(t, Target{Name: "dev", Path: dev.Path()})
	write(t, filepath.Join(dir, "f"), 4*mib, true)
	v := target(t, w.Sample(), "dev")
	if v.Own == nil || v.Own.WrittenBytes < 4*mib || v.FSType != "" || v.Syncs == nil || v.Syncs.Source != "flushes" {
		t.Errorf("%+v", v)
	}
	if _, err := blockdev.LookupPath(dev.Path()); err != nil {
		t.Error(err)
	}
}

// TestDrowned: a neighbour that passes down more than arrives is no reason to say that
// the volume has written less than it has.
func TestDrowned(t *testing.T) {
	pool := testfs.XFS(t, 1<<30)
	dir := volume(t, pool, "ext4", "v")
	w := watcher(t, Target{Name: "v", Path: dir})
	from := w.last
	write(t, filepath.Join(dir, "f"), 8*mib, true)
	to := w.state()
	x := w.layout.targets[0]
	g := x.groups[1]
	others := func(n int64) map[*group][]From {
		return map[*group][]From{g: {{Name: "other", WrittenBytes: n}}}
	}
	if s, _ := w.layout.target(from, to, x, others(mib)); s.Steps[0].Amplification == nil ||
		s.Steps[1].Amplification != nil {
		t.Errorf("a neighbour's MiB that did not arrive: %+v", s.Steps)
	}
	if s, _ := w.layout.target(from, to, x, others(1<<40)); s.Amplification != nil ||
		!strings.Contains(s.NoAmplification, "other writers") {
		t.Errorf("a neighbour's TiB that did not arrive: %v %q", s.Amplification, s.NoAmplification)
	}
	if s, _ := w.layout.target(from, to, x, nil); s.Amplification == nil {
		t.Errorf("alone: %q", s.NoAmplification)
	}
}
