package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

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
