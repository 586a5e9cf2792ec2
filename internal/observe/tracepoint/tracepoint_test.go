package tracepoint

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// need skips where events cannot be traced.
func need(t *testing.T) {
	t.Helper()
	err := Available()
	if errs.Is(err, errs.Permission) || errs.Is(err, errs.Unsupported) {
		if os.Getenv("PANDO_TEST_REQUIRE_ALL") != "" && os.Getuid() == 0 {
			t.Fatal(err)
		}
		t.Skipf("SKIPPED: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestCountAndRecord(t *testing.T) {
	need(t)
	c, err := Count("syscalls:sys_enter_fdatasync", "", Everything)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, err := NewRecorder(Spec{Event: "syscalls:sys_enter_fdatasync"}, Spec{Event: "syscalls:sys_exit_fdatasync"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const n = 20
	var before unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &before); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	for range n {
		if _, err := f.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			t.Fatal(err)
		}
	}
	took := time.Since(start)
	got, err := c.Read()
	if err != nil {
		t.Fatal(err)
	}
	if got < n {
		t.Errorf("%d counted of %d", got, n)
	}
	records, lost, err := r.Read()
	if err != nil || lost > 0 {
		t.Fatal(err, lost)
	}
	enter, exit := 0, 0
	last := uint64(before.Nano())
	for _, x := range records {
		if x.PID != os.Getpid() {
			continue
		}
		if x.Time < last || x.Time > uint64(before.Nano())+uint64(took)+uint64(time.Second) {
			t.Errorf("time %d after %d", x.Time, last)
		}
		last = x.Time
		switch x.Event.Name {
		case "syscalls:sys_enter_fdatasync":
			enter++
			if fd := x.Event.Int(x.Raw, "fd"); fd != int64(f.Fd()) {
				t.Errorf("fd %d, want %d", fd, f.Fd())
			}
		case "syscalls:sys_exit_fdatasync":
			exit++
			if ret := x.Event.Int(x.Raw, "ret"); ret != 0 {
				t.Errorf("ret %d", ret)
			}
		}
	}
	if enter != n || exit != n {
		t.Errorf("recorded %d and %d, want %d", enter, exit, n)
	}
}

func TestFilter(t *testing.T) {
	need(t)
	// The events are those of the whole host: a number that no other process uses.
	fd := 1_000_000 + os.Getpid()
	none, err := Count("syscalls:sys_enter_fdatasync", fmt.Sprintf("fd == %d", fd), Everything)
	if err != nil {
		t.Fatal(err)
	}
	defer none.Close()
	_ = unix.Fdatasync(fd - 1)
	_ = unix.Fdatasync(fd)
	if n, err := none.Read(); err != nil || n != 1 {
		t.Errorf("%d %v", n, err)
	}
	if _, err := Count("syscalls:sys_enter_fdatasync", "nonsense ===", Everything); !errs.Is(err, errs.Internal) {
		t.Errorf("a bad filter: %v", err)
	}
	if _, err := Count("block:no_such_event", "", Everything); !errs.Is(err, errs.Unsupported) {
		t.Errorf("no such event: %v", err)
	}
}

// TestChildren counts what a program and its children do, in several threads, and
// nothing of this process, not even of the thread that started it.
func TestChildren(t *testing.T) {
	need(t)
	if file := os.Getenv("PANDO_TEST_SYNCER"); file != "" {
		syncer(t, file)
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := Count("syscalls:sys_enter_fdatasync", "", Children)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestChildren$", "-test.count=1")
	cmd.Env = append(os.Environ(), "PANDO_TEST_SYNCER="+filepath.Join(t.TempDir(), "f"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := unix.Fdatasync(98764); err == nil {
		t.Error("there is a descriptor 98764")
	}
	// Once itself and four times in threads; and its child the same.
	if n, err := c.Read(); err != nil || n != 2*(1+4) {
		t.Errorf("%d counted, want 10 (%v)", n, err)
	}
}

// syncer syncs a file from several threads, and has a child do the same.
func syncer(t *testing.T, file string) {
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	errs := make(chan error)
	for range 4 {
		go func() {
			runtime.LockOSThread()
			errs <- unix.Fdatasync(int(f.Fd()))
		}()
	}
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		t.Error(err)
	}
	if filepath.Base(file) == "child" {
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestChildren$", "-test.count=1")
	cmd.Env = append(os.Environ(), "PANDO_TEST_SYNCER="+filepath.Join(filepath.Dir(file), "child"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestParseCPUs(t *testing.T) {
	got := parseCPUs("0-2,5,7-8")
	want := []int{0, 1, 2, 5, 7, 8}
	if len(got) != len(want) {
		t.Fatal(got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatal(got)
		}
	}
}
