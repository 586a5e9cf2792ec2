//go:build linux && arm64

package faulttest

import "golang.org/x/sys/unix"

// legacyCalls is nearly empty: arm64 came after the calls that amd64 keeps
// for old programs.
var legacyCalls = map[int]call{
	unix.SYS_RENAMEAT: {"renameat", both(at(0, 1), at(2, 3))},
}
