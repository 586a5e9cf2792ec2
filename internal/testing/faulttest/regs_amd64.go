//go:build linux && amd64

package faulttest

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	auditArch = unix.AUDIT_ARCH_X86_64
	noSyscall = ^uint64(0)
)

// skipSyscall makes the kernel execute nothing for the call that tid, in an
// entry stop, is about to make.
func skipSyscall(tid int) error {
	return changeRegs(tid, func(r *unix.PtraceRegs) { r.Orig_rax = noSyscall })
}

// setResult sets what the call that tid, in an exit stop, has made returns.
func setResult(tid int, result int64) error {
	return changeRegs(tid, func(r *unix.PtraceRegs) { r.Rax = uint64(result) })
}

func changeRegs(tid int, change func(*unix.PtraceRegs)) error {
	var r unix.PtraceRegs
	if err := regset(unix.PTRACE_GETREGSET, tid, ntPRStatus, unsafe.Pointer(&r), unsafe.Sizeof(r)); err != nil {
		return err
	}
	change(&r)
	return regset(unix.PTRACE_SETREGSET, tid, ntPRStatus, unsafe.Pointer(&r), unsafe.Sizeof(r))
}
