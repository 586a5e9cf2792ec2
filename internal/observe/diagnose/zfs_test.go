package diagnose

import (
	"context"
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/zfs"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// dataset makes a mounted filesystem in a zpool.
func dataset(t testing.TB, pool string) (name, dir string) {
	t.Helper()
	name, dir = pool+"/data", filepath.Join(t.TempDir(), "data")
	if err := zfs.ZFS.Do(t.Context(), "create", "-o", "mountpoint="+dir, "-o", "compression=off", name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := zfs.ZFS.Do(context.Background(), "unmount", name); err != nil {
			t.Error(err)
		}
	})
	return name, dir
}

// syncingLoad writes and syncs until the test ends. It returns when the first sync has
// ended.
func syncingLoad(t testing.TB, dir string) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	first, done := make(chan struct{}), make(chan error, 1)
	go func() {
		block := make([]byte, 8192)
		var err error
		for i := int64(0); ctx.Err() == nil && err == nil; i++ {
			if _, err = f.WriteAt(block, i%512*8192); err == nil {
				err = unix.Fdatasync(int(f.Fd()))
			}
			if i == 0 {
				close(first)
			}
		}
		done <- err
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		f.Close()
	})
	<-first
}

// TestZFS: the settings and the devices of a zpool, with syncs running.
func TestZFS(t *testing.T) {
	pool := testfs.ZFS(t, 512*mib)
	needTraces(t)
	log := testfs.Loop(t, filepath.Join(t.TempDir(), "log"), 128*mib, loopdev.Options{})
	if err := zfs.Zpool.Do(t.Context(), "add", "-f", pool, "log", log.Path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := zfs.Zpool.Do(context.Background(), "remove", pool, log.Path); err != nil {
			t.Error(err)
		}
	})
	name, dir := dataset(t, pool)
	syncingLoad(t, dir)

	r := watched(t, dir, 10*time.Second)
	if c := cause(r, "sync-disabled"); c != nil {
		t.Errorf("%+v", c)
	}
	l := device0(t, r, filepath.Base(log.Path))
	if l.Role != "log" || l.FlushesPerSecond <= 0 || l.SyncShare <= 0 {
		t.Errorf("the log device: %+v\n%s", l, list(r))
	}
	if r.Syncs.Count == 0 || len(r.Syncs.Processes) == 0 || r.Syncs.Processes[0].PID != os.Getpid() {
		t.Errorf("%+v", r.Syncs)
	}
	t.Logf("mean %s, p99 %s, %v:\n%s", seconds(r.Syncs.Mean), seconds(r.Syncs.P99), r.Syncs.Where, list(r))
	if r.Syncs.Mean >= slowLayer && l.SyncShare >= 0.3 && cause(r, "log-device") == nil {
		t.Error("the log device is not named")
	}

	if err := zfs.ZFS.Do(t.Context(), "set", "sync=disabled", name); err != nil {
		t.Fatal(err)
	}
	r = watched(t, dir, 5*time.Second, "sync-disabled")
	c := first(t, r, "sync-disabled", "memory-only") // the guest's files are in memory
	if c.Confidence != Certain {
		t.Errorf("%+v", c)
	}
	says(t, c, name)
	if err := zfs.ZFS.Do(t.Context(), "set", "sync=standard", name); err != nil {
		t.Fatal(err)
	}

	// A great deal to write: transaction groups take their time under emulation.
	f, err := os.Create(filepath.Join(dir, "bulk"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		block := make([]byte, mib)
		for i := int64(0); ctx.Err() == nil; i++ {
			if i%8 == 0 {
				_, _ = rand.Read(block)
			}
			_, _ = f.WriteAt(block, i%200*mib) // it may be full: what counts is that much is written
		}
		f.Close()
	}()
	before := uint64(0)
	for _, x := range readTxgs(pool) {
		before = max(before, x.txg)
	}
	r = watched(t, dir, 20*time.Second, "slow-commits")
	longest := time.Duration(0)
	groups := readTxgs(pool)
	cancel()
	<-done
	for _, x := range groups {
		if x.txg > before {
			longest = max(longest, time.Duration(x.sync))
		}
	}
	t.Logf("the longest transaction group took %s\n%s", longest, list(r))
	// One more may have ended between the report and the look here.
	if slow := cause(r, "slow-commits") != nil; slow && longest < slowTxg {
		t.Error("slow transaction groups are named, and there are none")
	}
	if cause(r, "slow-commits") == nil && longest >= slowTxg && len(groups) > 0 &&
		time.Duration(groups[len(groups)-1].sync) < slowTxg {
		t.Error("slow transaction groups are not named")
	}
	if longest == 0 {
		t.Error("no transaction group was seen")
	}
}

// TestZFSFull: a dataset that is nearly full. (ZFS keeps so much of a small zpool to itself
// that that is not.)
func TestZFSFull(t *testing.T) {
	pool := testfs.ZFS(t, 128*mib)
	_, dir := dataset(t, pool)
	if c := cause(watched(t, dir, time.Second), "near-full"); c != nil {
		t.Errorf("it is empty: %+v", c)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(dir, "data"), int64(st.Bavail)*st.Bsize*95/100)
	says(t, first(t, watched(t, dir, time.Second), "near-full", "memory-only"), dir)
}

// TestCgroupLimitUnified: the same as TestCgroupLimit in a hierarchy of version 2.
func TestCgroupLimitUnified(t *testing.T) {
	needTraces(t)
	root := groupRoots().unified
	if root == "" || !strings.Contains(slurp(filepath.Join(root, "cgroup.controllers")), "io") {
		t.Skip("does not apply: no io controller of version 2 here")
	}
	had := strings.Contains(slurp(filepath.Join(root, "cgroup.subtree_control")), "io")
	if !had {
		setting(t, filepath.Join(root, "cgroup.subtree_control"), "+io")
		t.Cleanup(func() { setting(t, filepath.Join(root, "cgroup.subtree_control"), "-io") })
	}
	group, err := os.MkdirTemp(root, "pando-test-")
	if err != nil {
		t.Fatal(err)
	}
	f := makeFresh(t, "ext4", t.TempDir(), 128*mib, nil)
	cmd := exec.Command("sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, group, "dd", "if=/dev/zero",
		"of="+filepath.Join(f.dir, "log"), "bs=8k", "count=100000", "oflag=dsync")
	runtime.LockOSThread() // for the rest of the test: dd dies with its thread
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if err := unix.Rmdir(group); err != nil {
			t.Error(err)
		}
	})
	f.writing(t, 20)
	setting(t, filepath.Join(group, "io.max"), f.dev.ID()+" wiops=20")
	r := watched(t, f.dir, 5*time.Second, "cgroup-limit")
	c := first(t, r, "cgroup-limit", "memory-only")
	says(t, c, "20 requests per second to "+f.dev.Name)
	says(t, c, filepath.Join(group, "io.max"))
	if !slices.ContainsFunc(r.Writers, func(w Writer) bool {
		return w.Kind == "cgroup" && w.Name == "/"+filepath.Base(group) && w.Here
	}) {
		t.Errorf("writers %+v", r.Writers)
	}
	if p := r.Syncs.Processes; len(p) == 0 || p[0].Command != "dd" || p[0].Call != "write (O_DSYNC)" ||
		p[0].CGroup != "/"+filepath.Base(group) {
		t.Errorf("processes %+v", p)
	}
}
