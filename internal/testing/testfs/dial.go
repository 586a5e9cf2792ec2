package testfs

import (
	"net"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// DialAs connects to a unix socket as another user of this host, which needs root.
func DialAs(path string, uid, gid uint32, groups ...uint32) (net.Conn, error) {
	type dialed struct {
		conn net.Conn
		err  error
	}
	done := make(chan dialed)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread, which is another user's now, ends with this function
		err := becomeInThread(uid, gid, groups)
		var c net.Conn
		if err == nil {
			c, err = net.Dial("unix", path)
		}
		done <- dialed{c, err}
	}()
	d := <-done
	return d.conn, d.err
}

// becomeInThread makes this thread, and no other one, act as another user.
func becomeInThread(uid, gid uint32, groups []uint32) error {
	var list unsafe.Pointer
	if len(groups) > 0 {
		list = unsafe.Pointer(&groups[0])
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(list), 0); errno != 0 {
		return errno
	}
	for _, c := range []struct{ call, id uintptr }{
		{unix.SYS_SETRESGID, uintptr(gid)}, {unix.SYS_SETRESUID, uintptr(uid)},
	} {
		if _, _, errno := unix.RawSyscall(c.call, c.id, c.id, c.id); errno != 0 {
			return errno
		}
	}
	return nil
}
