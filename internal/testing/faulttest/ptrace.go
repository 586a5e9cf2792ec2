//go:build linux && (amd64 || arm64)

package faulttest

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The requests that x/sys wraps differently, or not at all. ptrace(2) has the
// meaning of addr and data for each.

// ptrace makes one request. The directive keeps what the arguments point to off the stack: a stack moves
// when it grows, which may happen between the conversion and the call, and the
// kernel would write where it was.
//
//go:uintptrescapes
func ptrace(req, tid int, addr, data uintptr) error {
	// RawSyscall: none of these requests waits, so the scheduler need not know.
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, uintptr(req), uintptr(tid), addr, data, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// syscallInfo is struct ptrace_syscall_info. In entry stops Data is the
// call's number and six arguments; in exit stops it is the result, and then
// whether that is an error.
type syscallInfo struct {
	Op   uint8
	_    [3]uint8
	Arch uint32
	IP   uint64
	SP   uint64
	Data [8]uint64
}

func (i *syscallInfo) nr() uint64 { return i.Data[0] }

func (i *syscallInfo) args() args { return args(i.Data[1:7]) }

func (i *syscallInfo) result() int64 { return int64(i.Data[0]) }

func (i *syscallInfo) failed() bool { return uint8(i.Data[1]) != 0 }

func getSyscallInfo(tid int, info *syscallInfo) error {
	return ptrace(unix.PTRACE_GET_SYSCALL_INFO, tid, unsafe.Sizeof(*info), uintptr(unsafe.Pointer(info)))
}

func getEventMsg(tid int) (int, error) {
	var msg uint64
	err := ptrace(unix.PTRACE_GETEVENTMSG, tid, 0, uintptr(unsafe.Pointer(&msg)))
	return int(msg), err
}

// regset is the argument of PTRACE_GETREGSET and PTRACE_SETREGSET.
func regset(req, tid, set int, regs unsafe.Pointer, size uintptr) error {
	iov := unix.Iovec{Base: (*byte)(regs), Len: uint64(size)}
	return ptrace(req, tid, uintptr(set), uintptr(unsafe.Pointer(&iov)))
}

const (
	ntPRStatus       = 1     // general registers
	ntARMSystemCall  = 0x404 // the system call's number, arm64
	eventStop        = 128   // PTRACE_EVENT_STOP
	syscallStopFlag  = 0x80  // what PTRACE_O_TRACESYSGOOD adds to SIGTRAP
	errRestartSys    = 512   // the kernel's own ERESTARTSYS, seen only by a tracer
	errRestartNoIntr = 513
	errRestartNoHand = 514
	errRestartBlock  = 516
)

// willRestart says whether a result means that the call was interrupted by a
// signal and is about to be made again by the kernel, out of the program's sight.
func willRestart(result int64) bool {
	switch -result {
	case errRestartSys, errRestartNoIntr, errRestartNoHand, errRestartBlock:
		return true
	}
	return false
}
