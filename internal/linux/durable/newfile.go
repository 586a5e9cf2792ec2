package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// NewFile is a file of mode 0600 that is being written, and gets its name at the end. Where its filesystem has files
// without names (O_TMPFILE: ext4, XFS, btrfs, tmpfs), nothing is left of it if the process dies before. To replace a
// file, Commit gives it another name for a moment.
type NewFile struct {
	*os.File
	path string
	temp string // its name in the meantime; "" if it has none
}

// Create begins to write a file that will be at path. The caller ends with Commit or Discard.
func Create(path string) (*NewFile, error) {
	f, err := os.OpenFile(filepath.Dir(path), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return &NewFile{File: f, path: path}, nil
	}

	// Some filesystems have only files with names. Old kernels take the flag for O_DIRECTORY.
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return nil, err
	}

	return createNamed(path)
}

// createNamed is Create for filesystems without files that have no name.
func createNamed(path string) (*NewFile, error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".new-*")
	if err != nil {
		return nil, err
	}
	return &NewFile{File: f, path: path, temp: f.Name()}, nil
}

// Commit makes the content durable and gives the file its name, in place of an existing file only with replace;
// fs.ErrExist otherwise. On error nothing is left. Durable on return.
func (n *NewFile) Commit(replace bool) (err error) {
	defer n.Discard() // of the other name, if there still is one

	if err := n.Sync(); err != nil {
		return err
	}

	if err := n.giveName(replace); err != nil {
		return err
	}

	return SyncDir(filepath.Dir(n.path))
}

// giveName links the file to its path.
func (n *NewFile) giveName(replace bool) error {
	if !replace {
		return n.link(n.path)
	}

	// Only a rename can replace a file.
	for try := 0; n.temp == ""; try++ {
		temp := filepath.Join(filepath.Dir(n.path), fmt.Sprintf(".%s.new-%d-%d", filepath.Base(n.path), os.Getpid(), try))
		err := n.link(temp)
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err == nil {
			n.temp = temp
		}
	}

	if err := os.Rename(n.temp, n.path); err != nil {
		return err
	}

	n.temp = ""
	return nil
}

// link gives the file another name, which must not exist.
func (n *NewFile) link(path string) error {
	if n.temp != "" {
		return os.Link(n.temp, path)
	}
	from := fmt.Sprintf("/proc/self/fd/%d", n.Fd())
	err := unix.Linkat(unix.AT_FDCWD, from, unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
	if err != nil {
		return &os.LinkError{Op: "link", Old: from, New: path, Err: err}
	}
	return nil
}

// Discard closes the file, and removes it unless it was committed. It may be called again.
func (n *NewFile) Discard() {
	_ = n.Close() // after Commit it has been synced
	if n.temp != "" {
		_ = os.Remove(n.temp)
		n.temp = ""
	}
}
