package treewalk

import (
	"errors"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// ReplaceFile creates or replaces a file in a tree whose content need not be trusted: like Open it follows no link, and
// never leaves the tree or enters another mount. What had the name is gone, whatever it was, unless it is a directory.
// Readers see the old or the new content. It is not durable. The errors are those of open(2) and rename(2).
func ReplaceFile(root *os.File, name string, content []byte, mode uint32) error {
	dir, err := Open(root, path.Dir(name))
	if err != nil {
		return err
	}
	defer dir.Close()

	// Write the new file beside the old one.
	at, base := int(dir.Fd()), path.Base(name)
	fresh := base + ".new"
	if err := unix.Unlinkat(at, fresh, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "unlink", Path: name + ".new", Err: err}
	}

	fd, err := unix.Openat(at, fresh, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
	if err != nil {
		return &os.PathError{Op: "open", Path: name + ".new", Err: err}
	}

	f := os.NewFile(uintptr(fd), fresh)
	_, err = f.Write(content)
	if cerr := f.Close(); err == nil {
		err = cerr
	}

	// Give it its name.
	if err == nil {
		err = unix.Renameat(at, fresh, at, base)
	}
	if err != nil {
		_ = unix.Unlinkat(at, fresh, 0) // useless, and the disk may be full
		return &os.PathError{Op: "write", Path: name, Err: err}
	}

	return nil
}
