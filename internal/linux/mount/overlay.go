package mount

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Names of the directories in the root of an Overlay's Upper.
const (
	UpperDir = "upper" // what differs from the lower layer
	WorkDir  = "work"  // empty: overlayfs prepares changes in it
)

// Overlay describes an overlay mount: the files of Lower, and changes to them in the directory UpperDir of Upper, which
// also has a directory WorkDir. The overlay keeps both mounted after the caller has closed them.
type Overlay struct {
	Lower, Upper *Detached
	Name         string   // by which mount tables show it: see OverlaySource
	UpperPath    string   // absolute: block device or directory that has Upper, for those who read mount tables; or ""
	Options      []string // each "key" or "key=value"
	ReadOnly     bool     // nothing is written to Upper, which may be read-only and lack WorkDir

	otherWork *Detached // has the work directory in place of Upper: see UpperInUse
}

// OverlaySource returns the source of an overlay in mount tables. The kernel shows only where UpperDir is within Upper,
// and not where that is: so the source says it, behind an @.
func OverlaySource(name, upperPath string) string {
	if upperPath == "" {
		return name
	}
	return name + "@" + upperPath
}

// SplitOverlaySource is the reverse of OverlaySource. upperPath is "" for a source of another form.
func SplitOverlaySource(source string) (name, upperPath string) {
	if name, path, ok := strings.Cut(source, "@/"); ok {
		return name, "/" + path
	}
	return source, ""
}

func (o Overlay) source() string { return OverlaySource(o.Name, o.UpperPath) }

// Mount makes the overlay mount, detached. Access times are not updated.
//
// Overlayfs takes layers by descriptor, and from detached mounts, since Linux 6.15. On older kernels Mount attaches the
// layers in a mount namespace that nobody else sees and that ends with the call. Unsupported: the kernel has no
// overlayfs. Invalid: overlayfs cannot use one of the filesystems in this way.
func (o Overlay) Mount() (*Detached, error) {
	m, err := o.byDescriptor()
	if errs.IsAny(err, unix.EINVAL, unix.EBADF, unix.EOPNOTSUPP) { // the last before Linux 6.5
		return o.inNamespace()
	}
	return m, err
}

// UpperInUse reports whether another overlay has the same upper directory, even one that was unmounted but whose files
// are in use. Two of them destroy each other's changes. upperAgain is another mount of what Upper mounts. It changes
// nothing but the kernel's log.
//
// With an index, which an overlay that is mounted does not need to have, overlayfs refuses an upper directory in use
// before it looks at the work directory, which here is in another mount, and which it refuses then (ovl_get_upper and
// ovl_get_workdir in fs/overlayfs/super.c).
func (o Overlay) UpperInUse(upperAgain *Detached) (bool, error) {
	o.Options, o.otherWork = []string{"index=on"}, upperAgain
	m, err := o.Mount()
	switch {
	case errors.Is(err, unix.EBUSY):
		return true, nil
	case errors.Is(err, unix.EINVAL):
		return false, nil
	case err == nil:
		return false, m.Close()
	}
	return false, err
}

// byDescriptor passes the layers to the kernel as descriptors.
func (o Overlay) byDescriptor() (*Detached, error) {
	return o.mountWith(func(fsfd int) error {
		setDir := func(key string, in *Detached, name string) error {
			dir, err := unix.Openat(int(in.root.Fd()), name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("open %s: %w", name, err)
			}
			defer unix.Close(dir)
			return unix.FsconfigSetFd(fsfd, key, dir)
		}

		// Of several lower layers the first is the topmost. "lowerdir" takes only text.
		if o.ReadOnly {
			if err := setDir("lowerdir+", o.Upper, UpperDir); err != nil {
				return err
			}
		}

		if err := unix.FsconfigSetFd(fsfd, "lowerdir+", int(o.Lower.root.Fd())); err != nil || o.ReadOnly {
			return err
		}

		if err := setDir("upperdir", o.Upper, UpperDir); err != nil {
			return err
		}
		return setDir("workdir", cmp.Or(o.otherWork, o.Upper), WorkDir)
	})
}

// MountDirs is Mount for a process in a user namespace: the layers are the directory lower, UpperDir of the directory
// upper, and WorkDir of the directory work, and not those of Lower and Upper. It works on all kernels.
func (o Overlay) MountDirs(lower, upper, work *os.File) (*Detached, error) {
	defer runtime.KeepAlive([]*os.File{lower, upper, work})
	at := func(dir *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", dir.Fd()) }
	layers := [][2]string{{"lowerdir", at(lower)}, {"upperdir", at(upper) + "/" + UpperDir},
		{"workdir", at(work) + "/" + WorkDir}}
	if o.ReadOnly {
		layers = [][2]string{{"lowerdir", layers[1][1] + ":" + layers[0][1]}}
	}

	return o.mountWith(func(fsfd int) error {
		for _, l := range layers {
			if err := unix.FsconfigSetString(fsfd, l[0], l[1]); err != nil {
				return err
			}
		}
		return nil
	})
}

// mountWith makes the mount, with the layers that setLayers sets.
func (o Overlay) mountWith(setLayers func(fsfd int) error) (*Detached, error) {
	defer runtime.KeepAlive(o.Lower)
	defer runtime.KeepAlive(o.Upper)
	log := newKernelLog(o.source())
	defer log.close()

	fsfd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, mountError("overlay", o.source(), false, "fsopen", err, nil)
	}

	defer unix.Close(fsfd)

	fail := func(call string, err error) error {
		return mountError("overlay", o.source(), false, call, err, append(contextMessages(fsfd), log.messages()...))
	}

	// Set the layers and the options.
	if err := setLayers(fsfd); err != nil {
		return nil, fail("set layers", err)
	}

	for _, s := range append([]string{"source=" + o.source()}, o.Options...) {
		if err := setOption(fsfd, s); err != nil {
			return nil, fail("fsconfig "+s, err)
		}
	}

	// Mount it.
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fail("fsconfig create", err)
	}

	attr := unix.MOUNT_ATTR_NOATIME
	if o.ReadOnly {
		attr |= unix.MOUNT_ATTR_RDONLY
	}

	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, attr)
	if err != nil {
		return nil, fail("fsmount", err)
	}

	return detached(mfd, o.source()), nil
}

// inNamespace attaches the layers in a mount namespace of a thread of its own, and passes their paths to the kernel.
// The thread ends with the call, and its namespace with it: the overlay has mounts of its own.
func (o Overlay) inNamespace() (m *Detached, err error) {
	err = onOwnThread(func() (err error) {
		m, err = o.inThisThread()
		return err
	})
	return m, err
}

// inThisThread is inNamespace in a thread that nothing else will use.
func (o Overlay) inThisThread() (*Detached, error) {
	// Leave the mount namespace of the process.
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return nil, errs.Wrap("mount overlay", o.source(), fmt.Errorf("unshare: %w", err))
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, errs.Wrap("mount overlay", o.source(), fmt.Errorf("make mounts private: %w", err))
	}

	// Attach the layers below a directory that only this thread sees.
	scratch, err := attachScratch()
	if err != nil {
		return nil, err
	}

	defer scratch.Close()

	lower, err := attachLayer(scratch, o.Lower, "lower")
	if err != nil {
		return nil, errs.Wrap("mount overlay", o.source(), err)
	}
	upper, err := attachLayer(scratch, o.Upper, "upper")
	if err != nil {
		return nil, errs.Wrap("mount overlay", o.source(), err)
	}

	work := upper
	if o.otherWork != nil {
		if work, err = attachLayer(scratch, o.otherWork, "work"); err != nil {
			return nil, errs.Wrap("mount overlay", o.source(), err)
		}
	}

	paths := map[string]string{"lowerdir": lower, "upperdir": upper + "/" + UpperDir, "workdir": work + "/" + WorkDir}
	if err := refuseLinks(paths["upperdir"]); err != nil {
		return nil, err
	}
	if err := refuseLinks(paths["workdir"]); err != nil && !o.ReadOnly {
		return nil, err
	}

	if o.ReadOnly {
		paths = map[string]string{"lowerdir": upper + "/" + UpperDir + ":" + lower}
	}

	return o.mountWith(func(fsfd int) error {
		for key, path := range paths {
			if err := unix.FsconfigSetString(fsfd, key, path); err != nil {
				return err
			}
		}
		return nil
	})
}

// refuseLinks returns an error if a path does not end at a directory. Nobody else can change what this thread sees.
func refuseLinks(path string) error {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	return errs.Wrap("mount overlay", path, err)
}

// attachScratch mounts an empty filesystem over the root directory of this thread's namespace, and returns its root.
// What is below stays reachable: paths begin at the directory that was the root before.
func attachScratch() (*os.File, error) {
	m, err := Device("tmpfs", "pando", []string{"mode=700"}, false)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	if _, err := m.MoveTo("/"); err != nil {
		return nil, err
	}
	return m.Open()
}

// attachLayer attaches a mount as a directory of scratch, and returns its path there.
func attachLayer(scratch *os.File, m *Detached, name string) (path string, err error) {
	if err := unix.Mkdirat(int(scratch.Fd()), name, 0o700); err != nil {
		return "", fmt.Errorf("mkdir: %w", err)
	}
	err = unix.MoveMount(int(m.root.Fd()), "", int(scratch.Fd()), name, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return "", fmt.Errorf("move_mount: %w", err)
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", scratch.Fd(), name), nil
}
