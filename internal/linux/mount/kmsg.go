package mount

import (
	"errors"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kernelLog collects the messages that the kernel logs while it mounts a device. Newer kernel
// code reports through the mount's context, but ext4 and XFS still write many messages
// only to the kernel's log (dmesg).
type kernelLog struct {
	fd  int    // /dev/kmsg, positioned after existing messages; -1 if it cannot be read
	tag string // marks messages about the device
}

const maxKernelMessages = 3

// newKernelLog begins to collect messages about a block device.
func newKernelLog(device string) kernelLog {
	l := kernelLog{fd: -1, tag: "(" + filepath.Base(device) + "):"}
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return l
	}
	if _, err := unix.Seek(fd, 0, unix.SEEK_END); err != nil {
		unix.Close(fd)
		return l
	}
	l.fd = fd
	return l
}

func (l kernelLog) close() {
	if l.fd >= 0 {
		unix.Close(l.fd)
	}
}

// messages returns the first warnings about the device.
func (l kernelLog) messages() (out []string) {
	buf := make([]byte, 8192)
	for range 10_000 {
		n, err := unix.Read(l.fd, buf)
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EINTR) {
			continue // EPIPE: messages were lost
		}
		if err != nil || n <= 0 || len(out) == maxKernelMessages {
			break
		}
		if msg, ok := parseKernelMessage(string(buf[:n]), l.tag); ok {
			out = append(out, msg)
		}
	}

	return out
}

// parseKernelMessage returns the text of a record of /dev/kmsg if it contains tag and is a
// warning or worse:
//
//	3,437,2047102345,-;EXT4-fs (loop0): VFS: Can't find ext4 filesystem
func parseKernelMessage(record, tag string) (string, bool) {
	head, text, ok := strings.Cut(record, ";")
	if !ok {
		return "", false
	}

	priority, _, _ := strings.Cut(head, ",")
	n, err := strconv.Atoi(priority)
	const levels, warning = 8, 4
	if err != nil || n%levels > warning {
		return "", false
	}

	text, _, _ = strings.Cut(text, "\n") // the other lines are fields for programs
	_, msg, ok := strings.Cut(text, tag)
	return strings.TrimSpace(msg), ok
}

// contextMessages reads the kernel's messages about a failed fsconfig.
func contextMessages(fsfd int) (out []string) {
	if fsfd < 0 {
		return nil
	}

	buf := make([]byte, 4096)
	for range 16 {
		n, err := unix.Read(fsfd, buf)
		if err != nil || n <= 0 {
			break
		}
		msg := strings.TrimSpace(string(buf[:n]))
		if len(msg) > 2 && msg[1] == ' ' {
			msg = msg[2:] // "e ", "w ", "i "
		}
		out = append(out, msg)
	}

	return out
}
