package run_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestMain is also a process that runs a program and is killed in the meantime.
func TestMain(m *testing.M) {
	if script := os.Getenv("PANDO_TEST_CHILD"); script != "" {
		_, err := run.Program(context.Background(), "sh", "-c", script)
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func sh(t *testing.T, script string) (string, error) {
	t.Helper()
	out, err := run.Program(t.Context(), "sh", "-c", script)
	return string(out), err
}

func TestLook(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for name, hint := range map[string]string{
		"git":                    "install it: `apt-get install git`",
		"pando-no-such-program":  "",
		"/pando/no/such/program": "",
	} {
		_, err := run.Look(name)
		if !errs.Is(err, errs.Unsupported) || errs.HintOf(err) != hint || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v (hint %q, want %q)", name, err, errs.HintOf(err), hint)
		}
		_, err = run.Program(t.Context(), name)
		if !errs.Is(err, errs.Unsupported) || errs.HintOf(err) != hint {
			t.Errorf("running %s: %v (hint %q, want %q)", name, err, errs.HintOf(err), hint)
		}
	}
	// What may not be run is not there.
	path := filepath.Join(dir, "git")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run.Look("git"); !errs.Is(err, errs.Unsupported) {
		t.Errorf("not executable: %v", err)
	}
	if err := os.Chmod(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if got, err := run.Look("git"); err != nil || got != path {
		t.Errorf("%q, %v", got, err)
	}
}

// The PATH of users often has no sbin.
func TestLookInSbin(t *testing.T) {
	name := ""
	for _, n := range []string{"mkfs.ext4", "losetup", "ldconfig"} {
		if _, err := os.Stat("/usr/sbin/" + n); err == nil {
			name = n
		}
	}
	if name == "" {
		t.Skip("SKIPPED: nothing known in /usr/sbin")
	}
	t.Setenv("PATH", t.TempDir())
	if got, err := run.Look(name); err != nil || got != "/usr/sbin/"+name {
		t.Errorf("%q, %v", got, err)
	}
}

func TestOutput(t *testing.T) {
	if out, err := sh(t, "echo out; echo err >&2"); err != nil || out != "out\n" {
		t.Errorf("%q, %v", out, err)
	}
	t.Setenv("LC_ALL", "tlh_KX")
	t.Setenv("PANDO_TEST_VALUE", "kept")
	if out, err := sh(t, "echo $LC_ALL $PANDO_TEST_VALUE"); err != nil || out != "C kept\n" {
		t.Errorf("environment: %q, %v", out, err)
	}
	if out, err := sh(t, "cat; echo end"); err != nil || out != "end\n" {
		t.Errorf("input: %q, %v", out, err)
	}
	// A session of its own has no terminal to ask for a password on.
	if out, err := sh(t,
		"read -r pid comm state ppid group session rest </proc/$$/stat; echo $((session - pid))"); err != nil ||
		out != "0\n" {
		t.Errorf("session: %q, %v", out, err)
	}
}

// What a program leaves running does not keep it from having ended well.
func TestBackground(t *testing.T) {
	began := time.Now()
	out, err := sh(t, "sleep 60 & echo $!")
	if err != nil || time.Since(began) > 30*time.Second {
		t.Errorf("%q, %v, after %v", out, err, time.Since(began))
	}
	if pid, err := strconv.Atoi(strings.TrimSpace(out)); err != nil || unix.Kill(pid, unix.SIGKILL) != nil {
		t.Errorf("%q is not the number of the process that it left", out)
	}
}

func TestFailure(t *testing.T) {
	out, err := sh(t, "echo partial; for i in 1 2 3 4 5 6; do echo line $i >&2; done; echo >&2; exit 7")
	if !errs.Is(err, errs.IO) || out != "partial\n" {
		t.Errorf("%q, %v", out, err)
	}
	if want := "sh: exit status 7: line 3; line 4; line 5; line 6"; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
	_, err = sh(t, "exit 7")
	if want := "sh: exit status 7"; err == nil || err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
	_, err = sh(t, "kill -TERM $$")
	if !errs.Is(err, errs.IO) || !strings.Contains(err.Error(), "terminated") {
		t.Errorf("killed by a signal: %v", err)
	}
}

func TestCannotRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	if err := testfs.WriteProgram(path, []byte("neither ELF nor a script")); err != nil {
		t.Fatal(err)
	}
	if _, err := run.Program(t.Context(), path); err == nil || !strings.Contains(err.Error(), "exec format error") {
		t.Errorf("%v", err)
	}
}

// A fifo whose writing end a program and all its children hold: reading gets
// to the end when the last of them is gone.
func fifo(t *testing.T) (path string, opened func() *bufio.Reader) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, func() *bufio.Reader {
		f, err := os.Open(path) // when somebody writes
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		if err := f.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		return bufio.NewReader(f)
	}
}

// The program has a child that does not end by itself, as git has; both hold
// the program's output.
const withChild = `exec 3>%s; sleep 1000 & echo ready >&3; wait`

func allGone(t *testing.T, r *bufio.Reader) {
	t.Helper()
	if rest, err := io.ReadAll(r); err != nil || len(rest) != 0 {
		t.Errorf("somebody is still there: %q, %v", rest, err)
	}
}

func TestCancel(t *testing.T) {
	path, opened := fifo(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := run.Program(ctx, "sh", "-c", fmt.Sprintf(withChild, path))
		done <- err
	}()
	r := opened()
	if line, err := r.ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	began := time.Now()
	cancel()
	err := <-done
	if !errs.Is(err, errs.Canceled) || !strings.Contains(err.Error(), "sh: ") {
		t.Errorf("%v", err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
	allGone(t, r)
}

func TestCanceledBefore(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), -time.Second)
	defer cancel()
	if _, err := run.Program(ctx, "sh", "-c", "exit 0"); !errs.Is(err, errs.Canceled) {
		t.Errorf("%v", err)
	}
}

// A killed Pando leaves no mkfs behind that goes on writing.
func TestDiesWithItsCaller(t *testing.T) {
	path, opened := fifo(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "PANDO_TEST_CHILD=exec 3>"+path+"; echo ready >&3; exec sleep 1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := opened()
	if line, err := r.ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	allGone(t, r)
}

// TestForegroundGroup: signals reach all processes of the group, and none is left when the command has ended.
func TestForegroundGroup(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	gone := func() {
		t.Helper()
		b, err := os.ReadFile(pid)
		if err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			state, err := os.ReadFile("/proc/" + strings.TrimSpace(string(b)) + "/stat")
			if err != nil || strings.Contains(string(state), ") Z ") {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
		t.Errorf("process %s is left", b)
	}

	exit, err := run.ForegroundGroup(exec.Command("sh", "-c", "sleep 100 & echo $! > "+pid+"; exit 4"), nil)
	if err != nil || exit != 4 {
		t.Errorf("exit status %d, %v", exit, err)
	}
	gone()
	if err := os.Remove(pid); err != nil {
		t.Fatal(err)
	}

	c := make(chan os.Signal, 1)
	c <- unix.SIGTERM
	exit, err = run.ForegroundGroup(exec.Command("sh", "-c", "sleep 100 & echo $! > "+pid+"; wait; exit 0"),
		func() (<-chan os.Signal, func()) {
			late := make(chan os.Signal, 1)
			go func() {
				for range 1000 {
					if b, err := os.ReadFile(pid); err == nil && len(b) > 0 {
						break
					}
					time.Sleep(5 * time.Millisecond)
				}
				late <- <-c
			}()
			return late, func() {}
		})
	if err != nil || exit != 128+int(unix.SIGTERM) {
		t.Errorf("exit status %d, %v", exit, err)
	}
	gone()
}
