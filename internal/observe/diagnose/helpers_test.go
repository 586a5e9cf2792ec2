package diagnose

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
	"pando/internal/observe/tracepoint"
	"pando/internal/testing/testfs"
	"pando/internal/testing/tracetest"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	tracetest.Hold(append(tracetest.Calls("fdatasync", "fsync", "sync_file_range", "syncfs", "pwritev2", "write",
		"pwrite64", "writev", "pwritev"), "block:block_bio_queue", "block:block_rq_complete", "block:block_bio_complete",
		"block:block_rq_error", "jbd2:jbd2_start_commit", "jbd2:jbd2_end_commit", "writeback:balance_dirty_pages",
		"io_uring:io_uring_submit_req")...)
	os.Exit(m.Run())
}

// skip skips a test for want of something, or fails it where nothing may be missing.
func skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("PANDO_TEST_REQUIRE_ALL") != "" && os.Geteuid() == 0 {
		t.Fatalf(format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

func needTraces(t testing.TB) {
	t.Helper()
	err := tracepoint.Available()
	if errs.Is(err, errs.Permission) || errs.Is(err, errs.Unsupported) {
		skip(t, "%v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// fresh is a filesystem on a loop device, mounted with options. mkfs are more
// arguments for mkfs.
type fresh struct {
	dir  string
	loop *loopdev.Device
	dev  blockdev.Device
}

// direct is a loop device that bypasses the page cache: what it writes is of the
// control group that wrote to it.
var direct = loopdev.Options{DirectIO: true}

func makeFresh(t testing.TB, kind, dir string, size int64, mkfs []string, options ...string) *fresh {
	t.Helper()
	return makeFreshOn(t, loopdev.Options{}, kind, dir, size, mkfs, options...)
}

func makeFreshOn(
	t testing.TB, how loopdev.Options, kind, dir string, size int64, mkfs []string, options ...string,
) *fresh {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	if _, err := run.Look("mkfs." + kind); err != nil {
		skip(t, "%v", err)
	}
	testfs.LeakCheck(t, dir)
	f := &fresh{dir: filepath.Join(dir, "mnt")}
	f.loop = testfs.Loop(t, filepath.Join(dir, "image"), size, how)
	args := map[string][]string{"ext4": {"-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"},
		"xfs": {"-q", "-K"}, "btrfs": {"-q", "-K"}}[kind]
	if _, err := run.Program(t.Context(), "mkfs."+kind, append(append(args, mkfs...), f.loop.Path)...); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(f.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	m, err := mount.Device(kind, f.loop.Path, options, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(f.dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.Unmount(f.dir); err != nil {
			t.Error(err)
			_ = unix.Unmount(f.dir, unix.MNT_DETACH)
		}
	})
	if f.dev, err = blockdev.LookupPath(f.loop.Path); err != nil {
		t.Fatal(err)
	}
	return f
}

// load is a running fio.
type load struct {
	t   testing.TB
	cmd *exec.Cmd
	out bytes.Buffer
}

// startFio starts fio, in a control group if group is not "". It runs until the
// test ends.
func startFio(t testing.TB, group string, args ...string) *load {
	t.Helper()
	fio, err := run.Look("fio")
	if err != nil {
		skip(t, "%v", err)
	}
	l := &load{t: t}
	// The shell puts itself into the group, and becomes fio.
	l.cmd = exec.Command("sh",
		append([]string{"-c", `[ -z "$0" ] || echo $$ >"$0/cgroup.procs" && exec "$@"`, group, fio, "--thread", "--name=load",
			"--time_based", "--runtime=600", "--eta=never"}, args...)...)
	runtime.LockOSThread() // for the rest of the test: fio dies with its thread
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	l.cmd.Stdout, l.cmd.Stderr = &l.out, &l.out
	l.cmd.Dir = t.TempDir()
	if err := l.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.stop)
	return l
}

func (l *load) stop() {
	if l.cmd.Process != nil {
		_ = syscall.Kill(-l.cmd.Process.Pid, syscall.SIGKILL)
		_ = l.cmd.Wait()
		l.cmd.Process = nil
	}
}

func (l *load) pid() int { return l.cmd.Process.Pid }

// await waits until a condition holds that something else brings about.
func await(t testing.TB, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// writing waits until a device has been written to n times more.
func (f *fresh) writing(t testing.TB, n int64) {
	t.Helper()
	first, err := f.dev.Stat()
	if err != nil {
		t.Fatal(err)
	}
	await(t, "the load runs", func() bool {
		s, err := f.dev.Stat()
		if err != nil {
			t.Fatal(err)
		}
		return s.Writes+s.Flushes >= first.Writes+first.Flushes+n
	})
}

// blkioGroup makes a control group of version 1 that can be limited.
func blkioGroup(t testing.TB) string {
	t.Helper()
	root := groupRoots().blkio
	if root == "" {
		t.Skip("does not apply: no blkio controller of version 1 here")
	}
	dir, err := os.MkdirTemp(root, "pando-test-")
	if err != nil {
		skip(t, "no control group can be made: %v", err)
	}
	t.Cleanup(func() {
		await(t, "the control group is empty", func() bool { return strings.TrimSpace(slurp(dir+"/cgroup.procs")) == "" })
		if err := unix.Rmdir(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// unifiedGroup makes a control group of version 2; "" where there is no such hierarchy.
func unifiedGroup(t testing.TB) string {
	t.Helper()
	root := groupRoots().unified
	if root == "" {
		return ""
	}
	dir, err := os.MkdirTemp(root, "pando-test-")
	if err != nil {
		skip(t, "no control group can be made: %v", err)
	}
	t.Cleanup(func() {
		await(t, "the control group is empty", func() bool { return strings.TrimSpace(slurp(dir+"/cgroup.procs")) == "" })
		if err := unix.Rmdir(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func setting(t testing.TB, path, value string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

// watched watches a path. The host is shared: when others take the processors or the
// disk, a load does not come to what limits it. So if a cause that is expected is
// missing, or no sync was seen of which there should be some (someSyncs), it watches
// again, a few times, each twice as long, up to longestTry.
func watched(t testing.TB, path string, d time.Duration, expect ...string) *Report {
	t.Helper()
	const tries = 5
	for try := 1; ; try++ {
		r, err := Watch(t.Context(), Request{Path: path, For: d})
		if err != nil {
			t.Fatal(err)
		}
		sane(t, r)

		missing := slices.DeleteFunc(slices.Clone(expect), func(code string) bool {
			return cause(r, code) != nil || code == someSyncs && r.Syncs.Sampled >= 10
		})
		if len(missing) == 0 || try == tries {
			return r
		}
		t.Logf("not found in %s, which a busy host can hide: %v", d, missing)
		d = max(d, min(2*d, longestTry))
	}
}

// longestTry limits how long watched watches again.
const longestTry = 4 * time.Second

// someSyncs stands for at least ten syncs of the path that were recorded.
const someSyncs = "(syncs)"

// sane checks what holds of any report.
func sane(t testing.TB, r *Report) {
	t.Helper()
	for i, c := range r.Causes {
		if c.Rank != i+1 || c.Code == "" || c.Title == "" || len(c.Evidence) == 0 || len(c.Next) == 0 || c.Share > 1 ||
			c.Share < -1 {
			t.Errorf("cause %+v", c)
		}
		if i > 0 && c.score > r.Causes[i-1].score {
			t.Errorf("%s is ranked behind %s", c.Code, r.Causes[i-1].Code)
		}
	}
	if r.Syncs.Sampled > 0 && len(r.Devices) > 0 {
		sum := 0.0
		for _, p := range r.Syncs.Where {
			sum += p.Share
		}
		if sum < 0.95 || sum > 1.05 {
			t.Errorf("the parts of the time of the syncs are %.3f in all: %+v", sum, r.Syncs.Where)
		}
	}
	if r.Verdict == "" {
		t.Error("no verdict")
	}
}

// ofTheHost are causes that what else runs on this machine brings about.
var ofTheHost = []string{"cpu", "steal", "memory", "slow-device", "slow-layer", "above-devices", "deep-queue",
	"slow-commits"}

func cause(r *Report, code string) *Cause {
	for i := range r.Causes {
		if r.Causes[i].Code == code {
			return &r.Causes[i]
		}
	}
	return nil
}

// first checks that a cause is there, and before all others that the test itself could
// bring about. Others that host says may stand before it, too.
func first(t testing.TB, r *Report, code string, host ...string) *Cause {
	t.Helper()
	c := cause(r, code)
	if c == nil {
		t.Fatalf("%s is missing: %s\n%s", code, r.Verdict, list(r))
	}
	for _, x := range r.Causes[:c.Rank-1] {
		if !slices.Contains(ofTheHost, x.Code) && !slices.Contains(host, x.Code) {
			t.Errorf("%s stands before %s:\n%s", x.Code, code, list(r))
		}
	}
	return c
}

func list(r *Report) string {
	var b strings.Builder
	for _, c := range r.Causes {
		fmt.Fprintf(&b, "%d. %s share %.2f score %.2f: %s\n   %s\n", c.Rank, c.Code, c.Share, c.score, c.Title,
			strings.Join(c.Evidence, "\n   "))
	}
	for _, d := range r.Devices {
		fmt.Fprintf(&b, "%+v\n", d)
	}
	fmt.Fprintf(&b, "%+v\nnot looked at: %+v\n", r.Syncs, r.NotLooked)
	return b.String()
}

func says(t testing.TB, c *Cause, want string) {
	t.Helper()
	if !strings.Contains(c.Title+"\n"+strings.Join(c.Evidence, "\n"), want) {
		t.Errorf("%s does not say %q: %s, %q", c.Code, want, c.Title, c.Evidence)
	}
}

func device0(t testing.TB, r *Report, name string) Device {
	t.Helper()
	for _, d := range r.Devices {
		if d.Name == name {
			return d
		}
	}
	t.Fatalf("no device %s in %+v", name, r.Devices)
	return Device{}
}

// bottomOf is the disk below a path; the test is skipped if there is none.
func bottomOf(t testing.TB, path string) blockdev.Device {
	t.Helper()
	s, err := stack.Of(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	b := s.Bottom()
	if len(b) == 0 {
		skip(t, "nothing is known below %s: %s", path, s.Hidden)
	}
	return *b[len(b)-1].Device
}

// fill writes a file of some size, and syncs it.
func fill(t testing.TB, name string, size int64) {
	t.Helper()
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	block := bytes.Repeat([]byte("0123456789abcdef"), 64<<10/16)
	for n := int64(0); n < size; n += int64(len(block)) {
		if _, err := f.Write(block[:min(int64(len(block)), size-n)]); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

// repeat runs a program again and again until the test ends.
func repeat(t testing.TB, program string, args ...string) {
	t.Helper()
	if _, err := run.Look(program); err != nil {
		skip(t, "%v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		var err error
		for ctx.Err() == nil {
			if _, err = run.Program(ctx, program, args...); err != nil {
				break
			}
		}
		if ctx.Err() != nil {
			err = nil
		}
		done <- err
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", program, err)
		}
	})
}
