package history

import (
	"bytes"
	"errors"
	"iter"
	"os"
	"path/filepath"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Files of the log in a pool: the one that grows, and the one that was full before it.
const (
	FileName = "history.log"
	OldName  = "history.log.1"
)

// fileMost is the size at which a file is full, and another is begun. Tests use less.
const fileMost = 8 << 20

// chunkMost limits the bytes of one write.
const chunkMost = 64 << 10

// Log is the log of the pool in a directory. It may be used concurrently, and by several processes.
type Log struct {
	dir  string
	most int64 // size at which a file is full
}

// New returns the log of the pool in dir.
func New(dir string) *Log { return &Log{dir, fileMost} }

// Append appends events. It waits for no other process and not for the disk: a power loss may lose them. On error, some
// of the events may have been written. NoSpace, Permission, IO.
func (l *Log) Append(events iter.Seq[Event]) error {
	var b bytes.Buffer
	for e := range events {
		if err := appendLine(&b, e); err != nil {
			return errs.Wrap("write history", l.path(), err)
		}
		if b.Len() < chunkMost-lineMost {
			continue
		}
		if err := l.write(b.Bytes()); err != nil {
			return errs.Wrap("write history", l.path(), err)
		}
		b.Reset()
	}

	if b.Len() == 0 {
		return nil
	}
	return errs.Wrap("write history", l.path(), l.write(b.Bytes()))
}

func (l *Log) path() string { return filepath.Join(l.dir, FileName) }

// writeTries limits how often a chunk is written again because its file was removed in the meantime.
const writeTries = 3

// write appends whole lines in one system call, so that those of other processes are not mixed with them.
func (l *Log) write(lines []byte) error {
	for range writeTries {
		kept, err := l.writeOnce(lines)
		if err != nil || kept {
			return err
		}
	}
	return errors.New("the file was replaced again and again")
}

// writeOnce is one try of write. It reports false if the file was no longer part of the log when it was written: while
// this process slept, others have filled two more.
func (l *Log) writeOnce(lines []byte) (kept bool, err error) {
	fd, err := openFile(l.path())
	if err != nil {
		return false, err
	}
	defer unix.Close(fd) // nothing is buffered

	return l.append(fd, lines)
}

// append is writeOnce with an open file.
func (l *Log) append(fd int, lines []byte) (kept bool, err error) {
	n, err := retry(func() (int, error) { return unix.Write(fd, lines) })
	if err != nil {
		return false, err
	}
	if n < len(lines) {
		return false, unix.ENOSPC // a reader skips the line that was cut off
	}

	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, err
	}
	if st.Size >= l.most {
		l.rotate(fd, st.Ino)
	}
	return st.Nlink > 0, nil
}

// openFile opens a file of the log for appending, and makes it if it is missing. It never waits, not even for the
// reader of a pipe that somebody has put there.
func openFile(path string) (int, error) {
	open := func(more int) (int, error) { return openRegular(path, unix.O_WRONLY|unix.O_APPEND|more) }

	fd, err := open(0)
	if err != unix.ENOENT {
		return fd, err
	}
	if fd, err = open(unix.O_CREAT | unix.O_EXCL); err == unix.EEXIST {
		return open(0) // another process was faster
	}
	if err != nil {
		return fd, err
	}

	// The pool's owner owns it, even if root writes it first.
	var dir unix.Stat_t
	if unix.Stat(filepath.Dir(path), &dir) == nil && os.Geteuid() == 0 && dir.Uid != 0 {
		_ = unix.Fchown(fd, int(dir.Uid), int(dir.Gid)) // else only root can write events
	}
	return fd, nil
}

// openRegular opens a file of the log. It follows no symbolic link, does not wait for the other end of a FIFO, and
// refuses everything that is not a regular file: reading a device may never end.
func openRegular(path string, flags int) (int, error) {
	fd, err := retry(func() (int, error) {
		return unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	})
	var st unix.Stat_t
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENXIO): // a link, directory or FIFO
		return -1, errNotRegular(path)
	case err != nil:
		return -1, err
	}

	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		_ = unix.Close(fd)
		return -1, errors.Join(err, errNotRegular(path))
	}
	return fd, nil
}

func errNotRegular(path string) error {
	return errs.New(errs.IO, "open history", path, "it is not a regular file").
		WithHint("remove or rename it: pando then begins a new file")
}

// rotate gives the full file its other name, unless another process is doing that or has done it. Processes that have
// the file open go on appending to it. If it fails, the next event tries again.
func (l *Log) rotate(fd int, ino uint64) {
	if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
		return
	}
	defer func() { _ = unix.Flock(fd, unix.LOCK_UN) }() // a program that is being started may have it open, too

	var now unix.Stat_t
	if unix.Lstat(l.path(), &now) == nil && now.Ino == ino {
		_ = os.Rename(l.path(), filepath.Join(l.dir, OldName))
	}
}

// retry calls fn again while a signal interrupts it.
func retry(fn func() (int, error)) (int, error) {
	for {
		n, err := fn()
		if err != unix.EINTR {
			return n, err
		}
	}
}
