package run

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os/exec"
	"runtime"
	"syscall"

	"pando/internal/base/errs"
)

// pipeBytes is the size of the buffer between two programs, and of each pipe.
const pipeBytes = 1 << 20

// Pipe runs two programs and passes the output of the first to the second.
// progress, if not nil, is called with the number of bytes transferred. Both programs are killed
// when ctx ends, and when this process dies. The error is that of the program that failed
// first: if the second ends early, the first cannot continue, and if the first
// fails, the input of the second ends. If both may have failed first, the errors are joined.
// See Failure.
func Pipe(ctx context.Context, from, to []string, progress func(n int64)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	// Keep the thread that starts the programs: they get the death signal when it ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	// Prepare both programs.
	first, firstErr, err := command(ctx, from)
	if err != nil {
		return err
	}

	second, secondErr, err := command(ctx, to)
	if err != nil {
		return err
	}

	out, err := first.StdoutPipe()
	if err != nil {
		return errs.Wrap(from[0], "", err)
	}

	in, err := second.StdinPipe()
	if err != nil {
		return errs.Wrap(to[0], "", err)
	}

	// Start them, the reader first.
	enlarge(out)
	enlarge(in)
	if err := second.Start(); err != nil {
		return errs.Wrap(to[0], "", err)
	}

	if err := first.Start(); err != nil {
		cancel()
		_ = second.Wait()
		return errs.Wrap(from[0], "", err)
	}

	// Transfer the data.
	copied := pump(in, out, progress)
	closed := in.Close()
	if copied != nil {
		out.Close() // otherwise the first would wait for a reader
	}

	// Wait for both, and find out which one failed.
	firstEnd := ended(from[0], first.Wait(), firstErr)
	secondEnd := ended(to[0], second.Wait(), secondErr)
	if err := ctx.Err(); err != nil {
		return errs.Wrap(from[0], "", err)
	}

	if secondEnd == nil && firstEnd == nil {
		return errs.Wrap(to[0], "", errors.Join(copied, closed))
	}
	if copied != nil && secondEnd != nil {
		return secondEnd // it ended before reading all data
	}

	return errors.Join(firstEnd, secondEnd)
}

// command prepares a program, which is killed with its process group when ctx ends, and returns the
// buffer of its standard error. The caller must start it with its thread locked: see Pipe.
func command(ctx context.Context, args []string) (*exec.Cmd, *bytes.Buffer, error) {
	path, err := Look(args[0])
	if err != nil {
		return nil, nil, err
	}

	cmd := exec.CommandContext(ctx, path, args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killWait
	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	return cmd, &stderr, nil
}

// ended returns the error of a program from that of Wait.
func ended(name string, err error, stderr *bytes.Buffer) error {
	if err == nil || errors.Is(err, exec.ErrWaitDelay) {
		return nil
	}
	return &errs.Error{Kind: errs.IO, Op: name, Err: &Failure{Err: err, Stderr: stderr.String()}}
}

// pump copies src to dst until src ends, and reports the progress.
func pump(dst io.Writer, src io.Reader, progress func(int64)) error {
	buf := make([]byte, pipeBytes)
	var done int64
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return err
			}
			done += int64(n)
			if progress != nil {
				progress(done)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
