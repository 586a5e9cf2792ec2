package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// stdio is what the program has in place of the standard files of the caller. Pipes and sockets are passed as they
// are. The program must not get a terminal, because it could write to its input, or a regular file, because it could
// open that again through /proc with other rights.
type stdio struct {
	host     [3]*os.File
	files    [3]*os.File // of the init
	terminal [3]bool     // of the program: it gets a terminal of its own there
	inner    []*os.File  // those of files that this process closes after it has started the init

	outputs sync.WaitGroup // relays of output
	master  *os.File       // of the program's terminal, or nil
	cooked  *term.State    // of the caller's terminal while that is raw
	cancel  *os.File       // ends the relay of input when it is closed
}

func newStdio(o Options) (_ *stdio, err error) {
	s := &stdio{host: [3]*os.File{o.Stdin, o.Stdout, o.Stderr}}
	defer func() {
		if err != nil {
			s.closeInner()
		}
	}()

	for i, f := range s.host {
		if err := s.prepare(i, f); err != nil {
			return nil, err
		}
	}

	return s, nil
}

// prepare decides what the program gets as file i.
func (s *stdio) prepare(i int, f *os.File) error {
	if f == nil || term.IsTerminal(int(f.Fd())) {
		s.terminal[i] = f != nil
		return s.useNull(i)
	}

	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return s.useNull(i) // it is closed
	}

	switch st.Mode & unix.S_IFMT {
	case unix.S_IFIFO:
		if !isAnonymousPipe(int(f.Fd())) {
			return s.relayFile(i, f) // user 0 of the sandbox could change its mode and owner
		}
		s.files[i] = f
		return nil
	case unix.S_IFSOCK:
		s.files[i] = f
		return nil
	case unix.S_IFDIR:
		return errs.New(errs.Invalid, opSandbox, "", "standard input or output is a directory").
			WithHint("redirect it to a file or a pipe")
	}

	return s.relayFile(i, f)
}

// isAnonymousPipe reports whether a file is a pipe without a name, which belongs to whoever has it open.
func isAnonymousPipe(fd int) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(fd, &st) == nil && st.Type == unix.PIPEFS_MAGIC
}

func (s *stdio) useNull(i int) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err == nil {
		s.files[i], s.inner = null, append(s.inner, null)
	}
	return err
}

// relayFile gives the program a pipe in place of a file.
func (s *stdio) relayFile(i int, f *os.File) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}

	if i == 0 {
		s.files[i], s.inner = r, append(s.inner, r)
		go func() {
			defer w.Close()
			_, _ = io.Copy(w, f) // ends when the program no longer reads
		}()
		return nil
	}

	s.files[i], s.inner = w, append(s.inner, w)
	s.outputs.Go(func() {
		defer r.Close() // if f cannot be written, the program gets an error too
		_, _ = io.Copy(f, r)
	})
	return nil
}

// closeInner closes what only the init needs.
func (s *stdio) closeInner() {
	for _, f := range s.inner {
		f.Close()
	}
	s.inner = nil
}

// tty returns the caller's terminal, or nil.
func (s *stdio) tty() *os.File {
	for i, f := range s.host {
		if s.terminal[i] {
			return f
		}
	}
	return nil
}

// relayTerminal connects the caller's terminal with that of the program.
func (s *stdio) relayTerminal(master *os.File) error {
	if master == nil || s.master != nil {
		return fmt.Errorf("the sandbox sent no terminal")
	}

	s.master = master
	s.resize()

	// Output.
	out := s.host[0]
	for _, i := range []int{2, 1} {
		if s.terminal[i] {
			out = s.host[i]
		}
	}

	s.outputs.Go(func() { _, _ = io.Copy(out, master) }) // until the program's side is closed

	// Input: the program's terminal, and not this one, interprets it.
	if !s.terminal[0] {
		return nil
	}

	if err := s.makeRaw(); err != nil {
		return err
	}

	stop, cancel, err := os.Pipe()
	if err != nil {
		return err
	}

	s.cancel = cancel
	go func() {
		defer stop.Close()
		relayInput(s.host[0], master, stop)
	}()
	return nil
}

// relayInput copies what the user types until stop is closed. It reads nothing that it does not pass on.
func relayInput(from, to, stop *os.File) {
	buf := make([]byte, 4096)
	for {
		ready := []unix.PollFd{{Fd: int32(from.Fd()), Events: unix.POLLIN}, {Fd: int32(stop.Fd()), Events: unix.POLLIN}}
		if _, err := unix.Poll(ready, -1); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return
		}

		if ready[1].Revents != 0 {
			return
		}

		n, err := unix.Read(int(from.Fd()), buf)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil || n <= 0 {
			return
		}

		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (s *stdio) makeRaw() (err error) {
	s.cooked, err = term.MakeRaw(int(s.host[0].Fd()))
	if err != nil {
		return fmt.Errorf("making the terminal raw: %w", err)
	}
	return nil
}

func (s *stdio) restore() {
	if s.cooked != nil {
		_ = term.Restore(int(s.host[0].Fd()), s.cooked)
		s.cooked = nil
	}
}

// suspended restores the caller's terminal while this process is stopped.
func (s *stdio) suspended(stop func()) {
	raw := s.cooked != nil
	s.restore()
	stop()
	if raw {
		_ = s.makeRaw()
	}
	s.resize()
}

// resize gives the program's terminal the size of the caller's.
func (s *stdio) resize() {
	tty := s.tty()
	if s.master == nil || tty == nil {
		return
	}
	if size, err := unix.IoctlGetWinsize(int(tty.Fd()), unix.TIOCGWINSZ); err == nil {
		_ = unix.IoctlSetWinsize(int(s.master.Fd()), unix.TIOCSWINSZ, size)
	}
}

// finish waits until all output of the sandbox, whose processes have ended, is written.
func (s *stdio) finish() {
	s.outputs.Wait()
}

// close restores the caller's terminal.
func (s *stdio) close() {
	s.closeInner()
	s.restore()
	if s.cancel != nil {
		s.cancel.Close()
	}
	if s.master != nil {
		s.master.Close()
	}
}
