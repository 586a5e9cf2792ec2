package sandbox

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// capabilities is a set, as the kernel has it.
type capabilities [2]uint32

func capabilitySet(list []int) (set capabilities) {
	for _, c := range list {
		set[c/32] |= 1 << (c % 32)
	}
	return set
}

func (c capabilities) has(n int) bool { return c[n/32]&(1<<(n%32)) != 0 }

// dropBounding limits what this thread, and all that it starts, could ever gain. The caller of an unprivileged sandbox
// may lack what that needs, but then no_new_privs keeps it from gaining anything.
func dropBounding(kept capabilities) error {
	for c := range int(unix.CAP_LAST_CAP + 1) {
		if kept.has(c) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("dropping capability %d: %w", c, err)
		}
	}
	return nil
}

// setCapabilities gives this thread exactly the set kept, and nothing to inherit.
func setCapabilities(kept capabilities) error {
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("ambient capabilities: %w", err)
	}

	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	for i := range data {
		data[i] = unix.CapUserData{Effective: kept[i], Permitted: kept[i]}
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}

	return nil
}

// setGroups sets the supplementary groups of this thread.
func setGroups(groups []uint32) unix.Errno {
	list := uintptr(unsafe.Pointer(unsafe.SliceData(groups)))
	_, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), list, 0)
	return e
}

// scopeSockets keeps this thread from connecting to abstract Unix sockets of processes outside: these belong to the
// network, which it shares. Landlock does it since Linux 6.12.
func scopeSockets() error {
	attr := unix.LandlockRulesetAttr{Scoped: unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET}
	fd, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if e != 0 {
		return nil // an older kernel: documented
	}

	defer unix.Close(int(fd))

	if _, _, e := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); e != 0 {
		return fmt.Errorf("landlock_restrict_self: %w", e)
	}
	return nil
}
