package kernel

import (
	"fmt"
	"net"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Peer is who is at the other end of a connection, as the kernel noted when it was made.
type Peer struct {
	PID  int32
	UID  uint32
	GIDs []uint32 // the primary group first, each once
}

// PeerOf returns who is at the other end of a connection through a unix socket (SO_PEERCRED and SO_PEERGROUPS of
// unix(7)).
func PeerOf(c *net.UnixConn) (p Peer, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return p, err
	}

	cerr := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			err = fmt.Errorf("SO_PEERCRED: %w", err)
			return
		}
		p = Peer{PID: cred.Pid, UID: cred.Uid, GIDs: []uint32{cred.Gid}}
		var more []uint32
		if more, err = peerGroups(fd); err != nil {
			err = fmt.Errorf("SO_PEERGROUPS: %w", err)
			return
		}
		for _, g := range more {
			if g != cred.Gid {
				p.GIDs = append(p.GIDs, g)
			}
		}
	})
	if cerr != nil {
		err = cerr
	}
	return p, err
}

// peerGroups returns the supplementary groups of the process at the other end.
func peerGroups(fd uintptr) ([]uint32, error) {
	groups := make([]uint32, 64)
	for {
		bytes := uint32(len(groups) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&bytes)), 0)
		if errno == 0 {
			return groups[:bytes/4], nil
		}
		if errno != unix.ERANGE || len(groups) > 1<<16 {
			return nil, errno
		}
		groups = make([]uint32, bytes/4) // room for as many as there are
	}
}
