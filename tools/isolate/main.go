//go:build linux

// Isolate runs a test binary in namespaces of its own. It is for `go test -exec`:
//
//	go test -exec bin/isolate ./...
//
// As root it gives the binary
//
//   - a mount namespace, so that tests of packages that run at the same time neither see nor hold each other's mounts;
//   - a PID namespace, so that they do not find each other's processes;
//   - a network namespace with a loopback device, so that a port that one test found closed stays closed;
//   - a TMPDIR on an ext4 in memory, so that tests do not wait for the disk;
//   - no settings of git, which are those of whoever runs the tests.
//
// Packages that measure the host keep its PIDs ([hostPIDs]) or its disk ([hostDisk]).
//
// When the binary has ended, isolate looks inside: a mount, a loop device, a process or a file in TMPDIR that is
// still there fails the package. Then the namespaces end, and with them everything that is left. If it is killed, or
// who has started it is, a process outside cleans up ([reaper]).
//
// Without root the binary runs as it is. Environment variables:
//
//	PANDO_TEST_SCRATCH  "memory" (default, if there is enough of it) or "disk": where TMPDIR is
//	PANDO_TEST_USAGE    a file that gets one line of JSON for each package: see [usage]
//	PANDO_TEST_DEADLINE when all tests must have ended, in seconds since 1970: the binary gets the time that is left
//	PANDO_TEST_RUNNING  a directory with a file for each package that runs, named like the process to send SIGQUIT to
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// insideVariable tells the second stage, process 1 of the new namespaces, which directory is its own.
const insideVariable = "PANDO_TEST_INSIDE"

const (
	runningVariable  = "PANDO_TEST_RUNNING"
	deadlineVariable = "PANDO_TEST_DEADLINE"
)

var (
	// hostPIDs are packages that compare PIDs with those in events of the kernel, which are the host's, or that ask for
	// all mount namespaces, which the kernel lists only to the host's processes.
	hostPIDs = []string{"cmd/pando", "internal/linux/mount", "internal/observe/diagnose", "internal/observe/doctor",
		"internal/observe/iostat", "internal/observe/proof", "internal/observe/syncbench"}

	// hostDisk are packages whose tests are about a disk.
	hostDisk = []string{"internal/observe/diagnose", "internal/observe/doctor", "internal/observe/iostat",
		"internal/observe/proof", "internal/observe/syncbench"}
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: go test -exec bin/isolate PACKAGE...")
		os.Exit(2)
	}

	// The death signal of a child belongs to the thread that started it.
	runtime.LockOSThread()

	var status int
	var err error
	switch dir, first := os.Getenv(insideVariable), os.Getenv(reapVariable); {
	case first != "":
		err = reap(dir, first)
	case dir != "":
		status, err = inside(dir)
	case os.Geteuid() == 0:
		status, err = outside()
	default:
		err = syscall.Exec(os.Args[1], os.Args[1:], os.Environ())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "isolate:", err)
		os.Exit(1)
	}

	os.Exit(status)
}

// outside makes the directory of the package, starts the second stage in new namespaces, and measures it.
func outside() (status int, err error) {
	signals := notify() // before there is anything that a signal would leave behind
	dir, err := makeDir()
	if err != nil {
		return 0, err
	}

	defer func() { err = errors.Join(err, os.RemoveAll(dir), os.RemoveAll(memoryOf(dir))) }()

	// These are about this process: another one that the tests start has other PIDs.
	running, deadline := os.Getenv(runningVariable), os.Getenv(deadlineVariable)
	if err := errors.Join(os.Unsetenv(runningVariable), os.Unsetenv(deadlineVariable)); err != nil {
		return 0, err
	}

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), insideVariable+"="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET,
		Pdeathsig:  syscall.SIGKILL,
	}
	name, err := packageName()
	if err != nil {
		return 0, err
	}
	if slices.Contains(hostPIDs, name) {
		cmd.SysProcAttr.Cloneflags &^= unix.CLONE_NEWPID
	}

	if slices.Contains(hostDisk, name) {
		cmd.Env = append(cmd.Env, "PANDO_TEST_SCRATCH=disk")
		unlock, err := lockDisk()
		if err != nil {
			return 0, err
		}
		defer unlock()

		// scripts/test.sh runs all at a low priority. What is measured here gets a processor when it wants one.
		if err := unix.Setpriority(unix.PRIO_PROCESS, 0, 0); err != nil {
			return 0, err
		}
	}

	gone, err := announce(running)
	if err != nil {
		return 0, err
	}
	defer gone()

	args, err := withDeadline(os.Args[1:], deadline, time.Now())
	if err != nil {
		return 0, err
	}
	cmd.Args = append(cmd.Args, args...)

	start := time.Now()
	reaper, err := startWithReaper(cmd, dir)
	if err != nil {
		return 0, err
	}

	go passOn(signals, cmd.Process.Pid)
	if err := endWithParent(cmd.Process); err != nil {
		return 0, err
	}

	var exit *exec.ExitError
	err = cmd.Wait()
	well := err == nil || errors.As(err, &exit) && exit.ExitCode() >= 0 && exit.ExitCode() < 128
	if rerr := reaper.end(well); rerr != nil {
		return 0, fmt.Errorf("cleaning up: %w", rerr)
	}

	if err != nil && !errors.As(err, &exit) {
		return 0, err
	}

	if err := record(name, cmd.ProcessState, time.Since(start)); err != nil {
		return 0, err
	}

	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}

	return cmd.ProcessState.ExitCode(), nil
}

// lockDisk waits until no other package measures the disk: they would measure each other. What is locked is this
// program, which all packages of a run share.
func lockDisk() (unlock func(), err error) {
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// margin is what is left of a run after the last test: for its report, and for cleaning up.
const margin = time.Minute

// withDeadline shortens the time limit of a test binary to what is left until the deadline, so that Go itself says what
// was running, with stacks. Without a deadline the arguments are as they were.
func withDeadline(args []string, deadline string, now time.Time) ([]string, error) {
	if deadline == "" {
		return args, nil
	}
	seconds, err := strconv.ParseInt(deadline, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", deadlineVariable, err)
	}
	left := max(time.Unix(seconds, 0).Sub(now)-margin, time.Second)

	const flag = "-test.timeout="
	args = slices.Clone(args)
	i := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, flag) })
	if i < 0 {
		return append(args, flag+left.String()), nil
	}
	limit, err := time.ParseDuration(strings.TrimPrefix(args[i], flag))
	if err != nil {
		return nil, err
	}
	if limit == 0 || limit > left { // 0: none
		args[i] = flag + left.String()
	}
	return args, nil
}

// announce names this process in the directory of those that run. gone takes the name away.
func announce(dir string) (gone func(), err error) {
	if dir == "" {
		return func() {}, nil
	}
	path := filepath.Join(dir, strconv.Itoa(os.Getpid()))
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return nil, err
	}
	return func() { os.Remove(path) }, nil
}

// makeDir makes the package's directory. It has a short name: programs wrap lines at long paths, and sockets do not
// take them.
func makeDir() (string, error) {
	name := fmt.Sprintf("pando-%d", os.Getpid())
	dir := filepath.Join(os.TempDir(), name)
	err := os.Mkdir(dir, 0o777)
	if errors.Is(err, os.ErrExist) { // of a killed run, whose process had this number
		return os.MkdirTemp("", name+"-")
	}
	return dir, err
}

// endWithParent kills the process, and with it all in its namespaces, when the parent of this one is gone: go test does
// not tell it.
func endWithParent(p *os.Process) error {
	parent := os.Getppid()
	gone := make(chan os.Signal, 1)
	signal.Notify(gone, syscall.SIGUSR1)
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGUSR1), 0, 0, 0); err != nil {
		return err
	}

	go func() {
		for range gone { // it also comes when only a thread of the parent has ended
			if os.Getppid() != parent {
				_ = p.Kill() // it may have ended
			}
		}
	}()

	return nil
}

// ending are the signals that end a run.
var ending = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM}

// notify catches what ends a test run: SIGQUIT comes from go test when the time of a package is up, and makes
// the binary say where it hangs.
func notify() chan os.Signal {
	c := make(chan os.Signal, 8)
	signal.Notify(c, append(slices.Clone(ending), syscall.SIGQUIT)...)
	return c
}

func passOn(signals <-chan os.Signal, pid int) {
	for s := range signals {
		_ = syscall.Kill(pid, s.(syscall.Signal)) // it may have ended
	}
}

// usage is what a package cost, with all processes that it started and waited for.
type usage struct {
	Package       string  // its directory below the module's
	WallSeconds   float64 // from start to end
	UserSeconds   float64 // of processors, in programs
	SystemSeconds float64 // of processors, in the kernel on behalf of these programs
	WrittenBytes  int64   // handed to block devices, also to those in memory
}

// record appends a line to the file of usages. One write, so that packages that end together do not mix.
func record(name string, state *os.ProcessState, wall time.Duration) error {
	path := os.Getenv("PANDO_TEST_USAGE")
	if path == "" {
		return nil
	}

	rusage := state.SysUsage().(*syscall.Rusage)
	line, err := json.Marshal(usage{
		Package:       name,
		WallSeconds:   wall.Seconds(),
		UserSeconds:   state.UserTime().Seconds(),
		SystemSeconds: state.SystemTime().Seconds(),
		WrittenBytes:  rusage.Oublock * 512,
	})
	if err != nil {
		return err
	}

	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}

	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

// packageName returns the directory of the package, in which go test starts the binary, relative to its module's.
func packageName() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for top := dir; top != "/"; top = filepath.Dir(top) {
		if _, err := os.Stat(filepath.Join(top, "go.mod")); err == nil {
			return strings.TrimPrefix(strings.TrimPrefix(dir, top), "/"), nil
		}
	}
	return dir, nil
}
