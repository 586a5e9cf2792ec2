//go:build linux && (amd64 || arm64)

package faulttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The model of "victim publish": its steps, and what each leaves.

var publishSteps = []string{"openat", "write", "pwrite64", "ftruncate", "fsync", "mkdirat", "renameat", "fsync"}

// published returns what n steps of publish leave in its directory.
func published(n int) map[string]string {
	out := make(map[string]string)
	for i := 0; n > 0; i, n = i+1, n-len(publishSteps) {
		name := strconv.Itoa(i)
		tmp := name + ".tmp"
		effects := []func(){
			func() { out[tmp] = "file " },
			func() { out[tmp] = "file hello " },
			func() { out[tmp] = "file hello world" },
			func() { out[tmp] = "file hello wo" },
			func() {},
			func() { out[name+".d"] = "dir" },
			func() { out[name] = out[tmp]; delete(out, tmp) },
			func() {},
		}
		for _, effect := range effects[:min(n, len(effects))] {
			effect()
		}
	}
	return out
}

func TestStepsAreListed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	res := victim(t, Options{}, "publish", dir, "2")
	succeeded(t, res)
	if want := strings.Join(append(publishSteps, publishSteps...), " "); names(res.Steps) != want {
		t.Errorf("steps are %v, want %v", names(res.Steps), want)
	}
	for i, s := range res.Steps {
		if s.Index != i || !s.Done || s.Err != 0 || s.PID != res.PID {
			t.Errorf("step %d is %+v", i, s)
		}
	}
	if got, want := res.Steps[14].String(), fmt.Sprintf("#14 renameat %[1]s/1.tmp -> %[1]s/1", dir); got != want {
		t.Errorf("the rename is %q, want %q", got, want)
	}
	if want := []string{dir + "/1.tmp"}; !slices.Equal(res.Steps[9].Paths, want) {
		t.Errorf("a write has paths %q, want %q", res.Steps[9].Paths, want)
	}
	if res.Fired {
		t.Error("observing fired")
	}
}

func TestKillAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{KillBefore, KillAfter} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			runs := 0
			var dir string
			last := Sweep{Plan: Plan{Mode: mode}}.Each(t, func(plan Plan) Result {
				dir = t.TempDir()
				return victim(t, Options{Plan: plan}, "publish", dir, "2")
			}, func(res Result) {
				wasKilled(t, res)
				effects := runs
				if mode == KillAfter {
					effects++
				}
				if got := tree(t, dir); !maps.Equal(got, published(effects)) {
					t.Errorf("there is %q, want %q", got, published(effects))
				}
				if res.FiredAt.Index != runs || len(res.Steps) != runs+1 || res.FiredAt.Name != publishSteps[runs%8] {
					t.Errorf("fired at %v, the last of %d steps", res.FiredAt, len(res.Steps))
				}
				if res.FiredAt.Done != (mode == KillAfter) {
					t.Errorf("done: %v", res.FiredAt.Done)
				}
				if len(res.Stdout) != 0 {
					t.Errorf("it came to say %q", res.Stdout)
				}
				runs++
			})
			succeeded(t, last)
			if runs != 16 {
				t.Errorf("%d runs were struck, want 16", runs)
			}
		})
	}
}

func TestFailAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EIO} {
		t.Run(unix.ErrnoName(errno), func(t *testing.T) {
			t.Parallel()
			runs := 0
			var dir string
			last := Sweep{Plan: Plan{Mode: Fail, Errno: errno}}.Each(t, func(plan Plan) Result {
				dir = t.TempDir()
				return victim(t, Options{Plan: plan}, "publish", dir, "2")
			}, func(res Result) {
				if res.ExitCode != 1 || !strings.Contains(string(res.Stderr), errno.Error()) {
					t.Errorf("exit code %d, errors %q; want %q", res.ExitCode, res.Stderr, errno)
				}
				if res.FiredAt.Index != runs || res.FiredAt.Err != errno || !res.FiredAt.Done {
					t.Errorf("fired at %+v", res.FiredAt)
				}
				if got := tree(t, dir); !maps.Equal(got, published(runs)) {
					t.Errorf("there is %q, want %q", got, published(runs))
				}
				runs++
			})
			succeeded(t, last)
			if runs != 16 {
				t.Errorf("%d runs were struck, want 16", runs)
			}
		})
	}
}

func TestMatchSelectsWhatCounts(t *testing.T) {
	t.Parallel()
	isRename := func(s Step) bool { return s.Name == "renameat" }
	for mode, want := range map[Mode]string{KillBefore: "1.tmp", KillAfter: "1"} {
		dir := t.TempDir()
		res := victim(t, Options{Plan: Plan{Mode: mode, At: 1, Match: isRename}}, "publish", dir, "2")
		wasKilled(t, res)
		if names(res.Steps) != "renameat renameat" {
			t.Errorf("%v: steps %v", mode, names(res.Steps))
		}
		got := tree(t, dir)
		if _, ok := got[want]; !ok || len(got) != 4 {
			t.Errorf("%v: there is %q; want %s, the first file and two directories", mode, got, want)
		}
	}
}

func TestPathPrefix(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plan := Plan{PathPrefix: []string{dir + "/1"}}
	res := victim(t, Options{Plan: plan}, "publish", dir, "2")
	succeeded(t, res)
	// All that is about 1, without the fsync of the directory.
	if want := strings.Join(publishSteps[:7], " "); names(res.Steps) != want {
		t.Errorf("steps are %v, want %v", names(res.Steps), want)
	}
}

func TestStickyFailure(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plan := Plan{Mode: Fail, Errno: syscall.ENOSPC, At: 1, Sticky: true}
	res := victim(t, Options{Plan: plan}, "parallel", dir, "4")
	var failed, worked int
	for i, s := range res.Steps {
		switch {
		case s.Err == syscall.ENOSPC:
			failed++
		case i == 0 && s.Done && s.Err == 0:
			worked++
		}
	}
	if worked != 1 || failed != len(res.Steps)-1 || failed < 4 || res.ExitCode != 1 || res.FiredAt.Index != 1 {
		t.Errorf("%d worked, %d failed of %v; fired at %v, exit code %d", worked, failed, res.Steps, res.FiredAt,
			res.ExitCode)
	}
	if got := tree(t, dir); len(got) != 1 {
		t.Errorf("there is %q, want only the first directory", got)
	}
}

func TestWhatIsNoStep(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	res := victim(t, Options{}, "notsteps", file)
	if len(res.Steps) != 0 || res.ExitCode != 0 {
		t.Errorf("steps %v, exit code %d, errors %q", res.Steps, res.ExitCode, res.Stderr)
	}
	if got := tree(t, filepath.Dir(file))["file"]; !strings.Contains(got, "to the file\n") {
		t.Errorf("the file has %q", got)
	}
	res = victim(t, Options{Locks: true}, "notsteps", file)
	if names(res.Steps) != "flock" {
		t.Errorf("with locks the steps are %v", names(res.Steps))
	}
}

func TestPathsOfUnusualCalls(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	res := victim(t, Options{Dir: dir}, "odd", dir)
	succeeded(t, res)
	var got []string
	for _, s := range res.Steps {
		if s.Err != 0 || !s.Done {
			t.Errorf("%v", s)
		}
		line := s.Name
		for _, p := range s.Paths {
			rel, err := filepath.Rel(dir, p)
			if err != nil {
				t.Fatal(err)
			}
			line += " " + rel
		}
		got = append(got, line)
	}
	want := []string{
		"openat2 openat2",
		"openat .",
		"openat openat2",
		"mkdirat sub",
		"symlinkat link",
		"linkat openat2 hard",
		"renameat2 hard harder",
		"setxattr openat2",
		"utimensat harder",
		"unlinkat sub",
		"bind socket",
	}
	if !slices.Equal(got, want) {
		t.Errorf("steps are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestIoctls(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	from, to := dir+"/from", dir+"/to"
	for _, name := range []string{from, to} {
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	res := victim(t, Options{}, "ioctls", from, to)
	var got []string
	for _, s := range res.Steps {
		got = append(got, s.Name+" "+s.Detail)
		if !slices.Equal(s.Paths, []string{to, from}) {
			t.Errorf("%v is about %q", s, s.Paths)
		}
	}
	want := []string{"ioctl FICLONE " + to + " " + from, "ioctl FICLONERANGE " + to + " " + from}
	if !slices.Equal(got, want) {
		t.Errorf("steps are %q, want %q", got, want)
	}
	res = victim(t, Options{Ioctls: map[uint32]string{2: "FIGETBSZ"}}, "ioctls", from, to)
	if len(res.Steps) != 3 || res.Steps[0].Detail != "FIGETBSZ "+to {
		t.Errorf("with another request the steps are %v", res.Steps)
	}
}

func TestStdio(t *testing.T) {
	t.Parallel()
	in := strings.Repeat("input\n", 100_000) // more than a pipe holds
	file := filepath.Join(t.TempDir(), "in")
	if err := os.WriteFile(file, []byte(in), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	env := append(os.Environ(), "VICTIM=errors")
	var stdout, stderr bytes.Buffer
	for _, opt := range []Options{
		{Env: env, Stdin: strings.NewReader(in), Stdout: &stdout},
		{Env: env, Stdin: f, Stderr: &stderr},
	} {
		res := victim(t, opt, "echo")
		if string(res.Stdout) != in+"done\n" || string(res.Stderr) != "errors\n" {
			t.Errorf("%d bytes of output, errors %q", len(res.Stdout), res.Stderr)
		}
		if len(res.Steps) != 0 {
			t.Errorf("writing output made steps: %v", res.Steps)
		}
	}
	if stdout.String() != in+"done\n" || stderr.String() != "errors\n" {
		t.Errorf("the writers got %d bytes and %q", stdout.Len(), stderr.String())
	}
	if res := victim(t, Options{Env: env}, "echo"); string(res.Stdout) != "done\n" {
		t.Errorf("without input: %q", res.Stdout)
	}
}

func TestBadRuns(t *testing.T) {
	t.Parallel()
	if err := Available(); err != nil {
		t.Skipf("SKIPPED, NOTHING WAS TESTED: %v", err)
	}
	ctx := context.Background()
	if _, err := Run(ctx, []string{"/no/such/program"}, Options{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no program: %v", err)
	}
	if _, err := Run(ctx, []string{victimPath}, Options{Dir: "/no/such/directory"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
	if _, err := Run(ctx, nil, Options{}); err == nil {
		t.Error("no command: no error")
	}
	if _, err := Run(ctx, []string{victimPath}, Options{Plan: Plan{Mode: Fail}}); err == nil {
		t.Error("Fail without an errno: no error")
	}
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Run(canceled, []string{victimPath}, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled before: %v", err)
	}
	if res := victim(t, Options{}, "nosuchverb"); res.ExitCode != 2 || res.Signal != 0 {
		t.Errorf("exit code %d, signal %d; want 2, 0", res.ExitCode, res.Signal)
	}
}

func TestCallsOfTheRuntimeAreOutOfReach(t *testing.T) {
	all := Calls()
	for _, name := range []string{"futex", "mmap", "epoll_ctl", "read", "close", "rt_sigreturn", "exit_group"} {
		if slices.Contains(all, name) {
			t.Errorf("%s is in the table", name)
		}
	}
	for i, name := range all {
		if i > 0 && all[i-1] == name {
			t.Errorf("%s is in the table twice", name)
		}
	}
	if len(all) < 60 {
		t.Errorf("only %d calls: %v", len(all), all)
	}
}

func TestMatchThatExits(t *testing.T) {
	t.Parallel()
	if err := Available(); err != nil {
		t.Skipf("SKIPPED, NOTHING WAS TESTED: %v", err)
	}
	opt := Options{Plan: Plan{Match: func(Step) bool { runtime.Goexit(); return false }}}
	res, err := Run(context.Background(), []string{victimPath, "publish", t.TempDir(), "1"}, opt)
	if err == nil {
		t.Error("no error")
	}
	if err := unix.Kill(res.PID, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the program is still there: %v", err)
	}
}

// A context that ends kills the program and what it started.
func TestContextEnds(t *testing.T) {
	t.Parallel()
	if err := Available(); err != nil {
		t.Skipf("SKIPPED, NOTHING WAS TESTED: %v", err)
	}
	for _, follow := range []bool{false, true} {
		file := filepath.Join(t.TempDir(), "ids")
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var pids []int
		match := func(s Step) bool {
			if strings.HasPrefix(s.Name, "rename") {
				pids = readIDs(t, file+".tmp")
				cancel()
			}
			return true
		}
		opt := Options{Plan: Plan{Match: match}, FollowProcesses: follow}
		res, err := Run(ctx, []string{victimPath, "sleep", file}, opt)
		if !errors.Is(err, context.Canceled) || res.Signal != unix.SIGKILL {
			t.Errorf("error %v, signal %d", err, res.Signal)
		}
		if len(pids) != 2 || pids[0] != res.PID || !slices.Equal(pids[1:], res.Spawned) {
			t.Fatalf("the processes are %v, of which %v were seen", pids, res.Spawned)
		}
		ended(t, pids[1])
	}
}

func readIDs(t *testing.T, file string) []int {
	b, err := os.ReadFile(file)
	if err != nil {
		t.Error(err)
	}
	var ids []int
	for _, s := range strings.Fields(string(b)) {
		id, err := strconv.Atoi(s)
		if err != nil {
			t.Error(err)
		}
		ids = append(ids, id)
	}
	return ids
}

// When the test itself is killed, nothing traced survives.
func TestTracerDies(t *testing.T) {
	t.Parallel()
	if err := Available(); err != nil {
		t.Skipf("SKIPPED, NOTHING WAS TESTED: %v", err)
	}
	for _, follow := range []bool{false, true} {
		dir := t.TempDir()
		fifo := dir + "/ids.tmp" // the victim writes its ids there: reading waits for them
		if err := unix.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
		helper := exec.Command("/proc/self/exe")
		helper.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s/ids %v", helperVariable, victimPath, dir, follow))
		if err := helper.Start(); err != nil {
			t.Fatal(err)
		}
		pids := readIDs(t, fifo)
		if err := helper.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := helper.Wait(); err == nil {
			t.Error("the helper was not killed")
		}
		if len(pids) != 2 {
			t.Fatalf("the processes are %v", pids)
		}
		ended(t, pids[0])
		if !follow { // then the child was not traced, and is nobody's
			if err := unix.Kill(pids[1], unix.SIGKILL); err != nil {
				t.Errorf("the child that was not traced is gone: %v", err)
			}
		}
		ended(t, pids[1])
	}
}

func TestPlanString(t *testing.T) {
	for want, p := range map[string]Plan{
		"observe":               {},
		"kill-before@3":         {Mode: KillBefore, At: 3},
		"fail@4 ENOSPC":         {Mode: Fail, At: 4, Errno: syscall.ENOSPC},
		"fail@0 EIO sticky":     {Mode: Fail, Errno: syscall.EIO, Sticky: true},
		"kill-after@1234567890": {Mode: KillAfter, At: 1234567890},
	} {
		if got := p.String(); !reflect.DeepEqual(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
