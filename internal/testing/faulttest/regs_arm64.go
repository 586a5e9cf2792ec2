//go:build linux && arm64

package faulttest

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const auditArch = unix.AUDIT_ARCH_AARCH64

// skipSyscall makes the kernel execute nothing for the call that tid, in an
// entry stop, is about to make. The number has a register set of its own: x8
// is not read again after the stop.
func skipSyscall(tid int) error {
	none := int32(-1)
	return regset(unix.PTRACE_SETREGSET, tid, ntARMSystemCall, unsafe.Pointer(&none), unsafe.Sizeof(none))
}

// setResult sets what the call that tid, in an exit stop, has made returns.
func setResult(tid int, result int64) error {
	var r unix.PtraceRegs
	if err := regset(unix.PTRACE_GETREGSET, tid, ntPRStatus, unsafe.Pointer(&r), unsafe.Sizeof(r)); err != nil {
		return err
	}
	r.Regs[0] = uint64(result)
	return regset(unix.PTRACE_SETREGSET, tid, ntPRStatus, unsafe.Pointer(&r), unsafe.Sizeof(r))
}
