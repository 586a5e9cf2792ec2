package kernel_test

import (
	"testing"

	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestOnMount: it says the same as MountAt, of each mount.
func TestOnMount(t *testing.T) {
	dirs := []string{testfs.Tmpfs(t, 1<<20), testfs.Tmpfs(t, 1<<20)}
	for i, dir := range dirs {
		m, err := kernel.MountAt(unix.AT_FDCWD, dir)
		if err != nil {
			t.Fatal(err)
		}
		for j, d := range dirs {
			if on, err := kernel.OnMount(d, m.ID); err != nil || on != (i == j) {
				t.Errorf("%s is on the mount at %s: %v, %v", d, dir, on, err)
			}
		}
	}
	if on, err := kernel.OnMount(dirs[0], 1<<62); err != nil || on {
		t.Errorf("on a mount that does not exist: %v, %v", on, err)
	}
}
