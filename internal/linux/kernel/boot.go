package kernel

import (
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const unknownBoot = "unknown"

// BootID returns the random ID of this boot of the kernel, to be stored in records. Containers may
// replace it with an ID of their own, so one boot may have several IDs. To find out whether
// something was recorded in an earlier boot, use EarlierBoot.
var BootID = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return unknownBoot
	}
	return strings.TrimSpace(string(b))
})

// EarlierBoot reports whether a record with boot ID id, made at time at, was made before this kernel
// booted, so that its mounts, block devices and processes no longer exist. A different ID alone
// proves nothing: a record younger than this boot was made in this boot, seen from a container, or
// on another host, and EarlierBoot returns false.
//
// It computes the time of the boot from the wall clock and the uptime, so setting the clock
// moves the boot. On a host without a battery-backed clock, time begins in the past: until the clock is
// set, records of an earlier boot may look younger than this boot, and EarlierBoot returns false for
// too long, which only keeps things. Conversely, records that a container made in this boot before
// the clock was set look older than the boot afterwards. So before you destroy something that may be
// in use, ask the kernel for mounts and devices as well.
func EarlierBoot(id string, at time.Time) bool {
	if id == BootID() && id != unknownBoot {
		return false
	}
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return false
	}
	return at.Before(time.Now().Round(0).Add(-time.Duration(up.Nano())))
}
