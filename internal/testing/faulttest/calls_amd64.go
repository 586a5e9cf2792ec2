//go:build linux && amd64

package faulttest

import "golang.org/x/sys/unix"

// legacyCalls are those that newer architectures have only in a form that
// takes a directory's descriptor.
var legacyCalls = map[int]call{
	unix.SYS_OPEN:      {"open", openFlags(1, path(0))},
	unix.SYS_CREAT:     {"creat", path(0)},
	unix.SYS_RENAME:    {"rename", both(path(0), path(1))},
	unix.SYS_RENAMEAT:  {"renameat", both(at(0, 1), at(2, 3))},
	unix.SYS_LINK:      {"link", both(path(0), path(1))},
	unix.SYS_SYMLINK:   {"symlink", path(1)},
	unix.SYS_UNLINK:    {"unlink", path(0)},
	unix.SYS_RMDIR:     {"rmdir", path(0)},
	unix.SYS_MKDIR:     {"mkdir", path(0)},
	unix.SYS_MKNOD:     {"mknod", path(0)},
	unix.SYS_CHMOD:     {"chmod", path(0)},
	unix.SYS_CHOWN:     {"chown", path(0)},
	unix.SYS_LCHOWN:    {"lchown", path(0)},
	unix.SYS_UTIME:     {"utime", path(0)},
	unix.SYS_UTIMES:    {"utimes", path(0)},
	unix.SYS_FUTIMESAT: {"futimesat", at(0, 1)},
	unix.SYS_FORK:      {"fork", always},
	unix.SYS_VFORK:     {"vfork", always},
}
