package sandbox

import "golang.org/x/sys/unix"

const (
	auditArch     = unix.AUDIT_ARCH_X86_64
	cloneFlagsArg = 0
	x32Bit        = 0x40000000 // in the numbers of calls of the x32 interface
)

// x32 makes calls of the x32 interface fail, whose numbers would slip through.
func (f *program) x32() { f.ifAtLeast(x32Bit, filterNoSys) }

// archCalls are the older calls of this machine.
var archCalls = []int{
	unix.SYS_OPEN, unix.SYS_STAT, unix.SYS_LSTAT, unix.SYS_POLL, unix.SYS_ACCESS, unix.SYS_PIPE, unix.SYS_SELECT,
	unix.SYS_DUP2, unix.SYS_PAUSE, unix.SYS_ALARM, unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_GETDENTS, unix.SYS_RENAME,
	unix.SYS_MKDIR, unix.SYS_RMDIR, unix.SYS_CREAT, unix.SYS_LINK, unix.SYS_UNLINK, unix.SYS_SYMLINK,
	unix.SYS_READLINK, unix.SYS_CHMOD, unix.SYS_CHOWN, unix.SYS_LCHOWN, unix.SYS_GETPGRP, unix.SYS_UTIME,
	unix.SYS_MKNOD, unix.SYS_ARCH_PRCTL, unix.SYS_TIME, unix.SYS_SET_THREAD_AREA, unix.SYS_GET_THREAD_AREA,
	unix.SYS_EPOLL_CREATE, unix.SYS_EPOLL_WAIT, unix.SYS_UTIMES, unix.SYS_INOTIFY_INIT, unix.SYS_FUTIMESAT,
	unix.SYS_SIGNALFD, unix.SYS_EVENTFD,
}
