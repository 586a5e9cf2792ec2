//go:build linux && (amd64 || arm64)

package faulttest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var victimPath string

// helperVariable makes the test binary trace a program that sleeps, for a test
// that kills the tracer. Its value is the victim, the file for its ids, and
// whether to follow processes.
const helperVariable = "FAULTTEST_HELPER"

func TestMain(m *testing.M) {
	if spec := os.Getenv(helperVariable); spec != "" {
		f := strings.Fields(spec)
		_, err := Run(context.Background(), []string{f[0], "sleep", f[1]}, Options{FollowProcesses: f[2] == "true"})
		fmt.Fprintln(os.Stderr, "helper:", err)
		os.Exit(1)
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "faulttest")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	victimPath = filepath.Join(dir, "victim")
	build := exec.Command("go", "build", "-o", victimPath, "./testdata/victim")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "building the victim: %v\n%s", err, out)
		return 1
	}
	before := openFiles()
	code := m.Run()
	if after := openFiles(); code == 0 && after > before+4 { // the runtime has some of its own
		fmt.Fprintf(os.Stderr, "%d files open, %d before the tests\n", after, before)
		code = 1
	}
	var status unix.WaitStatus
	if pid, err := unix.Wait4(-1, &status, unix.WNOHANG|unix.WALL, nil); !errors.Is(err, unix.ECHILD) {
		fmt.Fprintf(os.Stderr, "the tests left a child: wait4 returned %d, %v\n", pid, err)
		code = 1
	}
	return code
}

func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	return len(entries)
}

// victim runs the victim, and expects the tracer to work.
func victim(t testing.TB, opt Options, args ...string) Result {
	t.Helper()
	if err := Available(); err != nil {
		t.Skipf("SKIPPED, NOTHING WAS TESTED: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	res, err := Run(ctx, append([]string{victimPath}, args...), opt)
	if err != nil {
		t.Fatalf("%v: %v\n%s%s", args, err, res.Stdout, res.Stderr)
	}
	return res
}

// succeeded expects the program to have come to its end and said so.
func succeeded(t testing.TB, res Result) {
	t.Helper()
	if res.Signal != 0 || res.ExitCode != 0 || !strings.HasSuffix(string(res.Stdout), "done\n") {
		t.Errorf("exit code %d, signal %d, output %q, errors %q", res.ExitCode, res.Signal, res.Stdout, res.Stderr)
	}
}

// wasKilled expects the program to have been killed by the plan.
func wasKilled(t testing.TB, res Result) {
	t.Helper()
	if !res.Fired || res.Signal != unix.SIGKILL || res.ExitCode != -1 {
		t.Errorf("fired %v, signal %d, exit code %d; want a SIGKILL", res.Fired, res.Signal, res.ExitCode)
	}
}

func names(steps []Step) string {
	var out []string
	for _, s := range steps {
		out = append(out, s.Name)
	}
	return strings.Join(out, " ")
}

// tree returns what is under dir: the content of files, and "dir" for directories.
func tree(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		out[rel] = "dir"
		if !d.IsDir() {
			b, err := os.ReadFile(path)
			out[rel] = "file " + string(b)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// ended waits for a process that is not this one's child to end.
func ended(t testing.TB, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 60_000)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			t.Fatalf("process %d is still there after a minute (%v)", pid, err)
		}
		return
	}
}
