// Package mountpoint handles the directory entries on which volumes are mounted, by descriptor, so that nobody can
// redirect Pando in the meantime, and the notes on directories that Pando has made for them. It knows neither pools nor
// volumes, only that some mount points are below a directory of Pando's own.
package mountpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// Place is a directory entry on which something is mounted, or is to be. It is held by the descriptor of its directory:
// renaming directories above it, or replacing them by symbolic links, leads Pando nowhere else.
type Place struct {
	parent *os.File // O_PATH
	name   string
	path   string // as it was when it was opened
}

// Inode identifies a directory for as long as it exists.
type Inode struct{ Dev, Ino uint64 }

// InodeOf returns the inode that st describes.
func InodeOf(st *unix.Stat_t) Inode { return Inode{st.Dev, st.Ino} }

// Open opens the directory above a mount point: own, Pando's own directory of mount points, by its name; any other by
// its path, which is absolute and has no symbolic links. NotFound, Conflict.
func Open(path, own string) (*Place, error) {
	dir, name := filepath.Split(path)
	if dir = filepath.Clean(dir); dir != own {
		parent, err := mount.OpenDir(dir)
		return &Place{parent: parent, name: name, path: path}, err
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap("open", dir, err)
	}
	return &Place{parent: os.NewFile(uintptr(fd), dir), name: name, path: path}, nil
}

// Beside returns another entry of the same directory, which is closed with p.
func (p *Place) Beside(name string) *Place {
	return &Place{parent: p.parent, name: name, path: filepath.Join(filepath.Dir(p.path), name)}
}

// Close closes the directory, and with it all places beside this one.
func (p *Place) Close() { _ = p.parent.Close() }

// Parent is the directory, for calls of the system (O_PATH).
func (p *Place) Parent() *os.File { return p.parent }

// Name is that of the entry.
func (p *Place) Name() string { return p.name }

// Fd is the descriptor of the directory.
func (p *Place) Fd() int { return int(p.parent.Fd()) }

// Mounted returns the mount at the place itself; ok is false if there is none.
func (p *Place) Mounted() (m kernel.MountInfo, ok bool) {
	m, err := kernel.MountAt(p.Fd(), p.name)
	return m, err == nil && m.Root
}

// OpenDir opens the directory at the place for reading and ioctls. Errors of the system:
// EXDEV if something is mounted there, ELOOP or ENOTDIR if it is not a directory.
func (p *Place) OpenDir() (*os.File, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	}
	fd, err := unix.Openat2(p.Fd(), p.name, &how)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), p.path), nil
}

// ReadLink returns the target of the symbolic link at the place; ok is false if there is none.
func (p *Place) ReadLink() (to string, ok bool) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(p.Fd(), p.name, buf)
	return string(buf[:max(n, 0)]), err == nil
}

// Unmount unmounts the mount with this ID. NotFound if it does not exist (any more), InUse. idle: see
// mount.UnmountIn.
func (p *Place) Unmount(id uint64, idle bool) error {
	if !mount.IsMounted(fmt.Sprintf("/proc/self/fd/%d/%s", p.Fd(), p.name), id) {
		return errs.New(errs.NotFound, "umount", p.path, "not mounted")
	}
	return mount.UnmountIn(p.parent, p.name, idle)
}

// RemoveDir removes the directory at the place if ours accepts it. It leaves anything else alone: another file, a
// mount, and a directory that is not empty.
func (p *Place) RemoveDir(ours func(dir *os.File) bool) error {
	dir, err := p.OpenDir()
	for _, other := range []error{unix.ENOENT, unix.EXDEV, unix.ELOOP, unix.ENOTDIR} {
		if errors.Is(err, other) {
			return nil
		}
	}
	if err != nil {
		return errs.Wrap("remove mount point", p.path, err)
	}

	defer dir.Close()

	if !ours(dir) {
		return nil
	}

	thawed, ferr := kernel.SetImmutable(dir, false)
	err = unix.Unlinkat(p.Fd(), p.name, unix.AT_REMOVEDIR)
	for _, done := range []error{nil, unix.ENOENT, unix.ENOTEMPTY, unix.EEXIST} {
		if errors.Is(err, done) {
			return nil
		}
	}

	if thawed {
		_, _ = kernel.SetImmutable(dir, true) // else it is like any directory
	}

	switch {
	case errors.Is(err, unix.EBUSY): // mounted on in the meantime
		return nil
	case ferr != nil:
		err = ferr
	}

	return errs.Wrap("remove mount point", p.path, err)
}

// RemoveLink removes the symbolic link at the place if ours accepts its target.
func (p *Place) RemoveLink(ours func(to string) bool) error {
	if to, ok := p.ReadLink(); !ok || !ours(to) {
		return nil
	}
	if err := unix.Unlinkat(p.Fd(), p.name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return errs.Wrap("remove mount point", p.path, err)
	}
	return nil
}

// RemoveLeftover removes what Pando leaves at a default mount point: an empty directory, or a link.
func (p *Place) RemoveLeftover(ourLink func(to string) bool) error {
	if err := p.RemoveLink(ourLink); err != nil {
		return err
	}
	return p.RemoveDir(func(*os.File) bool { return true })
}

// MakeDir makes the directory at the place, and reports whether it was missing.
func (p *Place) MakeDir(mode uint32) (made bool, err error) {
	err = unix.Mkdirat(p.Fd(), p.name, mode)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	return err == nil, errs.Wrap("mount", p.path, err)
}

// A directory that Pando has made outside of the pool says so itself, by an extended
// attribute with the ID of the volume that it was made for. Where only the first name is
// not allowed, as in containers, the second one is used.
var madeForNames = []string{"trusted.pando.mountpoint", "user.pando.mountpoint"}

// NoteMadeFor notes that a directory was made for a volume. Unsupported where extended attributes are.
func NoteMadeFor(dir *os.File, id driver.ObjectID) (err error) {
	for _, name := range madeForNames {
		err = unix.Fsetxattr(int(dir.Fd()), name, []byte(id), 0)
		if err == nil || !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EOPNOTSUPP) {
			break
		}
	}
	if errors.Is(err, unix.EPERM) {
		err = unix.EOPNOTSUPP
	}
	return errs.Wrap("mount", dir.Name(), err)
}

// MadeFor returns the volume for which Pando has made a directory; "" if it has not.
func MadeFor(dir *os.File) driver.ObjectID {
	buf := make([]byte, unix.NAME_MAX)
	for _, name := range madeForNames {
		if n, err := unix.Fgetxattr(int(dir.Fd()), name, buf); err == nil {
			return driver.ObjectID(buf[:n])
		}
	}
	return ""
}

// ForgetMadeFor removes the note of NoteMadeFor.
func ForgetMadeFor(dir *os.File) {
	for _, name := range madeForNames {
		_ = unix.Fremovexattr(int(dir.Fd()), name) // a leftover means nothing without a row
	}
}

// OthersCanEnter reports whether users other than root can reach the content of the directory fd: every directory on
// the way from the root lets some of them through.
func OthersCanEnter(fd int) (bool, error) {
	fd, err := unix.Openat(fd, ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, errs.Wrap("mount", "", err)
	}

	defer func() { unix.Close(fd) }()

	for last := (Inode{}); ; {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return false, errs.Wrap("mount", "", err)
		}

		if InodeOf(&st) == last { // the root, which is above itself
			return true, nil
		}
		if !admitsOthers(fd, &st) {
			return false, nil
		}

		last = InodeOf(&st)
		up, err := unix.Openat(fd, "..", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return false, errs.Wrap("mount", "", err)
		}

		unix.Close(fd)
		fd = up
	}
}

// admitsOthers reports whether one directory lets users other than root through.
func admitsOthers(fd int, st *unix.Stat_t) bool {
	switch {
	case st.Mode&0o001 != 0, st.Mode&0o100 != 0 && st.Uid != 0, st.Mode&0o010 != 0 && st.Gid != 0:
		return true
	case st.Mode&0o010 == 0:
		return false
	}
	// The bits of the group are the most that an access control list allows anybody.
	_, err := unix.Getxattr("/proc/self/fd/"+strconv.Itoa(fd), "system.posix_acl_access", nil)
	return err == nil
}

// FileInode returns the inode of an open file.
func FileInode(f *os.File) (Inode, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return InodeOf(&st), err
}
