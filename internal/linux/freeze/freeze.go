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

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"

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

// Limit is how long a filesystem stays frozen at most unless the caller of Do allows more: then
// the guard thaws it, although Do has not ended. A program that is stopped must not stop those
// that write for longer.
const Limit = 5 * time.Second

// ErrBroken says that the filesystem was thawed before the work was done, by the guard or by
// somebody else: the result must not be used.
var ErrBroken = errors.New("another process thawed the filesystem before the copy was complete")

// ErrFrozen says that the filesystem is frozen already, by somebody else.
var ErrFrozen = errors.New("another process has frozen the filesystem")

// Exit codes of a guard, which nobody but Do sees.
const (
	guardDismissed = 0 // nothing was left to thaw
	guardFailed    = 2 // it could not begin
	guardThawed    = 3 // it has thawed the filesystem
)

// guardRetry is the pause between a guard's attempts to thaw once its time is over: the
// filesystem may only be about to be frozen.
const guardRetry = 50 * time.Millisecond

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
		os.Exit(guardFailed)
	}

	// The kernel kills a guard last when memory is short; without the right to
	// say so it is one process among others.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0)
	if _, err := unix.Write(guardReady, []byte{1}); err != nil {
		os.Exit(guardFailed) // nobody waits for it any more
	}

	dir := os.NewFile(guardDir, "filesystem")
	if awaitDismissal(time.Now().Add(d), func() bool { return kernel.Thaw(dir) == nil }) {
		os.Exit(guardThawed)
	}

	os.Exit(guardDismissed)
}

// awaitDismissal waits for the end of the process that is guarded, or for its word that all is
// well. If there is no such word, or none before the deadline, it thaws, once. It reports whether
// it has.
func awaitDismissal(deadline time.Time, thaw func() bool) (thawed bool) {
	for {
		timeout := int(max(time.Until(deadline), guardRetry) / time.Millisecond)
		if thawed {
			timeout = -1
		}

		n, err := unix.Poll([]unix.PollFd{{Fd: guardControl, Events: unix.POLLIN}}, timeout)
		switch {
		case errors.Is(err, unix.EINTR):
		case n > 0:
			var b [1]byte
			if n, err := unix.Read(guardControl, b[:]); err == nil && n == 1 {
				return thawed
			}
			return thawed || thaw() // nobody is there any more
		case !time.Now().Before(deadline):
			// If it is not frozen (yet), this does nothing, and is tried again.
			thawed = thaw()
		}
	}
}

// Do freezes the mounted filesystem that dir is on, calls fn, and thaws it.
// While fn runs nothing writes to that filesystem, and what lies below it is as
// after an umount; fn must not write to it either. limit is how long it may stay frozen,
// 0 for Limit. Internal if the program has not called
// Guard, InUse (ErrFrozen) if it is frozen already,
// Unsupported if it cannot be frozen, Permission, Conflict (ErrBroken) if it was thawed before fn
// had ended, because that took longer than limit or somebody else did it, so that what fn
// saw may have changed.
func Do(ctx context.Context, dir *os.File, limit time.Duration, fn func() error) (err error) {
	if limit <= 0 {
		limit = Limit
	}

	g, err := startGuard(ctx, dir, limit)
	if err != nil {
		return errs.Wrap("freeze", dir.Name(), err)
	}

	if err := kernel.Freeze(dir); err != nil {
		g.dismiss()
		switch {
		case errors.Is(err, unix.EBUSY):
			return errs.New(errs.InUse, "freeze", dir.Name(), "%w", ErrFrozen).
				WithHint("wait until it is thawed, or use %s", errs.Param("no-freeze"))
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY):
			return errs.New(errs.Unsupported, "freeze", dir.Name(), "the filesystem does not support freezing").
				WithHint("copy it without freezing: %s", errs.Param("no-freeze"))
		}
		return errs.Wrap("freeze", dir.Name(), err)
	}

	defer func() {
		terr := kernel.Thaw(dir)
		switch {
		case terr == nil:
			// Somebody may have frozen it again after the guard had thawed it.
			if g.dismiss() {
				err = errors.Join(err, broken(dir, limit))
			}
		case errors.Is(terr, unix.EINVAL): // somebody was first
			g.dismiss()
			err = errors.Join(err, broken(dir, limit))
		default:
			// The guard tries again when the pipe closes.
			g.abandon()
			err = errors.Join(err, errs.Wrap("thaw", dir.Name(), terr))
		}
	}()

	return fn()
}

func broken(dir *os.File, limit time.Duration) error {
	return errs.New(errs.Conflict, "freeze", dir.Name(), "%w, or the limit of %v expired", ErrBroken, limit).
		WithHint("retry, or copy it without freezing: %s", errs.Param("no-freeze"))
}

type guardProcess struct {
	cmd     *exec.Cmd
	control *os.File
}

func startGuard(ctx context.Context, dir *os.File, limit time.Duration) (*guardProcess, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	if !served.Load() {
		return nil, errs.New(errs.Internal, "freeze", dir.Name(),
			"this program cannot start a guard, which thaws the filesystem if the program dies").
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
		Path: "/proc/self/exe", Args: []string{guardName, limit.String()}, Dir: "/", Env: []string{"GOMAXPROCS=1"},
		ExtraFiles:  []*os.File{dir, controlR, readyW},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}

	err = cmd.Start()
	readyW.Close()
	if err != nil {
		controlW.Close()
		return nil, fmt.Errorf("cannot start the guard process: %w", err)
	}

	g := &guardProcess{cmd, controlW}
	if n, err := readyR.Read(make([]byte, 1)); n != 1 {
		g.abandon()
		return nil, fmt.Errorf("the guard process did not start: %w", err)
	}

	return g, nil
}

// dismiss ends the guard: nothing is frozen any more. It reports whether the guard had thawed the
// filesystem before.
func (g *guardProcess) dismiss() (thawed bool) {
	_, _ = g.control.Write([]byte{1}) // it may have ended
	g.abandon()
	return g.cmd.ProcessState != nil && g.cmd.ProcessState.ExitCode() == guardThawed
}

// abandon closes the pipe: unless it was dismissed, the guard thaws.
func (g *guardProcess) abandon() {
	g.control.Close()
	_ = g.cmd.Wait() // its status says whether it thawed
}
