package run

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Into runs a program with r as its input, and discards its output. The program is
// killed when ctx ends, and when this process dies. If r fails, the program's input ends, and
// Into returns the error of r. If the program succeeds before r ends, Into returns ErrMore.
// See Failure for other errors of the program.
func Into(ctx context.Context, r io.Reader, args ...string) error {
	runtime.LockOSThread() // see Pipe
	defer runtime.UnlockOSThread()

	cmd, stderr, err := command(ctx, args)
	if err != nil {
		return err
	}

	in, err := cmd.StdinPipe()
	if err != nil {
		return errs.Wrap(args[0], "", err)
	}

	enlarge(in)
	if err := cmd.Start(); err != nil {
		return errs.Wrap(args[0], "", err)
	}

	src := &source{r: r}
	copied := pump(in, src, nil)
	closed := in.Close()
	end := ended(args[0], cmd.Wait(), stderr)
	switch {
	case ctx.Err() != nil:
		return errs.Wrap(args[0], "", ctx.Err())
	case src.err != nil:
		return src.err
	case end != nil:
		return end
	case errors.Is(copied, unix.EPIPE):
		return ErrMore
	}

	return errs.Wrap(args[0], "", errors.Join(copied, closed))
}

// ErrMore is the error of Into for a program that succeeded without reading all of its input.
var ErrMore = errors.New("there is more input than the program accepts")

// source remembers the error of a reader.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// OutOf runs a program without input and writes its output to w. The program is killed when
// ctx ends, when this process dies, and when w fails; then OutOf returns the error of w. See
// Failure for errors of the program.
func OutOf(ctx context.Context, w io.Writer, args ...string) error {
	ctx2, cancel := context.WithCancel(ctx)
	defer cancel()

	runtime.LockOSThread() // see Pipe
	defer runtime.UnlockOSThread()

	cmd, stderr, err := command(ctx2, args)
	if err != nil {
		return err
	}

	out, err := cmd.StdoutPipe()
	if err != nil {
		return errs.Wrap(args[0], "", err)
	}

	enlarge(out)
	if err := cmd.Start(); err != nil {
		return errs.Wrap(args[0], "", err)
	}

	dst := &sink{w: w}
	copied := pump(dst, out, nil)
	if copied != nil {
		cancel()
	}

	end := ended(args[0], cmd.Wait(), stderr)
	switch {
	case ctx.Err() != nil:
		return errs.Wrap(args[0], "", ctx.Err())
	case dst.err != nil:
		return dst.err
	case end != nil:
		return end
	}

	return errs.Wrap(args[0], "", copied)
}

// sink remembers the error of a writer.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(b []byte) (int, error) {
	n, err := s.w.Write(b)
	s.err = err
	return n, err
}

// enlarge increases the capacity of a pipe, for speed.
func enlarge(p any) {
	if f, ok := p.(*os.File); ok {
		_, _ = unix.FcntlInt(f.Fd(), unix.F_SETPIPE_SZ, pipeBytes)
	}
}
