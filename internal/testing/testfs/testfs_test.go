package testfs

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
)

// TestKinds makes each kind of filesystem and uses it.
func TestKinds(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs", "ext4", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			fs := New(t, kind, 64<<20)
			dir := fs.Dir()
			if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			if want := 2; kind != "tmpfs" && len(leaks(fs.top)) != want || len(leaks(dir)) != 0 {
				t.Fatalf("leaks above %q, inside %q; want %d and 0", leaks(fs.top), leaks(dir), want)
			}
		})
	}
}

// TestCut checks that a power cut keeps what was synced and loses what was not.
func TestCut(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			fs := New(t, kind, 64<<20)
			before := fs.Flushes()
			f, err := os.Create(filepath.Join(fs.Dir(), "synced"))
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
			if fs.Flushes() == before {
				t.Error("a sync was not counted as a flush")
			}
			if err := os.WriteFile(filepath.Join(fs.Dir(), "unsynced"), []byte("lost"), 0o600); err != nil {
				t.Fatal(err)
			}
			dir := fs.Cut()
			if b, err := os.ReadFile(filepath.Join(dir, "synced")); err != nil || string(b) != "kept" {
				t.Errorf("synced file after the cut: %q, %v", b, err)
			}
			if b, err := os.ReadFile(filepath.Join(dir, "unsynced")); err == nil && string(b) == "lost" {
				t.Error("a file that was never synced survived: this does not test durability")
			}
		})
	}
}

// TestLeaks checks that leaks are found.
func TestLeaks(t *testing.T) {
	dir := New(t, "ext4", 16<<20).Dir()
	image := filepath.Join(dir, "inner")
	if err := os.WriteFile(image, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dev, err := loopdev.Attach(t.Context(), f, loopdev.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	sub := filepath.Join(dir, "with space")
	if err := os.Mkdir(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := mount.Device("tmpfs", "tmpfs", nil, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.MoveTo(sub); err != nil {
		t.Fatal(err)
	}
	m.Close()
	if found := Leaks(dir, 0); len(found) != 2 { // the loop device, and the mount
		t.Errorf("found %q", found)
	}
	dev.Close()
	if err := mount.Unmount(sub); err != nil {
		t.Error(err)
	}
	if found := Leaks(dir, time.Second); len(found) != 0 {
		t.Errorf("after cleaning up: %q", found)
	}
}
