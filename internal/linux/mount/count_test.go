package mount_test

import (
	"os/exec"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// TestCountCopies: every newer mount of a filesystem counts, in every namespace, for as long as it lasts.
func TestCountCopies(t *testing.T) {
	needRoot(t)
	v := mountImage(t, newImage(t, "ext4"), "ext4")
	first := firstMount(t, v)
	count := func(want int) {
		t.Helper()
		n, err := mount.CountCopies(t.Context(), v.dev, first)
		if errs.Is(err, errs.Unsupported) {
			t.Skip("does not apply: ", err)
		}
		if err != nil || n != want {
			t.Errorf("%d copies, want %d: %v", n, want, err)
		}
	}
	count(0)

	// A bind mount of a directory.
	dir := t.TempDir()
	if err := unix.Mount(v.dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	count(1)

	// A namespace has copies of both.
	p := startRole(t, "wait", func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	})
	count(3)
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
	p.stop()
	count(0)
}

// TestCountManyCopies: more mounts than one call lists.
func TestCountManyCopies(t *testing.T) {
	needRoot(t)
	v := mountImage(t, newImage(t, "ext4"), "ext4")
	first := firstMount(t, v)
	dir := t.TempDir()
	const most = 1300
	for range most {
		if err := unix.Mount(v.dir, dir, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
	n, err := mount.CountCopies(t.Context(), v.dev, first)
	if errs.Is(err, errs.Unsupported) {
		t.Skip("does not apply: ", err)
	}
	if err != nil || n != most {
		t.Errorf("%d copies, want %d: %v", n, most, err)
	}
}

// firstMount returns the unique ID of a volume's mount.
func firstMount(t *testing.T, v volume) uint64 {
	t.Helper()
	m, err := kernel.MountAt(unix.AT_FDCWD, v.dir)
	if err != nil || !m.Root || m.Dev != v.dev {
		t.Fatalf("%+v, want the root of %d: %v", m, v.dev, err)
	}
	if !m.Unique {
		t.Skip("does not apply: the kernel uses the IDs of mounts again")
	}
	return m.ID
}
