package sandbox

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLastMessageArrives: that of a process that ends before it has read what it was sent.
func TestLastMessageArrives(t *testing.T) {
	ours, theirs, err := newChannel()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ours.fd)

	if err := ours.send(message{Signal: unix.SIGCONT}, -1); err != nil {
		t.Fatal(err)
	}
	if err := theirs.send(message{Ended: true, Exit: 7}, -1); err != nil {
		t.Fatal(err)
	}
	unix.Close(theirs.fd)

	if m, _, err := ours.receive(); err != nil || !m.Ended || m.Exit != 7 {
		t.Errorf("%+v, %v", m, err)
	}
	if _, _, err := ours.receive(); !errors.Is(err, errClosed) {
		t.Errorf("%v", err)
	}
}
