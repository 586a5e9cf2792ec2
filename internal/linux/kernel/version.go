package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// AtLeast reports whether the running kernel is Linux major.minor or newer. Use it only for faults of older kernels
// that no system call shows: distributions add features to old versions.
func AtLeast(major, minor int) bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	return releaseAtLeast(unix.ByteSliceToString(u.Release[:]), major, minor)
}

// Release returns the release of the running kernel, for users: "6.1.0-13-amd64".
func Release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

func releaseAtLeast(release string, major, minor int) bool {
	var x, y int
	if n, _ := fmt.Sscanf(release, "%d.%d", &x, &y); n != 2 {
		return false
	}
	return x > major || x == major && y >= minor
}
