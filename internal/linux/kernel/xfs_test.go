package kernel_test

import (
	"errors"
	"os/exec"
	"path/filepath"
	"testing"

	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestXFSReflinks: an XFS says how it was made.
func TestXFSReflinks(t *testing.T) {
	with := openDir(t, testfs.XFS(t, 320<<20))
	if ok, err := kernel.XFSReflinks(with); err != nil || !ok {
		t.Errorf("made with reflink=1: %v, %v", ok, err)
	}
	image := filepath.Join(t.TempDir(), "image")
	d := testfs.Loop(t, image, 320<<20, loopdev.Options{})
	if out, err := exec.Command("mkfs.xfs", "-q", "-m", "reflink=0", d.Path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	m, err := mount.Device("xfs", d.Path, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	root, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if ok, err := kernel.XFSReflinks(root); err != nil || ok {
		t.Errorf("made with reflink=0: %v, %v", ok, err)
	}
	if _, err := kernel.XFSReflinks(openDir(t, testfs.Tmpfs(t, 1<<20))); !errors.Is(err, unix.ENOTTY) {
		t.Errorf("on tmpfs: %v", err)
	}
}
