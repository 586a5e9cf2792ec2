package kernel

import "golang.org/x/sys/unix"

// IsImmutable reports whether the file name in the directory fd (with name "",
// fd itself) is immutable or append-only, so that neither it nor, for a directory, its
// entries can be deleted. False if the filesystem does not report that.
func IsImmutable(fd int, name string) bool {
	var st unix.Statx_t
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	if err := unix.Statx(fd, name, flags, 0, &st); err != nil {
		return false
	}
	return st.Attributes&(unix.STATX_ATTR_IMMUTABLE|unix.STATX_ATTR_APPEND) != 0
}
