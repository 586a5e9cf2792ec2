package mount_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// swapped makes a directory dir with a file "which" that says old, and beside
// it one with a mounted tree whose file says new.
func swapped(t *testing.T, top string) (dir, beside string) {
	t.Helper()
	tree, dir, beside := filepath.Join(top, "tree"), filepath.Join(top, "dir"), filepath.Join(top, "beside")
	for d, which := range map[string]string{tree: "new", dir: "old", beside: ""} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if which == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(d, "which"), []byte(which), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir, beside
}

func putTree(t *testing.T, top, at string) {
	t.Helper()
	m, err := mount.Tree(filepath.Join(top, "tree"), false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(at); err != nil {
		t.Fatal(err)
	}
}

func which(t *testing.T, dir string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "which"))
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

// swapPaths is mount.Swap by paths.
func swapPaths(dir, beside string) error {
	parent, err := mount.OpenDir(filepath.Dir(dir))
	if err != nil {
		return err
	}
	defer parent.Close()
	return mount.Swap(parent, filepath.Base(dir), filepath.Base(beside))
}

// TestSwapLeavesNoGap reads a file of the directory all the time while the
// directory is exchanged with a mount, many times: it is always there, and
// either the old one or the new one.
func TestSwapLeavesNoGap(t *testing.T) {
	needRoot(t)
	top := t.TempDir()
	dir, beside := swapped(t, top)
	var stop atomic.Bool
	var reads, bad [2]int64
	done := make(chan struct{})
	for i := range 2 {
		go func() {
			defer func() { done <- struct{}{} }()
			for !stop.Load() {
				reads[i]++
				b, err := os.ReadFile(filepath.Join(dir, "which"))
				if s := string(b); err != nil || s != "old" && s != "new" {
					if bad[i]++; bad[i] < 5 {
						t.Errorf("read %q, %v", s, err)
					}
				}
				var st unix.Stat_t
				if err := unix.Lstat(dir, &st); err != nil {
					t.Errorf("lstat: %v", err)
				}
			}
		}()
	}
	t.Cleanup(func() { stop.Store(true) })
	for range 300 {
		putTree(t, top, beside)
		if err := swapPaths(dir, beside); err != nil {
			t.Fatal(err)
		}
		if a, b := which(t, dir), which(t, beside); a != "new" || b != "old" {
			t.Fatalf("%s and %s after the exchange", a, b)
		}
		// And back: what is mounted at dir moves to beside.
		if err := swapPaths(beside, dir); err != nil {
			t.Fatal(err)
		}
		if a, b := which(t, dir), which(t, beside); a != "old" || b != "new" {
			t.Fatalf("%s and %s after the exchange back", a, b)
		}
		// The readers have it open.
		if err := unix.Unmount(beside, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
	stop.Store(true)
	<-done
	<-done
	t.Logf("%d reads, %d of them wrong", reads[0]+reads[1], bad[0]+bad[1])
}

func unmount(t *testing.T, at string) {
	t.Helper()
	if err := mount.Unmount(at); err != nil {
		t.Fatal(err)
	}
}

// TestSwapStaysInItsThread: the namespace of this process is not changed, not
// even if it is the first thread that swaps.
func TestSwapStaysInItsThread(t *testing.T) {
	needRoot(t)
	top := t.TempDir()
	dir, beside := swapped(t, top)
	before, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		putTree(t, top, beside)
		if err := swapPaths(dir, beside); err != nil {
			t.Fatal(err)
		}
		if err := swapPaths(beside, dir); err != nil {
			t.Fatal(err)
		}
		unmount(t, beside)
		for _, p := range []string{"/proc/self/ns/mnt", "/proc/thread-self/ns/mnt"} {
			if now, err := os.Readlink(p); err != nil || now != before {
				t.Fatalf("%s is %s, was %s (%v)", p, now, before, err)
			}
		}
	}
}

func TestSwapErrors(t *testing.T) {
	needRoot(t)
	top := t.TempDir()
	dir, beside := swapped(t, top)
	if err := swapPaths(dir, beside); err == nil {
		t.Error("nothing is mounted beside, and it was exchanged")
	}
	putTree(t, top, beside)
	defer unmount(t, beside)
	wantKind(t, swapPaths(filepath.Join(top, "missing"), beside), errs.NotFound)
	if which(t, dir) != "old" || which(t, beside) != "new" {
		t.Error("something was exchanged")
	}
}

// shell runs a shell command that prints a line when it is ready, and returns
// its PID; it ends with the test.
func shell(t *testing.T, name string, args ...string) int {
	t.Helper()
	cmd := exec.Command(name, args...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

func pids(hs []mount.Holder) (out []int) {
	for _, h := range hs {
		out = append(out, h.PID)
	}
	return out
}

func TestTreeUsers(t *testing.T) {
	needRoot(t)
	top := t.TempDir()
	dir, _ := swapped(t, top)
	users := func(writing bool) []mount.Holder {
		t.Helper()
		hs, err := mount.TreeUsers(t.Context(), dir, writing)
		if err != nil && !errs.Is(err, errs.Permission) { // containers often have processes of others
			t.Fatal(err)
		}
		return hs
	}
	if hs := users(false); len(hs) > 0 {
		t.Fatalf("of nobody: %v", hs)
	}
	// A neighbour with the same beginning of its name is none of them.
	if err := os.Mkdir(dir+"2", 0o755); err != nil {
		t.Fatal(err)
	}
	shell(t, "sh", "-c", `cd "$0" && echo && read x`, dir+"2")
	if hs := users(false); len(hs) > 0 {
		t.Errorf("of a neighbour: %v", hs)
	}
	cwd := shell(t, "sh", "-c", `cd "$0" && echo && read x`, dir)
	reader := shell(t, "sh", "-c", `exec 7<"$0" && echo && read x`, filepath.Join(dir, "which"))
	writer := shell(t, "sh", "-c", `exec 7>>"$0" && echo && read x`, filepath.Join(dir, "which"))
	hs := users(false)
	for pid, how := range map[int]string{cwd: "cwd", reader: "fd 7 " + dir + "/which", writer: "fd 7 " + dir + "/which"} {
		i := slices.Index(pids(hs), pid)
		if i < 0 || hs[i].How[0] != how || hs[i].Command == "" {
			t.Errorf("pid %d with %s is not in %v", pid, how, hs)
		}
	}
	if hs := users(true); !slices.Equal(pids(hs), []int{writer}) {
		t.Errorf("who writes: %v, wanted %d", hs, writer)
	}
}

// TestBlind: another mount namespace that does not take over mounts sees the
// directory but would see an empty one; one that does, sees the mount.
func TestBlind(t *testing.T) {
	needRoot(t)
	top := t.TempDir()
	if err := errors.Join(unix.Mount(top, top, "", unix.MS_BIND, ""),
		unix.Mount("", top, "", unix.MS_SHARED, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmount(t, top) })
	dir, beside := swapped(t, top)
	blind := shell(t, "unshare", "-m", "--propagation", "private", "sh", "-c", "echo; read x")
	slave := shell(t, "unshare", "-m", "--propagation", "slave", "sh", "-c", "echo; read x")
	putTree(t, top, beside)
	defer unmount(t, beside)
	hs, err := mount.Blind(t.Context(), dir, beside)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(pids(hs), blind) || slices.Contains(pids(hs), slave) {
		t.Errorf("found %v, wanted pid %d and not %d", hs, blind, slave)
	}
	if i := slices.Index(pids(hs), blind); i >= 0 && !strings.Contains(mount.FormatHolders(hs[i:i+1]), dir) {
		t.Errorf("does not say where: %s", mount.FormatHolders(hs))
	}
}
