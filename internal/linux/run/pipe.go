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

// pipeBytes is how much is taken from one program and given to the other at once.
const pipeBytes = 1 << 20

// Pipe runs two programs, the output of the first being the input of the second.
// progress, if not nil, is called with the bytes that have gone through. Both die
// with ctx, and with this process. The error is that of the program that failed
// first: when the second ends early, the first cannot go on, and when the first
// fails, the second sees its input end; see Failure. All that is known of a failure
// is returned joined, the cause first.
func Pipe(ctx context.Context, from, to []string, progress func(n int64)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	// The death signal comes when the thread ends that started the programs.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

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

	copied := pump(in, out, progress)
	closed := in.Close()
	if copied != nil {
		out.Close() // the first must not wait for somebody to read
	}

	firstEnd := ended(from[0], first.Wait(), firstErr)
	secondEnd := ended(to[0], second.Wait(), secondErr)
	if err := ctx.Err(); err != nil {
		return errs.Wrap(from[0], "", err)
	}

	if secondEnd == nil && firstEnd == nil {
		return errs.Wrap(to[0], "", errors.Join(copied, closed))
	}
	if copied != nil && secondEnd != nil {
		return secondEnd // it did not take all
	}

	return errors.Join(firstEnd, secondEnd)
}

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

func ended(name string, err error, stderr *bytes.Buffer) error {
	if err == nil || errors.Is(err, exec.ErrWaitDelay) {
		return nil
	}
	return &errs.Error{Kind: errs.IO, Op: name, Err: &Failure{Err: err, Stderr: stderr.String()}}
}

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
