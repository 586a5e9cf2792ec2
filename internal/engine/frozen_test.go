package engine_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// frozenVolume is a mounted volume v that somebody has frozen.
type frozenVolume struct {
	*testing.T
	e          *engine.Engine
	mountpoint string
	device     string
	fs         driver.FS
}

// freezeVolume makes a volume and freezes it. It is thawed at the end of the test, wherever it is mounted by then.
func freezeVolume(t *testing.T, fs driver.FS) frozenVolume {
	e := livePool(t, "xfs", fs)
	v := frozenVolume{T: t, e: e, mountpoint: clone(t, e, "g", "v", true).Mountpoint, fs: fs}
	must(t, os.WriteFile(filepath.Join(v.mountpoint, "written"), []byte("before"), 0o600))
	table, err := mount.Table("self")
	must(t, err)
	for _, m := range table {
		if m.Point == v.mountpoint {
			v.device = m.Source
		}
	}

	if err := v.at(v.mountpoint, kernel.Freeze); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // again, before the pool is removed
		if m, err := mount.Device(string(fs), v.device, nil, false); err == nil {
			if root, err := m.Open(); err == nil {
				_ = kernel.Thaw(root)
				root.Close()
			}
			m.Close()
		}
	})
	return v
}

// at calls fn with the root of what is mounted at a path. Without a mount there it would be the host's filesystem.
func (v frozenVolume) at(path string, fn func(*os.File) error) error {
	if m, err := kernel.MountAt(unix.AT_FDCWD, path); err != nil || !m.Root {
		return errors.Join(errors.New(path+" is not mounted"), err)
	}
	root, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(fn(root), root.Close())
}

// refused checks that an operation was refused because the volume is frozen, and that it changed nothing.
func (v frozenVolume) refused(what string, err error) {
	v.Helper()
	if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "frozen") ||
		!strings.Contains(errs.HintOf(err), "fsfreeze --unfreeze "+v.mountpoint) {
		v.Errorf("%s: %v (hint %q), wanted InUse and how to thaw it", what, err, errs.HintOf(err))
	}
	v.unchanged(what)
}

func (v frozenVolume) unchanged(what string) {
	v.Helper()
	if err := v.at(v.mountpoint, func(*os.File) error { return nil }); err != nil {
		v.Errorf("%s: %v", what, err)
	}
	if b, err := os.ReadFile(filepath.Join(v.mountpoint, "written")); err != nil || string(b) != "before" {
		v.Errorf("%s: the volume holds %q, %v", what, b, err)
	}
	if again, err := v.e.Mount(v.Context(), engine.MountRequest{Volume: ref.MustName("v")}); err != nil ||
		again.Mountpoint != v.mountpoint {
		v.Errorf("%s: mounted at %q, %v", what, again.Mountpoint, err)
	}
}

// works checks that the volume can be written to and unmounted once it is thawed.
func (v frozenVolume) works() {
	v.Helper()
	if err := v.at(v.mountpoint, kernel.Thaw); err != nil {
		v.Fatal(err)
	}
	must(v.T, os.WriteFile(filepath.Join(v.mountpoint, "later"), []byte("after"), 0o600))
	_, err := v.e.Umount(v.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
	must(v.T, err)
	destroy(v.T, v.e, "v")
}

func eachFrozen(t *testing.T, test func(v frozenVolume)) {
	for _, fs := range []driver.FS{driver.XFS, driver.Ext4} {
		t.Run(string(fs), func(t *testing.T) { test(freezeVolume(t, fs)) })
	}
}

// TestFrozenVolumeStays: the kernel unmounts a frozen filesystem, and keeps it. Nothing that takes a volume away does
// so,
// or waits for it.
func TestFrozenVolumeStays(t *testing.T) {
	eachFrozen(t, func(v frozenVolume) {
		umount := engine.UmountRequest{Volume: ref.MustName("v")}
		_, err := v.e.Umount(v.Context(), umount)
		v.refused("umount", err)
		r, err := v.e.Destroy(v.Context(), toDestroy("v"))
		must(v.T, err)
		v.refused("destroy", errors.Join(r.Failed...))
		_, err = engine.Deinit(v.Context(), engine.DeinitRequest{Dir: v.e.Dir(), Force: true}, drivers, nil)
		v.refused("deinit", err)
		_, err = v.e.Snapshot(v.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName("s")})
		must(v.T, err)
		_, err = v.e.Rewind(v.Context(), engine.RewindRequest{Volume: ref.MustName("v"), Snapshot: ref.MustName("s"),
			Detach: true})
		v.refused("rewind", err)

		// Somebody else unmounts it.
		must(v.T, mount.Unmount(v.mountpoint))
		_, err = v.e.Mount(v.Context(), engine.MountRequest{Volume: ref.MustName("v")})
		if !errs.Is(err, errs.InUse) || !strings.Contains(errs.HintOf(err), "fsfreeze --unfreeze") {
			v.Errorf("mount of what was unmounted: %v (hint %q)", err, errs.HintOf(err))
		}
		_, err = v.e.Umount(v.Context(), umount)
		v.refused("umount of what was unmounted", err)
		v.works()
	})
}

// TestUmountOfFrozenKilled: the next command puts back what an umount had unmounted when it was killed.
func TestUmountOfFrozenKilled(t *testing.T) {
	eachFrozen(t, func(v frozenVolume) {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "KILLED_UMOUNT_OF="+v.e.Dir())
		out, err := cmd.CombinedOutput()
		if err == nil || cmd.ProcessState.ExitCode() != -1 {
			v.Fatalf("it was not killed: %v\n%s", err, out)
		}
		if v.at(v.mountpoint, func(*os.File) error { return nil }) == nil {
			v.Fatal("it was killed before it had unmounted the volume")
		}
		e, _ := maintained(v.T, v.e.Dir())
		e.Close()
		v.unchanged("recovery")
		v.works()
	})
}

// TestInterruptedUmountPutsBack: an umount that is interrupted while it waits for the block device changes nothing.
func TestInterruptedUmountPutsBack(t *testing.T) {
	e := livePool(t, "xfs", driver.Ext4)
	v := clone(t, e, "g", "v", true)
	table, err := mount.Table("self")
	must(t, err)
	var user *os.File
	for _, m := range table {
		if m.Point == v.Mountpoint {
			user, err = os.Open(m.Source)
			must(t, err)
		}
	}

	ctx, interrupt := context.WithCancel(t.Context())
	engine.AtStep(t, func(step string) {
		if step == "unmounting" {
			interrupt()
		}
	})
	_, err = e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("v")})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("umount: %v", err)
	}
	if m, err := kernel.MountAt(unix.AT_FDCWD, v.Mountpoint); err != nil || !m.Root {
		t.Errorf("the volume is not mounted any more: %v", err)
	}
	user.Close()
	destroy(t, e, "v")
}
