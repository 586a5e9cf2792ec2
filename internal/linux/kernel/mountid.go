package kernel

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OnMount reports whether path is on the mount with the ID that MountAt returned earlier. It works
// even if the filesystem no longer answers statx, like an XFS that has shut down. It does not
// follow symbolic links.
func OnMount(path string, id uint64) (bool, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("open: %w", err)
	}

	defer unix.Close(fd)

	// fdinfo has the short ID, which the kernel reuses.
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return false, err
	}

	_, rest, _ := strings.Cut(string(b), "mnt_id:")
	var there uint64
	if n, _ := fmt.Sscan(rest, &there); n != 1 {
		return false, errors.New("fdinfo does not contain the mount ID")
	}

	short, err := shortMountID(id)
	if errors.Is(err, unix.ENOENT) { // the mount no longer exists
		return false, nil
	}

	return err == nil && short == there, err
}

// shortMountID returns the ID, as in mount tables, of the mount with the unique ID id. ENOENT: the mount
// does not exist.
func shortMountID(id uint64) (uint64, error) {
	const statmountMntBasic = 2
	request := struct { // struct mnt_id_req, version 0
		size, spare uint32
		id, param   uint64
	}{size: 24, id: id, param: statmountMntBasic}
	var answer struct { // the beginning of struct statmount
		_            [2]uint32
		mask         uint64
		_            [6]uint32
		_            [2]uint64
		short, above uint32
		_            [512 - 64]byte
	}
	_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&request)), uintptr(unsafe.Pointer(&answer)),
		unsafe.Sizeof(answer), 0, 0, 0)
	switch {
	case errno == unix.ENOSYS: // before Linux 6.8 there were only short ones
		return id, nil
	case errno != 0:
		return 0, fmt.Errorf("statmount: %w", errno)
	case answer.mask&statmountMntBasic == 0:
		return 0, errors.New("statmount did not return the mount ID")
	}

	return uint64(answer.short), nil
}
