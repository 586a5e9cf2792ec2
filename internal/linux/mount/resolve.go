package mount

import (
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// maxLinks is how many symbolic links a path may lead through, as in the kernel.
const maxLinks = 40

// OpenDir opens a directory as the base of *at calls only (O_PATH). path must be absolute
// and resolved (see Resolve). NotFound. Conflict: a component of path has become a symbolic
// link or is no longer a directory.
func OpenDir(path string) (*os.File, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &how)
	if errs.IsAny(err, unix.ELOOP, unix.ENOTDIR) {
		return nil, errs.New(errs.Conflict, "open", path, "a component of this path is no longer a directory").
			WithHint("find out what replaced it, then use the real path of the directory")
	}
	if err != nil {
		return nil, errs.Wrap("open", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Resolve returns the path without symbolic links of the directory that path leads to.
// It follows only links that nobody but root and the caller's user can have created:
// others could make theirs lead to any directory of the host, and change that
// at any time. NotFound. Permission: another user can change a link. Invalid: path does not
// lead to a directory.
func Resolve(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", errs.Wrap("resolve", path, err)
	}

	w, err := newPathWalk()
	if err != nil {
		return "", errs.Wrap("resolve", path, err)
	}

	defer w.close()

	todo := strings.Split(abs, "/")
	for links := 0; len(todo) > 0; {
		name := todo[0]
		todo = todo[1:]
		to, err := w.step(name)
		if err != nil {
			return "", errs.Wrap("resolve", path, err)
		}
		if to == "" {
			continue
		}

		if links++; links > maxLinks {
			return "", errs.Wrap("resolve", path, unix.ELOOP)
		}

		if strings.HasPrefix(to, "/") {
			if err := w.restart(); err != nil {
				return "", errs.Wrap("resolve", path, err)
			}
		}

		todo = append(strings.Split(to, "/"), todo...)
	}

	return w.path, nil
}

// pathWalk resolves a path component by component. It holds the directory reached so far.
type pathWalk struct {
	fd   int
	path string // without symbolic links
}

func newPathWalk() (*pathWalk, error) {
	w := &pathWalk{fd: -1}
	return w, w.restart()
}

func (w *pathWalk) close() {
	if w.fd >= 0 {
		unix.Close(w.fd)
	}
}

func (w *pathWalk) move(fd int, path string) {
	w.close()
	w.fd, w.path = fd, path
}

func (w *pathWalk) restart() error {
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		w.move(fd, "/")
	}
	return err
}

// step enters the directory name. If name is a symbolic link, it stays and returns the link's target.
func (w *pathWalk) step(name string) (link string, err error) {
	if name == "" || name == "." {
		return "", nil
	}

	next := filepath.Join(w.path, name)
	fd, err := unix.Openat(w.fd, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", &os.PathError{Op: "open", Path: next, Err: err}
	}

	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return "", &os.PathError{Op: "stat", Path: next, Err: err}
	}

	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		w.move(fd, next)
		return "", nil
	case unix.S_IFLNK:
		defer unix.Close(fd)
		return w.readLink(fd, &st, next)
	}

	unix.Close(fd)
	return "", errs.New(errs.Invalid, "resolve", next, "not a directory")
}

// readLink returns the target of the symbolic link fd in the current directory. Permission:
// users other than root and the caller's can have created it.
func (w *pathWalk) readLink(fd int, link *unix.Stat_t, path string) (string, error) {
	var dir unix.Stat_t
	if err := unix.Fstat(w.fd, &dir); err != nil {
		return "", &os.PathError{Op: "stat", Path: w.path, Err: err}
	}

	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	if err != nil {
		return "", &os.PathError{Op: "readlink", Path: path, Err: err}
	}

	to := string(buf[:n])
	shared := dir.Mode&0o022 != 0
	sticky := dir.Mode&unix.S_ISVTX != 0
	if !trusted(&dir) || shared && !(sticky && trusted(link)) {
		return "", errs.New(errs.Permission, "resolve", path, "it is a symbolic link that users other than root can change").
			WithHint("use the directory that it points to: %s", to)
	}

	return to, nil
}

// trusted reports whether a file belongs to root or to the caller's user.
func trusted(st *unix.Stat_t) bool { return st.Uid == 0 || int(st.Uid) == os.Geteuid() }
