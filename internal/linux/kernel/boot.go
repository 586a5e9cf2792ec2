package kernel

import (
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const unknownBoot = "unknown"

// BootID is the random ID of this boot of the kernel, for what is recorded. It proves less than
// it seems to: containers mask it with one of their own, so that one boot may have several.
// To find out whether something was recorded in an earlier boot, ask EarlierBoot.
var BootID = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return unknownBoot
	}
	return strings.TrimSpace(string(b))
})

// EarlierBoot reports whether what was recorded under boot id at time at was recorded before
// this kernel booted: then its mounts, block devices and processes are gone. Another ID alone
// is no proof. What is younger than this boot is of this very boot, seen from a container, or
// of another host; the answer is false.
//
// The time of the boot is what the wall clock says now, less the time since. So whoever sets
// the clock moves the boot. A host without a clock of its own begins in the past: until the
// clock is set, what an earlier boot recorded may look younger than this boot, and the answer
// is false for too long, which keeps things. The other way round, what another view of this
// boot recorded before the clock was set looks older than the boot afterwards. So whoever
// destroys something that may be in use asks the kernel for mounts and devices as well.
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
