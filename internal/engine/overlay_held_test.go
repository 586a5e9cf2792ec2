package engine_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/linux/mount"
	"pando/internal/linux/sandbox"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestOverlayUnmountedLazily: an overlay that was unmounted by hand while a program is in it is neither mounted again
// nor destroyed before the program has left it: two overlays with one upper layer would destroy it.
func TestOverlayUnmountedLazily(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		v := overlay(t, e, "g", "v", true)
		inside, err := os.Open(v.Mountpoint)
		if err != nil {
			t.Fatal(err)
		}
		defer inside.Close()
		if err := unix.Unmount(v.Mountpoint, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}

		again := engine.MountRequest{Volume: ref.MustName("v")}
		if _, err := e.Mount(t.Context(), again); !errs.Is(err, errs.InUse) {
			t.Errorf("mount: %v", err)
		}
		r, err := e.Destroy(t.Context(), toDestroy("v"))
		if err != nil || len(r.Failed) != 1 || !errs.Is(r.Failed[0], errs.InUse) {
			t.Errorf("destroy: %+v %v", r, err)
		}
		if e.Caps().Name == "plain" {
			_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName("s")})
			if !errs.Is(err, errs.InUse) {
				t.Errorf("snapshot: %v", err)
			}
		}

		inside.Close()
		if _, err := e.Mount(t.Context(), again); err != nil {
			t.Errorf("mount after the program has left it: %v", err)
		}
		wantClean(t, e)
	})
}

// TestOverlayHolderNamed: who has a file of an overlay open is named when it cannot be unmounted.
func TestOverlayHolderNamed(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		v := overlay(t, e, "g", "v", true)
		f, err := os.Create(filepath.Join(v.Mountpoint, "held"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()

		_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
		want := fmt.Sprintf("held by pid %d ", os.Getpid())
		if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	})
}

// TestOverlayHeldInNamespace: a mount namespace that keeps a copy of the mount keeps an overlay from being unmounted
// and destroyed.
func TestOverlayHeldInNamespace(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		v := overlay(t, e, "g", "v", true)
		release := copyMounts(t, "sh")

		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); !errs.Is(err, errs.InUse) {
			t.Errorf("umount: %v", err)
		}
		r, err := e.Destroy(t.Context(), toDestroy("v"))
		if err != nil || len(r.Failed) != 1 || !errs.Is(r.Failed[0], errs.InUse) {
			t.Errorf("destroy: %+v %v", r, err)
		}
		table, err := mount.Table("self")
		if err != nil {
			t.Fatal(err)
		}
		if at, ok := mount.At(table, v.Mountpoint); !ok || at.FSType != "overlay" {
			t.Errorf("it is no longer mounted: %+v", at)
		}

		release()
		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
			t.Error(err)
		}
		wantClean(t, e)
	})
}

// TestOverlayWhoseDeviceNumberIsReused: an overlay whose block device takes a while to disappear is not in use because
// another mount has got its device number by then.
func TestOverlayWhoseDeviceNumberIsReused(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		v := overlay(t, e, "g", "v", true)
		number := func(path string) uint64 {
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil {
				t.Error(err)
			}
			return st.Dev
		}
		was := number(v.Mountpoint)
		release := holdLoops(t, string(v.ID))
		if release == nil {
			return // such a pool has no block devices
		}

		done := make(chan struct{})
		go func() {
			defer close(done)
			defer release()
			for end := time.Now().Add(5 * time.Second); number(v.Mountpoint) == was && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			for range 100 { // most often the number is free at once
				if at := testfs.Tmpfs(t, 1<<20); number(at) == was {
					break
				}
			}
			time.Sleep(500 * time.Millisecond) // longer than an umount waits before it asks who holds the device
		}()
		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
			t.Error(err)
		}
		<-done
		wantClean(t, e)
	})
}

// holdLoops opens the loop devices of files whose paths contain text, until release is called. nil: there are none.
func holdLoops(t *testing.T, text string) (release func()) {
	t.Helper()
	backing, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}

	var held []*os.File
	for _, path := range backing {
		if b, err := os.ReadFile(path); err != nil || !strings.Contains(string(b), text) {
			continue
		}
		f, err := os.Open("/dev/" + filepath.Base(filepath.Dir(filepath.Dir(path))))
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, f)
	}
	if len(held) == 0 {
		return nil
	}
	return func() {
		for _, f := range held {
			f.Close()
		}
	}
}

// copyMounts starts a process of this name in a mount namespace with copies of all mounts. release ends it.
func copyMounts(t *testing.T, comm string) (release func()) {
	t.Helper()
	cmd := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c",
		"printf "+comm+" >/proc/self/comm; echo; read x")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(func() {
		in.Close()
		_ = cmd.Wait() // read fails at the end of its input
	})
	t.Cleanup(release)
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return release
}

// TestOverlayCopiedBySandbox: a sandbox of another run that takes long to start keeps no overlay from being destroyed.
func TestOverlayCopiedBySandbox(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		overlay(t, e, "g", "v", true)
		release := copyMounts(t, sandbox.Comm)
		time.AfterFunc(1500*time.Millisecond, release)

		r, err := e.Destroy(t.Context(), toDestroy("v"))
		if err != nil || len(r.Failed) > 0 {
			t.Errorf("destroy: %+v %v", r, err)
		}
		wantClean(t, e)
	})
}
