package engine_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// TestOpenWhileDeviceIsDetached: the file of a pool stays locked for a moment after its loop device has gone, which is
// no reason to refuse to mount it again.
func TestOpenWhileDeviceIsDetached(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a pool of images needs root: run the tests as root")
	}
	e := newPool(t, t.TempDir(), engine.InitRequest{SizeBytes: 2 << 30, MinFreePercent: 1})
	e.Close()
	if err := mount.Unmount(filepath.Join(e.Dir(), "data")); err != nil {
		t.Fatal(err)
	}
	backing := filepath.Join(e.Dir(), "backing.xfs")
	if gone, err := loopdev.WaitDetached(t.Context(), backing, 10*time.Second); err != nil || !gone {
		t.Fatal(gone, err)
	}

	f, err := os.OpenFile(backing, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	opened := make(chan error, 1)
	go func() {
		again, err := engine.Open(t.Context(), e.Dir(), drivers)
		if err == nil {
			again.Close()
		}
		opened <- err
	}()
	awaitLocked(t, filepath.Join(e.Dir(), "lock"))
	f.Close()
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

// TestDeinitNamesHolder: a pool of images that another mount namespace keeps mounted cannot be removed until that ends.
func TestDeinitNamesHolder(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mount namespaces need root: run the tests as root")
	}
	e := newPool(t, t.TempDir(), engine.InitRequest{SizeBytes: 2 << 30, MinFreePercent: 1})
	e.Close()
	pid, end := copyMounts(t)

	_, err := engine.Deinit(t.Context(), engine.DeinitRequest{Dir: e.Dir(), Force: true}, drivers, nil)
	if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), strconv.Itoa(pid)) {
		t.Errorf("pid %d keeps it mounted: %v", pid, err)
	}

	end()
	_, err = engine.Deinit(t.Context(), engine.DeinitRequest{Dir: e.Dir(), Force: true}, drivers, nil)
	must(t, err)
	_, err = engine.Init(t.Context(), engine.InitRequest{Dir: e.Dir()}, drivers) // or its removal would fail
	must(t, err)
}

// copyMounts starts a process that has copies of all mounts in a namespace of its own, until end.
func copyMounts(t *testing.T) (pid int, end func()) {
	t.Helper()
	child := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", "echo; read x")
	stdin, err := child.StdinPipe()
	must(t, err)
	stdout, err := child.StdoutPipe()
	must(t, err, child.Start())
	_, err = stdout.Read(make([]byte, 1))
	must(t, err)
	end = sync.OnceFunc(func() {
		stdin.Close()
		_ = child.Wait() // read says that it read nothing
	})
	t.Cleanup(end)
	return child.Process.Pid, end
}

// awaitLocked waits until somebody has locked a file.
func awaitLocked(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
			t.Fatal(err)
		}
	}
}
