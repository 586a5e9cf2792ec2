package mcp

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// Of a command's output, clients get as many bytes from its beginning, and from its end.
const (
	outputHead = 32 << 10
	outputTail = 32 << 10
)

// drainTime is how long output is awaited after the command has ended.
const drainTime = 2 * time.Second

// exitTimedOut is the exit status of a command that a timeout has ended.
const exitTimedOut = 124

type runArgs struct {
	Volume  string   `json:"volume"`
	Command []string `json:"command" jsonschema:"the program and its arguments"`
	Timeout float64  `json:"timeout_seconds,omitempty" jsonschema:"end it after this time; default: the longest one"`
}

type ran struct {
	Notice   string  `json:"notice"`
	Exit     int     `json:"exit" jsonschema:"128 + signal if a signal ended the command; 124 if the timeout did"`
	Stdout   string  `json:"stdout" jsonschema:"untrusted; without its middle if it is long"`
	Stderr   string  `json:"stderr" jsonschema:"untrusted; without its middle if it is long"`
	TimedOut bool    `json:"timed_out"`
	Seconds  float64 `json:"seconds"`
	also
}

func (s *Server) run(ctx context.Context, in runArgs) (out ran, err error) {
	const op = "run"
	timeout := s.o.Timeout
	if in.Timeout != 0 {
		timeout = time.Duration(min(in.Timeout, timeout.Seconds()) * float64(time.Second))
	}
	if len(in.Command) == 0 || in.Command[0] == "" || timeout <= 0 {
		return out, errs.New(errs.Invalid, op, in.Volume, "a command and a positive timeout are needed")
	}
	volume, err := s.own(ctx, op, in.Volume)
	if err != nil {
		return out, err
	}
	end, err := s.beginCommand(ctx, op, volume)
	if err != nil {
		return out, err
	}
	defer end()

	// Run it, and collect its output.
	stdin, err := os.Open(os.DevNull)
	if err != nil {
		return out, errs.Wrap(op, in.Volume, err)
	}
	defer stdin.Close()
	stdout, err := newOutput()
	if err != nil {
		return out, errs.Wrap(op, in.Volume, err)
	}
	stderr, err := newOutput()
	if err != nil {
		_ = stdout.end()
		return out, errs.Wrap(op, in.Volume, err)
	}
	began := time.Now()
	r, err := s.pool.Shell(ctx, engine.ShellRequest{Volume: volume, Command: in.Command, Sandbox: s.o.Sandbox,
		Timeout: timeout, Env: s.o.Env, Stdin: stdin, Stdout: stdout.w, Stderr: stderr.w})
	took := time.Since(began)

	out = ran{Notice: untrusted, Exit: r.Exit, Stdout: stdout.end(), Stderr: stderr.end(), Seconds: took.Seconds(),
		TimedOut: r.Exit == exitTimedOut && took >= timeout}
	return out, err
}

// beginCommand waits until another command may run. InUse: one runs in this volume already.
func (s *Server) beginCommand(ctx context.Context, op string, volume ref.Name) (end func(), err error) {
	s.mu.Lock()
	busy := s.busy[volume]
	s.busy[volume] = true
	s.mu.Unlock()
	if busy {
		return nil, errs.New(errs.InUse, op, volume.String(), "another command is running in this volume").
			WithHint("wait until it ends, or cancel it")
	}

	free := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.busy, volume)
	}
	select {
	case s.commands <- struct{}{}:
		return func() { <-s.commands; free() }, nil
	case <-ctx.Done():
		free()
		return nil, ctx.Err()
	}
}

// output collects what a program writes to a pipe, in bounded memory.
type output struct {
	w    *os.File
	r    *os.File
	done chan struct{}

	mu         sync.Mutex
	head, tail []byte
	left       int64 // bytes between them that are gone
}

func newOutput() (*output, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	o := &output{w: w, r: r, done: make(chan struct{})}
	go func() {
		defer close(o.done)
		_, _ = io.Copy(o, r) // it ends with the pipe
	}()
	return o, nil
}

// Write keeps the head and the tail of what is written.
func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := len(b)
	more := min(outputHead-len(o.head), n)
	o.head = append(o.head, b[:more]...)
	o.tail = append(o.tail, b[more:]...)
	if gone := len(o.tail) - outputTail; gone > 0 {
		o.left += int64(gone)
		o.tail = append(o.tail[:0], o.tail[gone:]...)
	}
	return n, nil
}

// end returns the text. It does not wait for programs that hold the pipe open.
func (o *output) end() string {
	o.w.Close()
	_ = o.r.SetReadDeadline(time.Now().Add(drainTime)) // pipes have deadlines
	<-o.done
	o.r.Close()

	text := string(o.head)
	if o.left > 0 {
		text += fmt.Sprintf("\n[... %d bytes are left out here ...]\n", o.left)
	}
	return strings.ToValidUTF8(text+string(o.tail), "\uFFFD")
}
