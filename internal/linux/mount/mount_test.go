package mount_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

func init() {
	childRoles["detached"] = func(args []string, ready func(string)) error {
		m, err := mount.Device(args[0], args[1], nil, false)
		if err != nil {
			return err
		}
		defer m.Close()
		dir, err := m.Open()
		if err != nil {
			return err
		}
		defer dir.Close()
		ready("")
		return nil
	}
}

func at(t *testing.T, path string) kernel.MountInfo {
	t.Helper()
	m, err := kernel.MountAt(unix.AT_FDCWD, path)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func wantKind(t *testing.T, err error, kind errs.Kind) {
	t.Helper()
	if got := errs.KindOf(err); got != kind {
		t.Errorf("error %v is of kind %q, want %q", err, got, kind)
	}
}

func TestDeviceKeepsData(t *testing.T) {
	needRoot(t)
	for _, fstype := range []string{"ext4", "xfs"} {
		t.Run(fstype, func(t *testing.T) {
			image := newImage(t, fstype)
			v := mountImage(t, image, fstype)
			var st unix.Statfs_t
			if err := unix.Statfs(v.dir, &st); err != nil {
				t.Fatal(err)
			}
			if want := map[string]int64{"ext4": unix.EXT4_SUPER_MAGIC, "xfs": unix.XFS_SUPER_MAGIC}[fstype]; st.Type != want {
				t.Errorf("filesystem type %x, want %x", st.Type, want)
			}
			if err := os.WriteFile(filepath.Join(v.dir, "f"), []byte("kept"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := mount.Unmount(v.dir); err != nil {
				t.Fatal(err)
			}
			v.gone(t)
			if _, err := os.Stat(filepath.Join(v.dir, "f")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the file is still there after unmounting: %v", err)
			}
			v = mountImage(t, image, fstype)
			if b, err := os.ReadFile(filepath.Join(v.dir, "f")); err != nil || string(b) != "kept" {
				t.Errorf("read %q, %v", b, err)
			}
		})
	}
}

// Two clones of an image have the same UUID: XFS refuses the second unless told
// not to look, ext4 does not mind.
func TestDeviceSameUUIDTwice(t *testing.T) {
	needRoot(t)
	for _, fstype := range []string{"ext4", "xfs"} {
		t.Run(fstype, func(t *testing.T) {
			one := newImage(t, fstype)
			two := filepath.Join(tempDir(t), "two.img")
			if out, err := exec.Command("cp", "--sparse=always", one, two).CombinedOutput(); err != nil {
				t.Fatalf("cp: %v: %s", err, out)
			}
			d := testfs.Loop(t, one, 0, loopdev.Options{})
			a, err := mount.Device(fstype, d.Path, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			dir := tempDir(t)
			unmountAtEnd(t, dir)
			info, err := a.MoveTo(dir)
			if err != nil {
				t.Fatal(err)
			}
			a.Close()
			if fstype == "xfs" {
				d := testfs.Loop(t, two, 0, loopdev.Options{})
				m, err := mount.Device("xfs", d.Path, nil, false)
				if err == nil {
					m.Close()
					t.Error("XFS mounted the same UUID twice without nouuid")
				} else if !strings.Contains(err.Error(), "duplicate UUID") {
					t.Errorf("error %q does not say why", err)
				}
				d.Close()
				// udev may have it open still, to look what is on it.
				if gone, err := loopdev.WaitDetached(t.Context(), two, 20*time.Second); err != nil || !gone {
					t.Fatalf("the loop device is still there: %v", err)
				}
			}
			b := mountImage(t, two, fstype)
			if info.Dev == b.dev {
				t.Errorf("both have device %d", b.dev)
			}
			touch(t, filepath.Join(dir, "only-here"))
			if _, err := os.Stat(filepath.Join(b.dir, "only-here")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the other one shows it too: %v", err)
			}
		})
	}
}

func TestDeviceErrorsSayWhy(t *testing.T) {
	needRoot(t)
	ext4 := testfs.Loop(t, newImage(t, "ext4"), 0, loopdev.Options{})
	xfs := testfs.Loop(t, newImage(t, "xfs"), 0, loopdev.Options{})
	empty := testfs.Loop(t, newImage(t, "none"), 0, loopdev.Options{})
	ro := testfs.Loop(t, newImage(t, "ext4"), 0, loopdev.Options{ReadOnly: true})
	file := touch(t, filepath.Join(tempDir(t), "file"))
	for _, c := range []struct {
		name, fstype, source string
		options              []string
		kind                 errs.Kind
		says                 string // in the message: words of the kernel
		hint                 string
	}{
		{"xfs as ext4", "ext4", xfs.Path, nil, errs.Invalid, "find ext4 filesystem", ""},
		{"ext4 as xfs", "xfs", ext4.Path, nil, errs.Invalid, "magic number", ""},
		{"nothing on it", "ext4", empty.Path, nil, errs.Invalid, "find ext4 filesystem", ""},
		{"unknown option", "ext4", ext4.Path, []string{"frobnicate"}, errs.Invalid, "Unknown parameter 'frobnicate'", ""},
		{"unknown option with value", "xfs", xfs.Path, []string{"frobnicate=1"}, errs.Invalid, "frobnicate", ""},
		{"bad value", "ext4", ext4.Path, []string{"commit=x"}, errs.Invalid, "commit", ""},
		{"flag where a value must be", "ext4", ext4.Path, []string{"commit"}, errs.Invalid, "commit", ""},
		{"unknown filesystem", "frobfs", ext4.Path, nil, errs.Unsupported, "fsopen", "modprobe frobfs"},
		{"no such device", "ext4", "/dev/pando-no-such-device", nil, errs.NotFound, "no such file", ""},
		{"not a device", "ext4", file, nil, errs.Invalid, "block device", ""},
		{"read-only device", "ext4", ro.Path, nil, errs.Permission, "permission denied", "read-only"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := mount.Device(c.fstype, c.source, c.options, false)
			if err == nil {
				m.Close()
				t.Fatal("mounted")
			}
			wantKind(t, err, c.kind)
			if !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), c.source) {
				t.Errorf("error %q, want %q and the device in it", err, c.says)
			}
			if hint := errs.HintOf(err); !strings.Contains(hint, c.hint) || c.hint == "" && hint != "" {
				t.Errorf("hint %q, want %q", hint, c.hint)
			}
		})
	}
}

// What is damaged is not the same as what never was a filesystem.
func TestDeviceDamaged(t *testing.T) {
	needRoot(t)
	image := newImage(t, "xfs")
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// A byte of the superblock behind the magic number, covered by its CRC.
	if _, err := f.WriteAt([]byte{0xff}, 130); err != nil {
		t.Fatal(err)
	}
	m, err := mount.Device("xfs", testfs.Loop(t, image, 0, loopdev.Options{}).Path, nil, false)
	if err == nil {
		m.Close()
		t.Fatal("mounted")
	}
	wantKind(t, err, errs.Damaged)
	if !strings.Contains(err.Error(), "CRC") {
		t.Errorf("error %q does not say why", err)
	}
}

func TestDetachedClose(t *testing.T) {
	needRoot(t)
	image := newImage(t, "ext4")
	v := volume{image: image}
	d := testfs.Loop(t, image, 0, loopdev.Options{})
	v.loop = d.Index
	m, err := mount.Device("ext4", d.Path, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	if !v.bound(t) {
		t.Fatal("the mount does not hold the loop device")
	}
	dir, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	// The root is usable before anybody can see it.
	if err := os.WriteFile("/proc/self/fd/"+strconv.Itoa(int(dir.Fd()))+"/f", []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	if err := kernel.Freeze(dir); err != nil {
		t.Error(err)
	} else if err := kernel.Thaw(dir); err != nil {
		t.Error(err)
	}
	dir.Close()
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	v.gone(t)
	if err := m.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestDetachedDiesWithItsProcess(t *testing.T) {
	needRoot(t)
	image := newImage(t, "ext4")
	d := testfs.Loop(t, image, 0, loopdev.Options{})
	v := volume{image: image, loop: d.Index}
	c := startRole(t, "detached", nil, "ext4", d.Path)
	d.Close()
	if !v.bound(t) {
		t.Fatal("the child's mount does not hold the loop device")
	}
	c.stop() // SIGKILL
	v.gone(t)
}

func TestAttachErrors(t *testing.T) {
	needRoot(t)
	d := testfs.Loop(t, newImage(t, "ext4"), 0, loopdev.Options{})
	m, err := mount.Device("ext4", d.Path, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	dir := tempDir(t)
	file := touch(t, filepath.Join(dir, "file"))
	link := filepath.Join(dir, "link")
	if err := os.Symlink(".", link); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		target string
		kind   errs.Kind
		says   string
	}{
		{filepath.Join(dir, "missing"), errs.NotFound, "no such file or directory"},
		{file, errs.Invalid, "not a directory"},
		{filepath.Join(file, "below"), errs.NotFound, "not a directory"},
		{link, errs.Invalid, "not a directory"},
	} {
		_, err := m.MoveTo(c.target)
		if err == nil {
			t.Fatalf("attached at %s", c.target)
		}
		wantKind(t, err, c.kind)
		if !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), c.target) {
			t.Errorf("error %q, want %q and the path in it", err, c.says)
		}
	}
	// A failure uses nothing up.
	target := filepath.Join(dir, "target")
	if err := os.Mkdir(target, 0o700); err != nil {
		t.Fatal(err)
	}
	unmountAtEnd(t, target)
	if _, err := m.MoveTo(target); err != nil {
		t.Fatal(err)
	}
	m.Close()
	if err := mount.Unmount(target); err != nil {
		t.Error(err)
	}
}

func TestAttachTellsTheMount(t *testing.T) {
	v := mountImage(t, newImage(t, "ext4"), "ext4")
	m := at(t, v.dir)
	if !m.Root || m.Dev != v.dev {
		t.Errorf("at %s there is %+v, want the root of a mount of device %d", v.dir, m, v.dev)
	}
	var st unix.Stat_t
	if err := unix.Stat(v.dir, &st); err != nil {
		t.Fatal(err)
	}
	if st.Dev != v.dev {
		t.Errorf("st_dev %d, MountInfo.Dev %d", st.Dev, v.dev)
	}
	if !mount.IsMounted(v.dir, m.ID) {
		t.Error("IsMounted says no")
	}
	sub := filepath.Join(v.dir, "sub")
	if err := os.Mkdir(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	if mount.IsMounted(sub, m.ID) {
		t.Error("IsMounted takes a directory in the mount for its root")
	}
}

func TestUnmount(t *testing.T) {
	needRoot(t)
	dir := tempDir(t)
	wantKind(t, mount.Unmount(dir), errs.NotFound)
	wantKind(t, mount.Unmount(filepath.Join(dir, "missing")), errs.NotFound)

	v := mountImage(t, newImage(t, "ext4"), "ext4")
	link := filepath.Join(dir, "link")
	if err := os.Symlink(v.dir, link); err != nil {
		t.Fatal(err)
	}
	wantKind(t, mount.Unmount(link), errs.NotFound)
	f, err := os.Open(v.dir)
	if err != nil {
		t.Fatal(err)
	}
	wantKind(t, mount.Unmount(v.dir), errs.InUse)
	if m := at(t, v.dir); !m.Root {
		t.Error("a refused Unmount unmounted")
	}
	f.Close()
	if err := mount.Unmount(v.dir); err != nil {
		t.Fatal(err)
	}
	wantKind(t, mount.Unmount(v.dir), errs.NotFound)
	v.gone(t)
}

func TestUnmountTakesTheTopmost(t *testing.T) {
	a := mountImage(t, newImage(t, "ext4"), "ext4")
	d := testfs.Loop(t, newImage(t, "ext4"), 0, loopdev.Options{})
	m, err := mount.Device("ext4", d.Path, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	info, err := m.MoveTo(a.dir)
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	if !mount.IsMounted(a.dir, info.ID) {
		t.Error("the second is not on top")
	}
	if err := mount.Unmount(a.dir); err != nil {
		t.Fatal(err)
	}
	if got := at(t, a.dir); got.Dev != a.dev {
		t.Errorf("below it there is device %d, want %d", got.Dev, a.dev)
	}
}

// Somebody unmounts our volume by hand and mounts it, or something else, again:
// that is not the mount that we know.
func TestIsMountedTellsMountsApart(t *testing.T) {
	image := newImage(t, "ext4")
	v := mountImage(t, image, "ext4")
	before := at(t, v.dir)
	if err := mount.Unmount(v.dir); err != nil {
		t.Fatal(err)
	}
	if mount.IsMounted(v.dir, before.ID) {
		t.Error("unmounted, but IsMounted")
	}
	v.gone(t)
	m, err := mount.Device("ext4", testfs.Loop(t, image, 0, loopdev.Options{}).Path, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.MoveTo(v.dir); err != nil {
		t.Fatal(err)
	}
	m.Close()
	unmountAtEnd(t, v.dir)
	after := at(t, v.dir)
	if !after.Unique {
		t.Skip("SKIPPED: before Linux 6.8 the kernel uses IDs of mounts again")
	}
	if mount.IsMounted(v.dir, before.ID) {
		t.Errorf("mounted again by somebody else, but IsMounted (IDs %d, %d)", before.ID, after.ID)
	}
	if mount.IsMounted(filepath.Join(v.dir, "missing"), before.ID) {
		t.Error("a missing path IsMounted")
	}
}

// Reading a clone must not make it differ from its origin.
func TestNoAccessTimes(t *testing.T) {
	needRoot(t)
	old := time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC)
	check := func(t *testing.T, dir string) {
		t.Helper()
		path := touch(t, filepath.Join(dir, "f"))
		if err := os.Chtimes(path, old, time.Now()); err != nil {
			t.Fatal(err)
		}
		if _, err := os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		if st.Atim.Sec != old.Unix() {
			t.Errorf("reading set the access time to %v", time.Unix(st.Atim.Unix()))
		}
		if line := tableLine(t, dir); !strings.Contains(line, "noatime") {
			t.Errorf("mount table: %s", line)
		}
	}
	t.Run("device", func(t *testing.T) {
		check(t, mountImage(t, newImage(t, "ext4"), "ext4").dir)
	})
	t.Run("tree", func(t *testing.T) {
		_, dir := mountTree(t, false)
		check(t, dir)
	})
}

// tableLine is the line of the mount table about dir.
func tableLine(t *testing.T, dir string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		if bytes.Contains(line, []byte(" "+dir+" ")) {
			return string(line)
		}
	}
	return ""
}

// mountTree makes a tree and a bind mount of it.
func mountTree(t *testing.T, readOnly bool) (tree, dir string) {
	t.Helper()
	needRoot(t)
	tree, dir = filepath.Join(tempDir(t), "tree"), tempDir(t)
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	touch(t, filepath.Join(tree, "original"))
	m, err := mount.Tree(tree, readOnly)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.MoveTo(dir); err != nil {
		t.Fatal(err)
	}
	m.Close()
	unmountAtEnd(t, dir)
	return tree, dir
}

func TestTree(t *testing.T) {
	tree, dir := mountTree(t, false)
	touch(t, filepath.Join(dir, "new"))
	for _, name := range []string{"original", "new"} {
		if _, err := os.Stat(filepath.Join(tree, name)); err != nil {
			t.Error(err)
		}
	}
	if m := at(t, dir); !m.Root {
		t.Error("not the root of a mount")
	}
	if err := mount.Unmount(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(tree, "new")); err != nil {
		t.Error(err)
	}
}

// What somebody mounted inside the original is not part of the volume.
func TestTreeLeavesMountsBelowOut(t *testing.T) {
	needRoot(t)
	tree, dir := filepath.Join(tempDir(t), "tree"), tempDir(t)
	sub := filepath.Join(tree, "sub")
	if err := os.MkdirAll(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	other, err := mount.Tree(tempDir(t), false)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := other.MoveTo(sub); err != nil {
		t.Fatal(err)
	}
	other.Close()
	unmountAtEnd(t, sub)
	touch(t, filepath.Join(sub, "foreign"))
	m, err := mount.Tree(tree, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(dir); err != nil {
		t.Fatal(err)
	}
	unmountAtEnd(t, dir)
	m.Close()
	if _, err := os.Stat(filepath.Join(dir, "sub", "foreign")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the foreign mount shows: %v", err)
	}
}

func TestTreeMissing(t *testing.T) {
	needRoot(t)
	m, err := mount.Tree(filepath.Join(tempDir(t), "missing"), false)
	if err == nil {
		m.Close()
	}
	wantKind(t, err, errs.NotFound)
}

func TestReadOnlyRefusesWrites(t *testing.T) {
	needRoot(t)
	refuses := func(t *testing.T, dir string) {
		t.Helper()
		err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600)
		if !errors.Is(err, unix.EROFS) {
			t.Errorf("writing gave %v, want EROFS", err)
		}
		err = unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOATIME, "")
		if err != nil {
			t.Errorf("the mount at %s is not usual: %v", dir, err)
		}
	}
	t.Run("tree", func(t *testing.T) {
		tree, dir := mountTree(t, true)
		refuses(t, dir)
		touch(t, filepath.Join(tree, "still-writable"))
	})
	for _, fstype := range []string{"ext4", "xfs"} {
		t.Run(fstype, func(t *testing.T) {
			image := newImage(t, fstype)
			before := checksum(t, image)
			d := testfs.Loop(t, image, 0, loopdev.Options{ReadOnly: true})
			m, err := mount.Device(fstype, d.Path, nil, true)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			dir := tempDir(t)
			unmountAtEnd(t, dir)
			if _, err := m.MoveTo(dir); err != nil {
				t.Fatal(err)
			}
			m.Close()
			refuses(t, dir)
			if _, err := os.ReadDir(dir); err != nil {
				t.Error(err)
			}
			if err := mount.Unmount(dir); err != nil {
				t.Fatal(err)
			}
			if checksum(t, image) != before {
				t.Error("mounting read-only changed the image")
			}
		})
	}
}

// IsMounted relies on it.
func TestMountIDsAreNotReused(t *testing.T) {
	tree, _ := mountTree(t, false)
	seen := map[uint64]bool{}
	for range 50 {
		m, err := mount.Tree(tree, false)
		if err != nil {
			t.Fatal(err)
		}
		info, err := m.Info()
		m.Close()
		if err != nil {
			t.Fatal(err)
		}
		if !info.Unique {
			t.Skip("SKIPPED: before Linux 6.8 the kernel uses IDs of mounts again")
		}
		if seen[info.ID] {
			t.Fatalf("ID %d twice", info.ID)
		}
		seen[info.ID] = true
	}
}
