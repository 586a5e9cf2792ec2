package mount_test

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"pando/internal/linux/mount"
)

// TestCopy: a copy of a detached mount outlives the mount, and shows the same files; nothing is attached here.
func TestCopy(t *testing.T) {
	needRoot(t)
	for name, makeCopy := range map[string]func(*mount.Detached) (*mount.Detached, error){
		"now": (*mount.Detached).Copy, "older kernels": mount.CopyInNamespace,
	} {
		t.Run(name, func(t *testing.T) {
			before, err := mount.Table("self")
			if err != nil {
				t.Fatal(err)
			}
			m, err := mount.Device("tmpfs", "tmpfs", nil, false)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()

			c, err := makeCopy(m)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()

			root, err := m.Open()
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("/proc/self/fd", strconv.Itoa(int(root.Fd())), "file")
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			root.Close()
			if after, err := mount.Table("self"); err != nil || len(after) != len(before) {
				t.Errorf("%d mounts, want %d: %v", len(after), len(before), err)
			}
			m.Close()

			dir := tempDir(t)
			unmountAtEnd(t, dir)
			if _, err := c.MoveTo(dir); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(filepath.Join(dir, "file")); err != nil {
				t.Error(err)
			}
		})
	}
}
