package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// messageBytes is more than any message has.
const messageBytes = 16 << 10

// message is what Run and the init tell each other, over a socket that keeps messages apart.
type message struct {
	Go      bool           `json:",omitempty"` // to the init: the spec is complete, and everything outside is ready
	Signal  syscall.Signal `json:",omitempty"` // to the init: send it to the program
	Group   bool           `json:",omitempty"` // and to its process group
	Master  bool           `json:",omitempty"` // from the init: the terminal's master comes with this message
	Started bool           `json:",omitempty"` // from the init: the program runs
	Ended   bool           `json:",omitempty"` // from the init: the program has ended with Exit
	Exit    int            `json:",omitempty"`
	Error   *wireError     `json:",omitempty"` // from the init: the program could not be started
}

// wireError is an errs.Error on its way between two processes.
type wireError struct {
	Kind    errs.Kind
	Op, Ref string
	Hint    errs.Message
	Text    string
}

func toWire(err error) *wireError {
	const most = messageBytes / 16 // texts that name arguments can be of any length; JSON makes them six times as long
	shorten := func(s string) string { return s[:min(len(s), most)] }
	w := &wireError{Kind: errs.KindOf(err), Op: "sandbox", Hint: errs.HintIn(err), Text: err.Error()}
	var e *errs.Error
	if errors.As(err, &e) && e.Err != nil {
		w.Op, w.Ref, w.Text = e.Op, e.Ref, e.Err.Error()
	}
	w.Ref, w.Text = shorten(w.Ref), shorten(w.Text)
	return w
}

func (w *wireError) error() error {
	return &errs.Error{Kind: w.Kind, Op: w.Op, Ref: w.Ref, Hint: w.Hint, Err: errors.New(w.Text)}
}

// channel is one end of the socket.
type channel struct{ fd int }

// newChannel returns both ends.
func newChannel() (ours, theirs channel, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return channel{-1}, channel{-1}, fmt.Errorf("socketpair: %w", err)
	}
	return channel{fds[0]}, channel{fds[1]}, nil
}

// send sends a message, and a descriptor with it unless that is negative.
func (c channel) send(m message, fd int) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}

	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}

	for {
		err := unix.Sendmsg(c.fd, b, rights, nil, unix.MSG_NOSIGNAL)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// errClosed means that the other process has ended.
var errClosed = errors.New("the other process has ended")

// receive waits for a message. file is the descriptor that came with it, or nil.
func (c channel) receive() (m message, file *os.File, err error) {
	b, rights := make([]byte, messageBytes), make([]byte, unix.CmsgSpace(4))
	var n, nr int
	for reset := false; ; {
		n, nr, _, _, err = unix.Recvmsg(c.fd, b, rights, unix.MSG_CMSG_CLOEXEC)

		// The other process has ended without reading everything. What it sent before comes after this error.
		if errors.Is(err, unix.ECONNRESET) && !reset {
			reset = true
			continue
		}
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil || n == 0 {
		return m, nil, errors.Join(errClosed, err)
	}

	if nr > 0 {
		file = receivedFile(rights[:nr])
	}

	return m, file, json.Unmarshal(b[:n], &m)
}

func receivedFile(rights []byte) *os.File {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil || len(messages) != 1 {
		return nil
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil
	}
	return os.NewFile(uintptr(fds[0]), "terminal")
}
