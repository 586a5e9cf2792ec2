package sandbox

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data.
const (
	dataNumber = 0
	dataArch   = 4
	dataArgs   = 16 // 8 bytes each, the low half first on the machines that Pando is built for
)

// Return values of a filter.
const (
	filterAllow = unix.SECCOMP_RET_ALLOW
	filterDeny  = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	filterNoSys = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS) // the C library then uses an older call
	filterKill  = unix.SECCOMP_RET_KILL_PROCESS
)

// namespaceFlags are the flags of clone that make namespaces.
const namespaceFlags = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
	unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP

// filter is the program that the kernel runs before each system call: it allows those that ordinary programs need, as
// Docker's default profile does. Calls of other architectures, such as 32-bit ones, kill the program; x32 calls do not
// exist.
func filter() []unix.SockFilter {
	var f program
	f.load(dataArch)
	f.unless(auditArch, filterKill)
	f.load(dataNumber)
	f.x32()

	// Calls that depend on their arguments. The kernel looks at the low half of these arguments only.
	f.when(unix.SYS_CLONE, func(f *program) {
		f.load(dataArgs + 8*cloneFlagsArg)
		f.ifSet(namespaceFlags, filterDeny)
	})
	f.when(unix.SYS_IOCTL, func(f *program) { // writing to the input of a terminal
		f.load(dataArgs + 8)
		f.ifEqual(unix.TIOCSTI, filterDeny)
		f.ifEqual(tioclinux, filterDeny)
	})
	f.when(unix.SYS_SOCKET, func(f *program) {
		f.load(dataArgs)
		f.ifEqual(unix.AF_VSOCK, filterDeny)
		f.ifEqual(unix.AF_ALG, filterDeny)
	})
	f.when(unix.SYS_PERSONALITY, func(f *program) {
		f.load(dataArgs)
		for _, allowed := range []uint32{0, 0x8, 0x20000, 0x20008, 0xffffffff} {
			f.ifEqual(allowed, filterAllow)
		}
		f.ret(filterDeny)
	})

	// Calls that need no arguments.
	for _, number := range append(allowedCalls, archCalls...) {
		f.ifEqual(uint32(number), filterAllow)
	}
	for _, number := range absentCalls {
		f.ifEqual(uint32(number), filterNoSys)
	}
	f.ifAtLeast(firstUnknownCall, filterNoSys)
	f.ret(filterDeny)
	return f
}

// program is a BPF program under construction.
type program []unix.SockFilter

func (f *program) add(code uint16, k uint32, jt, jf uint8) {
	*f = append(*f, unix.SockFilter{Code: code, Jt: jt, Jf: jf, K: k})
}

func (f *program) load(offset uint32) { f.add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, offset, 0, 0) }
func (f *program) ret(value uint32)   { f.add(unix.BPF_RET|unix.BPF_K, value, 0, 0) }

func (f *program) unless(value, result uint32) {
	f.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, value, 1, 0)
	f.ret(result)
}

func (f *program) ifEqual(value, result uint32) {
	f.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, value, 0, 1)
	f.ret(result)
}

func (f *program) ifSet(bits, result uint32) {
	f.add(unix.BPF_JMP|unix.BPF_JSET|unix.BPF_K, bits, 0, 1)
	f.ret(result)
}

func (f *program) ifAtLeast(value, result uint32) {
	f.add(unix.BPF_JMP|unix.BPF_JGE|unix.BPF_K, value, 0, 1)
	f.ret(result)
}

// when adds instructions for one system call, which is allowed unless they decide otherwise.
func (f *program) when(number uint32, add func(f *program)) {
	var body program
	add(&body)
	body.ret(filterAllow)
	f.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, number, 0, uint8(len(body)))
	*f = append(*f, body...)
}

// loadFilter applies the filter to this thread, and to all that it starts.
func loadFilter() error {
	f := filter()
	p := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	_, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&p)))
	if e != 0 {
		return fmt.Errorf("seccomp: %w", e)
	}
	return nil
}
