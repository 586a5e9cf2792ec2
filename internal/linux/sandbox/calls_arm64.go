package sandbox

import "golang.org/x/sys/unix"

const (
	auditArch     = unix.AUDIT_ARCH_AARCH64
	cloneFlagsArg = 0
)

// x32 does nothing: this machine has one interface.
func (f *program) x32() {}

// archCalls are the older calls of this machine: it has none.
var archCalls []int
