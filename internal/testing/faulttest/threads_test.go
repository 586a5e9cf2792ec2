//go:build linux && (amd64 || arm64)

package faulttest

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Many threads, garbage collections, preemption signals, threads that come
// and go: the program must not notice that it is traced.
func TestManyThreads(t *testing.T) {
	t.Parallel()
	runs := 5
	if testing.Short() {
		runs = 1
	}
	const files, rounds = 16, 40
	for _, all := range []bool{true, false} {
		for range runs {
			res := victim(t, Options{AllCPUs: all}, "storm", t.TempDir(), strconv.Itoa(files), strconv.Itoa(rounds))
			succeeded(t, res)
			if len(res.Steps) != files*(rounds+1) {
				t.Errorf("%d steps, want %d", len(res.Steps), files*(rounds+1))
			}
			tids := make(map[int]bool)
			for i, s := range res.Steps {
				tids[s.TID] = true
				if s.Index != i || !s.Done || s.Err != 0 {
					t.Errorf("step %d is %+v", i, s)
				}
			}
			if len(tids) < 2 {
				t.Errorf("all steps on one thread: nothing was tested")
			}
		}
	}
}

// Of a program with several threads a kill leaves, for each of them, what its
// finished steps made, and at most what one more makes.
func TestKillManyThreads(t *testing.T) {
	t.Parallel()
	const workers = 4
	stride := 1
	if testing.Short() {
		stride = 7
	}
	for _, mode := range []Mode{KillBefore, KillAfter} {
		for _, all := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v,allcpus=%v", mode, all), func(t *testing.T) {
				t.Parallel()
				var dir string
				last := Sweep{Plan: Plan{Mode: mode}, Stride: stride}.Each(t, func(plan Plan) Result {
					dir = t.TempDir()
					return victim(t, Options{Plan: plan, AllCPUs: all}, "parallel", dir, strconv.Itoa(workers))
				}, func(res Result) {
					wasKilled(t, res)
					for i := range workers {
						checkWorker(t, filepath.Join(dir, "dir"+strconv.Itoa(i)), res, mode)
					}
				})
				succeeded(t, last)
				if want := workers * (1 + 3*len(publishSteps)); len(last.Steps) != want {
					t.Errorf("%d steps, want %d", len(last.Steps), want)
				}
			})
		}
	}
}

// checkWorker checks the directory of one goroutine of "parallel".
func checkWorker(t *testing.T, dir string, res Result, mode Mode) {
	t.Helper()
	done, begun := 0, 0
	for _, s := range res.Steps {
		if !strings.HasPrefix(s.Paths[0], dir) {
			continue
		}
		if s.Done {
			done++
		}
		if s.Index != res.FiredAt.Index || mode == KillAfter {
			begun++
		}
	}
	var got map[string]string
	if _, err := os.Stat(dir); err == nil {
		got = tree(t, dir)
	}
	for n := done; n <= begun; n++ {
		if n == 0 && got == nil || n > 0 && got != nil && maps.Equal(got, published(n-1)) {
			return
		}
	}
	t.Errorf("%s: %d steps done, %d begun, and there is %q", dir, done, begun, got)
}

// Several tracers at once, while os/exec waits for children of its own.
func TestTracersInParallel(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 10 {
				if err := exec.Command(victimPath, "getpid", "1").Run(); err != nil {
					t.Errorf("a child that is not traced: %v", err)
				}
			}
		})
	}
	for i := range 4 {
		dir := t.TempDir()
		wg.Go(func() {
			for at := range 8 {
				plan := Plan{Mode: KillAfter, At: at + i*8}
				sub := filepath.Join(dir, strconv.Itoa(at))
				if err := os.Mkdir(sub, 0o700); err != nil {
					t.Error(err)
				}
				res := victim(t, Options{Plan: plan}, "publish", sub, "4")
				wasKilled(t, res)
				if got, want := tree(t, sub), published(plan.At+1); !maps.Equal(got, want) {
					t.Errorf("%v: there is %q, want %q", plan, got, want)
				}
			}
		})
	}
	wg.Wait()
}

func TestChildrenAreNotTraced(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	res := victim(t, Options{}, "spawn", file)
	succeeded(t, res)
	if len(res.Steps) != 1 || len(res.Spawned) != 1 || !strings.HasPrefix(res.Steps[0].Name, "clone") {
		t.Fatalf("steps %v, spawned %v; want one clone", res.Steps, res.Spawned)
	}
	if got := tree(t, filepath.Dir(file))["file"]; got != "file traced by 0\n" {
		t.Errorf("the child says %q", got)
	}
	res = victim(t, Options{}, "silent", file)
	succeeded(t, res)
	if names(res.Steps) != "clone" || len(res.Spawned) != 1 {
		t.Errorf("without SIGCHLD: steps %v, spawned %v; want one clone", res.Steps, res.Spawned)
	}
	if got := tree(t, filepath.Dir(file))["file"]; got != "file traced by 0\n" {
		t.Errorf("the child without SIGCHLD says %q", got)
	}
}

func TestSpawnSaysWhat(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	res := victim(t, Options{}, "spawn", file)
	if len(res.Steps) != 1 {
		t.Fatalf("steps %v; want one clone", res.Steps)
	}
	// The name alone, if the child has ended when it is looked at.
	if got := res.Steps[0].Detail; !strings.Contains(got, "child "+file) && got != "victim" && got != "exe" {
		t.Errorf("the step does not say what was started: %q", got)
	}
}

func TestKillAtSpawn(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode  Mode
		group bool
		lives bool
	}{
		{KillBefore, false, false},
		{KillAfter, true, false},
		{KillAfter, false, true},
	} {
		dir := t.TempDir()
		file := dir + "/file"
		if err := unix.Mkfifo(file+".fifo", 0o600); err != nil {
			t.Fatal(err)
		}
		// Holds both ends open, so that the child's opening does not wait.
		fifo, err := os.OpenFile(file+".fifo", os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer fifo.Close()
		res := victim(t, Options{Plan: Plan{Mode: c.mode}, KillGroup: c.group}, "spawn", file, "wait")
		wasKilled(t, res)
		if want := c.mode == KillAfter; (len(res.Spawned) == 1) != want {
			t.Fatalf("%+v: spawned %v", c, res.Spawned)
		}
		for _, pid := range res.Spawned {
			if c.lives {
				if err := unix.Kill(pid, 0); err != nil {
					t.Errorf("%+v: the child did not survive: %v", c, err)
				}
				if _, err := fifo.WriteString("x"); err != nil {
					t.Fatal(err)
				}
			}
			ended(t, pid)
		}
		content, err := os.ReadFile(file)
		if (err == nil) != c.lives || c.lives && string(content) != "traced by 0\n" {
			t.Errorf("%+v: the child wrote %q, %v", c, content, err)
		}
	}
}

func TestFollowProcesses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	res := victim(t, Options{FollowProcesses: true}, "spawn", dir+"/file")
	succeeded(t, res)
	// The clone, the execve in the child, and what it writes.
	const want = "execve openat write write write"
	if got := names(res.Steps); !strings.HasPrefix(got, "clone") || !strings.HasSuffix(got, want) || len(res.Steps) != 6 {
		t.Errorf("steps are %v, want clone %v", got, want)
	}
	if got := tree(t, dir)["file"]; !strings.HasPrefix(got, "file traced by ") || strings.HasSuffix(got, " 0\n") {
		t.Errorf("the child says %q", got)
	}
	for mode, want := range map[Mode]string{KillBefore: "", KillAfter: "traced by "} {
		file := filepath.Join(t.TempDir(), "file")
		plan := Plan{Mode: mode, Match: func(s Step) bool { return s.Name == "write" }}
		res := victim(t, Options{FollowProcesses: true, Plan: plan}, "spawn", file)
		wasKilled(t, res)
		if res.FiredAt.PID == res.PID || len(res.Steps) != 1 {
			t.Errorf("fired at %v in %d, steps %v", res.FiredAt, res.FiredAt.PID, res.Steps)
		}
		ended(t, res.FiredAt.PID)
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%v: the child wrote %q, %v; want %q", mode, got, err, want)
		}
	}
}

// A call that a signal interrupts and the kernel repeats is one step, and it
// takes effect when the repetition does.
func TestInterruptedCall(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, all := range []bool{true, false} {
		opt := Options{Locks: true, AllCPUs: all}
		res := victim(t, opt, "lock", file)
		succeeded(t, res)
		if names(res.Steps) != "flock flock flock" {
			t.Errorf("steps are %v, want three", res.Steps)
		}
		opt.Plan = Plan{Mode: KillAfter, At: 1}
		res = victim(t, opt, "lock", file)
		wasKilled(t, res)
		if len(res.Steps) != 3 || res.FiredAt.Index != 1 || !res.FiredAt.Done {
			t.Errorf("killed at %+v of %v; want the second, after the lock was given up", res.FiredAt, res.Steps)
		}
		opt.Plan = Plan{Mode: Fail, Errno: unix.EIO, At: 1}
		res = victim(t, opt, "lock", file)
		if res.ExitCode != 1 || !strings.Contains(string(res.Stderr), unix.EIO.Error()) {
			t.Errorf("exit code %d, errors %q", res.ExitCode, res.Stderr)
		}
	}
}

// A call that a signal interrupts for good ends where nobody sees it.
func TestInterruptedForGood(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := dir + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	res := victim(t, Options{Locks: true}, "eintr", file, dir+"/observed")
	succeeded(t, res)
	if got := names(res.Steps); !strings.HasPrefix(got, "flock flock mkdir") || len(res.Steps) != 3 {
		t.Errorf("steps are %v", got)
	}
	res = victim(t, Options{Locks: true, Plan: Plan{Mode: KillAfter, At: 1}}, "eintr", file, dir+"/killed")
	wasKilled(t, res)
	if res.FiredAt.Index != 1 {
		t.Errorf("fired at %v", res.FiredAt)
	}
	if _, err := os.Stat(dir + "/killed"); !os.IsNotExist(err) {
		t.Errorf("the next step had effect: %v", err)
	}
}

// A program that ends while the step is under way was struck all the same: a
// sweep must not take it for the end.
func TestProgramEndsWithinTheStep(t *testing.T) {
	t.Parallel()
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	res := victim(t, Options{Plan: Plan{Mode: KillAfter}}, "exitrace", fifo)
	succeeded(t, res)
	if !res.Fired || res.FiredAt.Done || res.FiredAt.Name != "openat" {
		t.Errorf("fired %v at %+v", res.Fired, res.FiredAt)
	}
}

// A thread other than the first that calls execve takes over its id.
func TestExecFromAnotherThread(t *testing.T) {
	t.Parallel()
	want := "execve openat write write write"
	dir := t.TempDir()
	res := victim(t, Options{}, "become", dir+"/file")
	succeeded(t, res)
	if names(res.Steps) != want {
		t.Errorf("steps are %v, want %v", names(res.Steps), want)
	}
	for i, s := range res.Steps {
		if !s.Done || s.Err != 0 || (s.TID == res.PID) == (i == 0) && i == 0 {
			t.Errorf("step %+v", s)
		}
	}
	for mode, n := range map[Mode]int{KillBefore: 0, KillAfter: 1} {
		res := victim(t, Options{Plan: Plan{Mode: mode}}, "become", dir+"/"+mode.String())
		wasKilled(t, res)
		if res.FiredAt.Name != "execve" || len(res.Steps) != 1 || res.FiredAt.Done != (n == 1) {
			t.Errorf("%v: fired at %+v of %v", mode, res.FiredAt, res.Steps)
		}
		if got := tree(t, dir); len(got) != 1 {
			t.Errorf("%v: there is %q", mode, got)
		}
	}
	res = victim(t, Options{Plan: Plan{Mode: Fail, Errno: unix.ENOMEM}}, "become", dir+"/failed")
	if res.ExitCode != 1 || !strings.Contains(string(res.Stderr), unix.ENOMEM.Error()) {
		t.Errorf("exit code %d, errors %q", res.ExitCode, res.Stderr)
	}
}

func TestGroupStop(t *testing.T) {
	t.Parallel()
	res := victim(t, Options{}, "stopself")
	succeeded(t, res)
	if !strings.HasPrefix(string(res.Stdout), "stopped: true\n") {
		t.Errorf("it says %q", res.Stdout)
	}
}

// The program sees the CPUs that it would have had.
func TestCPUsArePretended(t *testing.T) {
	t.Parallel()
	for _, all := range []bool{true, false} {
		res := victim(t, Options{AllCPUs: all}, "numcpu")
		if got, want := string(res.Stdout), fmt.Sprintf("%d ", runtime.NumCPU()); !strings.HasPrefix(got, want) {
			t.Errorf("all CPUs %v: it sees %q, want %q", all, got, want)
		}
	}
}
