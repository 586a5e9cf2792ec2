package kernel

import "golang.org/x/sys/unix"

// Stat returns what fstat reports for an open file.
func Stat(fd int) (st unix.Stat_t, err error) {
	err = unix.Fstat(fd, &st)
	return st, err
}

// Lstat returns what fstatat reports for a name in a directory, and follows no symbolic link.
func Lstat(dir int, name string) (st unix.Stat_t, err error) {
	err = unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, err
}
