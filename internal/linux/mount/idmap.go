package mount

import (
	"fmt"
	"os"
	"runtime"
	"syscall"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Owner is a user and a group, by their IDs on this host.
type Owner struct{ UID, GID uint32 }

// IDMap says whose files a mount shows: see Detached.SetIDMap. It is kept by a user namespace, in which nothing runs.
type IDMap struct{ namespace *os.File }

// SwapOwners returns the map of mounts that show the files of one owner as those of another, and the other way round;
// all other users and groups stay who they are. What is written through such a mount is stored with the IDs swapped
// back. Making it takes some milliseconds, as a process has to be started. Permission: the process is not root.
func SwapOwners(a, b Owner) (*IDMap, error) {
	// The kernel begins a process in a user namespace with this map, and stops it before it runs anything.
	runtime.LockOSThread() // only the thread that started it can let it go on
	defer runtime.UnlockOSThread()
	p, err := os.StartProcess("/proc/self/exe", []string{"pando: a map of user IDs"}, &os.ProcAttr{
		Sys: &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWUSER, UidMappings: swap(a.UID, b.UID), GidMappings: swap(a.GID, b.GID),
			GidMappingsEnableSetgroups: true, Ptrace: true, Pdeathsig: unix.SIGKILL,
		}})
	if err != nil {
		return nil, errs.Wrap("map user IDs", "", fmt.Errorf("start a process in a user namespace: %w", err))
	}

	defer func() {
		_ = p.Kill()
		_, _ = p.Wait()
	}()

	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
	if err != nil {
		return nil, errs.Wrap("map user IDs", "", err)
	}
	return &IDMap{f}, nil
}

// maxID is the largest user or group ID: the next one means none.
const maxID = 1<<32 - 2

// swap returns the mappings that exchange two IDs and keep all others.
func swap(a, b uint32) (out []syscall.SysProcIDMap) {
	add := func(first, to, end int) { // first to end-1
		if first < end {
			out = append(out, syscall.SysProcIDMap{ContainerID: first, HostID: to, Size: end - first})
		}
	}

	low, high := int(min(a, b)), int(max(a, b))
	add(0, 0, low)
	add(low, high, low+1)
	add(low+1, low+1, high)
	if low < high {
		add(high, low, high+1)
	}
	add(high+1, high+1, maxID+1)
	return out
}

// Close releases the map. Mounts that have it keep it.
func (m *IDMap) Close() error { return m.namespace.Close() }

// SetIDMap makes the mount show files as m says. Its filesystem must support that (ext4, XFS, btrfs, ZFS 2.2), and the
// kernel (Linux 5.12, btrfs 5.15): Unsupported. An overlay has the maps of its layers, which were set before.
func (d *Detached) SetIDMap(m *IDMap) error {
	defer runtime.KeepAlive(d)
	defer runtime.KeepAlive(m)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(m.namespace.Fd())}
	err := unix.MountSetattr(int(d.root.Fd()), "", unix.AT_EMPTY_PATH, &attr)
	if errs.IsAny(err, unix.EINVAL, unix.ENOSYS, unix.EOPNOTSUPP) {
		return errs.New(errs.Unsupported, "mount", d.root.Name(),
			"this kernel cannot show its files as those of another user: mount_setattr: %w", err)
	}
	return errs.Wrap("mount", d.root.Name(), err)
}

// Owner returns the owner of the root directory, as the mount shows it.
func (d *Detached) Owner() (Owner, error) { return d.OwnerOf(".") }

// OwnerOf returns the owner of an entry of the root directory, as the mount shows it.
func (d *Detached) OwnerOf(name string) (Owner, error) {
	defer runtime.KeepAlive(d)
	var st unix.Stat_t
	err := unix.Fstatat(int(d.root.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return Owner{st.Uid, st.Gid}, errs.Wrap("mount", d.root.Name(), err)
}
