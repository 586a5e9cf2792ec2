package testfs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Disks gives the nodes of n empty disks that a test may write to: whole disks, for
// what cannot be shown on loop devices. Only the guest of `make test-zfs` has them,
// and there it is a failure if they are missing. They are for one test at a time, which
// leaves nothing on them that is still in use.
func Disks(t testing.TB, n int) []string {
	t.Helper()
	names := strings.Fields(os.Getenv("PANDO_TEST_DISKS"))
	if len(names) < n {
		if os.Getenv("PANDO_TEST_ZFS") != "" {
			t.Fatalf("PANDO_TEST_DISKS names %d disks, not %d", len(names), n)
		}
		t.Skip("does not apply: there are no empty disks (`make test-zfs` runs it in a guest)")
	}

	var out []string
	for _, name := range names[:n] {
		real, err := filepath.EvalSymlinks(name)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, real)
	}

	return out
}
