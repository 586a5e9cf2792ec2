package proof_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/observe/blockdev"
	"pando/internal/observe/proof"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestNoBarrier: an ext4 that does not flush its disk is found by its options, by the
// counts alone, and by every single sync.
func TestNoBarrier(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	fs := testfs.NewIn(t, "", "ext4", 64<<20, "barrier=0")
	name := "ext4 on " + fs.Dir()
	p := watch(t, fs.Dir(), options{sample: 100 * time.Millisecond})
	wantFail(t, p, name, "mounted with nobarrier")
	if l := layer(t, p, fs.Device()); l.Result != proof.Fail || l.Flushes+l.FUA > l.Needed/20 || l.Needed < 10 ||
		l.Writes == 0 {
		t.Errorf("%+v", l)
	}
	if n := p.Sample.Uncovered[fs.Device()]; p.Sample.Syncs < 3 || n < p.Sample.Syncs*9/10 {
		t.Errorf("%+v", p.Sample)
	}
	if p.Calls.Result != proof.OK || p.Calls.Counted < p.Calls.Reported {
		t.Errorf("%+v", p.Calls)
	}
	for _, call := range []string{"fsync", "dsync"} {
		wantFail(t, watch(t, fs.Dir(), options{call: call, counts: true}), name, "it does not pass syncs on")
	}
	// The same filesystem, honest.
	remount(t, fs.Dir(), "barrier")
	wantOK(t, watch(t, fs.Dir(), options{sample: 100 * time.Millisecond}))
}

func remount(t *testing.T, dir, options string) {
	t.Helper()
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_NOATIME, options); err != nil {
		t.Fatal(err)
	}
}

// TestWhichLayer: of two filesystems on each other the one that lies is named.
func TestWhichLayer(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	for _, c := range []struct{ outer, outerOption, inner, innerOption, liar string }{
		{"xfs", "", "ext4", "nobarrier", "inner"},
		{"ext4", "nobarrier", "ext4", "", "outer"},
		{"ext4", "", "ext4", "", ""},
		{"btrfs", "", "xfs", "", ""},
		{"btrfs", "nobarrier", "ext4", "", "outer"},
	} {
		t.Run(fmt.Sprintf("%s %s in %s %s", c.inner, c.innerOption, c.outer, c.outerOption), func(t *testing.T) {
			var outerOptions, innerOptions []string
			if c.outerOption != "" {
				outerOptions = []string{c.outerOption}
			}
			if c.innerOption != "" {
				innerOptions = []string{c.innerOption}
			}
			size := int64(400 << 20)
			outer := testfs.NewIn(t, "", c.outer, 2*size, outerOptions...)
			inner := testfs.NewIn(t, outer.Dir(), c.inner, size, innerOptions...)
			e := count(t, inner.Dir(), options{})
			for _, counts := range []bool{false, true} {
				p := e.judge(t, options{counts: counts})
				switch c.liar {
				case "inner":
					wantFail(t, p, c.inner+" on "+inner.Dir(), "")
				case "outer":
					wantFail(t, p, c.outer+" on "+outer.Dir(), "")
					if l := layer(t, p, inner.Device()); l.Result != proof.OK || l.Flushes+l.FUA < l.Needed {
						t.Errorf("the honest layer above: %+v", l)
					}
				default:
					wantOK(t, p)
				}
			}
		})
	}
}

// TestWriteThrough: a device whose write cache is declared away ends flushes.
func TestWriteThrough(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	fs := testfs.New(t, "ext4", 64<<20)
	setting := "/sys/block/" + fs.Device() + "/queue/write_cache"
	set := func(value string) {
		t.Helper()
		if err := os.WriteFile(setting, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	wantOK(t, watch(t, fs.Dir(), options{}))
	set("write through")
	defer set("write back")
	e := count(t, fs.Dir(), options{})
	wantFail(t, e.judge(t, options{}), fs.Device()+" (write through)", "the kernel drops its flushes")
	// By the counts: the loop device has nothing to flush, but below it there is.
	p := e.judge(t, options{counts: true})
	if p.Result != proof.Fail || layer(t, p, fs.Device()).Result != proof.NotNeeded || !strings.Contains(p.Layer, " on ") {
		t.Errorf("result %s at %q", p.Result, p.Layer)
	}
}

// TestMemory: what is in memory is not durable.
func TestMemory(t *testing.T) {
	dir := testfs.Tmpfs(t, 16<<20)
	wantFail(t, watch(t, dir, options{}), "memory (tmpfs on "+dir+")", "in memory")

	fs := testfs.NewIn(t, testfs.Tmpfs(t, 64<<20), "ext4", 32<<20)
	p := watch(t, fs.Dir(), options{})
	if p.Result != proof.Fail || !strings.HasPrefix(p.Layer, "memory (tmpfs on ") {
		t.Errorf("result %s at %q", p.Result, p.Layer)
	}

	// Reading hot_add makes a new device and tells its number.
	id, err := os.ReadFile("/sys/class/zram-control/hot_add")
	if err != nil {
		skip(t, "no zram: %v", err)
	}
	n := strings.TrimSpace(string(id))
	defer func() {
		var err error
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
			// Whoever looks at all devices may have it open for a moment.
			if err = os.WriteFile("/sys/class/zram-control/hot_remove", []byte(n), 0); err == nil {
				return
			}
		}
		t.Error(err)
	}()
	if err := os.WriteFile("/sys/block/zram"+n+"/disksize", []byte("64M"), 0); err != nil {
		t.Fatal(err)
	}
	do(t, "mkfs.ext4", "-q", "/dev/zram"+n)
	m := t.TempDir()
	if err := unix.Mount("/dev/zram"+n, m, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unmount(t, m)
	wantFail(t, watch(t, m, options{}), "memory (zram"+n+")", "memory")
}

func unmount(t *testing.T, dir string) {
	t.Helper()
	if err := unix.Unmount(dir, 0); err != nil {
		t.Error(err)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
}

// TestNoSyncs: loads that do not do what they say.
func TestNoSyncs(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	dir := testfs.Ext4(t, 64<<20)
	e := count(t, dir, options{call: "none"})
	p := e.judge(t, options{})
	wantFail(t, p, "system call", "synced nothing")
	if p.Calls.Result != proof.Fail || p.Calls.Counted != 0 {
		t.Errorf("%+v", p.Calls)
	}
	p = e.judge(t, options{syncs: 5000})
	wantFail(t, p, "system call", "the kernel counted 0 of the 5,000 calls of fdatasync")
	e = count(t, dir, options{call: "fdatasync"})
	p = e.judge(t, options{claims: "write (O_DSYNC)"})
	wantFail(t, p, "system call", "no file was opened with O_DSYNC")
	wantFail(t, e.judge(t, options{claims: "fsync"}), "system call", "calls of fsync")
}

// TestOverlay: an overlay passes syncs on, but not with the option that is for images
// that nobody needs.
func TestOverlay(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	base := testfs.Ext4(t, 64<<20)
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(base, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	merged := filepath.Join(base, "merged")
	layers := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", base)
	if err := unix.Mount("overlay", merged, "overlay", 0, layers); err != nil {
		skip(t, "no overlay: %v", err)
	}
	wantOK(t, watch(t, merged, options{}))
	unmount(t, merged)
	if err := unix.Mount("overlay", merged, "overlay", 0, layers+",volatile"); err != nil {
		t.Fatal(err)
	}
	defer unmount(t, merged)
	e := count(t, merged, options{})
	wantFail(t, e.judge(t, options{}), "overlay on "+merged, "volatile")
	wantFail(t, e.judge(t, options{counts: true}), "overlay on "+merged, "it does not pass syncs on")
}

// TestOthers: that another program flushes the same disk all the time must not make a
// liar look honest; and an honest filesystem beside it passes.
func TestOthers(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	need(t, "addpart", "util-linux")
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 200<<20); err != nil {
		t.Fatal(err)
	}
	testfs.LeakCheck(t, filepath.Dir(image))
	loop := do(t, "losetup", "-P", "--show", "-f", image)
	defer do(t, "losetup", "-d", loop)
	// What somebody has set on this device before stays: see package loopdev.
	if err := os.WriteFile("/sys/block/"+filepath.Base(loop)+"/queue/write_cache", []byte("write back"), 0); err != nil {
		t.Fatal(err)
	}
	dirs := [2]string{}
	for i, start := range []string{"2048", "204800"} {
		n := fmt.Sprint(i + 1)
		do(t, "addpart", loop, n, start, "184320")
		defer do(t, "delpart", loop, n)
		do(t, "mkfs.ext4", "-q", loop+"p"+n)
		dirs[i] = t.TempDir()
		option := ""
		if i == 0 {
			option = "nobarrier"
		}
		if err := unix.Mount(loop+"p"+n, dirs[i], "ext4", 0, option); err != nil {
			t.Fatal(err)
		}
		defer unmount(t, dirs[i])
	}
	liar, honest := dirs[0], dirs[1]

	var other *exec.Cmd
	busy := func() {
		files := makeFiles(t, honest, 4)
		// fsync of what grows makes the journal's thread flush, and not the program. It is killed.
		other, _ = loadCommand(t, "/proc/self/exe", "grow", 0, files...)
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
	}
	device, err := blockdev.LookupPath(loop)
	if err != nil {
		t.Fatal(err)
	}
	flushed := func() int64 {
		s, err := device.Stat()
		if err != nil {
			t.Fatal(err)
		}
		return s.Flushes
	}
	until := func() { // the other program has flushed
		deadline := time.Now().Add(time.Minute)
		for first := flushed(); flushed() < first+100 && time.Now().Before(deadline); {
			time.Sleep(5 * time.Millisecond)
		}
	}
	stop := func() {
		if other != nil {
			_ = other.Process.Kill()
			_ = other.Wait()
			other = nil
		}
	}
	defer stop()
	// It may claim few syncs, so that the other's would be enough for it.
	for _, syncs := range []int64{0, 50} {
		p := watch(t, liar, options{counts: true, busy: busy, until: until, syncs: syncs})
		stop()
		if p.Result != proof.Fail {
			t.Errorf("with %d syncs: %s: %q", syncs, p.Result, p.Reasons)
		}
		l := layer(t, p, filepath.Base(loop))
		if l.Flushes+l.FUA < 50 {
			t.Errorf("the other program has not flushed: %+v", l)
		}
		if l.Result == proof.OK {
			t.Errorf("with %d syncs: %+v", syncs, l)
		}
	}
	wantOK(t, watch(t, honest, options{}))
}
