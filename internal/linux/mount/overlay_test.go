package mount_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// layers makes a lower tree with a file and a directory, and an upper directory, and returns detached mounts of both.
func layers(t *testing.T) (lower, upper *mount.Detached, lowerDir, upperDir string) {
	t.Helper()
	lowerDir, upperDir = t.TempDir(), testfs.Tmpfs(t, 16<<20)
	for path, dir := range map[string]bool{
		lowerDir + "/file": false, lowerDir + "/dir": true,
		upperDir + "/" + mount.UpperDir: true, upperDir + "/" + mount.WorkDir: true,
	} {
		var err error
		if dir {
			err = os.Mkdir(path, 0o755)
		} else {
			err = os.WriteFile(path, []byte("lower"), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	var err error
	if lower, err = mount.Tree(lowerDir, true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lower.Close() })
	if upper, err = mount.Tree(upperDir, false); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { upper.Close() })
	return lower, upper, lowerDir, upperDir
}

func TestOverlay(t *testing.T) {
	needRoot(t)
	for name, make := range map[string]func(mount.Overlay) (*mount.Detached, error){
		"as the kernel allows": mount.Overlay.Mount,
		"in a namespace":       mount.OverlayInNamespace,
	} {
		t.Run(name, func(t *testing.T) {
			lower, upper, lowerDir, upperDir := layers(t)
			m, err := make(mount.Overlay{Lower: lower, Upper: upper, Name: "pando:test", UpperPath: upperDir,
				Options: []string{"index=off", "metacopy=off", "redirect_dir=on", "xino=on"}})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			lower.Close()
			upper.Close()

			// Another overlay with the same upper directory would destroy this one.
			if used, err := upperInUse(t, lowerDir, upperDir); err != nil || !used {
				t.Errorf("the upper directory of a mounted overlay is in use: %v, %v", used, err)
			}

			// Nothing of it is in the namespace of the test before it is attached.
			if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(b), "pando:test") {
				t.Errorf("the mount table has it: %v", err)
			}

			target := t.TempDir()
			if _, err := m.MoveTo(target); err != nil {
				t.Fatal(err)
			}
			m.Close()
			defer mount.Unmount(target)

			// Write, remove and move.
			if err := os.WriteFile(filepath.Join(target, "file"), []byte("upper"), 0o644); err != nil {
				t.Error(err)
			}
			if err := os.Rename(filepath.Join(target, "dir"), filepath.Join(target, "moved")); err != nil {
				t.Error(err)
			}
			if b, err := os.ReadFile(lowerDir + "/file"); string(b) != "lower" {
				t.Errorf("the lower layer has changed: %q %v", b, err)
			}
			if b, err := os.ReadFile(filepath.Join(upperDir, mount.UpperDir, "file")); string(b) != "upper" {
				t.Errorf("the upper layer has %q: %v", b, err)
			}
			b, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil || !strings.Contains(string(b), " - overlay pando:test@"+upperDir+" ") {
				t.Errorf("the mount table does not name the source: %v\n%s", err, b)
			}

			// It is in use even when it is unmounted, as long as something has it open.
			f, err := os.Open(target)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
				t.Fatal(err)
			}
			if used, err := upperInUse(t, lowerDir, upperDir); err != nil || !used {
				t.Errorf("the upper directory of an overlay that is held is in use: %v, %v", used, err)
			}
			f.Close()
			if used, err := upperInUse(t, lowerDir, upperDir); err != nil || used {
				t.Errorf("afterwards it is in use: %v, %v", used, err)
			}
			sameReadOnly(t, make, lowerDir, upperDir)
		})
	}
}

func upperInUse(t *testing.T, lowerDir, upperDir string) (bool, error) {
	t.Helper()
	var all [3]*mount.Detached
	for i, dir := range []string{lowerDir, upperDir, upperDir} {
		m, err := mount.Tree(dir, i == 0)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		all[i] = m
	}
	return mount.Overlay{Lower: all[0], Upper: all[1], Name: "pando:probe"}.UpperInUse(all[2])
}

// sameReadOnly wants the layers of TestOverlay to be the same files again, mounted read-only.
func sameReadOnly(t *testing.T, make func(mount.Overlay) (*mount.Detached, error), lowerDir, upperDir string) {
	t.Helper()
	lower, err := mount.Tree(lowerDir, true)
	if err != nil {
		t.Fatal(err)
	}
	defer lower.Close()
	upper, err := mount.Tree(upperDir, true)
	if err != nil {
		t.Fatal(err)
	}
	defer upper.Close()
	m, err := make(mount.Overlay{Lower: lower, Upper: upper, Name: "pando:test", ReadOnly: true,
		Options: []string{"index=off", "metacopy=off", "redirect_dir=on", "xino=on"}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	root, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	names, err := root.Readdirnames(-1)
	if slices.Sort(names); err != nil || !slices.Equal(names, []string{"file", "moved"}) {
		t.Errorf("read-only it has %v: %v", names, err)
	}
	if err := unix.Mkdirat(int(root.Fd()), "x", 0o755); err != unix.EROFS {
		t.Errorf("something was written to it: %v", err)
	}
}

// TestOverlayRefused: an upper layer without its directories is refused, with the reason.
func TestOverlayRefused(t *testing.T) {
	needRoot(t)
	lower, upper, _, upperDir := layers(t)
	if err := os.Remove(filepath.Join(upperDir, mount.WorkDir)); err != nil {
		t.Fatal(err)
	}
	_, err := mount.Overlay{Lower: lower, Upper: upper, Name: "pando:test"}.Mount()
	wantKind(t, err, errs.NotFound)

	// Overlayfs does not take an upper layer that is read-only.
	lower, upper, _, upperDir = layers(t)
	if err := unix.Mount("", upperDir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if m, err := (mount.Overlay{Lower: lower, Upper: upper, Name: "pando:test"}).Mount(); err == nil {
		m.Close()
		t.Error("a read-only upper layer was taken")
	}
}
