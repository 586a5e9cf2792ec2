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
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestMountedAgain: the image of a volume is mounted at its place, but by another mount than the
// recorded one, as after a refused umount that was killed. That is where the volume is mounted.
func TestMountedAgain(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	v := clone(t, e, "g", "v", true)
	table, err := mount.Table("self")
	if err != nil {
		t.Fatal(err)
	}
	device := ""
	for _, m := range table {
		if m.Point == v.Mountpoint {
			device = m.Source
		}
	}
	held, err := os.Open(device) // else it goes with the mount
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := mount.Unmount(v.Mountpoint); err != nil {
		t.Fatal(err)
	}
	m, err := mount.Device("ext4", device, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.MoveTo(v.Mountpoint); err != nil {
		t.Fatal(err)
	}
	m.Close()
	held.Close()
	if again, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")}); err != nil ||
		again.Mountpoint != v.Mountpoint {
		t.Errorf("it is mounted, but %+v, %v", again, err)
	}
	if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
		t.Error(err)
	}
	if err := mount.Unmount(v.Mountpoint); !errs.Is(err, errs.NotFound) {
		t.Error("it is still mounted")
	}
	destroy(t, e, "v")
}

// TestHolderVanishes: a volume that was held a moment ago is not in use if nobody is found who holds it.
func TestHolderVanishes(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	umount := func() error {
		_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
		return err
	}
	for _, c := range []struct {
		name    string
		overlay bool
		do      func() error
	}{
		{"umount", false, umount},
		{"umount of an overlay", true, umount},
		{"deinit", false, func() error {
			_, err := engine.Deinit(t.Context(), engine.DeinitRequest{Dir: e.Dir(), Force: true}, drivers, nil)
			return err
		}},
	} {
		v, err := e.Clone(t.Context(), engine.CloneRequest{From: reference(t, "g"), Name: ref.MustName("v"), Mount: true,
			Overlay: c.overlay})
		must(t, err)
		held, err := os.Open(filepath.Join(v[0].Mountpoint, "file"))
		must(t, err)

		if err := c.do(); !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
			t.Errorf("%s: held by this process: %v", c.name, err)
		}

		refused := 0
		engine.AtStep(t, func(step string) {
			if step == "refused" {
				refused++
				held.Close()
			}
		})
		if err := c.do(); err != nil || refused != 1 {
			t.Errorf("%s: %v after %d refusals", c.name, err, refused)
		}
		engine.AtStep(t, func(string) {})
		if c.name != "deinit" {
			destroy(t, e, "v")
		}
	}

	_, err := engine.Init(t.Context(), engine.InitRequest{Dir: e.Dir()}, drivers) // or its removal would fail
	must(t, err)
}

// TestHolderBeforeExec: a child that has been forked and has a volume open is waited for, as it is about to begin a
// program, which closes that. If it does not, it is named.
func TestHolderBeforeExec(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	for _, ends := range []bool{true, false} {
		v := clone(t, e, "g", "v", true)
		end := keepOpen(t, filepath.Join(v.Mountpoint, "file"))
		refused := 0
		engine.AtStep(t, func(step string) {
			if step == "refused" {
				if refused++; refused == 3 && ends {
					end()
				}
			}
		})
		_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
		if ends && (err != nil || refused < 3) {
			t.Errorf("%d refusals, and the child has ended: %v", refused, err)
		}
		if !ends && (!errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "(sh)")) {
			t.Errorf("the child does not begin a program: %v", err)
		}

		end()
		destroy(t, e, "v")
	}
}

// TestAdoptBeforeExec: a child that has been forked and has a file of an adopted directory open is waited for, too.
func TestAdoptBeforeExec(t *testing.T) {
	top := testfs.XFS(t, 1<<30)
	e := newPool(t, top, engine.InitRequest{})
	dir := liveTree(t, top)
	end := keepOpen(t, filepath.Join(dir, "sub", "file"))
	q := engine.ImportRequest{Name: ref.MustName("g"), Source: dir, Adopt: true, Replace: true, SizeBytes: 64 << 20}
	if _, err := e.Import(t.Context(), q); !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "(sh)") {
		t.Errorf("the child does not begin a program: %v", err)
	}

	refused := 0
	engine.AtStep(t, func(step string) {
		if step == "refused" {
			refused++
			end()
		}
	})
	out, err := e.Import(t.Context(), q)
	if err != nil || out.Replaced != dir || refused == 0 {
		t.Errorf("%d refusals, and the child has ended: %+v, %v", refused, out, err)
	}
}

// keepOpen starts a process that has been forked, has not begun a program, and keeps a file open until end.
func keepOpen(t *testing.T, file string) (end func()) {
	t.Helper()
	child := exec.Command("sh", "-c", `(echo open; read line; :) 3<"$1"; :`, "sh", file)
	stdin, err := child.StdinPipe()
	must(t, err)
	stdout, err := child.StdoutPipe()
	must(t, err, child.Start())
	end = sync.OnceFunc(func() {
		stdin.Close()
		must(t, child.Wait())
	})
	t.Cleanup(end)
	_, err = stdout.Read(make([]byte, 1))
	must(t, err)
	return end
}

// TestAttachedByHand: a volume whose image losetup has attached is neither mounted nor destroyed.
func TestAttachedByHand(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	for _, overlay := range []bool{false, true} {
		v, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"),
			Overlay: overlay})
		must(t, err)
		mountVolume := func() error {
			_, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")})
			return err
		}

		image := filepath.Join(e.Dir(), "data", "objects", string(v[0].ID)+".img")
		node, err := run.Program(t.Context(), "losetup", "--show", "-f", image)
		must(t, err)
		loop := strings.TrimSpace(string(node))
		d, err := e.Destroy(t.Context(), toDestroy("v"))
		for _, err := range []error{mountVolume(), errors.Join(append(d.Failed, err)...)} {
			if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "v: it is in use: "+loop) ||
				!strings.Contains(errs.HintOf(err), "losetup -d "+loop) {
				t.Errorf("overlay %v: %v", overlay, err)
			}
		}

		_, err = run.Program(t.Context(), "losetup", "-d", loop)
		must(t, err, mountVolume())
		destroy(t, e, "v")
	}
	wantClean(t, e)
}

// TestImageLetGo: an image that is about to be detached is waited for. The open file here stands for the copy of it
// that a child of any process has until it begins a program.
func TestImageLetGo(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	v := clone(t, e, "g", "v", false)
	image := filepath.Join(e.Dir(), "data", "objects", string(v.ID)+".img")
	for _, verb := range []struct {
		name string
		do   func() error
	}{
		{"mount", func() error {
			_, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")})
			return err
		}},
		{"umount", func() error {
			_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
			return err
		}},
		{"destroy", func() error {
			d, err := e.Destroy(t.Context(), toDestroy("v"))
			return errors.Join(append(d.Failed, err)...)
		}},
	} {
		_ = mount.Unmount(filepath.Join(e.Dir(), "mnt", "v")) // by hand, if it is mounted
		_, err := loopdev.WaitDetached(t.Context(), image, 10*time.Second)
		must(t, err)
		for _, lets := range []bool{false, true} {
			f, err := os.OpenFile(image, os.O_RDWR, 0)
			must(t, err)
			lock := func(kind int16) { must(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind})) }
			lock(unix.F_WRLCK)
			engine.AtStep(t, func(step string) {
				if lets && (step == "attached already" || step == "refused") {
					lock(unix.F_UNLCK)
				}
			})
			if err := verb.do(); lets && err != nil || !lets && !errs.Is(err, errs.InUse) {
				t.Errorf("%s, and the image is let go: %v: %v", verb.name, lets, err)
			}
			lock(unix.F_UNLCK)
			f.Close()
		}
	}
}

// TestRawDeviceInUse: to refuse to take a raw device away changes nothing, even when its user ends.
func TestRawDeviceInUse(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("raw"), Source: image,
		FS: driver.None}); err != nil {
		t.Fatal(err)
	}
	v := clone(t, e, "raw", "v", true)
	user, err := os.Open(v.Mountpoint)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); !errs.Is(err, errs.InUse) {
		t.Errorf("umount of a device that is open: %v", err)
	}
	user.Close()
	if again, err := os.Open(v.Mountpoint); err != nil {
		t.Errorf("the device went with its user: %v", err)
	} else {
		var buf [512]byte
		if _, err := unix.Pread(int(again.Fd()), buf[:], 0); err != nil {
			t.Errorf("the device went with its user: %v", err)
		}
		again.Close()
	}
	destroy(t, e, "v")
}
