//go:build linux && (amd64 || arm64)

package faulttest

import (
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Every stop of the program wakes the tracer and every resumption wakes the
// program. Left alone, the scheduler puts the one that is woken on an idle CPU,
// because the one that wakes it still runs; and waking an idle CPU costs up to
// ten times as much as the rest of the stop, above all in a virtual machine. So
// both are confined to one CPU, which is a context switch instead, and the
// program is shown the CPUs that it would have had, for a program with
// GOMAXPROCS at 1 may not even start the threads whose order matters.

var pinned atomic.Uint32

// pin confines the calling thread to one of its CPUs, and with it the program
// that it is going to start. It returns the CPUs that it had.
func pin() (unix.CPUSet, error) {
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return all, err
	}

	// Round robin, so that parallel runs spread; from somewhere that differs
	// between the test binaries of a run.
	n := (os.Getpid() + int(pinned.Add(1))) % max(all.Count(), 1)
	for cpu := range len(all) * int(unsafe.Sizeof(all[0])) * 8 {
		if !all.IsSet(cpu) {
			continue
		}
		if n == 0 {
			one.Set(cpu)
			break
		}
		n--
	}

	return all, unix.SchedSetaffinity(0, &one)
}

// pretend gives a thread that asked for its CPUs, and got size bytes at addr,
// those of before.
func pretend(tid int, addr uint64, size int64, cpus *unix.CPUSet) {
	size = min(size, int64(unsafe.Sizeof(*cpus)))
	if size <= 0 {
		return
	}
	local := []unix.Iovec{{Base: (*byte)(unsafe.Pointer(cpus)), Len: uint64(size)}}
	// If it fails, the program believes what is true for it: no harm.
	_, _ = unix.ProcessVMWritev(tid, local, []unix.RemoteIovec{{Base: uintptr(addr), Len: int(size)}}, 0)
}
