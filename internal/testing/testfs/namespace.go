package testfs

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// PinMountNamespace keeps the mount namespace of a process by a bind mount at pin,
// which is a file. start begins a process in a namespace of its own.
//
// The kernel lets a namespace keep only younger ones, so that they cannot keep each
// other in a circle. It tells their age by numbers which since Linux 6.18 each
// processor takes from a range of its own: a younger namespace made on another
// processor may count as older. Then another process is tried.
func PinMountNamespace[P any](t testing.TB, pin string, start func() (process P, pid int, stop func())) P {
	t.Helper()
	const tries = 100
	for try := 1; ; try++ {
		process, pid, stop := start()
		err := unix.Mount(fmt.Sprintf("/proc/%d/ns/mnt", pid), pin, "", unix.MS_BIND, "")
		if err == nil {
			t.Cleanup(func() { _ = unix.Unmount(pin, unix.MNT_DETACH) })
			return process
		}
		if stop(); !errors.Is(err, unix.EINVAL) || try == tries {
			t.Fatalf("keeping a mount namespace, try %d: %v", try, err)
		}
	}
}
