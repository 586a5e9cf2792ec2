package zfs_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/zfs"
)

// TestMain is also a process that runs one command as somebody else.
func TestMain(m *testing.M) {
	if words := os.Getenv("PANDO_TEST_COMMAND"); words != "" {
		args := strings.Split(words, "\x1f")
		err := zfs.Tool(args[0]).Do(context.Background(), args[1:]...)
		fmt.Printf("%s\x1f%s\x1f%s\x1f%v", zfs.ReasonOf(err), errs.KindOf(err), errs.HintOf(err), err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// needZFS skips the test where there is no ZFS.
func needZFS(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/proc/spl/kstat/zfs"); err != nil {
		t.Skip("does not apply: this kernel has no ZFS (`make test-zfs` runs it in a guest)")
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: making a zpool needs root: run the tests as root")
	}
}

var pools int

// newPool makes a zpool of size bytes in a sparse file, and destroys it at the end.
func newPool(t *testing.T, size int64) string {
	t.Helper()
	needZFS(t)
	pools++
	name := fmt.Sprintf("pandotest%d", pools)
	file := filepath.Join(t.TempDir(), "vdev")
	makeFile(t, file, size)
	do(t, zfs.Zpool, "create", "-O", "mountpoint=none", name, file)
	t.Cleanup(func() {
		if err := zfs.Zpool.Do(context.Background(), "destroy", "-f", name); err != nil {
			t.Errorf("LEAK: %v", err)
		}
	})
	return name
}

func do(t *testing.T, tool zfs.Tool, args ...string) {
	t.Helper()
	if err := tool.Do(context.Background(), args...); err != nil {
		t.Fatalf("%s %q: %v", tool, args, err)
	}
}

// as runs a command with another user's rights.
func as(
	t *testing.T, uid uint32, tool zfs.Tool, args ...string,
) (reason zfs.Reason, kind errs.Kind, hint, text string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "PANDO_TEST_COMMAND="+strings.Join(append([]string{string(tool)}, args...), "\x1f"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	f := strings.Split(string(out), "\x1f")
	if err != nil || len(f) != 4 {
		t.Fatalf("as user %d: %v: %q", uid, err, out)
	}
	return zfs.Reason(f[0]), errs.Kind(f[1]), f[2], f[3]
}

// makeFile makes a sparse file.
func makeFile(t *testing.T, path string, size int64) {
	t.Helper()
	f, err := os.Create(path)
	if err == nil {
		err = f.Truncate(size)
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}
