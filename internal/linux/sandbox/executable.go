package sandbox

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// protectedExecutable opens this program so that the init can run it, but nothing in the sandbox can write to it:
// a program there could reach the file through /proc/PID/exe (CVE-2019-5736). As root the file is opened on a
// read-only mount that only this descriptor holds. Other users may not make one: if they could write to the file,
// they get a sealed copy in memory.
func protectedExecutable() (*os.File, error) {
	const self = "/proc/self/exe"
	fd, err := unix.OpenTree(unix.AT_FDCWD, self, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err == nil {
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
		if err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err == nil {
			return os.NewFile(uintptr(fd), "executable"), nil
		}
		unix.Close(fd)
	}

	if unix.Access(self, unix.W_OK) == nil {
		return sealedCopy(self)
	}

	if fd, err = unix.Open(self, unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("open %s: %w", self, err)
	}

	return os.NewFile(uintptr(fd), "executable"), nil
}

// sealedCopy copies a program into memory, where nobody can change it.
func sealedCopy(path string) (*os.File, error) {
	from, err := os.Open(path)
	if err != nil {
		return nil, err
	}

	defer from.Close()

	fd, err := unix.MemfdCreate("pando", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}

	to := os.NewFile(uintptr(fd), "copy")
	defer to.Close()

	if _, err = io.Copy(to, from); err == nil {
		const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
		_, err = unix.FcntlInt(to.Fd(), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		return nil, fmt.Errorf("copying %s: %w", path, err)
	}

	// A file that is open for writing cannot be run.
	again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", to.Fd()), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("reopening a copy of %s: %w", path, err)
	}
	return os.NewFile(uintptr(again), "executable"), nil
}

func trimSpace(b []byte) []byte { return bytes.TrimSpace(b) }
