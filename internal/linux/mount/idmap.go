package mount

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Exchange swaps two user or group IDs: files of A on disk are files of B in the mount, and the reverse. All other IDs
// stay. So whatever B creates there belongs to A on disk. Equal IDs change nothing.
type Exchange struct{ A, B uint32 }

// IDMap says how a mount changes the owners of files.
type IDMap struct{ Users, Groups Exchange }

// lastID is the largest user or group ID: the next one means "no change" to chown(2).
const lastID = 1<<32 - 2

// Owner returns the user and group to whom the root directory belongs.
func (d *Detached) Owner() (uid, gid uint32, err error) {
	defer runtime.KeepAlive(d)
	var st unix.Stat_t
	if err := unix.Fstatat(int(d.root.Fd()), "", &st, unix.AT_EMPTY_PATH); err != nil {
		return 0, 0, errs.Wrap("stat", d.root.Name(), err)
	}
	return st.Uid, st.Gid, nil
}

// MapIDs changes the owners that the files of a mount have for those who use it, and not on disk: an idmapped mount
// (Linux 5.12; mount_setattr(2)). Nobody may have used the mount before. It costs one short-lived process. Unsupported:
// the kernel cannot do this, or not with this filesystem (overlayfs: map its layers instead). Permission.
func (d *Detached) MapIDs(m IDMap) error {
	users, groups := m.Users.ranges(), m.Groups.ranges()
	if m.Users.A == m.Users.B && m.Groups.A == m.Groups.B {
		return nil
	}

	// The kernel takes the map as a user namespace that has it.
	ns, err := userNamespace(users, groups)
	if err != nil {
		return errs.Wrap("mount", d.root.Name(), err)
	}

	defer ns.Close()
	defer runtime.KeepAlive(d)

	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(ns.Fd())}
	err = unix.MountSetattr(int(d.root.Fd()), "", unix.AT_EMPTY_PATH, &attr)
	if errs.IsAny(err, unix.EINVAL, unix.ENOSYS, unix.EOPNOTSUPP) {
		return errs.New(errs.Unsupported, "mount", d.root.Name(),
			"this filesystem cannot be mounted with other owners on this kernel: mount_setattr: %w", err).
			WithHint("idmapped mounts need Linux 5.12 for ext4 and XFS, 5.15 for btrfs, 5.19 below overlays, 6.3 for tmpfs, " +
				"and OpenZFS 2.2")
	}
	if err != nil {
		return errs.Wrap("mount", d.root.Name(), fmt.Errorf("mount_setattr: %w", err))
	}

	return nil
}

// ranges returns the lines of uid_map or gid_map: an ID on disk, the ID in the mount, and how many follow.
func (s Exchange) ranges() []syscall.SysProcIDMap {
	low, high := min(s.A, s.B), max(s.A, s.B)
	var out []syscall.SysProcIDMap
	add := func(from, to, count uint32) {
		if count > 0 {
			out = append(out, syscall.SysProcIDMap{ContainerID: int(from), HostID: int(to), Size: int(count)})
		}
	}

	if low == high {
		add(0, 0, lastID+1)
		return out
	}

	add(0, 0, low)
	add(low, high, 1)
	add(low+1, low+1, high-low-1)
	add(high, low, 1)
	add(high+1, high+1, lastID-high)
	return out
}

// userNamespace makes a user namespace with these maps. It lives as long as the file, or a mount that uses it.
func userNamespace(users, groups []syscall.SysProcIDMap) (*os.File, error) {
	// A namespace comes with a process. This one stops at its first instruction, waiting for a debugger, and is killed.
	runtime.LockOSThread() // the thread that starts it is the debugger
	defer runtime.UnlockOSThread()

	p, err := os.StartProcess("/proc/self/exe", []string{"pando"}, &os.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: users, GidMappings: groups,
			Ptrace: true, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", namespaceError(err))
	}

	defer func() {
		_ = p.Kill()
		_, _ = p.Wait()
	}()

	return os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
}

// namespaceError adds what to do about it to an error of clone(2).
func namespaceError(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return errs.New(errs.Unsupported, "mount", "", "%w", err).
			WithHint("allow more user namespaces: `sysctl user.max_user_namespaces=1000`")
	case errors.Is(err, unix.EPERM):
		return errs.New(errs.Permission, "mount", "", "%w", err).WithHint("run it as root, outside of containers")
	}
	return err
}
