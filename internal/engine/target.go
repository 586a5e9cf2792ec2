package engine

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/mount"

	"golang.org/x/sys/unix"
)

// target is where something is to be mounted.
type target struct {
	path string // absolute, without symbolic links; "" for a raw block device
	link bool   // a symbolic link instead of a mount
	made bool   // makeTarget made the directory
	own  bool   // chosen by the user

	prepare func(root *os.File) error // done to the filesystem before anybody can see it
}

// checkTarget decides where a volume is to be mounted, and checks a directory
// of the user's. It changes nothing. Invalid, InUse, Permission.
func (e *Engine) checkTarget(op, name string, kind driver.FS, dir string) (target, error) {
	def := e.defaultMountpoint(name)
	if dir == "" || dir == def {
		return target{path: def, link: kind == driver.None || !canMount()}, nil
	}
	if kind == driver.None {
		return target{}, errs.New(errs.Invalid, op, name, "a raw volume has no filesystem to mount on %s", dir).
			WithHint("attach it without a directory: it becomes a block device")
	}
	if !canMount() {
		return target{}, errs.New(errs.Permission, op, name, "mounting on %s needs root", dir).
			WithHint("run it as root, or leave the directory out to get a path below the pool")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return target{}, errs.Wrap(op, dir, err)
	}
	st, err := os.Stat(abs)
	if errors.Is(err, fs.ErrNotExist) {
		parent, perr := filepath.EvalSymlinks(filepath.Dir(abs))
		if perr != nil {
			return target{}, errs.New(errs.Invalid, op, dir, "the directory above the mount point does not exist").WithHint("create it: `mkdir -p %s`", filepath.Dir(abs))
		}
		abs = filepath.Join(parent, filepath.Base(abs))
		return target{path: abs, made: true, own: true}, e.outsidePool(op, abs)
	}
	if err != nil {
		return target{}, errs.Wrap(op, dir, err)
	}
	if !st.IsDir() {
		return target{}, errs.New(errs.Invalid, op, dir, "the mount point is not a directory")
	}
	if abs, err = filepath.EvalSymlinks(abs); err != nil {
		return target{}, errs.Wrap(op, dir, err)
	}
	if err := e.outsidePool(op, abs); err != nil {
		return target{}, err
	}
	m, err := kernel.MountAt(unix.AT_FDCWD, abs)
	if err != nil {
		return target{}, errs.Wrap(op, dir, err)
	}
	if m.Root {
		return target{}, errs.New(errs.InUse, op, dir, "something is mounted there already").WithHint("choose another directory")
	}
	f, err := os.Open(abs)
	if err != nil {
		return target{}, errs.Wrap(op, dir, err)
	}
	defer f.Close()
	if names, _ := f.Readdirnames(1); len(names) > 0 {
		return target{}, errs.New(errs.Invalid, op, dir, "the mount point is not empty").WithHint("what is in it would be hidden: choose an empty directory")
	}
	return target{path: abs, own: true}, nil
}

func (e *Engine) outsidePool(op, abs string) error {
	dir, err := filepath.EvalSymlinks(e.pool.Dir)
	if err != nil {
		return errs.Wrap(op, abs, err)
	}
	if abs == dir || strings.HasPrefix(abs, dir+"/") || strings.HasPrefix(dir, abs+"/") {
		return errs.New(errs.Invalid, op, abs, "the mount point is inside the pool, or above it").WithHint("choose a directory outside %s", e.pool.Dir)
	}
	return nil
}

// putAt moves a detached mount to its place, whose directory it makes.
func (e *Engine) putAt(m *mount.Detached, a *catalog.Attached, t target) error {
	made := false
	if !t.own || t.made {
		mode := fs.FileMode(0o700)
		if t.own {
			mode = 0o755
		}
		if err := os.Mkdir(t.path, mode); err == nil {
			made = true
		} else if !errors.Is(err, fs.ErrExist) {
			return errs.Wrap("mount", t.path, err)
		} else if !t.own {
			// Left by a command that was killed, or mounted on by somebody.
			if i, err := kernel.MountAt(unix.AT_FDCWD, t.path); err != nil || i.Root {
				return errs.New(errs.InUse, "mount", t.path, "something else is mounted there").WithHint("unmount it: `umount %s`", t.path)
			}
		}
	}
	if t.prepare != nil {
		if err := withRoot(m, t.prepare); err != nil {
			return err
		}
	}
	info, err := m.Attach(t.path)
	if errs.Is(err, errs.NotFound) && !t.own {
		// A clean-up took the empty directory for a leftover: make it again.
		if err = os.Mkdir(t.path, 0o700); err == nil {
			info, err = m.Attach(t.path)
		}
	}
	if err != nil {
		if made {
			_ = os.Remove(t.path)
		}
		return err
	}
	a.MountID, a.MadeDir = info.ID, made && t.own
	return nil
}

func withRoot(m *mount.Detached, fn func(root *os.File) error) error {
	root, err := m.Open()
	if err != nil {
		return err
	}
	defer root.Close()
	return fn(root)
}

// linkTo makes path a symbolic link, in the place of an older one.
func linkTo(to, path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap("mount", path, err)
	}
	return errs.Wrap("mount", path, os.Symlink(to, path))
}

// removeTarget takes away the directory or link that attach made. A directory
// that somebody has put something into, or mounted something on, stays.
func (e *Engine) removeTarget(name string, a catalog.Attached) error {
	paths := []string{e.defaultMountpoint(name)} // a link, or an empty directory
	if a.MadeDir {
		paths = append(paths, a.Mountpoint)
	}
	for _, p := range paths {
		// Not os.Remove, which may report the failure of the wrong one of its two attempts.
		err := unix.Rmdir(p)
		if errors.Is(err, unix.ENOTDIR) {
			err = unix.Unlink(p)
		}
		switch {
		case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST), errors.Is(err, unix.EBUSY):
		default:
			return errs.Wrap("remove mount point", p, err)
		}
	}
	return nil
}

// removeStaleTargets takes away default mount points that nothing uses.
func (e *Engine) removeStaleTargets(used map[string]bool) error {
	entries, err := os.ReadDir(e.pool.MountDir())
	if err != nil {
		return errs.Wrap("gc", e.pool.MountDir(), err)
	}
	for _, d := range entries {
		path := e.defaultMountpoint(d.Name())
		if used[path] {
			continue
		}
		if m, err := kernel.MountAt(unix.AT_FDCWD, path); err != nil || m.Root {
			continue // gone meanwhile, or something is mounted there that is not ours to remove
		}
		_ = os.Remove(path) // an empty directory or a link; anything else stays
	}
	return nil
}

// samePath reports whether two paths lead to the same directory.
func samePath(a, b string) bool {
	abs, err := filepath.Abs(a)
	if err != nil {
		return false
	}
	if abs == b {
		return true
	}
	real, err := filepath.EvalSymlinks(abs)
	return err == nil && real == b
}
