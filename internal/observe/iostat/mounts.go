package iostat

import (
	"os"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Mounts detects changes of the mount table. It is for one goroutine.
type Mounts struct{ fd int }

// WatchMounts starts to watch the mount table of this process.
func WatchMounts() (*Mounts, error) {
	// Not os.Open: Go's own poller would consume the event, which the kernel reports once.
	const file = "/proc/self/mountinfo"
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap(op, "", &os.PathError{Op: "open", Path: file, Err: err})
	}
	return &Mounts{fd}, nil
}

// Changed reports whether mounts have changed since the last call, or since the start. It neither waits nor reads the
// table.
func (m *Mounts) Changed() bool {
	p := []unix.PollFd{{Fd: int32(m.fd), Events: unix.POLLPRI}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0
}

// Close stops watching.
func (m *Mounts) Close() { _ = unix.Close(m.fd) }
