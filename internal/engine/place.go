package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/mount"
	"pando/internal/pool"

	"golang.org/x/sys/unix"
)

// place is the entry of a directory on which something is mounted, or is to be. It is
// held by the directory's descriptor: others may rename directories above it and put
// symbolic links in their place, but lead Pando nowhere else by that.
type place struct {
	parent *os.File // O_PATH
	name   string
	path   string // as it was when it was opened
}

// inode identifies a directory for as long as it is there.
type inode struct{ dev, ino uint64 }

func inodeOf(st *unix.Stat_t) inode { return inode{st.Dev, st.Ino} }

// openPlace opens the directory above a mount point: of a default one the pool's, of
// another one by its path, which is absolute and has no symbolic links. NotFound,
// Conflict.
func (e *Engine) openPlace(path string) (*place, error) { return openPlace(e.pool, path) }

func openPlace(of *pool.Pool, path string) (*place, error) {
	dir, name := filepath.Split(path)
	if dir = filepath.Clean(dir); dir != of.MountDir() {
		parent, err := mount.OpenDir(dir)
		return &place{parent: parent, name: name, path: path}, err
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap("open", dir, err)
	}
	return &place{parent: os.NewFile(uintptr(fd), dir), name: name, path: path}, nil
}

func (p *place) close() { _ = p.parent.Close() }

func (p *place) fd() int { return int(p.parent.Fd()) }

// mounted returns the mount at the place itself; ok is false if there is none.
func (p *place) mounted() (m kernel.MountInfo, ok bool) {
	m, err := kernel.MountAt(p.fd(), p.name)
	return m, err == nil && m.Root
}

// openDir opens the directory at the place for reading and ioctls. Errors of the system:
// EXDEV if something is mounted there, ELOOP or ENOTDIR if it is not a directory.
func (p *place) openDir() (*os.File, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	}
	fd, err := unix.Openat2(p.fd(), p.name, &how)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), p.path), nil
}

// readLink returns what the symbolic link at the place says; ok is false if there is none.
func (p *place) readLink() (to string, ok bool) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(p.fd(), p.name, buf)
	return string(buf[:max(n, 0)]), err == nil
}

// unmount takes away the mount with this ID. NotFound if it is not there (any more), InUse.
// idle: it may just as well stay, see mount.UnmountIdle.
func (p *place) unmount(id uint64, idle bool) error {
	if !mount.IsMounted(fmt.Sprintf("/proc/self/fd/%d/%s", p.fd(), p.name), id) {
		return errs.New(errs.NotFound, "umount", p.path, "not mounted")
	}
	return mount.UnmountIn(p.parent, p.name, idle)
}

// removeDir removes the directory at the place if ours says so. Anything else that is
// there, is mounted there or is in it stays.
func (p *place) removeDir(ours func(dir *os.File) bool) error {
	dir, err := p.openDir()
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
	err = unix.Unlinkat(p.fd(), p.name, unix.AT_REMOVEDIR)
	for _, done := range []error{nil, unix.ENOENT, unix.ENOTEMPTY, unix.EEXIST} {
		if errors.Is(err, done) {
			return nil
		}
	}
	if thawed {
		_, _ = kernel.SetImmutable(dir, true) // else it is as any directory
	}
	switch {
	case errors.Is(err, unix.EBUSY): // mounted on in the meantime
		return nil
	case ferr != nil:
		err = ferr
	}
	return errs.Wrap("remove mount point", p.path, err)
}

// removeLink removes the symbolic link at the place if ours says so of where it leads.
func (p *place) removeLink(ours func(to string) bool) error {
	if to, ok := p.readLink(); !ok || !ours(to) {
		return nil
	}
	if err := unix.Unlinkat(p.fd(), p.name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return errs.Wrap("remove mount point", p.path, err)
	}
	return nil
}

// removeLeftover removes what Pando puts at a default mount point: an empty directory, or
// a link.
func (p *place) removeLeftover(ourLink func(to string) bool) error {
	if err := p.removeLink(ourLink); err != nil {
		return err
	}
	return p.removeDir(func(*os.File) bool { return true })
}

// makeDir makes the directory at the place, and reports whether it was missing.
func (p *place) makeDir(mode uint32) (made bool, err error) {
	err = unix.Mkdirat(p.fd(), p.name, mode)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	return err == nil, errs.Wrap("mount", p.path, err)
}

// A directory that Pando has made outside of the pool says so itself, by an extended
// attribute with the ID of the volume that it was made for. Where only the first name is
// not allowed, as in containers, the second one is used.
var madeForNames = []string{"trusted.pando.mountpoint", "user.pando.mountpoint"}

// noteMadeFor marks a directory as made for a volume. Unsupported where that cannot be.
func noteMadeFor(dir *os.File, id driver.ObjectID) (err error) {
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

// madeFor returns for which volume Pando has made a directory; "" if it has not.
func madeFor(dir *os.File) driver.ObjectID {
	buf := make([]byte, unix.NAME_MAX)
	for _, name := range madeForNames {
		if n, err := unix.Fgetxattr(int(dir.Fd()), name, buf); err == nil {
			return driver.ObjectID(buf[:n])
		}
	}
	return ""
}

// forgetMadeFor takes the mark of noteMadeFor away.
func forgetMadeFor(dir *os.File) {
	for _, name := range madeForNames {
		_ = unix.Fremovexattr(int(dir.Fd()), name) // what is left says nothing without a row
	}
}

// atStep is called between steps that others can get in between. Tests set it.
var atStep = func(string) {}

// othersCanEnter reports whether somebody besides root can get to what is in the
// directory fd: every directory on the way from the root lets somebody else through.
func othersCanEnter(fd int) (bool, error) {
	fd, err := unix.Openat(fd, ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, errs.Wrap("mount", "", err)
	}
	defer func() { unix.Close(fd) }()
	for last := (inode{}); ; {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return false, errs.Wrap("mount", "", err)
		}
		if inodeOf(&st) == last { // the root, which is above itself
			return true, nil
		}
		if !admitsOthers(fd, &st) {
			return false, nil
		}
		last = inodeOf(&st)
		up, err := unix.Openat(fd, "..", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return false, errs.Wrap("mount", "", err)
		}
		unix.Close(fd)
		fd = up
	}
}

// admitsOthers reports whether one directory lets others than root through.
func admitsOthers(fd int, st *unix.Stat_t) bool {
	switch {
	case st.Mode&0o001 != 0, st.Mode&0o100 != 0 && st.Uid != 0, st.Mode&0o010 != 0 && st.Gid != 0:
		return true
	case st.Mode&0o010 == 0:
		return false
	}
	// The bits of the group are the most that an access control list allows anybody.
	_, err := unix.Getxattr("/proc/self/fd/"+itoa(fd), "system.posix_acl_access", nil)
	return err == nil
}
