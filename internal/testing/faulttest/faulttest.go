//go:build linux && (amd64 || arm64)

// Package faulttest runs a real, unmodified program under ptrace and lets a
// test list the system calls by which the program changes state, kill it with
// SIGKILL just before or just after the n-th of them, or make the n-th fail
// with an errno of the test's choice.
//
// It is what "nothing is lost, nothing leaks, whatever the moment of the crash"
// is tested with, and the reason why production code needs no failpoints: a
// crash can only be told apart by what the kernel was asked to do before it,
// so a kill at every state-changing call is a kill at every distinguishable
// moment, in the binary that people run and not in one built for the test.
//
// The counter is global over all threads of the program. Tools that count per
// thread cannot do this for a Go program, whose goroutines move from thread to
// thread: "the 12th call of the process" is then a different one in every run.
//
// What is a step: see [Calls] and [MutatingIoctls]. Processes that the
// program starts run untraced to their end, as one step (the clone), unless
// [Options.FollowProcesses] is set.
//
// # Limits
//
//   - Changes made through mmap or io_uring are not seen, and neither is
//     close(2), even where it has effects (the last reference to an autoclear
//     loop device); what the program did before a close is a step, and so is
//     what it does after.
//   - With several threads inside state-changing calls, steps are ordered by
//     entry. A call that another thread had entered earlier may or may not take
//     effect when the program is killed, as in a real crash.
//   - The numbering can differ between runs of a program with several threads.
//   - The program leads a process group of its own, so it cannot call setsid.
//   - sync(2) cannot report an error: making it fail only leaves it out.
//   - 32-bit system calls of a 64-bit program are not recognised.
package faulttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Step is one state-changing system call of the traced program.
type Step struct {
	Index  int      // position among the steps that matched, from 0
	Name   string   // the system call: "openat"
	Detail string   // for people: the paths, the name of an ioctl, the command that was spawned
	Paths  []string // the absolute paths of the files it is about; none for sync, clone and the like
	PID    int      // process; differs from the program's only with FollowProcesses
	TID    int      // thread
	Done   bool     // the call returned (false: the program was killed in it)
	Err    syscall.Errno
}

// String returns a line such as "#3 renameat /a/b.tmp -> /a/b".
func (s Step) String() string {
	out := fmt.Sprintf("#%d %s", s.Index, s.Name)
	if s.Detail != "" {
		out += " " + s.Detail
	}
	if s.Err != 0 {
		out += " = " + unix.ErrnoName(s.Err)
	}
	return out
}

// Mode is what a [Plan] does to the program.
type Mode int

const (
	Observe    Mode = iota // nothing: only list the steps
	KillBefore             // SIGKILL in place of the step: it has no effect
	KillAfter              // SIGKILL when the step has taken effect, before the program learns of it
	Fail                   // the step has no effect and returns Plan.Errno; the program goes on
)

func (m Mode) String() string {
	switch m {
	case Observe:
		return "observe"
	case KillBefore:
		return "kill-before"
	case KillAfter:
		return "kill-after"
	case Fail:
		return "fail"
	}
	return fmt.Sprintf("Mode(%d)", int(m))
}

// Plan says which step to strike and how. The zero Plan observes.
type Plan struct {
	Mode   Mode
	At     int           // index of the step to strike, from 0
	Errno  syscall.Errno // for Fail
	Sticky bool          // Fail every matching step from At on, as a disk that stays full does

	// Match, if set, selects the steps that exist at all: others are neither
	// counted nor listed. It sees a step before it takes effect, and runs on the
	// tracer's thread: it must not call t.FailNow.
	Match func(Step) bool

	// PathPrefix, if set, drops steps that name files of which none begins with
	// one of these strings (plain strings: "/dev/loop" matches /dev/loop7). Steps
	// that name no file, such as sync or clone, are kept.
	PathPrefix []string
}

// String returns what is needed to repeat the plan: "fail@12 ENOSPC".
func (p Plan) String() string {
	if p.Mode == Observe {
		return p.Mode.String()
	}
	s := fmt.Sprintf("%v@%d", p.Mode, p.At)
	if p.Mode == Fail {
		s += " " + unix.ErrnoName(p.Errno)
		if p.Sticky {
			s += " sticky"
		}
	}
	return s
}

func (p Plan) wants(s Step) bool {
	if len(p.PathPrefix) > 0 && len(s.Paths) > 0 && !underAny(s.Paths, p.PathPrefix) {
		return false
	}
	return p.Match == nil || p.Match(s)
}

func underAny(paths, prefixes []string) bool {
	for _, path := range paths {
		for _, prefix := range prefixes {
			if strings.HasPrefix(path, prefix) {
				return true
			}
		}
	}
	return false
}

// Options are how to run the program. The zero value observes it, in the
// caller's directory and environment, with nothing on its standard input.
type Options struct {
	Plan Plan

	Env   []string // nil: this process's
	Dir   string   // "": this process's
	Stdin io.Reader

	// Stdout and Stderr get what the program wrote once it has ended; Result
	// holds it in any case. The program itself writes into memory, not into a
	// pipe, so that neither a reader nor a surviving grandchild can delay it.
	Stdout, Stderr io.Writer

	// KillGroup makes a kill strike the whole process group: also the
	// children of the program that did not leave it. Without it they live on, as
	// when only the program is killed; Result.Spawned has their ids. A context that
	// ends kills the group in any case.
	KillGroup bool

	// FollowProcesses traces the processes that the program starts, and theirs:
	// their steps count too, a kill kills all of them, and Run returns when the
	// last of them has ended, even if the program has ended long before.
	FollowProcesses bool

	// AllCPUs lets the program run on every CPU. Otherwise it shares one with
	// the tracer, and so do the processes that it starts, which makes tracing several
	// times faster; its threads then take turns instead of running at the same
	// moment. It sees all CPUs in either case; processes that are not traced see one.
	AllCPUs bool

	// Locks makes flock and the locking commands of fcntl steps.
	Locks bool

	// Ioctls are request numbers, with a name each, to count in addition to MutatingIoctls.
	Ioctls map[uint32]string
}

// Result is what a run came to.
type Result struct {
	Steps []Step // the steps that matched, in order; the last one is FiredAt after a kill

	// Fired says that the plan's step was reached. In the rare case that the
	// program ended, by another of its threads, while a KillAfter step was
	// under way, Fired is true and Signal is 0.
	Fired   bool
	FiredAt Step

	ExitCode int            // -1 if a signal ended it
	Signal   syscall.Signal // 0 if it exited
	Stdout   []byte
	Stderr   []byte

	PID     int
	Spawned []int // ids of the processes it started; they may have ended long ago

	// Stops is how often the program was stopped for the tracer, the measure of what tracing costs.
	Stops int
}

// Available reports why programs cannot be traced here: a container that
// forbids ptrace, or a kernel older than 5.3. A test that needs the tracer
// should skip loudly, with this error.
func Available() error { return available() }

var available = sync.OnceValue(func() error {
	// Any program will do, as it is killed before its first instruction.
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err = run(ctx, []string{exe}, Options{}, true)
	if err != nil {
		return fmt.Errorf("faulttest: programs cannot be traced here: %w", err)
	}
	return nil
})

// Run runs a program to its end, or to the end that the plan makes.
//
// The error is about the tracer: the program could not be started or traced,
// or ctx ended, in which case the program and its process group were killed. A
// program that fails or is killed by plan is no error. When Run returns, the
// program is gone and waited for. Any number of Runs may be under way at once.
func Run(ctx context.Context, cmd []string, opt Options) (Result, error) {
	return run(ctx, cmd, opt, false)
}

func run(ctx context.Context, cmd []string, opt Options, probe bool) (Result, error) {
	if len(cmd) == 0 {
		return Result{}, errors.New("faulttest: no command")
	}
	if opt.Plan.Mode == Fail && opt.Plan.Errno == 0 {
		return Result{}, errors.New("faulttest: a Fail plan needs an Errno")
	}

	if err := ctx.Err(); err != nil {
		return Result{}, err
	}

	path, err := exec.LookPath(cmd[0])
	if err != nil {
		return Result{}, err
	}

	files, err := openStdio(opt.Stdin)
	if err != nil {
		return Result{}, err
	}

	defer files.close()

	tr := newTracer(opt)
	tr.probe = probe
	done := make(chan error, 1)
	go func() {
		// Only the thread that attached may make ptrace requests, and waiting is
		// confined to that thread's children. It is not unlocked: the thread
		// ends with the goroutine, and with it whatever might still be attached.
		runtime.LockOSThread()
		err := errors.New("faulttest: Match ended the tracer's goroutine")
		defer func() { done <- err }()
		defer tr.abandon()
		err = tr.run(ctx, path, cmd, files)
	}()

	err = <-done
	if err != nil {
		return tr.res, fmt.Errorf("faulttest: %s: %w", cmd[0], err)
	}
	if probe {
		return tr.res, nil
	}

	if tr.res.Stdout, err = files.contents(1, opt.Stdout); err != nil {
		return tr.res, err
	}

	if tr.res.Stderr, err = files.contents(2, opt.Stderr); err != nil {
		return tr.res, err
	}

	return tr.res, nil
}

// stdio are the program's standard files. Output goes to memory files: unlike
// a pipe they keep every byte written before a kill, need no reader, do not
// stay open because an orphan holds the other end, and cannot be mistaken for a
// file whose writes count.
type stdio [3]*os.File

func openStdio(stdin io.Reader) (f stdio, err error) {
	defer func() {
		if err != nil {
			f.close()
		}
	}()

	for i, name := range []string{"stdin", "stdout", "stderr"} {
		if i == 0 && stdin == nil {
			f[i], err = os.Open(os.DevNull)
		} else if in, ok := stdin.(*os.File); ok && i == 0 {
			var fd int
			fd, err = unix.FcntlInt(in.Fd(), unix.F_DUPFD_CLOEXEC, 3)
			f[i] = os.NewFile(uintptr(fd), in.Name())
		} else {
			var fd int
			fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
			f[i] = os.NewFile(uintptr(fd), name)
		}
		if err != nil {
			return f, fmt.Errorf("faulttest: open %s: %w", name, err)
		}
	}

	if _, ok := stdin.(*os.File); stdin != nil && !ok {
		if _, err = io.Copy(f[0], stdin); err != nil {
			return f, fmt.Errorf("faulttest: read stdin: %w", err)
		}
		if _, err = f[0].Seek(0, io.SeekStart); err != nil {
			return f, err
		}
	}

	return f, nil
}

// contents returns what was written to file i, and copies it to w if there is one.
func (f stdio) contents(i int, w io.Writer) ([]byte, error) {
	var b bytes.Buffer
	// Not through the file's offset: an orphan that still writes shares it.
	if _, err := b.ReadFrom(io.NewSectionReader(f[i], 0, 1<<62)); err != nil {
		return nil, fmt.Errorf("faulttest: read %s: %w", f[i].Name(), err)
	}
	if w != nil {
		if _, err := w.Write(b.Bytes()); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), nil
}

func (f stdio) fds() []uintptr {
	return []uintptr{f[0].Fd(), f[1].Fd(), f[2].Fd()}
}

func (f stdio) close() {
	for _, file := range f {
		if file != nil {
			_ = file.Close() // memory, or opened for reading
		}
	}
}
