//go:build linux

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// reapVariable tells the reaper which process is the first of the namespaces; insideVariable, which directory is
// theirs.
const reapVariable = "PANDO_TEST_REAP"

// fiThaw is FITHAW of linux/fs.h.
const fiThaw = 0xc0045878

// reaper is a process outside of the namespaces that cleans up when isolate, or the first process inside, is killed.
// The end of the namespaces alone is not enough: a filesystem that a test has frozen outlives its mount and keeps its
// loop device, and a killed isolate cannot remove its directories.
type reaper struct {
	cmd *exec.Cmd
	say io.WriteCloser
}

// startWithReaper starts the first process of the namespaces, which does nothing until there is a reaper.
func startWithReaper(cmd *exec.Cmd, dir string) (*reaper, error) {
	wait, goOn, err := os.Pipe()
	if err != nil {
		return nil, err
	}

	defer goOn.Close()
	cmd.ExtraFiles = []*os.File{wait}
	err = cmd.Start()
	wait.Close()
	if err != nil {
		return nil, err
	}

	r, err := startReaper(dir, cmd.Process.Pid)
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}

	return r, nil
}

// waitForReaper is the other end of startWithReaper.
func waitForReaper() error {
	wait := os.NewFile(3, "pipe") // the first of ExtraFiles
	_, err := io.Copy(io.Discard, wait)
	return errors.Join(err, wait.Close())
}

// startReaper starts it. It has a session of its own, so that what ends a process group does not end it, and none of
// the files for which others wait.
func startReaper(dir string, pid int) (*reaper, error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVariable+"="+dir, reapVariable+"="+strconv.Itoa(pid))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	ready, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}

	say, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}

	if err := cmd.Start(); err != nil {
		return nil, err
	}

	// It has the namespace before anything happens there.
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		return nil, errors.Join(fmt.Errorf("starting the reaper: %w", err), say.Close(), cmd.Wait())
	}

	return &reaper{cmd, say}, nil
}

// end lets the reaper clean up unless all has ended well, and waits for it.
func (r *reaper) end(well bool) error {
	if well {
		_, _ = r.say.Write([]byte{1}) // if it is no more, Wait says so
	}
	return errors.Join(r.say.Close(), r.cmd.Wait())
}

// reap is the reaper.
func reap(dir, first string) error {
	namespace, err := os.Open("/proc/" + first + "/ns/mnt")
	if err == nil {
		defer namespace.Close()
	} else if !errors.Is(err, os.ErrNotExist) { // it has ended already, and its namespaces with it
		return err
	}

	if _, err := os.Stdout.Write([]byte{1}); err != nil {
		return err
	}

	if n, _ := os.Stdin.Read(make([]byte, 1)); n > 0 {
		return nil
	}

	err = nil
	if namespace != nil {
		killAllIn(namespace)
		cleaned := make(chan error, 1)
		go func() { cleaned <- cleanInside(namespace, dir) }()
		err = errors.Join(<-cleaned, namespace.Close())
	}

	return errors.Join(err, os.RemoveAll(dir), os.RemoveAll(memoryOf(dir)))
}

// killAllIn kills all processes of a mount namespace, and waits until they are gone.
func killAllIn(namespace *os.File) {
	var want unix.Stat_t
	if err := unix.Fstat(int(namespace.Fd()), &want); err != nil {
		return
	}

	for deadline := time.Now().Add(patience()); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		found := false
		paths, _ := filepath.Glob("/proc/[0-9]*/ns/mnt") // the pattern is a good one
		for _, path := range paths {
			var is unix.Stat_t
			if err := unix.Stat(path, &is); err != nil || is.Ino != want.Ino || is.Dev != want.Dev {
				continue
			}
			if pid, err := strconv.Atoi(strings.Split(path, "/")[2]); err == nil {
				found = true
				_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
			}
		}

		if !found {
			return
		}
	}
}

// cleanInside thaws and unmounts all that is below dir in a mount namespace, and detaches the loop devices that have
// files there. It uses up its thread, which joins the namespace.
func cleanInside(namespace *os.File, dir string) error {
	runtime.LockOSThread()

	// The namespace's own /proc ended with its first process.
	table := fmt.Sprintf("%d/task/%d/mountinfo", os.Getpid(), unix.Gettid())
	proc, err := os.OpenRoot("/proc")
	if err != nil {
		return err
	}

	defer proc.Close()

	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}

	if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
		return err
	}

	f, err := proc.Open(table)
	if err != nil {
		return err
	}

	defer f.Close()

	all, err := mountinfo.GetMountsFromReader(f, func(m *mountinfo.Info) (skip, stop bool) {
		return !isBelow(m.Mountpoint, dir) && !isBelow(m.Mountpoint, memoryOf(dir)), false
	})
	if err != nil {
		return err
	}

	for _, m := range all { // those below others first
		thaw(m.Mountpoint)
	}

	loops, err := loopsBelow(dir)
	if err != nil {
		return err
	}

	for _, m := range slices.Backward(all) {
		err = errors.Join(err, unix.Unmount(m.Mountpoint, unix.MNT_DETACH))
	}

	for _, path := range loops {
		err = errors.Join(err, detach(path))
	}

	return err
}

// isBelow reports whether a path is dir or below it.
func isBelow(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

// thaw thaws a filesystem. One that is not frozen, or cannot be, is left as it is.
func thaw(path string) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_ = unix.IoctlSetInt(fd, fiThaw, 0)
}

// detach detaches a loop device: at once, or when its last user is gone.
func detach(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detaching %s: %w", path, err)
	}
	return nil
}
