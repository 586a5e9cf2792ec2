package sandbox

import (
	"errors"
	"fmt"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// What of /proc and /sys tells of the host, or changes it. A sandbox has neither.
var (
	hiddenInProc = []string{"acpi", "asound", "interrupts", "kallsyms", "kcore", "keys", "key-users", "kmsg", "kpagecount",
		"kpageflags", "kpagecgroup", "latency_stats", "pagetypeinfo", "sched_debug", "scsi", "slabinfo", "timer_list",
		"timer_stats", "vmallocinfo", "config.gz"}
	fixedInProc = []string{"bus", "fs", "irq", "mtrr", "sys", "sysrq-trigger", "dynamic_debug", "driver"}
	hiddenInSys = []string{"firmware", "kernel/debug", "kernel/tracing", "kernel/security", "devices/virtual/powercap",
		"fs/bpf", "fs/pstore", "fs/fuse"}
)

// mountProc shows the processes of the sandbox.
func (t *tree) mountProc(m Mount) error {
	fd, err := newMount("proc", safe|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return err
	}

	defer unix.Close(fd)

	if err := t.attachDir(fd, m.Target); err != nil {
		return err
	}
	if err := hide(fd, hiddenInProc); err != nil {
		return err
	}
	return fix(fd, fixedInProc)
}

// mountSys shows devices and settings of the kernel, read-only.
func (t *tree) mountSys(m Mount) error {
	fd, err := newMount("sysfs", m.attributes())
	if m.Optional && errs.Is(err, errs.Permission) { // with the host's network, in a user namespace
		return nil
	}
	if err != nil {
		return err
	}

	defer unix.Close(fd)

	if err := t.attachDir(fd, m.Target); err != nil {
		return err
	}
	return hide(fd, hiddenInSys)
}

// hide covers files below an attached mount with /dev/null, and directories with empty ones.
func hide(mount int, names []string) error {
	for _, name := range names {
		target, directory, err := openBelow(mount, name)
		if err != nil {
			return err
		}
		if target < 0 {
			continue
		}

		var cover int
		if directory {
			cover, err = newMount("tmpfs", safe|unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_RDONLY, "mode=555", "nr_inodes=2")
		} else {
			cover, err = hostDevice("null")
			if err == nil {
				err = setAttributes(cover, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID, false)
			}
		}
		if err == nil {
			err = attach(cover, target)
			unix.Close(cover)
		}

		unix.Close(target)
		if err != nil {
			return fmt.Errorf("hiding %s: %w", name, err)
		}
	}

	return nil
}

// fix makes files and directories below an attached mount read-only.
func fix(mount int, names []string) error {
	for _, name := range names {
		target, _, err := openBelow(mount, name)
		if err != nil {
			return err
		}
		if target < 0 {
			continue
		}

		again, err := unix.OpenTree(target, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
		if err == nil {
			err = setAttributes(again, safe|unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_RDONLY, false)
			if err == nil {
				err = attach(again, target)
			}
			unix.Close(again)
		}

		unix.Close(target)
		if err != nil {
			return fmt.Errorf("making %s read-only: %w", name, err)
		}
	}

	return nil
}

// openBelow opens a file below an attached mount. target is negative if there is no such file.
func openBelow(mount int, name string) (target int, directory bool, err error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: strictly}
	target, err = unix.Openat2(mount, name, &how)
	if errs.IsAny(err, unix.ENOENT, unix.ENOTDIR, unix.EACCES) {
		return -1, false, nil
	}
	if err != nil {
		return -1, false, fmt.Errorf("%s: %w", name, err)
	}

	var st unix.Stat_t
	if err := unix.Fstat(target, &st); err != nil {
		unix.Close(target)
		return -1, false, err
	}
	return target, st.Mode&unix.S_IFMT == unix.S_IFDIR, nil
}

// devices are the device nodes of a sandbox, which are harmless.
var devices = []string{"null", "zero", "full", "random", "urandom", "tty"}

// hostDevice returns a detached mount of a device node of the host.
func hostDevice(name string) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, "/dev/"+name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("/dev/%s: %w", name, err)
	}

	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
		unix.Close(fd)
		return -1, errs.New(errs.Unsupported, opSandbox, "/dev/"+name, "not a character device on this host")
	}

	return fd, nil
}

// mountDev makes a /dev with harmless devices and terminals of the sandbox.
func (t *tree) mountDev(m Mount) error {
	fd, err := newMount("tmpfs", safe|unix.MOUNT_ATTR_NOEXEC, "mode=755", "size=64k", "nr_inodes=64")
	if err != nil {
		return err
	}

	defer unix.Close(fd)

	if err := t.attachDir(fd, m.Target); err != nil {
		return err
	}

	dev := &tree{root: fd}
	for _, name := range devices {
		node, err := hostDevice(name)
		if err != nil {
			return err
		}

		// Read-only: devices can be written to even so, but nobody can change the mode of the host's node.
		err = setAttributes(node, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_RDONLY, false)
		if err == nil {
			err = dev.attachFile(node, "/"+name)
		}
		unix.Close(node)
		if err != nil {
			return err
		}
	}

	// Terminals, shared memory and message queues of the sandbox.
	if err := dev.mountPts(); err != nil {
		return err
	}

	shm := Mount{Kind: Tmpfs, Target: "/shm", NoExec: true, Options: []string{"mode=1777"}}
	if err := dev.mountNew(shm, "tmpfs"); err != nil {
		return err
	}

	mqueue := Mount{Target: "/mqueue", NoExec: true}
	if err := dev.mountNew(mqueue, "mqueue"); err != nil && !errors.Is(err, unix.ENODEV) {
		return err
	}

	for _, link := range []string{"fd /proc/self/fd", "stdin /proc/self/fd/0", "stdout /proc/self/fd/1",
		"stderr /proc/self/fd/2", "ptmx pts/ptmx"} {
		name, to, _ := strings.Cut(link, " ")
		if err := unix.Symlinkat(to, fd, name); err != nil {
			return fmt.Errorf("symlink %s: %w", name, err)
		}
	}

	return setAttributes(fd, unix.MOUNT_ATTR_RDONLY, false)
}

// mountPts mounts terminals that only the sandbox has. Group 5 is tty; a user namespace may not have it.
func (t *tree) mountPts() error {
	attr := unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC
	options := []string{"newinstance", "ptmxmode=0666", "mode=620"}
	fd, err := newMount("devpts", attr, append(options, "gid=5")...)
	if errors.Is(err, unix.EINVAL) {
		fd, err = newMount("devpts", attr, options...)
	}
	if err != nil {
		return err
	}

	defer unix.Close(fd)
	return t.attachDir(fd, "/pts")
}
