package syncbench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
)

// fioVersion finds fio and asks it who it is. Unsupported, with what to install, if it is
// not there.
func fioVersion(ctx context.Context) (path, version string, err error) {
	path, err = run.Look("fio")
	if err != nil {
		return "", "", errs.Wrap(op, "", err)
	}
	out, err := run.Program(ctx, path, "--version")
	if err != nil {
		return "", "", errs.Wrap(op, "fio --version", err)
	}
	return path, strings.TrimSpace(string(out)), nil
}

// load is a fio that runs.
type load struct {
	cmd    *exec.Cmd
	stderr limited

	samples []*sample
	notes   string
	readErr error
	read    chan struct{} // closed when all that it prints has been read
}

// limited keeps the first bytes of what is written.
type limited struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *limited) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(b[:min(len(b), max(0, 16<<10-l.buf.Len()))])
	return len(b), nil
}

func (l *limited) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// fio runs fio in dir with the arguments given, besides those of its output, and returns its samples when it
// has ended. It is started by start; while it runs, during is called, with a context that
// ends with it, and seen with each sample.
//
// It is one process in a group of its own, so a Ctrl-C does not reach it; it is killed when ctx ends and dies
// with this process, whatever ends that.
func fio(
	ctx context.Context, path, dir string, args []string, start func(*exec.Cmd) error, during func(context.Context) error,
	seen func(*sample),
) ([]*sample, error) {
	// The death signal comes when the thread ends that started the program.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	l := &load{read: make(chan struct{})}
	l.cmd = exec.CommandContext(ctx, path, append(args,
		"--output-format=json+", fmt.Sprintf("--status-interval=%d", int(interval.Seconds())), "--eta=never")...)
	l.cmd.Dir = dir
	l.cmd.Env = append(l.cmd.Environ(), "LC_ALL=C")
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	l.cmd.Cancel = func() error { return syscall.Kill(-l.cmd.Process.Pid, syscall.SIGKILL) }
	l.cmd.WaitDelay = 5 * time.Second
	l.cmd.Stderr = &l.stderr
	r, w, err := os.Pipe()
	if err != nil {
		return nil, errs.Wrap(op, "fio", err)
	}

	l.cmd.Stdout = w
	err = start(l.cmd)
	w.Close()
	if err != nil {
		r.Close()
		return nil, errs.Wrap(op, "fio", err)
	}

	go func() {
		defer close(l.read)
		defer r.Close()
		l.notes, l.readErr = readSamples(r, func(s *sample) error {
			l.samples = append(l.samples, s)
			if seen != nil {
				seen(s)
			}
			return nil
		})

		if l.readErr != nil {
			cancel(l.readErr) // nobody reads on: fio would wait for ever
		}
	}()

	done := make(chan struct{})
	go func() {
		defer close(done)
		if during != nil {
			if err := during(ctx); err != nil {
				cancel(err)
			}
		}
	}()

	waited := l.cmd.Wait()
	cause := context.Cause(ctx)
	cancel(nil) // ends during
	<-done
	<-l.read
	if cause == nil {
		// during may have failed just when fio ended.
		if c := context.Cause(ctx); !errors.Is(c, context.Canceled) {
			cause = c
		}
	}

	return l.samples, l.outcome(cause, waited)
}

// outcome is what went wrong, in fio's own words where it has any.
func (l *load) outcome(cause, waited error) error {
	if cause != nil {
		return errs.Wrap(op, "fio", cause)
	}
	if l.readErr != nil {
		return errs.New(errs.Internal, op, "fio", "%w", l.readErr)
	}

	var number syscall.Errno
	if n := len(l.samples); n > 0 {
		number = l.samples[n-1].err
	}

	said := strings.TrimSpace(run.LastLines(l.stderr.String()+"\n"+l.notes, 4))
	if waited == nil && number == 0 && len(l.samples) > 0 {
		return nil
	}

	kind := errs.Internal
	if number != 0 {
		kind = errs.KindOf(number)
	}

	if said == "" {
		switch {
		case number != 0:
			said = number.Error()
		case waited != nil:
			said = waited.Error()
		default:
			said = "no report"
		}
	}

	if number == syscall.ENOSPC || number == syscall.EDQUOT {
		return errs.New(kind, op, "fio", "the filesystem ran out of space during the run: %s", said).
			WithHint("free some space: copy-on-write filesystems need space even to overwrite")
	}

	return errs.New(kind, op, "fio", "%s", said).
		WithHint("install fio 3.24 or newer, or run the command of the profile by hand to find the cause")
}
