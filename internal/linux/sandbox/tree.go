package sandbox

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// safe are the attributes of every mount in a sandbox.
const safe = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// tree is the root of the sandbox while its mounts are made.
type tree struct {
	root  int  // attached, and not yet the root of this process
	empty bool // it belongs to the sandbox alone, and is made read-only at the end
}

// makeTree makes the mounts of a spec, and makes its root the root of this process. Sources are opened and targets
// resolved by descriptors, so that nothing in a hostile root can lead a mount elsewhere.
func makeTree(s Spec) error {
	// Nothing that happens here reaches the host, and nothing of the host comes in later.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}

	if s.Root == "" && !s.EmptyRoot && s.RootOverlay == nil {
		return changeHostTree(s)
	}

	// Attach the new root over the old one. Paths still begin at the old one.
	root, err := openRoot(s)
	if err != nil {
		return err
	}

	defer unix.Close(root)

	if err := unix.MoveMount(root, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attaching the root: move_mount: %w", err)
	}

	t := &tree{root, s.EmptyRoot}
	if err := t.fill(s); err != nil {
		return err
	}

	return t.enter()
}

// openRoot returns the detached mount that becomes the root.
func openRoot(s Spec) (int, error) {
	if s.EmptyRoot {
		return newMount(Tmpfs, safe, "mode=755", "size=16m")
	}
	if s.RootOverlay != nil {
		return newMount(Overlay, safe, s.RootOverlay...)
	}
	return cloneTree(Mount{Kind: Bind, Source: s.Root})
}

// changeHostTree makes the mounts in a private copy of the host's tree, which stays the root.
func changeHostTree(s Spec) error {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /: %w", err)
	}

	defer unix.Close(root)

	return (&tree{root: root}).mountAll(s.Mounts)
}

// fill makes everything below the root.
func (t *tree) fill(s Spec) error {
	if err := t.mountAll(s.Mounts); err != nil {
		return err
	}

	for _, l := range s.Symlinks {
		dir, name := splitPath(l.Path)
		fd, err := t.openDir(dir, true)
		if err != nil {
			return err
		}
		err = unix.Symlinkat(l.To, fd, name)
		unix.Close(fd)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return errs.Wrap(opSandbox, l.Path, fmt.Errorf("symlink: %w", err))
		}
	}

	if !t.empty {
		return nil
	}
	return setAttributes(t.root, unix.MOUNT_ATTR_RDONLY, false)
}

func (t *tree) mountAll(mounts []Mount) error {
	for _, m := range mounts {
		if err := t.mount(m); err != nil {
			return errs.Wrap(opSandbox, m.Target, fmt.Errorf("mounting %s: %w", m.Kind, err))
		}
	}
	return nil
}

// enter makes the tree the root of this process and lets go of the old root.
func (t *tree) enter() error {
	if err := unix.Fchdir(t.root); err != nil {
		return fmt.Errorf("entering the root: %w", err)
	}

	// The old root comes to lie on the new one, and is taken off.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching the host's root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("chdir: %w", err)
	}

	return nil
}

// mount makes one mount.
func (t *tree) mount(m Mount) error {
	switch m.Kind {
	case Bind:
		return t.bind(m)
	case Proc:
		return t.mountProc(m)
	case Dev:
		return t.mountDev(m)
	case Tmpfs:
		return t.mountNew(m, "tmpfs")
	case Overlay:
		return t.mountNew(m, "overlay")
	case Sys:
		m.ReadOnly, m.NoExec = true, true
		return t.mountSys(m)
	}
	return errs.New(errs.Invalid, opSandbox, m.Target, "unknown kind of mount %q", m.Kind)
}

// withSource adds the name by which mount tables show a mount, unless the options have one.
func withSource(options []string) []string {
	if slices.ContainsFunc(options, func(o string) bool { return strings.HasPrefix(o, "source=") }) {
		return options
	}
	return append([]string{"source=pando"}, options...)
}

// openLayers replaces the directories in the options of an overlay by descriptors: the kernel takes at most 255 bytes,
// and a colon or comma in a path has a meaning.
func openLayers(options []string) (out []string, layers []*os.File, err error) {
	for _, o := range options {
		key, path, _ := strings.Cut(o, "=")
		if !slices.Contains([]string{"lowerdir", "upperdir", "workdir"}, key) {
			out = append(out, o)
			continue
		}

		fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			closeAll(layers)
			return nil, nil, fmt.Errorf("open %s: %w", path, err)
		}
		layers = append(layers, os.NewFile(uintptr(fd), path))
		out = append(out, fmt.Sprintf("%s=/proc/self/fd/%d", key, fd))
	}
	return out, layers, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func (m Mount) attributes() int {
	attr := safe
	if m.ReadOnly {
		attr |= unix.MOUNT_ATTR_RDONLY
	}
	if m.NoExec {
		attr |= unix.MOUNT_ATTR_NOEXEC
	}
	return attr
}

func (t *tree) mountNew(m Mount, fstype string) error {
	fd, err := newMount(fstype, m.attributes(), m.Options...)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return t.attachDir(fd, m.Target)
}

// bind shows a file or directory of the host.
func (t *tree) bind(m Mount) error {
	fd, err := cloneTree(m)
	if m.Optional && errs.IsAny(err, unix.ENOENT, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return err
	}

	defer unix.Close(fd)

	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return t.attachDir(fd, m.Target)
	}
	err = t.attachFile(fd, m.Target)
	if m.Optional && errs.Is(err, errs.Invalid) {
		return nil
	}
	return err
}

// newMount makes a mount of a new filesystem, detached. options are "key" or "key=value".
func newMount(fstype string, attributes int, options ...string) (int, error) {
	fs, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen: %w", err)
	}

	defer unix.Close(fs)

	if fstype == Overlay {
		var layers []*os.File
		if options, layers, err = openLayers(options); err != nil {
			return -1, err
		}
		defer closeAll(layers)
	}

	for _, o := range withSource(options) {
		if key, value, has := strings.Cut(o, "="); has {
			err = unix.FsconfigSetString(fs, key, value)
		} else {
			err = unix.FsconfigSetFlag(fs, key)
		}
		if err != nil {
			return -1, fmt.Errorf("option %s: %w%s", o, err, reasonOf(fs))
		}
	}

	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, explainMount(fstype, fmt.Errorf("fsconfig: %w%s", err, reasonOf(fs)))
	}

	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return -1, explainMount(fstype, fmt.Errorf("fsmount: %w", err))
	}

	return fd, nil
}

// explainMount adds a hint to the error of a mount that a container around this host forbids.
func explainMount(fstype string, err error) error {
	if !errors.Is(err, unix.EPERM) || fstype != "proc" && fstype != "sysfs" {
		return err
	}
	return errs.New(errs.Permission, opSandbox, fstype, "%w", err).
		WithHint("a container that hides a part of /%s forbids this: run pando on the host, or in a container whose /proc "+
			"is not masked", fstype[:3])
}

// reasonOf returns the messages of the kernel about a filesystem, in parentheses.
func reasonOf(fs int) string {
	var all []string
	buf := make([]byte, 1024)
	for {
		n, err := unix.Read(fs, buf)
		if err != nil || n <= 0 || len(all) > 8 {
			break
		}
		all = append(all, strings.TrimSpace(strings.TrimPrefix(string(buf[:n]), "e ")))
	}
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, "; ") + ")"
}

// cloneTree makes a detached bind mount, or takes the one that is given.
func cloneTree(m Mount) (int, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if m.Recursive {
		flags |= unix.AT_RECURSIVE
	}

	fd, err := givenFD, error(nil)
	if m.Source != Given {
		fd, err = unix.OpenTree(unix.AT_FDCWD, m.Source, flags)
	}
	if err != nil {
		return -1, fmt.Errorf("%s: %w", m.Source, err)
	}

	if err := setAttributes(fd, m.attributes(), m.Recursive); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("%s: %w", m.Source, err)
	}

	return fd, nil
}

func setAttributes(fd, attributes int, recursive bool) error {
	attr := unix.MountAttr{Attr_set: uint64(attributes), Propagation: unix.MS_PRIVATE}
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(fd, "", flags, &attr); err != nil {
		return fmt.Errorf("mount_setattr: %w", err)
	}
	return nil
}

func splitPath(path string) (dir, name string) {
	i := strings.LastIndexByte(path, '/')
	return path[:i+1], path[i+1:]
}

// strictly are the rules by which targets are resolved: within the root, and through no link of any kind.
const strictly = unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_BENEATH

// openDir opens a directory of the tree (O_PATH). If wanted, it creates what is missing.
func (t *tree) openDir(path string, create bool) (int, error) {
	fd, err := unix.FcntlInt(uintptr(t.root), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}

	for name := range strings.SplitSeq(path, "/") {
		if name == "" {
			continue
		}
		next, err := openStep(fd, name, create)
		unix.Close(fd)
		if err != nil {
			return -1, explainTarget(path, name, err)
		}
		fd = next
	}

	return fd, nil
}

func openStep(dir int, name string, create bool) (int, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: strictly}
	fd, err := unix.Openat2(dir, name, &how)
	if !errors.Is(err, unix.ENOENT) || !create {
		return fd, err
	}
	if err := unix.Mkdirat(dir, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) { // by another sandbox, just now
		return -1, err
	}
	return unix.Openat2(dir, name, &how)
}

func explainTarget(path, name string, err error) error {
	if errs.IsAny(err, unix.ELOOP, unix.ENOTDIR, unix.EXDEV) {
		return errs.New(errs.Invalid, opSandbox, path, "%s is a symbolic link or not a directory: nothing is mounted there",
			name).WithHint("replace it with a directory, in the golden")
	}
	return errs.Wrap(opSandbox, path, fmt.Errorf("%s: %w", name, err))
}

// attachDir attaches a mount to a directory, which it creates if it is missing.
func (t *tree) attachDir(fd int, target string) error {
	dir, err := t.openDir(target, true)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	return attach(fd, dir)
}

// attachFile attaches a mount of a file.
func (t *tree) attachFile(fd int, target string) error {
	parent, name := splitPath(target)
	dir, err := t.openDir(parent, true)
	if err != nil {
		return err
	}

	defer unix.Close(dir)

	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: strictly}
	file, err := unix.Openat2(dir, name, &how)
	if errors.Is(err, unix.ENOENT) {
		made, merr := unix.Openat(dir, name, unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_WRONLY, 0o644)
		if merr != nil && !errors.Is(merr, unix.EEXIST) {
			return merr
		}
		if merr == nil {
			unix.Close(made)
		}
		file, err = unix.Openat2(dir, name, &how)
	}
	if err != nil {
		return explainTarget(target, name, err)
	}

	defer unix.Close(file)
	return attach(fd, file)
}

// attach attaches a mount to what a descriptor refers to.
func attach(fd, target int) error {
	const byDescriptor = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(fd, "", target, "", byDescriptor); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}
