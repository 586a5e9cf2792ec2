// Package tracetest keeps kernel events switched on while the tests of a package run.
package tracetest

import (
	"os"
	"runtime"

	"pando/internal/observe/tracepoint"
	"pando/internal/testing/testfs"
)

// Calls are the events of system calls, at their start and their end.
func Calls(names ...string) (events []string) {
	for _, n := range names {
		events = append(events, "syscalls:sys_enter_"+n, "syscalls:sys_exit_"+n)
	}
	return events
}

// Syncs are the events that package proof counts and records.
func Syncs() []string {
	return append(Calls("fsync", "fdatasync", "msync", "syncfs", "sync", "write", "pwrite64", "writev", "pwritev",
		"pwritev2", "open", "openat", "sync_file_range", "io_uring_enter", "io_submit"), "block:block_bio_queue")
}

// held are counters of nothing.
var held []*tracepoint.Counter

// Hold keeps the kernel from switching these events on and off with each test, by holding one counter of each, which
// counts nothing, until the process ends. Events that cannot be counted here are left out.
//
// Switching an event off takes the kernel some 30 ms, so that closing the counters of one watch takes half a second.
// And the kernel switches by patching its code while other processors run it: QEMU without acceleration gets that wrong
// now and then, and the guest dies of "int3". So Hold does nothing in `make test-all`, but always works in guests.
func Hold(events ...string) {
	if testfs.Full() && os.Getenv("PANDO_TEST_ZFS") == "" {
		return
	}
	for _, e := range events {
		if c, err := tracepoint.Count(e, "common_pid == 1 && common_pid == 2", tracepoint.Everything); err == nil {
			held = append(held, c)
		}
	}
	// Counters by descent patch what switches between threads.
	runtime.LockOSThread()
	if c, err := tracepoint.Count(events[0], "", tracepoint.Children); err == nil {
		held = append(held, c)
	}
	runtime.UnlockOSThread()
}
