package testfs

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/mount"
	"pando/internal/linux/run"

	"golang.org/x/sys/unix"
)

func zfs(t *testing.T, args ...string) {
	t.Helper()
	if _, err := run.Program(t.Context(), "zfs", args...); err != nil {
		t.Fatalf("zfs %s: %v", strings.Join(args, " "), err)
	}
}

// mountZFS mounts a dataset, until the function that it returns is called.
func mountZFS(t *testing.T, dataset string) (string, func()) {
	t.Helper()
	dir := t.TempDir()
	m, err := mount.Device("zfs", dataset, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(dir); err != nil {
		t.Fatal(err)
	}
	return dir, func() {
		t.Helper()
		if err := mount.Unmount(dir); err != nil {
			t.Error(err)
		}
	}
}

// TestZFS uses a pool, and finds what would be left behind of it.
func TestZFS(t *testing.T) {
	p := NewZpool(t, 256<<20)
	zfs(t, "create", "-o", "mountpoint=legacy", p.Name()+"/tree")
	zfs(t, "create", "-s", "-V", "64M", p.Name()+"/volume")
	dev := "/dev/zvol/" + p.Name() + "/volume"
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(dev); err == nil {
			break
		}
		if time.Since(start) > time.Minute {
			t.Fatalf("there is no %s", dev)
		}
	}
	node, err := filepath.EvalSymlinks(dev)
	if err != nil {
		t.Fatal(err)
	}
	dir, unmount := mountZFS(t, p.Name()+"/tree")
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := []string{p.Name() + "/tree mounted at " + dir, kstat(p.Name()), "/dev/zvol/" + p.Name(),
		node + " is " + p.Name() + "/volume"}
	if got := zpoolLeaks(t, p.Name()); !slices.Equal(got, want) {
		t.Errorf("there is %q of the pool, want %q", got, want)
	}
	unmount()
	p.destroy()
	if got := zpoolLeaks(t, p.Name()); len(got) != 0 {
		t.Errorf("after its end there is %q of the pool", got)
	}
}

// TestZFSFull: a small pool can be filled.
func TestZFSFull(t *testing.T) {
	pool := ZFS(t, 64<<20)
	zfs(t, "create", "-o", "mountpoint=legacy", "-o", "compression=off", pool+"/tree")
	dir, unmount := mountZFS(t, pool+"/tree")
	defer unmount()
	f, err := os.Create(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1<<20)
	for range 64 {
		if _, err = f.Write(b); err != nil {
			break
		}
	}
	if err == nil {
		err = f.Sync()
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing all that its device has room for: %v", err)
	}
}

// TestZFSCut checks that a power cut keeps what was synced and loses what was not.
func TestZFSCut(t *testing.T) {
	p := NewZpool(t, 256<<20)
	tree := p.Name() + "/tree"
	zfs(t, "create", "-o", "mountpoint=legacy", tree)
	p.Quiet()
	for _, when := range []string{"first", "second"} {
		before := p.Flushes()
		dir, _ := mountZFS(t, tree)
		f, err := os.Create(filepath.Join(dir, when))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write([]byte("kept")); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		f.Close()
		// After the sync: the first one of a dataset writes all there is.
		if err := os.WriteFile(filepath.Join(dir, "unsynced"), []byte("lost"), 0o600); err != nil {
			t.Fatal(err)
		}
		if p.Flushes() == before {
			t.Error("a sync was not counted as a flush")
		}
		p.Cut()
		if left := zfsMounts(t, p.Name()); len(left) != 0 {
			t.Errorf("after the cut: %q", left)
		}
		dir, unmount := mountZFS(t, tree)
		if b, err := os.ReadFile(filepath.Join(dir, when)); err != nil || string(b) != "kept" {
			t.Errorf("synced file after the %s cut: %q, %v", when, b, err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "unsynced")); err == nil && string(b) == "lost" {
			t.Errorf("a file that was never synced survived the %s cut: this does not test durability", when)
		}
		unmount()
	}
}
