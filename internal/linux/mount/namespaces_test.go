package mount_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// find returns a namespace and whether something is mounted at a place there.
func find(t *testing.T, id uint64, point string) (mount.Namespace, bool) {
	t.Helper()
	all, err := mount.Namespaces(t.Context())
	if err != nil && !errs.Is(err, errs.Permission) { // some init may be out of reach
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	for _, n := range all {
		if seen[n.ID] {
			t.Errorf("namespace %d twice", n.ID)
		}
		seen[n.ID] = true
	}
	if !all[0].Own || all[0].ID != namespace(t, "self") {
		t.Errorf("the first is %d, not the own one", all[0].ID)
	}
	for _, n := range all {
		if n.ID != id {
			continue
		}
		for _, m := range n.Table {
			if m.Point == point {
				return n, true
			}
		}
		return n, false
	}
	return mount.Namespace{}, false
}

// keepable starts a process in a mount namespace of its own that can be kept by a
// bind mount at pin, and is not yet.
func keepable(t *testing.T, pin string) *child {
	t.Helper()
	p := testfs.PinMountNamespace(t, pin, func() (*child, int, func()) {
		p := startRole(t, "wait", func(c *exec.Cmd) {
			c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		})
		return p, p.pid(), p.stop
	})
	if err := mount.Unmount(pin); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestNamespaces: one with a process in it, one that lives in a thread, and those
// that nothing but a file keeps, each with its mounts.
func TestNamespaces(t *testing.T) {
	needRoot(t)
	dir := tempDir(t)
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	unmountAtEnd(t, dir)
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	pin := touch(t, filepath.Join(dir, "pin"))
	p := keepable(t, pin)
	id := namespace(t, p.String())
	n, ok := find(t, id, dir)
	if !ok || n.Own || n.Living != 1 || len(n.Processes) != 1 || n.Processes[0].PID != p.pid() ||
		n.Processes[0].Command == "" || len(n.Kept) != 0 {
		t.Errorf("of a process: %v, %+v", ok, n.Processes)
	}
	if own, ok := find(t, namespace(t, "self"), dir); !ok || own.Living < 1 {
		t.Errorf("our own: %v, %d", ok, own.Living)
	}
	thread := startRole(t, "nsthread", nil)
	var inThread uint64
	if _, err := fmt.Sscan(thread.said, &inThread); err != nil {
		t.Fatal(err)
	}
	if n, ok := find(t, inThread, dir); !ok || n.Processes[0].PID != thread.pid() {
		t.Errorf("of a thread: %v, %+v", ok, n.Processes)
	}
	f, err := os.Open("/proc/" + p.String() + "/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Mount("/proc/"+p.String()+"/ns/mnt", pin, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	unmountAtEnd(t, pin)
	p.stop()
	n, ok = find(t, id, dir)
	kept := strings.Join(n.Kept, "; ")
	if !ok || n.Living != 0 || !strings.Contains(kept, pin) ||
		!strings.Contains(kept, fmt.Sprintf("of pid %d", os.Getpid())) {
		t.Errorf("kept: %v, %d, %s", ok, n.Living, kept)
	}
	if own := namespace(t, "thread-self"); own != namespace(t, "self") {
		t.Error("looking into the namespace changed our own")
	}
	f.Close()
	if err := mount.Unmount(pin); err != nil {
		t.Fatal(err)
	}
	if n, ok := find(t, id, dir); ok {
		t.Errorf("not kept any more: %+v", n)
	}
}
