package freeze

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestMain can be a process that freezes a filesystem and never thaws it.
func TestMain(m *testing.M) {
	Guard(os.Args)
	if dirs := os.Getenv("FREEZE_TEST_DIR"); dirs != "" {
		var opened []*os.File
		for _, dir := range filepath.SplitList(dirs) {
			f, err := os.Open(dir)
			if err != nil {
				panic(err)
			}
			opened = append(opened, f)
		}
		limit, _ := time.ParseDuration(os.Getenv("FREEZE_TEST_LIMIT")) // else the usual one
		_, err := Do(context.Background(), opened, limit, func() error {
			os.Stdout.WriteString("frozen\n")
			if limit > 0 {
				_, err := io.ReadAll(os.Stdin) // until it is told
				return err
			}
			time.Sleep(time.Hour) // until it is killed
			return nil
		})
		if errors.Is(err, ErrBroken) {
			os.Stdout.WriteString("broken\n")
			os.Exit(0)
		}
		panic(err)
	}
	os.Exit(m.Run())
}

// do is Do with one filesystem.
func do(ctx context.Context, dir *os.File, limit time.Duration, fn func() error) error {
	_, err := Do(ctx, []*os.File{dir}, limit, fn)
	return err
}

// frozen reports whether the filesystem of dir is frozen: if not, it can be.
func frozen(t *testing.T, dir string) bool {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = kernel.Freeze(f)
	if errors.Is(err, unix.EBUSY) {
		return true
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := kernel.Thaw(f); err != nil {
		t.Fatal(err)
	}
	return false
}

func kinds(t *testing.T, fn func(t *testing.T, dir string)) {
	t.Run("ext4", func(t *testing.T) { fn(t, testfs.Ext4(t, 64<<20)) })
	t.Run("xfs", func(t *testing.T) { fn(t, testfs.XFS(t, 320<<20)) })
	t.Run("btrfs", func(t *testing.T) { fn(t, testfs.Btrfs(t, 256<<20)) })
}

func TestWritesWaitAndGoOn(t *testing.T) {
	kinds(t, func(t *testing.T, dir string) {
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		wrote := make(chan error, 1)
		err = do(context.Background(), f, 0, func() error {
			if !frozen(t, dir) {
				t.Error("it is not frozen")
			}
			go func() { wrote <- os.WriteFile(filepath.Join(dir, "late"), []byte("x"), 0o600) }()
			select {
			case err := <-wrote:
				t.Errorf("a write went through: %v", err)
			case <-time.After(100 * time.Millisecond):
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
		if frozen(t, dir) {
			t.Error("it is still frozen")
		}
	})
}

func TestErrorOfTheWorkThaws(t *testing.T) {
	dir := testfs.Ext4(t, 64<<20)
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	mine := errors.New("mine")
	if err := do(context.Background(), f, 0, func() error { return mine }); !errors.Is(err, mine) {
		t.Errorf("got %v", err)
	}
	if frozen(t, dir) {
		t.Error("it is still frozen")
	}
}

func TestFrozenBySomethingElse(t *testing.T) {
	dir := testfs.Ext4(t, 64<<20)
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := kernel.Freeze(f); err != nil {
		t.Fatal(err)
	}
	err = do(context.Background(), f, 0, func() error { t.Error("the work was done"); return nil })
	if !errs.Is(err, errs.InUse) || errs.HintOf(err) == "" {
		t.Errorf("got %v", err)
	}
	if !frozen(t, dir) {
		t.Error("it thawed what somebody else had frozen")
	}
	if err := kernel.Thaw(f); err != nil {
		t.Fatal(err)
	}
}

func TestCannotBeFrozen(t *testing.T) {
	f, err := os.Open("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := do(context.Background(), f, 0, func() error {
		return nil
	}); !errs.Is(err, errs.Unsupported) && !errs.Is(err, errs.Permission) {
		t.Errorf("got %v", err)
	}
}

// TestKilledBetweenFreezeAndThaw kills the process that has frozen a filesystem,
// with its whole process group.
func TestKilledBetweenFreezeAndThaw(t *testing.T) {
	kinds(t, func(t *testing.T, dir string) {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "FREEZE_TEST_DIR="+dir)
		cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
			t.Fatalf("%q, %v", line, err)
		}
		if !frozen(t, dir) {
			t.Error("it is not frozen")
		}
		if err := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		// This hangs for good if nobody thaws.
		if err := os.WriteFile(filepath.Join(dir, "late"), []byte("x"), 0o600); err != nil {
			t.Error(err)
		}
		for deadline := time.Now().Add(10 * time.Second); frozen(t, dir); {
			if time.Now().After(deadline) {
				t.Fatal("it stays frozen")
			}
		}
	})
}

// severalDirs makes filesystems of several kinds, and opens them.
func severalDirs(t *testing.T) (dirs []*os.File) {
	for _, dir := range []string{testfs.Ext4(t, 64<<20), testfs.XFS(t, 320<<20), testfs.Ext4(t, 64<<20)} {
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		dirs = append(dirs, f)
	}
	return dirs
}

func wantFrozen(t *testing.T, when string, dirs []*os.File, want bool) {
	t.Helper()
	for _, dir := range dirs {
		if frozen(t, dir.Name()) != want {
			t.Errorf("%s, %s: frozen is %v", when, dir.Name(), !want)
		}
	}
}

// TestSeveral freezes several filesystems at once: all of them, or none.
func TestSeveral(t *testing.T) {
	dirs := severalDirs(t)
	held, err := Do(t.Context(), dirs, 0, func() error {
		wantFrozen(t, "inside", dirs, true)
		return nil
	})
	if err != nil || held <= 0 {
		t.Errorf("held for %v, %v", held, err)
	}
	wantFrozen(t, "afterwards", dirs, false)

	// Somebody else has frozen the second.
	if err := kernel.Freeze(dirs[1]); err != nil {
		t.Fatal(err)
	}
	_, err = Do(t.Context(), dirs, 0, func() error { t.Error("the work was done"); return nil })
	var busy *FrozenError
	if !errors.As(err, &busy) || busy.Dir != dirs[1] || !errors.Is(err, ErrFrozen) {
		t.Errorf("got %v", err)
	}
	wantFrozen(t, "after a failure", []*os.File{dirs[0], dirs[2]}, false)
	wantFrozen(t, "after a failure", dirs[1:2], true)
	if err := kernel.Thaw(dirs[1]); err != nil {
		t.Fatal(err)
	}

	// Somebody thaws the last one too early.
	if _, err = Do(t.Context(), dirs, 0, func() error { return kernel.Thaw(dirs[2]) }); !errors.Is(err, ErrBroken) {
		t.Errorf("thawed too early: got %v", err)
	}
	wantFrozen(t, "thawed too early", dirs, false)

	// The guard thaws all of them.
	_, err = Do(t.Context(), dirs, 10*time.Millisecond, func() error {
		for _, dir := range dirs { // waits until it is thawed
			if err := os.WriteFile(filepath.Join(dir.Name(), "late"), []byte("x"), 0o600); err != nil {
				return err
			}
		}
		return nil
	})
	if !errors.Is(err, ErrBroken) {
		t.Errorf("thawed by the guard: got %v", err)
	}
	wantFrozen(t, "thawed by the guard", dirs, false)
}

// TestSeveralKilled kills the process that has frozen several filesystems: its guard thaws all of them.
func TestSeveralKilled(t *testing.T) {
	dirs := severalDirs(t)
	names := make([]string, len(dirs))
	for i, dir := range dirs {
		names[i] = dir.Name()
	}

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "FREEZE_TEST_DIR="+strings.Join(names, string(filepath.ListSeparator)))
	out, err := cmd.StdoutPipe()
	if err := errors.Join(err, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	wantFrozen(t, "before the kill", dirs, true)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	for _, dir := range dirs {
		// This hangs for good if nobody thaws.
		if err := os.WriteFile(filepath.Join(dir.Name(), "late"), []byte("x"), 0o600); err != nil {
			t.Error(err)
		}
	}
}

// TestBroken thaws a filesystem before the work is done: by somebody else, and by the guard when the time is over,
// even if somebody has frozen it again since then.
func TestBroken(t *testing.T) {
	testfs.NotShort(t, "it waits for guards")
	kinds(t, func(t *testing.T, dir string) {
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		// waits until it is thawed
		written := func() error { return os.WriteFile(filepath.Join(dir, "late"), []byte("x"), 0o600) }
		refrozen := func() error { return errors.Join(written(), kernel.Freeze(f)) }
		for name, c := range map[string]struct {
			limit time.Duration
			fn    func() error
		}{
			"by somebody":           {time.Hour, func() error { return kernel.Thaw(f) }},
			"by the guard":          {10 * time.Millisecond, written},
			"and frozen by another": {10 * time.Millisecond, refrozen},
		} {
			err := do(t.Context(), f, c.limit, c.fn)
			if !errors.Is(err, ErrBroken) || !errs.Is(err, errs.Conflict) || errs.HintOf(err) == "" {
				t.Errorf("thawed %s: got %v", name, err)
			}
			if frozen(t, dir) {
				t.Errorf("thawed %s: it is still frozen", name)
			}
		}
	})
}

// TestStopped stops the process that has frozen a filesystem: the guard thaws it, and the process gets to know when
// it goes on.
func TestStopped(t *testing.T) {
	dir := testfs.Ext4(t, 64<<20)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "FREEZE_TEST_DIR="+dir, "FREEZE_TEST_LIMIT=100ms")
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "frozen" {
		t.Fatalf("%q, %v", lines.Text(), lines.Err())
	}
	if err := cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// This hangs for good if nobody thaws.
	if err := os.WriteFile(filepath.Join(dir, "late"), []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	if err := errors.Join(cmd.Process.Signal(unix.SIGCONT), in.Close()); err != nil {
		t.Fatal(err)
	}
	if !lines.Scan() || lines.Text() != "broken" {
		t.Errorf("%q, %v", lines.Text(), lines.Err())
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// A program whose main function does not call Guard gets an error, and not a filesystem that is
// frozen with nobody to thaw it.
func TestWithoutGuard(t *testing.T) {
	served.Store(false)
	defer served.Store(true)
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	err = do(t.Context(), dir, 0, func() error {
		t.Error("it was frozen all the same")
		return nil
	})
	if !errs.Is(err, errs.Internal) || !strings.Contains(errs.HintOf(err), "engine.Helper(os.Args)") {
		t.Errorf("%v (hint %q)", err, errs.HintOf(err))
	}
}
