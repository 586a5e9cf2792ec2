// Package freeze suspends writes to a mounted filesystem for a moment, so that the image
// or device below it can be copied in a consistent state, and guarantees that writes
// resume whatever happens to this process.
//
// A frozen filesystem stays frozen if the process that froze it dies, and every program
// that writes to it then hangs forever. So Do first starts a guard: a separate process in
// its own session that holds the filesystem open, and one end of a pipe. If the other end
// closes before Do has dismissed the guard, the guard thaws the filesystem. The guard is
// the same program, started again under another name: its main function calls Guard
// first. A program that does not call Guard cannot freeze.
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
	guardControl = 4 // pipe: a byte dismisses the guard
	guardReady   = 5 // pipe: the guard reports that it is ready
)

// Limit is how long a filesystem may stay frozen unless the caller of Do allows more. After that
// the guard thaws it, even if Do has not ended: a stopped program must not block writers longer.
const Limit = 5 * time.Second

// ErrBroken means that the filesystem was thawed before the work was done, by the guard or by
// another process: the result must not be used.
var ErrBroken = errors.New("another process thawed the filesystem before the copy was complete")

// ErrFrozen means that another process has already frozen the filesystem.
var ErrFrozen = errors.New("another process has frozen the filesystem")

// Exit codes of a guard, which only Do sees.
const (
	guardDismissed = 0 // nothing was left to thaw
	guardFailed    = 2 // it could not start
	guardThawed    = 3 // it has thawed the filesystem
)

// guardRetry is the pause between a guard's attempts to thaw once the limit has expired: the
// filesystem may not be frozen yet.
const guardRetry = 50 * time.Millisecond

// served is set when the main function of this program has called Guard, so that the program can
// be started again as a guard.
var served atomic.Bool

// Guard runs the guard and never returns if this process was started as one; otherwise it only
// enables Do. The main function of each program that freezes filesystems must call it with [os.Args]
// before anything else, because Do starts the program again. Without this call, Do would run the
// program's own work a second time, and there would be no guard.
func Guard(args []string) {
	if len(args) > 1 && args[0] == guardName {
		guard(args[1])
	}
	served.Store(true)
}

// guard is the main function of a guard. It never returns.
func guard(limit string) {
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGPIPE)
	d, err := time.ParseDuration(limit)
	if err != nil {
		os.Exit(guardFailed)
	}

	// Make the kernel kill the guard last when memory is short. Without the permission
	// to do so, it is killed like any other process.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0)
	if _, err := unix.Write(guardReady, []byte{1}); err != nil {
		os.Exit(guardFailed) // the parent has ended
	}

	dir := os.NewFile(guardDir, "filesystem")
	if awaitDismissal(time.Now().Add(d), func() bool { return kernel.Thaw(dir) == nil }) {
		os.Exit(guardThawed)
	}

	os.Exit(guardDismissed)
}

// awaitDismissal waits until the guarded process dismisses the guard or dies. If the process dies,
// or has not dismissed it by the deadline, it calls thaw, until that succeeds once. It reports
// whether it has thawed.
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
			return thawed || thaw() // the process has died
		case !time.Now().Before(deadline):
			// If the filesystem is not frozen yet, this fails and is tried again.
			thawed = thaw()
		}
	}
}

// Do freezes the mounted filesystem that contains dir, calls fn, and thaws it. While fn
// runs, nothing writes to that filesystem, and the device below it is in the same state
// as after an umount; fn must not write to it either. limit is how long it may stay
// frozen, 0 for Limit.
//
// Internal: the program has not called Guard. InUse (ErrFrozen): it is already frozen.
// Unsupported: it cannot be frozen. Permission. Conflict (ErrBroken): it was thawed before
// fn returned, because fn took longer than limit or another process thawed it, so the data
// that fn read may have changed.
func Do(ctx context.Context, dir *os.File, limit time.Duration, fn func() error) (err error) {
	if limit <= 0 {
		limit = Limit
	}

	// Start the guard, then freeze.
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
		case errs.IsAny(err, unix.EOPNOTSUPP, unix.ENOTTY):
			return errs.New(errs.Unsupported, "freeze", dir.Name(), "the filesystem does not support freezing").
				WithHint("copy it without freezing: %s", errs.Param("no-freeze"))
		}
		return errs.Wrap("freeze", dir.Name(), err)
	}

	// Thaw after fn, and check that nobody has thawed it before.
	defer func() {
		terr := kernel.Thaw(dir)
		switch {
		case terr == nil:
			// Another process may have frozen it again after the guard had thawed it.
			if g.dismiss() {
				err = errors.Join(err, broken(dir, limit))
			}
		case errors.Is(terr, unix.EINVAL): // it was thawed before
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

	// Not bound to ctx: the guard must outlive it.
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

// dismiss ends the guard after the filesystem was thawed. It reports whether the guard had thawed
// it before.
func (g *guardProcess) dismiss() (thawed bool) {
	_, _ = g.control.Write([]byte{1}) // it may have ended
	g.abandon()
	return g.cmd.ProcessState != nil && g.cmd.ProcessState.ExitCode() == guardThawed
}

// abandon closes the pipe and waits for the guard, which thaws unless it was dismissed.
func (g *guardProcess) abandon() {
	g.control.Close()
	_ = g.cmd.Wait() // its exit status tells whether it has thawed
}
