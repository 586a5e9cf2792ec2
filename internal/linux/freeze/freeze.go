// Package freeze suspends writes to mounted filesystems for a moment, so that the images
// or devices below them can be copied in a consistent state, and guarantees that writes
// resume whatever happens to this process.
//
// A frozen filesystem stays frozen if the process that froze it dies, and every program
// that writes to it then hangs forever. So Do first starts a guard: a separate process in
// its own session that holds the filesystems open, and one end of a pipe. If the other end
// closes before Do has dismissed the guard, the guard thaws them. The guard is
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
	"slices"
	"strconv"
	"sync"
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
	guardControl = 3 // pipe: a byte dismisses the guard
	guardReady   = 4 // pipe: the guard reports that it is ready
	guardDirs    = 5 // and the following: one on each filesystem
)

// Limit is how long a filesystem may stay frozen unless the caller of Do allows more. After that
// the guard thaws it, even if Do has not ended: a stopped program must not block writers longer.
const Limit = 5 * time.Second

// ErrBroken means that the filesystem was thawed before the work was done, by the guard or by
// another process: the result must not be used.
var ErrBroken = errors.New("another process thawed the filesystem before the copy was complete")

// ErrFrozen means that another process has already frozen the filesystem.
var ErrFrozen = errors.New("another process has frozen the filesystem")

// FrozenError is an ErrFrozen that names the filesystem.
type FrozenError struct {
	Dir *os.File // as passed to Do
}

// Error implements error.
func (*FrozenError) Error() string { return ErrFrozen.Error() }

// Unwrap returns ErrFrozen.
func (*FrozenError) Unwrap() error { return ErrFrozen }

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
	if len(args) == 3 && args[0] == guardName {
		guard(args[1], args[2])
	}
	served.Store(true)
}

// guard is the main function of a guard of n filesystems. It never returns.
func guard(limit, n string) {
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGPIPE)
	d, err := time.ParseDuration(limit)
	count, cerr := strconv.Atoi(n)
	if err != nil || cerr != nil {
		os.Exit(guardFailed)
	}

	// Make the kernel kill the guard last when memory is short. Without the permission
	// to do so, it is killed like any other process.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0)
	if _, err := unix.Write(guardReady, []byte{1}); err != nil {
		os.Exit(guardFailed) // the parent has ended
	}

	var frozen []*os.File
	for i := range count {
		frozen = append(frozen, os.NewFile(uintptr(guardDirs+i), "filesystem"))
	}

	// Thaw each filesystem once: then others may freeze it.
	left := func() int {
		frozen = slices.DeleteFunc(frozen, func(dir *os.File) bool { return kernel.Thaw(dir) == nil })
		return len(frozen)
	}

	if awaitDismissal(time.Now().Add(d), count, left) {
		os.Exit(guardThawed)
	}

	os.Exit(guardDismissed)
}

// awaitDismissal waits until the guarded process dismisses the guard or dies. If the process dies,
// or has not dismissed it by the deadline, it calls thaw, which returns how many of count filesystems it
// has never thawed, until that is 0. It reports whether it has thawed any.
func awaitDismissal(deadline time.Time, count int, thaw func() (left int)) (thawed bool) {
	left := count
	for {
		timeout := int(max(time.Until(deadline), guardRetry) / time.Millisecond)
		if left == 0 {
			timeout = -1
		}

		n, err := unix.Poll([]unix.PollFd{{Fd: guardControl, Events: unix.POLLIN}}, timeout)
		switch {
		case errors.Is(err, unix.EINTR):
		case n > 0:
			var b [1]byte
			if n, err := unix.Read(guardControl, b[:]); err != nil || n != 1 {
				left = thaw() // the process has died
			}
			return left < count
		case !time.Now().Before(deadline):
			// If a filesystem is not frozen yet, this fails and is tried again.
			left = thaw()
		}
	}
}

// Do freezes the mounted filesystems that contain dirs, one of each, calls fn, and thaws them. While fn
// runs, nothing writes to any of them, and the devices below them are in the same state
// as after an umount; fn must not write to them either. limit is how long they may stay
// frozen, 0 for Limit. held is how long writes may have waited, also after an error.
//
// The filesystems are frozen at the same time, because the kernel takes about 30 ms for each. If one cannot be
// frozen, the others are thawed at once, so two calls with the same filesystems cannot wait for each other.
//
// Internal: the program has not called Guard. InUse (a FrozenError): one is already frozen.
// Unsupported: one cannot be frozen. Permission. Conflict (ErrBroken): one was thawed before
// fn returned, because fn took longer than limit or another process thawed it, so the data
// that fn read may have changed.
func Do(ctx context.Context, dirs []*os.File, limit time.Duration, fn func() error) (held time.Duration, err error) {
	if limit <= 0 {
		limit = Limit
	}

	// Start the guard, then freeze.
	g, err := startGuard(ctx, dirs, limit)
	if err != nil {
		return 0, errs.Wrap("freeze", dirs[0].Name(), err)
	}

	began := time.Now()
	frozen, err := freezeAll(dirs)
	if err != nil {
		g.end(frozen, limit)
		return time.Since(began), err
	}

	// Thaw after fn, and check that nobody has thawed them before.
	defer func() {
		err = errors.Join(err, g.end(dirs, limit))
		held = time.Since(began)
	}()

	return 0, fn()
}

// freezeAll freezes filesystems at the same time, and returns those that it has frozen. The error is that of the first
// one that it could not.
func freezeAll(dirs []*os.File) (frozen []*os.File, err error) {
	failed := make([]error, len(dirs))
	var all sync.WaitGroup
	for i, dir := range dirs {
		all.Go(func() { failed[i] = kernel.Freeze(dir) })
	}
	all.Wait()

	for i, dir := range dirs {
		switch {
		case failed[i] == nil:
			frozen = append(frozen, dir)
		case err == nil:
			err = freezeError(dir, failed[i])
		}
	}

	return frozen, err
}

// freezeError explains why a filesystem could not be frozen.
func freezeError(dir *os.File, err error) error {
	switch {
	case errors.Is(err, unix.EBUSY):
		return errs.New(errs.InUse, "freeze", dir.Name(), "%w", &FrozenError{dir}).
			WithHint("wait until it is thawed, or use %s", errs.Param("no-freeze"))
	case errs.IsAny(err, unix.EOPNOTSUPP, unix.ENOTTY):
		return errs.New(errs.Unsupported, "freeze", dir.Name(), "the filesystem does not support freezing").
			WithHint("copy it without freezing: %s", errs.Param("no-freeze"))
	}
	return errs.Wrap("freeze", dir.Name(), err)
}

// end thaws filesystems that this process has frozen, and ends the guard. Conflict (ErrBroken): one was thawed before.
func (g *guardProcess) end(frozen []*os.File, limit time.Duration) error {
	var failed error
	early := "" // the one that was thawed before
	for _, dir := range frozen {
		err := kernel.Thaw(dir)
		if errors.Is(err, unix.EINVAL) {
			early = dir.Name()
		} else if err != nil {
			failed = errors.Join(failed, errs.Wrap("thaw", dir.Name(), err))
		}
	}

	if failed != nil {
		g.abandon() // the guard tries again when the pipe closes
		return failed
	}

	// Another process may have frozen one again after the guard had thawed it.
	if g.dismiss() && early == "" && len(frozen) > 0 {
		early = frozen[0].Name()
	}

	if early != "" {
		return broken(early, limit)
	}

	return nil
}

func broken(dir string, limit time.Duration) error {
	return errs.New(errs.Conflict, "freeze", dir, "%w, or the limit of %v expired", ErrBroken, limit).
		WithHint("retry, or copy it without freezing: %s", errs.Param("no-freeze"))
}

type guardProcess struct {
	cmd     *exec.Cmd
	control *os.File
}

func startGuard(ctx context.Context, dirs []*os.File, limit time.Duration) (*guardProcess, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	if !served.Load() {
		return nil, errs.New(errs.Internal, "freeze", dirs[0].Name(),
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
		Path: "/proc/self/exe", Args: []string{guardName, limit.String(), strconv.Itoa(len(dirs))},
		Dir: "/", Env: []string{"GOMAXPROCS=1"},
		ExtraFiles:  append([]*os.File{controlR, readyW}, dirs...),
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

// dismiss ends the guard after the filesystems were thawed. It reports whether the guard had thawed
// any before.
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
