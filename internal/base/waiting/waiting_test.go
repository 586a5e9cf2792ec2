package waiting

import (
	"bufio"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/logs"

	"golang.org/x/sys/unix"
)

// TestMain can be a process that holds a lock until it is killed.
func TestMain(m *testing.M) {
	how, path, child := strings.Cut(os.Getenv("WAITING_TEST_LOCK"), ":")
	if !child {
		os.Exit(m.Run())
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: 120, Len: 1}
	switch how {
	case "flock":
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	case "posix":
		err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &l)
	case "ofd":
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l)
	}
	if err != nil {
		panic(err)
	}
	os.Stdout.WriteString("locked\n")
	time.Sleep(time.Hour)
}

// holder starts a process that holds a lock on path.
func holder(t *testing.T, how, path string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "WAITING_TEST_LOCK="+how+":"+path)
	out, err := cmd.StdoutPipe()
	if err := errors.Join(err, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd
}

// stop stops a process, and returns when it is.
func stop(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	var status unix.WaitStatus
	if err := cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Wait4(cmd.Process.Pid, &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("%v, status %#x", err, status)
	}
}

func TestLockHolders(t *testing.T) {
	for _, how := range []string{"flock", "posix", "ofd"} {
		path := filepath.Join(t.TempDir(), "lock")
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := LockHolders(path, 120); len(got) != 0 {
			t.Errorf("%s: a lock that nobody holds: %v", how, got)
		}
		cmd := holder(t, how, path)
		for i, stopped := range []bool{false, true} {
			if stopped {
				stop(t, cmd)
			}
			got := LockHolders(path, 120)
			if len(got) != 1 || got[0].PID != cmd.Process.Pid || got[0].Stopped != stopped || got[0].Since.IsZero() ||
				got[0].Command != "exe" {
				t.Errorf("%s, look %d: %+v, wanted pid %d", how, i, got, cmd.Process.Pid)
			}
		}
		if got := LockHolders(path, 121); len(got) != 0 && how != "flock" {
			t.Errorf("%s: another byte: %v", how, got)
		}
	}
}

// TestUntil waits for a lock of another process: it says so, and gives up in time.
func TestUntil(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := holder(t, "flock", path)
	stop(t, cmd)
	defer func(was time.Duration) { quietTime = was }(quietTime)
	quietTime = time.Millisecond

	var notes []string
	var log strings.Builder
	ctx := WithNotes(t.Context(), func(text string) { notes = append(notes, text) })
	ctx = logs.With(ctx, slog.New(slog.NewTextHandler(&log, nil)))
	w := Wait{Op: "mount", Ref: "job", What: "the lock", Limit: 300 * time.Millisecond, Holders: func() []Process {
		return LockHolders(path, 0)
	}}
	err := w.Until(ctx, func() (bool, error) { return false, nil })
	pid := Process{PID: cmd.Process.Pid}.pid()
	if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "the lock, held by exe (pid "+pid) ||
		!strings.Contains(errs.HintOf(err), "kill -CONT "+pid) {
		t.Errorf("%v (hint %q)", err, errs.HintOf(err))
	}
	if len(notes) == 0 || !strings.Contains(notes[0], "waiting for the lock, held by exe (pid "+pid) ||
		!strings.Contains(notes[0], "stopped") {
		t.Errorf("notes %q", notes)
	}
	if strings.Count(log.String(), "level=INFO msg=\"waiting for the lock, held by exe") != len(notes) {
		t.Errorf("notes %q, logged %s", notes, log.String())
	}

	// What fails, ends or is done ends the wait.
	mine := errors.New("mine")
	if err := w.Until(ctx, func() (bool, error) { return false, mine }); !errors.Is(err, mine) {
		t.Errorf("got %v", err)
	}
	if err := w.Until(ctx, func() (bool, error) { return true, nil }); err != nil {
		t.Error(err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if err := w.Until(ended, func() (bool, error) { return false, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
