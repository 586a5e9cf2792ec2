package engine

import (
	"context"
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
	"pando/internal/mountpoint"
	"pando/internal/pool"
	"pando/internal/warnings"

	"golang.org/x/sys/unix"
)

// target is where something is to be mounted.
type target struct {
	path string           // absolute, without symbolic links; "" for a raw block device
	link bool             // a symbolic link instead of a mount
	made bool             // the directory is missing: makeTarget makes it
	own  bool             // chosen by the user
	at   mountpoint.Inode // of the user's directory; if it is to be made, of the one above
	may  Rights

	prepare func(root *os.File) error // done to the filesystem before anybody can see it
}

// Rights are what a mounted volume allows that could give somebody the host. A volume is
// mounted without them wherever others than root can get to the mount point.
type Rights struct {
	Dev  bool // device nodes in the volume lead to devices of the host
	SUID bool // programs in the volume may run with the rights of their owner
}

// checkTarget decides where a volume is to be mounted, and checks a directory
// of the user's. It changes nothing. Invalid, InUse, Permission.
func (e *Engine) checkTarget(op, name string, kind driver.FS, dir string, may Rights) (target, error) {
	def := e.defaultMountpoint(name)
	if dir == "" || dir == def {
		return target{path: def, link: kind == driver.None || !canMount(), may: may}, nil
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
	t := target{own: true, may: may}
	t.path, err = mount.Resolve(abs)
	switch {
	case errs.Is(err, errs.NotFound):
		parent, err := mount.Resolve(filepath.Dir(abs))
		if errs.Is(err, errs.NotFound) {
			return t, errs.New(errs.Invalid, op, dir, "the directory above the mount point does not exist").
				WithHint("create it: `mkdir -p %s`", filepath.Dir(abs))
		}
		if err != nil {
			return t, err
		}
		t.path, t.made = filepath.Join(parent, filepath.Base(abs)), true
	case errs.Is(err, errs.Invalid):
		return t, errs.New(errs.Invalid, op, dir, "the mount point is not a directory")
	case err != nil:
		return t, err
	}
	if err := e.outsidePool(op, t.path); err != nil {
		return t, err
	}
	err = e.inspectTarget(op, dir, &t)
	return t, err
}

// inspectTarget checks that something can be mounted on a directory of the user's, and
// remembers which one it is. given is what the user calls it.
func (e *Engine) inspectTarget(op, given string, t *target) error {
	m, err := kernel.MountAt(unix.AT_FDCWD, t.path)
	if err == nil && m.Root {
		return errs.New(errs.InUse, op, given, "something is mounted there already").
			WithHint("choose another directory")
	}
	p, err := e.openPlace(t.path)
	if err != nil {
		return err
	}
	defer p.Close()
	if t.made {
		t.at, err = statInode(p.Parent())
		return errs.Wrap(op, given, err)
	}

	dir, err := p.OpenDir()
	if err != nil {
		return errs.Wrap(op, given, err)
	}
	defer dir.Close()
	if t.at, err = statInode(dir); err != nil {
		return errs.Wrap(op, given, err)
	}
	if names, _ := dir.Readdirnames(1); len(names) > 0 {
		return errs.New(errs.Invalid, op, given, "the mount point is not empty").
			WithHint("what is in it would be hidden: choose an empty directory")
	}
	return nil
}

func statInode(f *os.File) (mountpoint.Inode, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return mountpoint.InodeOf(&st), err
}

func (e *Engine) outsidePool(op, abs string) error {
	dir, err := filepath.EvalSymlinks(e.pool.Dir)
	if err != nil {
		return errs.Wrap(op, abs, err)
	}
	if abs == dir || strings.HasPrefix(abs, dir+"/") || strings.HasPrefix(dir, abs+"/") {
		return errs.New(errs.Invalid, op, abs, "the mount point is inside the pool, or above it").
			WithHint("choose a directory outside %s", e.pool.Dir)
	}
	return nil
}

// putAt moves a detached mount to its place, whose directory it makes.
func (e *Engine) putAt(m *mount.Detached, a *catalog.Attached, t target) error {
	atStep("target checked")
	p, err := e.openPlace(t.path)
	if err != nil {
		return err
	}
	defer p.Close()
	atStep("place opened")
	if err := restrict(m, p, t.may); err != nil {
		return err
	}
	if t.prepare != nil {
		if err := withRoot(m, t.prepare); err != nil {
			return err
		}
	}
	made, err := e.attachAt(m, p, a.ID, t)
	if errs.Is(err, errs.NotFound) && !t.own {
		// A clean-up took the empty directory for a leftover: make it again.
		made, err = e.attachAt(m, p, a.ID, t)
	}
	if err != nil {
		if made {
			_ = p.RemoveDir(isMadeFor(a.ID, true))
		}
		return err
	}
	info, err := m.Info()
	if err != nil {
		return errs.Wrap("mount", t.path, err)
	}
	if !mount.IsMounted(t.path, info.ID) {
		if err := m.TakeBack(); err != nil {
			return err // for recovery
		}
		if made {
			_ = p.RemoveDir(isMadeFor(a.ID, false))
		}
		return movedError(t.path)
	}
	a.MountID, a.MadeDir = info.ID, made && t.own
	return nil
}

// restrict takes from a mount that others will be able to get to what was not asked for.
func restrict(m *mount.Detached, p *mountpoint.Place, may Rights) error {
	if may.Dev && may.SUID {
		return nil
	}
	open, err := mountpoint.OthersCanEnter(p.Fd())
	if err != nil || !open {
		return err
	}
	return m.Restrict(!may.SUID, !may.Dev)
}

// attachAt moves a mount to the directory at p. made: the directory was not there, and
// may be there now even on error.
func (e *Engine) attachAt(m *mount.Detached, p *mountpoint.Place, id driver.ObjectID, t target) (made bool, err error) {
	if made, err = e.makeTarget(p, t); err != nil {
		return made, err
	}
	atStep("directory made")
	dir, err := p.OpenDir()
	switch {
	case errors.Is(err, unix.EXDEV):
		return made, errs.New(errs.InUse, "mount", t.path, "something else is mounted there").
			WithHint("unmount it: `umount %s`", t.path)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		return made, notOursError(t.path, "it is not a directory")
	case err != nil:
		return made, errs.Wrap("mount", t.path, err)
	}
	defer dir.Close()

	switch {
	case t.own && t.made && !made:
		return false, movedError(t.path)
	case t.own && !t.made:
		// The user's: it stays as it is, if it is the one that was checked.
		if is, err := statInode(dir); err != nil || is != t.at {
			return false, movedError(t.path)
		}
	default:
		if err := prepareMade(dir, id, t.own); err != nil {
			return made, err
		}
	}
	atStep("directory checked")
	_, err = m.AttachTo(dir)
	atStep("mounted")
	return made, err
}

// makeTarget makes the directory of a target, if Pando makes it.
func (e *Engine) makeTarget(p *mountpoint.Place, t target) (made bool, err error) {
	switch {
	case t.own && !t.made:
		return false, nil
	case t.own:
		if is, err := statInode(p.Parent()); err != nil || is != t.at {
			return false, movedError(t.path)
		}
		return p.MakeDir(0o755)
	}
	if err := p.RemoveLink(pool.IsMountLink); err != nil { // left by a command that was killed
		return false, err
	}
	return p.MakeDir(0o700)
}

// prepareMade makes a directory of Pando's fit to be mounted on: nothing is ever written
// into it while nothing is mounted there. outside: of the pool.
func prepareMade(dir *os.File, id driver.ObjectID, outside bool) error {
	if outside {
		if err := mountpoint.NoteMadeFor(dir, id); err != nil && !errs.Is(err, errs.Unsupported) {
			return err
		}
	}
	_, err := kernel.SetImmutable(dir, true)
	return errs.Wrap("mount", dir.Name(), err)
}

// isMadeFor tells directories that Pando has made for a volume from others. unnoted: so is
// an empty one of ours without a note, as of a command that was killed before that.
func isMadeFor(id driver.ObjectID, unnoted bool) func(dir *os.File) bool {
	return func(dir *os.File) bool {
		if noted := mountpoint.MadeFor(dir); noted != "" || !unnoted {
			return noted == id
		}
		var st unix.Stat_t
		return unix.Fstat(int(dir.Fd()), &st) == nil && int(st.Uid) == os.Geteuid()
	}
}

// movedError is about a mount point that is not the directory any more that was checked.
func movedError(path string) error {
	return errs.New(errs.Conflict, "mount", path, "somebody replaced this directory, or one above it, in the meantime").
		WithHint("find out who can write to the directories above it, then try again")
}

func notOursError(path, why string) error {
	return errs.New(errs.Invalid, "mount", path, "%s, and Pando did not make it", why).
		WithHint("move it away: `mv %s %s.old`", path, path)
}

func withRoot(m *mount.Detached, fn func(root *os.File) error) error {
	root, err := m.Open()
	if err != nil {
		return err
	}
	defer root.Close()
	return fn(root)
}

// linkTo makes path, a default mount point, a symbolic link, in the place of an older one.
func (e *Engine) linkTo(to, path string) error {
	p, err := e.openPlace(path)
	if err != nil {
		return err
	}
	defer p.Close()
	if err := p.RemoveLeftover(pool.IsMountLink); err != nil {
		return err
	}
	err = unix.Symlinkat(to, p.Fd(), p.Name())
	if errors.Is(err, fs.ErrExist) {
		return notOursError(path, "something is there")
	}
	return errs.Wrap("mount", path, err)
}

// openPlace opens the directory above a mount point. NotFound, Conflict.
func (e *Engine) openPlace(path string) (*mountpoint.Place, error) {
	return mountpoint.Open(path, e.pool.MountDir())
}

// atStep is called between steps that others can get in between. Tests set it.
var atStep = func(string) {}

// removeTarget takes away the directory or link that attach made. What somebody else has
// put there stays, and so does a directory that somebody has put something into, or
// mounted something on.
func (e *Engine) removeTarget(ctx context.Context, name string, a catalog.Attached) error {
	link := func(to string) bool {
		if a.Loop >= 0 || a.Dev != 0 {
			return to == a.Mountpoint // a raw volume's device
		}
		return pool.IsMountLink(to) && strings.HasPrefix(filepath.Base(to), string(a.ID)+".")
	}
	return e.removeTargets(ctx, name, a.Mountpoint, a.MadeDir, link, isMadeFor(a.ID, false))
}

// removeMarked is removeTarget for a mount that was being made.
func (e *Engine) removeMarked(ctx context.Context, name string, m catalog.Mark) error {
	return e.removeTargets(ctx, name, m.Mountpoint, m.MadeDir, pool.IsMountLink, isMadeFor(m.ID, true))
}

func (e *Engine) removeTargets(ctx context.Context, name, path string, made bool, link func(to string) bool, ours func(dir *os.File) bool) error {
	if name != "" {
		p, err := e.openPlace(e.defaultMountpoint(name))
		if err != nil {
			return err
		}
		defer p.Close()
		if err := p.RemoveLeftover(link); err != nil {
			return err
		}
	}
	if made {
		e.removeMade(ctx, path, ours)
	}
	return nil
}

// removeMade removes the directory of the user's choice that Pando has made. That can become
// impossible, as in a filesystem that is read-only by now: nothing of the volume is left there,
// so that is worth a warning, and must not keep the volume from being used or destroyed.
func (e *Engine) removeMade(ctx context.Context, path string, ours func(dir *os.File) bool) {
	p, err := e.openPlace(path)
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Conflict) {
		return // gone, or somewhere where it cannot be found
	}
	if err == nil {
		defer p.Close()
		err = p.RemoveDir(ours)
	}
	if err != nil {
		word := quoteWord(path)
		warnings.Add(ctx, "could not remove the mount point %s: %s; remove it later with `chattr -i %s; rmdir %s`", path, reason(err), word, word)
	}
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
		p, err := e.openPlace(path)
		if err != nil {
			return err
		}
		_ = p.RemoveLeftover(pool.IsMountLink) // what cannot be removed stays, for the next time
		p.Close()
	}
	return nil
}

// unmount takes the mount of an attachment away. NotFound if it is not there, InUse.
func (e *Engine) unmountAt(path string, id uint64, idle bool) error {
	p, err := e.openPlace(path)
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Conflict) {
		return errs.New(errs.NotFound, "umount", path, "not mounted")
	}
	if err != nil {
		return err
	}
	defer p.Close()
	atStep("unmounting")
	return p.Unmount(id, idle)
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
