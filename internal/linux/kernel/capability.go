package kernel

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Capable reports whether this process has a capability (unix.CAP_...). In a user namespace it may have one that does
// not count outside. It returns false if that cannot be determined.
func Capable(capability int) bool {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData // of 32 capabilities each
	if unix.Capget(&head, (*unix.CapUserData)(unsafe.Pointer(&data))) != nil {
		return false
	}
	return data[capability/32].Effective&(1<<(capability%32)) != 0
}
