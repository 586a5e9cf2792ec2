// Package mount mounts filesystems with the kernel's file-descriptor based calls
// (fsopen, fsmount, move_mount; Linux 5.2). A mount is first detached, held by a
// descriptor only: if the process dies, it disappears. Mounting and unmounting never
// read the mount table, whose length is not under Pando's control; only functions such
// as Holders do, which explain errors.
package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// Detached is a mount that is not attached to a directory yet. Open opens its root;
// MoveTo attaches it to a path; Close without MoveTo unmounts it.
type Detached struct {
	root *os.File
}

// Device mounts the filesystem of type fstype on the block device source. options are
// like those of mount(8)'s -o, each "key" or "key=value". Damaged or Invalid: the device
// does not contain such a filesystem. Access times are not updated, because reading a
// clone must not change it.
func Device(fstype, source string, options []string, readOnly bool) (*Detached, error) {
	log := newKernelLog(source)
	defer log.close()
	fail := func(call string, fsfd int, err error) error {
		return mountError(fstype, source, readOnly, call, err, append(contextMessages(fsfd), log.messages()...))
	}

	// Open the filesystem with its options.
	fsfd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fail("fsopen", -1, err)
	}

	defer unix.Close(fsfd)

	if err := unix.FsconfigSetString(fsfd, "source", source); err != nil {
		return nil, fail("fsconfig source", fsfd, err)
	}

	if readOnly {
		options = append([]string{"ro"}, options...)
	}

	for _, o := range options {
		if err := setOption(fsfd, o); err != nil {
			return nil, fail("fsconfig "+o, fsfd, err)
		}
	}

	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fail("fsconfig create", fsfd, err)
	}

	// Mount it.
	attr := unix.MOUNT_ATTR_NOATIME
	if readOnly {
		attr |= unix.MOUNT_ATTR_RDONLY
	}

	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, attr)
	if err != nil {
		return nil, fail("fsmount", fsfd, err)
	}

	return detached(mfd, source), nil
}

// setOption sets an option of a filesystem that is about to be mounted: "key" or "key=value".
func setOption(fsfd int, option string) error {
	key, value, has := strings.Cut(option, "=")
	if has {
		return unix.FsconfigSetString(fsfd, key, value)
	}
	return unix.FsconfigSetFlag(fsfd, key)
}

// mountError returns the error of the system call named call, with the messages of the kernel and a hint.
func mountError(fstype, source string, readOnly bool, call string, err error, messages []string) error {
	detail := fmt.Errorf("%s: %w", call, err)
	if len(messages) > 0 {
		detail = fmt.Errorf("%s: %w (%s)", call, err, strings.Join(messages, "; "))
	}

	e := &errs.Error{Kind: errs.KindOf(err), Op: "mount " + fstype, Ref: source, Err: detail}
	switch {
	case call == "fsopen" && errors.Is(err, unix.ENODEV):
		e.Kind = errs.Unsupported
		e.Hint = errs.Messagef("load the %s driver of the kernel with `modprobe %s`", fstype, fstype)
	case errors.Is(err, unix.EPERM) && os.Geteuid() != 0:
		e.Hint = "run it as root"
	case errors.Is(err, unix.EACCES) && fstype == "zfs":
		e.Hint = errs.Messagef("load its encryption key with `zfs load-key -r %s`", strings.Split(source, "/")[0])
	case errors.Is(err, unix.EACCES) && !readOnly:
		e.Hint = "the block device is read-only"
	}

	return e
}

// Tree makes a detached bind mount of the directory path, without mounts below it.
func Tree(path string, readOnly bool) (*Detached, error) {
	mfd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, errs.Wrap("mount", path, fmt.Errorf("open_tree: %w", err))
	}

	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOATIME, Attr_clr: unix.MOUNT_ATTR__ATIME,
		Propagation: unix.MS_PRIVATE}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}

	if err := unix.MountSetattr(mfd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		unix.Close(mfd)
		return nil, errs.Wrap("mount", path, fmt.Errorf("mount_setattr: %w", err))
	}

	return detached(mfd, path), nil
}

// detached wraps the descriptor of fsmount or open_tree, which is O_PATH and holds the mount.
func detached(mfd int, name string) *Detached {
	return &Detached{root: os.NewFile(uintptr(mfd), name)}
}

// FromDescriptor wraps the descriptor of a detached mount that another process has made.
func FromDescriptor(fd int, name string) *Detached { return detached(fd, name) }

// Descriptor returns the descriptor of the mount, which stays open until Close.
func (d *Detached) Descriptor() int { return int(d.root.Fd()) }

// File is Descriptor as a file.
func (d *Detached) File() *os.File { return d.root }

// Open opens the root directory for reading its entries, for ioctls, and as the
// base of *at calls. The caller must close it before MoveTo or Close, because it keeps
// the filesystem in use.
func (d *Detached) Open() (*os.File, error) {
	fd, err := unix.Openat(int(d.root.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap("open", d.root.Name(), err)
	}
	return os.NewFile(uintptr(fd), d.root.Name()), nil
}

// MoveTo attaches the mount to the directory target, and returns its identity there. It
// does not follow a symbolic link. NotFound. Invalid: target is not a directory. The mount
// cannot be unmounted until Close.
func (d *Detached) MoveTo(target string) (kernel.MountInfo, error) {
	fd := int(d.root.Fd())
	info, err := kernel.MountAt(fd, "")
	if err != nil {
		return kernel.MountInfo{}, errs.Wrap("mount", target, err)
	}

	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		var st unix.Stat_t
		if errors.Is(err, unix.EINVAL) && unix.Lstat(target, &st) == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return kernel.MountInfo{}, errs.New(errs.Invalid, "mount", target, "not a directory")
		}
		return kernel.MountInfo{}, errs.Wrap("mount", target, fmt.Errorf("move_mount: %w", err))
	}

	runtime.KeepAlive(d)
	return info, nil
}

// stNoSymFollow is ST_NOSYMFOLLOW of statfs(2).
const stNoSymFollow = 0x2000

// Attributes are the options of a mount itself, as opposed to those of its filesystem, such as
// nosuid, nodev, noexec, and whether reading changes access times.
type Attributes uint64

// AttributesOf returns the attributes of the mount that contains path. If the filesystem no longer
// answers, it returns those that Device sets.
func AttributesOf(path string) Attributes {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return unix.MOUNT_ATTR_NOATIME
	}

	a := Attributes(unix.MOUNT_ATTR_STRICTATIME)
	switch {
	case st.Flags&unix.ST_NOATIME != 0:
		a = unix.MOUNT_ATTR_NOATIME
	case st.Flags&unix.ST_RELATIME != 0:
		a = unix.MOUNT_ATTR_RELATIME
	}

	for flag, attr := range map[int64]Attributes{
		unix.ST_RDONLY: unix.MOUNT_ATTR_RDONLY, unix.ST_NOSUID: unix.MOUNT_ATTR_NOSUID, unix.ST_NODEV: unix.MOUNT_ATTR_NODEV,
		unix.ST_NOEXEC: unix.MOUNT_ATTR_NOEXEC, unix.ST_NODIRATIME: unix.MOUNT_ATTR_NODIRATIME,
		stNoSymFollow: unix.MOUNT_ATTR_NOSYMFOLLOW,
	} {
		if int64(st.Flags)&flag != 0 {
			a |= attr
		}
	}

	return a
}

// ReadOnly reports whether the mount is read-only.
func (a Attributes) ReadOnly() bool { return a&unix.MOUNT_ATTR_RDONLY != 0 }

// SetAttributes sets the attributes of a mount that is not attached yet.
func (d *Detached) SetAttributes(a Attributes) error {
	attr := unix.MountAttr{Attr_set: uint64(a), Attr_clr: unix.MOUNT_ATTR__ATIME}
	if err := unix.MountSetattr(int(d.root.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return errs.Wrap("mount", d.root.Name(), fmt.Errorf("mount_setattr: %w", err))
	}
	return nil
}

// MoveToDir is MoveTo for a directory that the caller has opened, even if another process
// has moved it since. NotFound: it was removed.
func (d *Detached) MoveToDir(dir *os.File) (kernel.MountInfo, error) {
	defer runtime.KeepAlive(dir)
	defer runtime.KeepAlive(d)
	fd := int(d.root.Fd())
	info, err := kernel.MountAt(fd, "")
	if err != nil {
		return kernel.MountInfo{}, errs.Wrap("mount", dir.Name(), err)
	}

	const byDescriptor = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(fd, "", int(dir.Fd()), "", byDescriptor); err != nil {
		return kernel.MountInfo{}, errs.Wrap("mount", dir.Name(), fmt.Errorf("move_mount: %w", err))
	}

	return info, nil
}

// TakeBack undoes MoveTo and MoveToDir, wherever the mount is now, even if a process
// already uses it.
func (d *Detached) TakeBack() error {
	defer runtime.KeepAlive(d)
	at := fmt.Sprintf("/proc/self/fd/%d", d.root.Fd())
	return errs.Wrap("umount", d.root.Name(), unix.Unmount(at, unix.MNT_DETACH))
}

// Restrict makes the mount ignore setuid and setgid bits, device nodes, or both.
func (d *Detached) Restrict(noSUID, noDev bool) error {
	defer runtime.KeepAlive(d)
	var attr unix.MountAttr
	if noSUID {
		attr.Attr_set |= unix.MOUNT_ATTR_NOSUID
	}
	if noDev {
		attr.Attr_set |= unix.MOUNT_ATTR_NODEV
	}
	if attr.Attr_set == 0 {
		return nil
	}

	err := unix.MountSetattr(int(d.root.Fd()), "", unix.AT_EMPTY_PATH, &attr)
	switch {
	case errors.Is(err, unix.ENOSYS):
		return errs.New(errs.Unsupported, "mount", d.root.Name(), "mounting with nosuid and nodev needs Linux 5.12").
			WithHint("mount it where only root has access, or allow both with %s %s", errs.Param("suid"), errs.Param("dev"))
	case err != nil:
		return errs.Wrap("mount", d.root.Name(), fmt.Errorf("mount_setattr: %w", err))
	}

	return nil
}

// Info identifies the mount.
func (d *Detached) Info() (kernel.MountInfo, error) { return kernel.MountAt(int(d.root.Fd()), "") }

// Frozen reports whether the filesystem is frozen, without waiting. It asks the kernel to reconfigure
// the filesystem without any change, which the kernel refuses while the filesystem is frozen. Otherwise the
// filesystem drops its cache of names, and ext4 also commits and writes a message to the kernel's log.
func (d *Detached) Frozen() (bool, error) {
	defer runtime.KeepAlive(d)
	fd, err := unix.Fspick(int(d.root.Fd()), "", unix.FSPICK_CLOEXEC|unix.FSPICK_EMPTY_PATH)
	if err != nil {
		return false, errs.Wrap("mount", d.root.Name(), fmt.Errorf("fspick: %w", err))
	}
	defer unix.Close(fd)
	err = unix.FsconfigReconfigure(fd)
	if errors.Is(err, unix.EBUSY) {
		return true, nil
	}
	return false, errs.Wrap("mount", d.root.Name(), err)
}

// Close releases the mount. If it was not attached, that unmounts it.
func (d *Detached) Close() error {
	if d.root == nil {
		return nil
	}
	err := d.root.Close()
	d.root = nil
	return err
}

// forkWait bounds how long a child that another goroutine has just started may keep
// copies of descriptors that this process has closed. The kernel closes them in exec, but
// only after the parent has resumed, so nothing, not even syscall.ForkLock, shows when.
// An unmount of a busy mount takes up to twice this time longer.
const forkWait = 16 * time.Millisecond

// Unmount unmounts the topmost mount at target, and its propagated copies in other mount
// namespaces. It is never lazy. InUse: something holds one of them (see Holders).
// NotFound: nothing is mounted there.
func Unmount(target string) error { return unmount(target, target, forkWait) }

// UnmountIn is Unmount of the mount at the entry name of the directory parent, even if another process has moved that
// directory. With idle it does not wait for a child that this process is starting, for mounts that may stay mounted.
func UnmountIn(parent *os.File, name string, idle bool) error {
	defer runtime.KeepAlive(parent)
	patience := forkWait
	if idle {
		patience = 0
	}
	return unmount(fmt.Sprintf("/proc/self/fd/%d/%s", parent.Fd(), name), filepath.Join(parent.Name(), name), patience)
}

// unmount unmounts target. Errors name it as known.
func unmount(target, known string, patience time.Duration) error {
	for wait := time.Millisecond; ; {
		err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) && wait <= patience {
			time.Sleep(wait)
			wait *= 2
			continue
		}

		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case errs.IsAny(err, unix.EINVAL, unix.ENOENT):
			return &errs.Error{Kind: errs.NotFound, Op: "umount", Ref: known, Err: errors.New("not mounted")}
		}

		return errs.Wrap("umount", known, err)
	}
}

// IsMounted reports whether the mount with this ID is still the one at target, in O(1).
func IsMounted(target string, id uint64) bool {
	m, err := kernel.MountAt(unix.AT_FDCWD, target)
	if errors.Is(err, unix.EIO) { // an XFS that has shut down does not answer
		on, err := kernel.OnMount(target, id)
		return err == nil && on
	}
	return err == nil && m.Root && m.ID == id
}
