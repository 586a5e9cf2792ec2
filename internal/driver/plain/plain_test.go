package plain_test

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/internal/driver/drivertest"
	"pando/internal/driver/plain"
	"pando/internal/testfs"
)

func TestConformance(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  plain.Open,
		Dir:   func(t testing.TB) string { return t.TempDir() },
		Small: func(t testing.TB) string { return testfs.Ext4(t, 64<<20) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "ext4", 256<<20) },
	})
}

func TestConformanceTmpfs(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  plain.Open,
		Dir:   func(t testing.TB) string { return testfs.Tmpfs(t, 1<<30) },
		Small: func(t testing.TB) string { return testfs.Tmpfs(t, 64<<20) },
	})
}

func TestConformanceXFS(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  plain.Open,
		Dir:   func(t testing.TB) string { return testfs.XFS(t, 2<<30) },
		Small: func(t testing.TB) string { return testfs.XFS(t, 320<<20) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "xfs", 320<<20) },
	})
}

func TestConformanceBtrfs(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  plain.Open,
		Dir:   func(t testing.TB) string { return testfs.Btrfs(t, 2<<30) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "btrfs", 256<<20) },
	})
}

// nobody is a user without any rights.
const nobody = 65534

// Environment of a child that runs without root: where it may write, and a
// small filesystem.
const (
	envDir   = "PANDO_TEST_UNPRIVILEGED_DIR"
	envSmall = "PANDO_TEST_UNPRIVILEGED_SMALL"
)

// unprivileged runs the calling test again in a child process without root, and
// returns false there. It returns true in the parent, when the child is done.
func unprivileged(t *testing.T) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		return false
	}
	dir, small := t.TempDir(), testfs.Ext4(t, 64<<20)
	for _, d := range []string{dir, small} {
		if err := os.Chown(d, nobody, nobody); err != nil {
			t.Fatal(err)
		}
		// Temporary directories of tests are closed to others.
		for up := filepath.Dir(d); up != os.TempDir() && up != "/"; up = filepath.Dir(up) {
			if err := os.Chmod(up, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	binary := filepath.Join(filepath.Dir(dir), "tests")
	if err := copyFile(binary, "/proc/self/exe", 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), binary, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), envDir+"="+dir, envSmall+"="+small, "TMPDIR="+dir, "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("without root: %v\n%s", err, out)
	} else if !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("without root, the test did not run:\n%s", out)
	}
	return true
}

func copyFile(to, from string, mode os.FileMode) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close(), os.Chmod(to, mode))
}

// TestConformanceUnprivileged runs the suite as a user without rights.
func TestConformanceUnprivileged(t *testing.T) {
	if unprivileged(t) {
		return
	}
	target := drivertest.Target{
		Open: plain.Open,
		Dir: func(t testing.TB) string {
			if dir := os.Getenv(envDir); dir != "" {
				return dir
			}
			return t.TempDir()
		},
	}
	if small := os.Getenv(envSmall); small != "" {
		target.Small = func(testing.TB) string { return small }
	}
	drivertest.Run(t, target)
}
