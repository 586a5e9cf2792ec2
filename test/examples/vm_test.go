package examples

import (
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"testing"
)

// vmCommand makes a command that runs the example with a small disk and few guests.
func vmCommand(t *testing.T) (cmd *exec.Cmd, dir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("SKIPPED: the guest is for x86_64 only")
	}
	for _, p := range []string{"qemu-system-x86_64", "qemu-img", "debugfs"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("SKIPPED: %v: run make deps", err)
		}
	}

	cache, err := os.UserCacheDir()
	if err == nil {
		_, err = os.Stat(filepath.Join(cache, "pando/vm/kernel"))
	}
	if err != nil {
		t.Skipf("SKIPPED: there is no kernel for the guests, which have no network here: %v: run make deps", err)
	}

	source := t.TempDir()
	content := make([]byte, 64<<20)
	_, _ = rand.Read(content) // it never fails
	if err := os.WriteFile(filepath.Join(source, "file"), content, 0o644); err != nil {
		t.Fatal(err)
	}

	dir = workDir(t)
	return command(t, []string{"VM_DIR=" + dir, "VM_SOURCE=" + source, "VM_COUNT=3"}, "../../examples/vm/run.sh"), dir
}

// TestVM runs the example. Its times are only printed, but the disk of a guest must not cost as much as a copy, and
// each guest must have written to its own.
func TestVM(t *testing.T) {
	cmd, _ := vmCommand(t)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{
		`golden import vm .*/disk\.qcow2 --fs none\n   vm@1\n`,
		`numbers on the disks: 1 2 3\n`,
		`qemu-img compare .*\n   Images are identical\.\n`,
		`golden publish vm clone-1\n   vm@2\n`,
		`qemu-img check .*\n   No errors were found on the image\.\n`,
		`Left behind: nothing`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("it does not print %q", want)
		}
	}

	if cloned, copied := mib(t, out, "pando clone"), mib(t, out, "cp "); cloned > copied/4 {
		t.Errorf("a clone took %v MiB, and a copy %v", cloned, copied)
	}
}

// TestVMInterrupted stops the example while guests run on clones. It leaves nothing behind.
func TestVMInterrupted(t *testing.T) {
	cmd, dir := vmCommand(t)
	interrupt(t, cmd, filepath.Join(dir, "*/console/clone-2"))
}
