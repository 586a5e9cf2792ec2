package treediff

import (
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
)

// TestGoneIsConflict: what has gone since it was listed is no bug of Pando's, but
// somebody else's doing.
func TestGoneIsConflict(t *testing.T) {
	for call, err := range map[string]error{
		"open": unix.ENOENT, "openat": unix.ENOTDIR, "read": unix.ESTALE, "openat2": unix.ELOOP, "getxattr": unix.ENODATA,
	} {
		if got := failed("dir/file", call, err); !errs.Is(got, errs.Conflict) {
			t.Errorf("%v of %s is of kind %s: %v", err, call, errs.KindOf(got), got)
		}
	}
}
