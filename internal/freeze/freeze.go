// Package freeze stops the writes to a mounted filesystem for a moment, so that
// what lies below it can be copied whole and clean, and sees to it that they go
// on again whatever becomes of this process.
//
// A frozen filesystem stays frozen when the process that froze it dies; every
// program that writes to it then hangs for good. So Do starts a guard first: a
// process of its own, in a session of its own, that holds the filesystem open
// and one end of a pipe. When the other end closes, and nobody has said that
// all is well, it thaws the filesystem. The guard is this very program, started
// again under another name: its main function calls Guard first. A program that
// does not cannot freeze.
package freeze

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"pando/internal/errs"
	"pando/internal/kernel"

	"golang.org/x/sys/unix"
)

// guardName is the guard's argv[0].
const guardName = "pando-freeze-guard"

// The guard's files.
const (
	guardDir     = 3 // on the filesystem
	guardControl = 4 // pipe: a byte says that all is well
	guardReady   = 5 // pipe: the guard says that it is there
)

// Limit is how long a filesystem stays frozen at most: then the guard thaws it,
// although Do has not ended.
const Limit = 60 * time.Second

// served says that the main function of this program has called Guard, so that it can be
// started again as a guard.
var served atomic.Bool

// Guard makes this process a guard, and then never returns, if it was started to be one;
// else it does nothing but permit Do. The main function of each program that
// freezes filesystems calls it with [os.Args] before anything else: Do starts the program again.
// Without it, Do would start the program's own work a second time, and nobody would guard.
func Guard(args []string) {
	if len(args) > 1 && args[0] == guardName {
		guard(args[1])
	}
	served.Store(true)
}

// guard never returns.
func guard(limit string) {
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGPIPE)
	d, err := time.ParseDuration(limit)
	if err != nil {
		os.Exit(2)
	}
	// The kernel kills a guard last when memory is short; without the right to
	// say so it is one process among others.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0)
	if _, err := unix.Write(guardReady, []byte{1}); err != nil {
		os.Exit(2) // nobody waits for it any more
	}
	deadline := time.Now().Add(d)
	for {
		fds := []unix.PollFd{{Fd: guardControl, Events: unix.POLLIN}}
		n, err := unix.Poll(fds, max(0, int(time.Until(deadline)/time.Millisecond)))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		var b [1]byte
		if n > 0 {
			if n, err := unix.Read(guardControl, b[:]); err == nil && n == 1 {
				os.Exit(0)
			}
		}
		break
	}
	// It may not be frozen (yet, or any more): then this does nothing.
	_ = kernel.Thaw(os.NewFile(guardDir, "filesystem"))
	os.Exit(1)
}

// Do freezes the mounted filesystem that dir is on, calls fn, and thaws it.
// While fn runs nothing writes to that filesystem, and what lies below it is as
// after an umount; fn must not write to it either. Internal if the program has not called
// Guard, InUse if it is frozen already,
// Unsupported if it cannot be frozen, Permission, Conflict if fn took longer than
// Limit, so that what it saw may have changed.
func Do(ctx context.Context, dir *os.File, fn func() error) (err error) {
	g, err := startGuard(ctx, dir)
	if err != nil {
		return errs.Wrap("freeze", dir.Name(), err)
	}
	if err := kernel.Freeze(dir); err != nil {
		g.dismiss()
		switch {
		case errors.Is(err, unix.EBUSY):
			return errs.New(errs.InUse, "freeze", dir.Name(), "the filesystem is frozen by something else").
				WithHint("thaw it (`fsfreeze --unfreeze %s`), or take it as it is with %s", dir.Name(), errs.Param("no-freeze"))
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY):
			return errs.New(errs.Unsupported, "freeze", dir.Name(), "its filesystem cannot be frozen").WithHint("take it as it is with %s", errs.Param("no-freeze"))
		}
		return errs.Wrap("freeze", dir.Name(), err)
	}
	defer func() {
		terr := kernel.Thaw(dir)
		switch {
		case terr == nil:
			g.dismiss()
		case errors.Is(terr, unix.EINVAL):
			g.dismiss() // it was first
			err = errors.Join(err, errs.New(errs.Conflict, "freeze", dir.Name(), "it took longer than %v, and its writes went on", Limit).
				WithHint("take it as it is with %s", errs.Param("no-freeze")))
		default:
			// The guard tries again when the pipe closes.
			g.abandon()
			err = errors.Join(err, errs.Wrap("thaw", dir.Name(), terr))
		}
	}()
	return fn()
}

type guardProcess struct {
	cmd     *exec.Cmd
	control *os.File
}

func startGuard(ctx context.Context, dir *os.File) (*guardProcess, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !served.Load() {
		return nil, errs.New(errs.Internal, "freeze", dir.Name(), "this program cannot start a guard, which thaws the filesystem if the program dies").
			WithHint("call engine.Helper(os.Args) first in the main function of this program")
	}
	controlR, controlW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer controlR.Close()
	readyR, readyW, err := os.Pipe()
	if err != nil {
		controlW.Close()
		return nil, err
	}
	defer readyR.Close()
	// Not bound to ctx: a guard that is killed guards nothing.
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{guardName, Limit.String()}, Dir: "/", Env: []string{"GOMAXPROCS=1"},
		ExtraFiles:  []*os.File{dir, controlR, readyW},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	err = cmd.Start()
	readyW.Close()
	if err != nil {
		controlW.Close()
		return nil, fmt.Errorf("start a guard: %w", err)
	}
	g := &guardProcess{cmd, controlW}
	if n, err := readyR.Read(make([]byte, 1)); n != 1 {
		g.abandon()
		return nil, fmt.Errorf("the guard did not start: %w", err)
	}
	return g, nil
}

// dismiss ends the guard: nothing is frozen any more.
func (g *guardProcess) dismiss() {
	_, _ = g.control.Write([]byte{1}) // it may have ended
	g.abandon()
}

// abandon closes the pipe: unless it was dismissed, the guard thaws.
func (g *guardProcess) abandon() {
	g.control.Close()
	_ = g.cmd.Wait() // its status says whether it thawed, which the thaw of Do says better
}
