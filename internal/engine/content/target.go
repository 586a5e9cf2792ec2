package content

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/mountpoint"
	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// Target is where something is to be mounted.
type Target struct {
	Path string           // absolute, without symbolic links; "" for a raw block device
	Made bool             // the directory is missing: Mount makes it
	Own  bool             // chosen by the user
	At   mountpoint.Inode // of the user's directory; if it is to be made, of the one above
	May  Rights

	Prepare func(root *os.File) error // nil, or done to the filesystem before anybody can see it

	link bool // a symbolic link instead of a mount
}

// Rights are permissions in a mounted volume with which a user could take over the host. A volume is mounted without
// them wherever users other than root can reach the mount point, and for another owner.
type Rights struct {
	Dev  bool // device nodes in the volume lead to devices of the host
	SUID bool // programs in the volume may run with the rights of their owner

	// Owner is shown in place of the owner of the volume's root directory, wherever that owns files, and the other way
	// round; nil: owners are shown as they are. In the volume itself, no owner changes.
	Owner *principal.Owner
}

// CheckTarget decides where a volume is to be mounted, and checks a directory
// of the user's. It changes nothing. Invalid, InUse, Permission, Unsupported.
func (acc *Access) CheckTarget(op, name string, kind driver.FS, dir string, may Rights) (Target, error) {
	if err := checkOwner(op, name, kind == driver.None, may); err != nil {
		return Target{}, err
	}

	def := acc.pool.DefaultMountpoint(name)
	if dir == "" || dir == def {
		return Target{Path: def, link: kind == driver.None || !CanMount(), May: may}, nil
	}

	if kind == driver.None {
		return Target{}, errs.New(errs.Invalid, op, name, "a raw volume has no filesystem to mount on %s", dir).
			WithHint("mount it without a directory: it becomes a block device")
	}

	if !CanMount() {
		return Target{}, errs.New(errs.Permission, op, name, "mounting on %s needs root", dir).
			WithHint("run it as root, or omit the directory to use a path below the pool")
	}

	abs, err := filepath.Abs(dir)
	if err != nil {
		return Target{}, errs.Wrap(op, dir, err)
	}

	t := Target{Own: true, May: may}
	t.Path, err = mount.Resolve(abs)
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
		t.Path, t.Made = filepath.Join(parent, filepath.Base(abs)), true
	case errs.Is(err, errs.Invalid):
		return t, errs.New(errs.Invalid, op, dir, "the mount point is not a directory")
	case err != nil:
		return t, err
	}

	if err := acc.CheckOutside(op, t.Path); err != nil {
		return t, err
	}

	err = acc.inspectTarget(op, dir, &t)
	return t, err
}

// inspectTarget checks that a directory of the user's can be mounted on, and remembers which one it is. given is its
// path as the user typed it.
func (acc *Access) inspectTarget(op, given string, t *Target) error {
	m, err := kernel.MountAt(unix.AT_FDCWD, t.Path)
	if err == nil && m.Root {
		return errs.New(errs.InUse, op, given, "something is already mounted there").
			WithHint("choose another directory")
	}

	p, err := acc.OpenPlace(t.Path)
	if err != nil {
		return err
	}

	defer p.Close()

	if t.Made {
		t.At, err = mountpoint.FileInode(p.Parent())
		return errs.Wrap(op, given, err)
	}

	dir, err := p.OpenDir()
	if err != nil {
		return errs.Wrap(op, given, err)
	}

	defer dir.Close()

	if t.At, err = mountpoint.FileInode(dir); err != nil {
		return errs.Wrap(op, given, err)
	}

	if names, _ := dir.Readdirnames(1); len(names) > 0 {
		return errs.New(errs.Invalid, op, given, "the mount point is not empty").
			WithHint("choose an empty directory: mounting would hide its files")
	}

	return nil
}

// CheckIs makes sure that the target is a directory that is open, and no other. Conflict.
func (t Target) CheckIs(dir *os.File) error {
	at, err := mountpoint.FileInode(dir)
	if err != nil {
		return errs.Wrap("mount", t.Path, err)
	}
	if !t.Own || t.Made || t.At != at {
		return MovedError(t.Path)
	}
	return nil
}

// CheckOutside makes sure that a path is neither in the pool nor above it. Invalid.
func (acc *Access) CheckOutside(op, abs string) error {
	dir, err := filepath.EvalSymlinks(acc.pool.Dir)
	if err != nil {
		return errs.Wrap(op, abs, err)
	}
	if abs == dir || strings.HasPrefix(abs, dir+"/") || strings.HasPrefix(dir, abs+"/") {
		return errs.New(errs.Invalid, op, abs, "the mount point is inside the pool, or above it").
			WithHint("choose a directory outside %s", acc.pool.Dir)
	}
	return nil
}

// placeMount moves a detached mount to its mount point, whose directory it makes.
func (acc *Access) placeMount(m *mount.Detached, a *catalog.MountRecord, t Target) error {
	AtStep("target checked")
	p, err := acc.OpenPlace(t.Path)
	if err != nil {
		return err
	}

	defer p.Close()

	AtStep("place opened")
	if err := restrictMount(m, p, t.May); err != nil {
		return err
	}

	if t.Prepare != nil {
		if err := withRoot(m, t.Prepare); err != nil {
			return err
		}
	}

	// Make the directory, and move the mount there.
	made, err := acc.moveMountTo(m, p, a.ID, t)
	if errs.Is(err, errs.NotFound) && !t.Own {
		// A clean-up mistook the empty directory for a leftover: make it again.
		made, err = acc.moveMountTo(m, p, a.ID, t)
	}
	if err != nil {
		if made {
			_ = p.RemoveDir(isMadeFor(a.ID, true))
		}
		return err
	}

	// Check that the mount is where the path leads.
	info, err := m.Info()
	if err != nil {
		return errs.Wrap("mount", t.Path, err)
	}

	if !mount.IsMounted(t.Path, info.ID) {
		if err := m.TakeBack(); err != nil {
			return err // for recovery
		}
		if made {
			_ = p.RemoveDir(isMadeFor(a.ID, false))
		}
		return MovedError(t.Path)
	}

	a.MountID, a.MadeDir = info.ID, made && t.Own
	return nil
}

// restrictMount takes rights that were not asked for from a mount that other users will be able to reach.
func restrictMount(m *mount.Detached, p *mountpoint.Place, may Rights) error {
	if may.Owner != nil {
		return m.Restrict(true, true)
	}
	if may.Dev && may.SUID {
		return nil
	}
	open, err := mountpoint.OthersCanEnter(p.Fd())
	if err != nil || !open {
		return err
	}
	return m.Restrict(!may.SUID, !may.Dev)
}

// moveMountTo moves a mount to the directory at p. made: the directory was missing, and may exist now even on error.
func (acc *Access) moveMountTo(
	m *mount.Detached, p *mountpoint.Place, id driver.ObjectID, t Target,
) (made bool, err error) {
	if made, err = acc.makeTarget(p, t); err != nil {
		return made, err
	}

	AtStep("directory made")
	dir, err := p.OpenDir()
	switch {
	case errors.Is(err, unix.EXDEV):
		return made, errs.New(errs.InUse, "mount", t.Path, "something else is mounted there").
			WithHint("unmount it: `umount %s`, or %s if it is a volume that was renamed; or mount this one elsewhere",
				t.Path, errs.Run("umount", "VOLUME"))
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		return made, notOursError(t.Path, "it is not a directory")
	case err != nil:
		return made, errs.Wrap("mount", t.Path, err)
	}

	defer dir.Close()

	switch {
	case t.Own && t.Made && !made:
		return false, MovedError(t.Path)
	case t.Own && !t.Made:
		// A directory of the user's stays unchanged, if it is the one that was checked.
		if is, err := mountpoint.FileInode(dir); err != nil || is != t.At {
			return false, MovedError(t.Path)
		}
	default:
		if err := prepareMade(dir, id, t.Own); err != nil {
			return made, err
		}
	}

	AtStep("directory checked")
	_, err = m.MoveToDir(dir)
	AtStep("mounted")
	return made, err
}

// makeTarget makes the directory of a target, if Pando makes it.
func (acc *Access) makeTarget(p *mountpoint.Place, t Target) (made bool, err error) {
	switch {
	case t.Own && !t.Made:
		return false, nil
	case t.Own:
		if is, err := mountpoint.FileInode(p.Parent()); err != nil || is != t.At {
			return false, MovedError(t.Path)
		}
		return p.MakeDir(0o755)
	}

	if err := p.RemoveLink(pool.IsMountLink); err != nil { // left by a command that was killed
		return false, err
	}

	return p.MakeDir(0o700)
}

// prepareMade makes a directory of Pando's ready to be mounted on: nothing is ever written into it while nothing is
// mounted there. outside: of the pool.
func prepareMade(dir *os.File, id driver.ObjectID, outside bool) error {
	if outside {
		if err := mountpoint.NoteMadeFor(dir, id); err != nil && !errs.Is(err, errs.Unsupported) {
			return err
		}
	}
	_, err := kernel.SetImmutable(dir, true)
	return errs.Wrap("mount", dir.Name(), err)
}

// isMadeFor returns a func that recognizes the directories that Pando has made for a volume. unnoted: an empty
// directory of ours without a note counts too, such as one left by a command that was killed before it wrote the note.
func isMadeFor(id driver.ObjectID, unnoted bool) func(dir *os.File) bool {
	return func(dir *os.File) bool {
		if noted := mountpoint.MadeFor(dir); noted != "" || !unnoted {
			return noted == id
		}
		var st unix.Stat_t
		return unix.Fstat(int(dir.Fd()), &st) == nil && int(st.Uid) == os.Geteuid()
	}
}

// MovedError returns the error for a mount point that is no longer the directory that was checked.
func MovedError(path string) error {
	return errs.New(errs.Conflict, "mount", path, "this directory, or one above it, was replaced in the meantime").
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

// makeMountLink makes path, a default mount point, a symbolic link, in place of an older one.
func (acc *Access) makeMountLink(to, path string) error {
	p, err := acc.OpenPlace(path)
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

// OpenPlace opens the directory above a mount point. NotFound, Conflict.
func (acc *Access) OpenPlace(path string) (*mountpoint.Place, error) {
	return mountpoint.Open(path, acc.pool.MountDir())
}

// AtStep is called between steps that others can get in between, with the name of the last one. Tests set it.
var AtStep = func(step string) {}

// RemoveTarget removes the directory or link that Mount made. It leaves anything else there alone, and so it does with
// a directory that is not empty or has something mounted on it.
func (acc *Access) RemoveTarget(ctx context.Context, name string, a catalog.MountRecord) error {
	link := func(to string) bool {
		if a.Loop >= 0 || a.Dev != 0 {
			return to == a.Mountpoint // a raw volume's device
		}
		return pool.IsMountLink(to) && strings.HasPrefix(filepath.Base(to), string(a.ID)+".")
	}
	return acc.removeTargets(ctx, name, a.Mountpoint, a.MadeDir, link, isMadeFor(a.ID, false))
}

// removeMarked is RemoveTarget for a mount that was being made.
func (acc *Access) removeMarked(ctx context.Context, name string, m catalog.Mark) error {
	return acc.removeTargets(ctx, name, m.Mountpoint, m.MadeDir, pool.IsMountLink, isMadeFor(m.ID, true))
}

func (acc *Access) removeTargets(
	ctx context.Context, name, path string, made bool, link func(to string) bool, ours func(dir *os.File) bool,
) error {
	places := []string{}
	if name != "" {
		places = append(places, acc.pool.DefaultMountpoint(name))
	}
	if acc.pool.IsDefaultMountpoint(path) && !slices.Contains(places, path) {
		places = append(places, path) // the volume has been renamed since
	}

	for _, place := range places {
		if err := acc.removeLeftover(place, link); err != nil {
			return err
		}
	}

	if made {
		acc.removeMade(ctx, path, ours)
	}

	return nil
}

// removeLeftover removes what Mount made at a place below the pool.
func (acc *Access) removeLeftover(place string, link func(to string) bool) error {
	p, err := acc.OpenPlace(place)
	if err != nil {
		return err
	}
	defer p.Close()
	return p.RemoveLeftover(link)
}

// removeMade removes the directory of the user's choice that Pando has made. That can become impossible, as in a
// filesystem that has become read-only: nothing of the volume is left there, so this is only worth a warning, and must
// not keep the volume from being used or destroyed.
func (acc *Access) removeMade(ctx context.Context, path string, ours func(dir *os.File) bool) {
	p, err := acc.OpenPlace(path)
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Conflict) {
		return // gone, or moved
	}

	if err == nil {
		defer p.Close()
		err = p.RemoveDir(ours)
	}
	if err != nil {
		word := errs.ShellWord(path)
		warnings.Add(ctx, "could not remove the mount point %s: %s; remove it later with `chattr -i %s; rmdir %s`",
			path, errs.Reason(err), word, word)
	}
}

// RemoveStaleTargets removes default mount points that nothing uses.
func (acc *Access) RemoveStaleTargets(used map[string]bool) error {
	entries, err := os.ReadDir(acc.pool.MountDir())
	if err != nil {
		return errs.Wrap("gc", acc.pool.MountDir(), err)
	}

	for _, d := range entries {
		path := acc.pool.DefaultMountpoint(d.Name())
		if used[path] {
			continue
		}
		p, err := acc.OpenPlace(path)
		if err != nil {
			return err
		}
		_ = p.RemoveLeftover(pool.IsMountLink) // the next time tries again
		p.Close()
	}

	return nil
}

// unmountAt unmounts the mount at path with this ID. NotFound if it does not exist, InUse.
func (acc *Access) unmountAt(path string, id uint64, idle bool) error {
	p, err := acc.OpenPlace(path)
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Conflict) {
		return errs.New(errs.NotFound, "umount", path, "not mounted")
	}
	if err != nil {
		return err
	}
	defer p.Close()
	AtStep("unmounting")
	return p.Unmount(id, idle)
}

// RightsOf returns the rights in a mounted volume.
func RightsOf(a catalog.MountRecord) Rights {
	if a.MountID == 0 {
		return Rights{Dev: true, SUID: true} // a link or a device restricts nothing
	}
	var st unix.Statfs_t
	if err := unix.Statfs(a.Mountpoint, &st); err != nil {
		return Rights{Owner: a.Owner}
	}
	r := rightsFrom(&st)
	r.Owner = a.Owner
	return r
}

// RightsIn returns the rights in a directory.
func RightsIn(dir *os.File) (Rights, error) {
	var st unix.Statfs_t
	err := unix.Fstatfs(int(dir.Fd()), &st)
	return rightsFrom(&st), err
}

func rightsFrom(st *unix.Statfs_t) Rights {
	return Rights{Dev: st.Flags&unix.ST_NODEV == 0, SUID: st.Flags&unix.ST_NOSUID == 0}
}
