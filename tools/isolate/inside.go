//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"pando/internal/testing/testfs"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// inside is the first process of the namespaces: it makes them habitable, runs the binary, and looks for what is left.
func inside(dir string) (status int, err error) {
	if err := errors.Join(os.Unsetenv(insideVariable), waitForReaper()); err != nil {
		return 0, err
	}

	// Nothing that happens here reaches the host, and nothing of the host comes in later.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return 0, fmt.Errorf("making mounts private: %w", err)
	}

	if err := detachOthers(dir); err != nil {
		return 0, err
	}

	if os.Getpid() == 1 {
		if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return 0, fmt.Errorf("mounting /proc: %w", err)
		}
	}

	// Orphans come to this process, as they do anyway if it is process 1.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, err
	}

	if err := loopbackUp(); err != nil {
		return 0, err
	}

	if err := makeScratch(dir); err != nil {
		return 0, err
	}

	// Tests do not change the settings of whoever runs them, and do not depend on them.
	if err := os.Setenv("GIT_CONFIG_GLOBAL", os.DevNull); err != nil {
		return 0, err
	}

	before, err := mounts()
	if err != nil {
		return 0, err
	}

	status, interrupted, err := runBinary()
	if err != nil {
		return 0, err
	}
	if interrupted { // what is left is no leak then, and the reaper's
		return status, nil
	}

	left := leftBehind(dir, before)
	for _, l := range left {
		fmt.Printf("LEAK: %s\n", l)
	}

	if len(left) > 0 && status == 0 {
		status = 1
	}

	return status, nil
}

// detachOthers takes mounts that the tests do not need out of the namespace: this copy would keep them busy for
// whoever unmounts them on the host.
func detachOthers(dir string) error {
	needed := []string{dir, os.Args[1], "/usr", "/etc", "/run", "/dev", "/proc", "/sys"}
	for _, name := range []string{"HOME", "GOROOT", "GOCACHE", "GOMODCACHE", "PWD", "PANDO_TEST_BINARY"} {
		needed = append(needed, os.Getenv(name))
	}

	all, err := mounts()
	if err != nil {
		return err
	}

	for _, m := range slices.Backward(all) {
		isNeeded := func(path string) bool {
			return m.point == "/" || path == m.point || strings.HasPrefix(path, m.point+"/")
		}
		system := slices.ContainsFunc([]string{"/dev/", "/proc/", "/sys/", "/run/"}, func(top string) bool {
			return strings.HasPrefix(m.point, top)
		})
		if system || slices.ContainsFunc(needed, isNeeded) {
			continue
		}
		if err := unix.Unmount(m.point, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("detaching %s: %w", m.point, err)
		}
	}

	return nil
}

// loopbackUp turns on the loopback device, which is down in a new network namespace.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}

	defer unix.Close(fd)

	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}

	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("turning on the loopback device: %w", err)
	}

	return nil
}

// runBinary runs the test binary to its end, and waits for every process that was left to process 1. interrupted says
// that a signal has ended it that was sent to end the run.
func runBinary() (status int, interrupted bool, err error) {
	signals := notify()
	pid, err := syscall.ForkExec(os.Args[1], os.Args[1:], &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}})
	if err != nil {
		return 0, false, fmt.Errorf("starting %s: %w", os.Args[1], err)
	}

	go passOn(signals, pid)

	for {
		var ws syscall.WaitStatus
		ended, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return 0, false, fmt.Errorf("waiting for %s: %w", os.Args[1], err)
		case ended == pid && ws.Signaled():
			return 128 + int(ws.Signal()), slices.Contains(ending, os.Signal(ws.Signal())), nil
		case ended == pid:
			return ws.ExitStatus(), false, nil
		}
	}
}

// patience is how long the last processes and loop devices of a package may take to end: PANDO_TEST_PATIENCE, or 10 s.
func patience() time.Duration {
	if d, err := time.ParseDuration(os.Getenv("PANDO_TEST_PATIENCE")); err == nil {
		return d
	}
	return 10 * time.Second
}

// leftBehind lists what the tests have left: processes, mounts, loop devices with files below tmp, files in tmp.
func leftBehind(tmp string, before []mounted) []string {
	processes := waitForProcesses(time.Now().Add(patience()))

	left := testfs.Leaks(tmp, patience())
	left = append(left, clearLoops(tmp)...)
	now, err := mounts()
	if err != nil {
		return append(left, err.Error())
	}

	for _, m := range now {
		if !slices.Contains(before, m) && !strings.HasPrefix(m.point, tmp+"/") { // Leaks has named those below tmp
			left = append(left, fmt.Sprintf("%s mounted at %s", m.kind, m.point))
		}
	}

	entries, err := os.ReadDir(tmp)
	if err != nil {
		left = append(left, err.Error())
	}

	for _, e := range entries {
		if e.Name() != "lost+found" {
			left = append(left, "file "+filepath.Join(tmp, e.Name()))
		}
	}

	return append(processes, left...)
}

// clearLoops detaches the loop devices that have files below tmp, which [testfs.Leaks] has named. Unlike mounts they
// do not end with the namespace, and would keep the memory that their files are in.
func clearLoops(tmp string) (failed []string) {
	devices, err := loopsBelow(tmp)
	if err != nil {
		return []string{err.Error()}
	}
	for _, device := range devices {
		if out, err := exec.Command("losetup", "-d", device).CombinedOutput(); err != nil {
			failed = append(failed, fmt.Sprintf("losetup -d %s: %v\n%s", device, err, out))
		}
	}
	return failed
}

// loopsBelow lists the loop devices that have files below a directory.
func loopsBelow(dir string) (devices []string, err error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	for _, path := range files {
		behind, err := os.ReadFile(path)
		if err == nil && strings.HasPrefix(string(behind), dir+"/") {
			devices = append(devices, "/dev/"+strings.Split(path, "/")[3])
		}
	}
	return devices, nil
}

type mounted struct{ point, kind, source string }

// mounts lists the mounts of this namespace, in the order in which they were made.
func mounts() ([]mounted, error) {
	infos, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, err
	}
	var out []mounted
	for _, i := range infos {
		out = append(out, mounted{i.Mountpoint, i.FSType, i.Source})
	}
	return out, nil
}

// waitForProcesses waits until this process has no descendants. If that takes too long it names them, and kills them.
func waitForProcesses(deadline time.Time) []string {
	var named []string
	for {
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
				break
			}
		}

		left, err := children()
		if err != nil {
			return append(named, err.Error())
		}
		if len(left) == 0 {
			return named
		}
		if len(named) > 0 && time.Now().After(deadline.Add(patience())) {
			return named // some do not even die
		}

		if time.Now().After(deadline) {
			for _, pid := range left {
				if line := fmt.Sprintf("process %d: %s", pid, commandLine(pid)); !slices.Contains(named, line) {
					named = append(named, line)
				}
				_ = syscall.Kill(pid, syscall.SIGKILL) // its own children come here next
			}
		}

		time.Sleep(5 * time.Millisecond) // waiting for the event, by wait4, has no time limit
	}
}

// children are the processes whose parent is this one.
func children() ([]int, error) {
	lists, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return nil, err
	}

	var out []int
	for _, list := range lists {
		b, err := os.ReadFile(list)
		if err != nil {
			return nil, err
		}
		for _, word := range strings.Fields(string(b)) {
			pid, err := strconv.Atoi(word)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", list, err)
			}
			out = append(out, pid)
		}
	}

	return out, nil
}

func commandLine(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(strings.TrimRight(string(b), "\x00"), "\x00", " ")
}
