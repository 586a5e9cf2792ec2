package loopdev_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/loopdev"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

const imageBytes = 256 << 10

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: loop devices need root")
	}
}

// image makes a file whose every sector says which it is.
func image(t *testing.T, dir, mark string) string {
	t.Helper()
	path := filepath.Join(dir, mark+".img")
	if err := os.WriteFile(path, content(mark), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func content(mark string) []byte {
	b := make([]byte, 0, imageBytes)
	for len(b) < imageBytes {
		sector := fmt.Sprintf("%s at %08x, ", mark, len(b))
		b = append(b, strings.Repeat(sector, 512/len(sector)+1)[:512]...)
	}
	return b
}

func open(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// try attaches the image at path, and closes it.
func try(t *testing.T, path string, o loopdev.Options) (*loopdev.Device, error) {
	t.Helper()
	flags := os.O_RDWR
	if o.ReadOnly {
		flags = os.O_RDONLY
	}
	f := open(t, path, flags)
	defer f.Close()
	return loopdev.Attach(t.Context(), f, o)
}

func attach(t *testing.T, path string, o loopdev.Options) *loopdev.Device {
	t.Helper()
	d, err := try(t, path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func wantKind(t *testing.T, err error, kind errs.Kind) {
	t.Helper()
	if got := errs.KindOf(err); got != kind {
		t.Errorf("error %v is of kind %q, want %q", err, got, kind)
	}
}

// detached fails the test unless the image becomes free.
func detached(t *testing.T, path string) {
	t.Helper()
	if free, err := loopdev.WaitDetached(t.Context(), path, 10*time.Second); err != nil || !free {
		t.Errorf("%s is still attached (%v)", path, err)
	}
}

func stat(t *testing.T, path string) *unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return &st
}

func TestAttach(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	for _, o := range []loopdev.Options{{}, {DirectIO: true}, {SectorBytes: 4096}, {DirectIO: true, SectorBytes: 4096}} {
		t.Run(fmt.Sprintf("%+v", o), func(t *testing.T) {
			path := image(t, dir, "abc")
			d := attach(t, path, o)
			if d.Path != "/dev/loop"+strconv.Itoa(d.Index) {
				t.Errorf("index %d, path %s", d.Index, d.Path)
			}
			dev := open(t, d.Path, os.O_RDWR)
			got, err := io.ReadAll(dev)
			if err != nil || !bytes.Equal(got, content("abc")) {
				t.Errorf("the device reads differently from its image: %d bytes, %v", len(got), err)
			}
			if _, err := dev.WriteAt(bytes.Repeat([]byte("W"), 4096), 8192); err != nil {
				t.Fatal(err)
			}
			if err := dev.Sync(); err != nil {
				t.Fatal(err)
			}
			back := make([]byte, 4096)
			if _, err := open(t, path, os.O_RDONLY).ReadAt(back, 8192); err != nil ||
				!bytes.Equal(back, bytes.Repeat([]byte("W"), 4096)) {
				t.Errorf("what was written to the device is not in the image: %.16q, %v", back, err)
			}
			sector, err := unix.IoctlGetInt(int(dev.Fd()), unix.BLKSSZGET)
			if want := max(int(o.SectorBytes), 512); err != nil || sector != want {
				t.Errorf("sectors of %d bytes, want %d, %v", sector, want, err)
			}
			dev.Close()
			d.Close()
			detached(t, path)
		})
	}
}

func TestAttachErrors(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	f := open(t, path, os.O_RDWR)
	_, err := loopdev.Attach(t.Context(), f, loopdev.Options{SectorBytes: 1000})
	wantKind(t, err, errs.Invalid)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = loopdev.Attach(ctx, f, loopdev.Options{})
	wantKind(t, err, errs.Canceled)
	_, err = loopdev.Attach(t.Context(), open(t, path, os.O_RDONLY), loopdev.Options{})
	wantKind(t, err, errs.Invalid)
	_, err = try(t, dir, loopdev.Options{ReadOnly: true})
	wantKind(t, err, errs.Invalid)
	// What failed left nothing locked, although its descriptors are open.
	if attached, err := loopdev.Attached(path); err != nil || attached {
		t.Errorf("attached: %v, %v", attached, err)
	}
	attach(t, path, loopdev.Options{})
}

func TestAutoclear(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	d := attach(t, path, loopdev.Options{})
	b, err := loopdev.Lookup(d.Index)
	if err != nil || !b.Auto || !b.SameFile(stat(t, path)) {
		t.Errorf("%+v, %v", b, err)
	}
	user := open(t, d.Path, os.O_RDONLY) // as a mount would be
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if attached, err := loopdev.Attached(path); err != nil || !attached {
		t.Errorf("detached while somebody uses it: %v, %v", attached, err)
	}
	if err := d.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	user.Close()
	detached(t, path)
	b, err = loopdev.Lookup(d.Index)
	if err == nil && !b.SameFile(stat(t, path)) {
		return // somebody else has taken it
	}
	wantKind(t, err, errs.NotFound)
}

func TestKeepOpen(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	d := attach(t, path, loopdev.Options{KeepOpen: true})
	clearAtEnd(t, d.Index)
	d.Close()
	b, err := loopdev.Lookup(d.Index)
	if err != nil || b.Auto || !b.SameFile(stat(t, path)) {
		t.Fatalf("%+v, %v", b, err)
	}
	user := open(t, d.Path, os.O_RDONLY)
	if err := loopdev.Clear(d.Index); err != nil {
		t.Fatal(err)
	}
	if free, err := loopdev.WaitDetached(t.Context(), path, 0); err != nil || free {
		t.Errorf("it went although somebody uses it: %v, %v", free, err)
	}
	user.Close()
	detached(t, path)
	wantKind(t, b.Clear(), errs.NotFound)
}

// A Clear that found somebody using the device can be taken back.
func TestKeep(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	d := attach(t, path, loopdev.Options{KeepOpen: true})
	clearAtEnd(t, d.Index)
	d.Close()
	b, err := loopdev.Lookup(d.Index)
	if err != nil {
		t.Fatal(err)
	}
	user := open(t, d.Path, os.O_RDONLY)
	if err := b.Clear(); err != nil {
		t.Fatal(err)
	}
	if err := b.Keep(); err != nil {
		t.Fatal(err)
	}
	user.Close()
	if now, err := loopdev.Lookup(d.Index); err != nil || now.Auto || !now.SameFile(stat(t, path)) {
		t.Errorf("after its user has gone: %+v, %v", now, err)
	}
	other := b
	other.Ino++
	wantKind(t, other.Keep(), errs.NotFound)
}

// A device may have become somebody else's since it was looked up.
func TestClearLeavesOthersAlone(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path, other := image(t, dir, "abc"), image(t, dir, "xyz")
	d := attach(t, path, loopdev.Options{KeepOpen: true})
	d.Close()
	b, err := loopdev.Lookup(d.Index)
	if err != nil {
		t.Fatal(err)
	}
	wrong := b
	wrong.Ino = stat(t, other).Ino
	wantKind(t, wrong.Clear(), errs.NotFound)
	if attached, err := loopdev.Attached(path); err != nil || !attached {
		t.Errorf("it was detached: %v, %v", attached, err)
	}
	if err := b.Clear(); err != nil {
		t.Error(err)
	}
	detached(t, path)
}

// TestHold: a held device stays with its file, even after its owner has closed it; one that has gone cannot be held.
func TestHold(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path, other := image(t, dir, "abc"), image(t, dir, "xyz")
	d := attach(t, path, loopdev.Options{})
	b, err := loopdev.Lookup(d.Index)
	if err != nil {
		t.Fatal(err)
	}

	wrong := b
	wrong.Ino = stat(t, other).Ino
	_, err = wrong.Hold()
	wantKind(t, err, errs.NotFound)

	f, err := b.Hold()
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	if now, err := loopdev.Lookup(b.Index); err != nil || !now.SameFile(stat(t, path)) {
		t.Errorf("held, and closed by its owner: %+v, %v", now, err)
	}

	f.Close()
	detached(t, path)
	_, err = b.Hold()
	wantKind(t, err, errs.NotFound)
}

// clearAtEnd detaches a device that does not detach itself, if it still is this
// test's.
func clearAtEnd(t *testing.T, n int) {
	t.Helper()
	b, err := loopdev.Lookup(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Clear() })
}

// Two devices on one image would corrupt what is inside.
func TestAttachTwice(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	rw, ro := loopdev.Options{}, loopdev.Options{ReadOnly: true}
	a := attach(t, path, rw)
	_, err := try(t, path, rw)
	wantKind(t, err, errs.InUse)
	_, err = try(t, path, ro)
	wantKind(t, err, errs.InUse)
	a.Close()
	detached(t, path)
	b, c := attach(t, path, ro), attach(t, path, ro) // nobody writes
	_, err = try(t, path, rw)
	wantKind(t, err, errs.InUse)
	b.Close()
	if attached, err := loopdev.Attached(path); err != nil || !attached {
		t.Errorf("the second reader's device is not noticed: %v, %v", attached, err)
	}
	c.Close()
	detached(t, path)
}

// Asking whether an image is attached must not get in the way of attaching it.
func TestAttachedDisturbsNobody(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					if _, err := loopdev.Attached(path); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	for range 100 {
		d, err := try(t, path, loopdev.Options{})
		if err != nil {
			t.Error(err)
			break
		}
		d.Close()
		detached(t, path)
	}
	close(stop)
	wg.Wait()
}

func TestReadOnly(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	for _, flags := range []int{os.O_RDONLY, os.O_RDWR} {
		f := open(t, path, flags)
		d, err := loopdev.Attach(t.Context(), f, loopdev.Options{ReadOnly: true})
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		w, err := os.OpenFile(d.Path, os.O_WRONLY, 0)
		if err == nil {
			_, err = w.Write(make([]byte, 4096))
			err = errors.Join(err, w.Sync())
			w.Close()
		}
		if err == nil {
			t.Error("a read-only device was written")
		}
		d.Close()
		detached(t, path)
		b, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(b, content("abc")) {
			t.Error("the image changed")
		}
	}
}

// Direct I/O is asked of the filesystem that the image is on.
func TestDirectIO(t *testing.T) {
	needRoot(t)
	ramfs := func(t testing.TB, _ int64) string {
		dir := t.TempDir()
		if err := unix.Mount("ramfs", dir, "ramfs", 0, ""); err != nil {
			t.Skipf("SKIPPED: no ramfs: %v", err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(dir, 0); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	for _, c := range []struct {
		name   string
		mk     func(testing.TB, int64) string
		always bool // on every kernel that Pando runs on
		direct bool
	}{
		{"ext4", testfs.Ext4, true, true},
		{"xfs", testfs.XFS, true, true},
		{"btrfs", testfs.Btrfs, true, true},
		{"tmpfs", testfs.Tmpfs, false, true}, // since Linux 6.6
		{"ramfs", ramfs, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := image(t, c.mk(t, 64<<20), "abc")
			d := attach(t, path, loopdev.Options{DirectIO: true})
			b, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/loop/dio", d.Index))
			if err != nil {
				t.Fatal(err)
			}
			if really := strings.TrimSpace(string(b)) == "1"; d.DirectIO != really || c.always && really != c.direct {
				t.Errorf("Device.DirectIO %v, the kernel does %v, want %v", d.DirectIO, really, c.direct)
			}
			got, err := os.ReadFile(d.Path)
			if err != nil || !bytes.Equal(got, content("abc")) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			d.Close()
			detached(t, path)
			if d := attach(t, path, loopdev.Options{}); d.DirectIO {
				t.Error("direct I/O unasked")
			} else {
				d.Close()
				detached(t, path)
			}
		})
	}
}

// The kernel identifies the file behind a device as stat(2) does, also where
// device numbers are unusual: this is what SameFile relies on.
func TestSameFileOnUnusualDevices(t *testing.T) {
	check := func(t *testing.T, dir string) {
		t.Helper()
		path, other := image(t, dir, "abc"), image(t, dir, "xyz")
		d := attach(t, path, loopdev.Options{})
		b, err := loopdev.Lookup(d.Index)
		if err != nil {
			t.Fatal(err)
		}
		st := stat(t, path)
		if b.Dev != st.Dev || b.Ino != st.Ino || !b.SameFile(st) {
			t.Errorf("the kernel says device %#x, inode %d; stat says %#x, %d", b.Dev, b.Ino, st.Dev, st.Ino)
		}
		if b.SameFile(stat(t, other)) {
			t.Error("another file is the same")
		}
		d.Close()
		detached(t, path)
	}
	t.Run("btrfs", func(t *testing.T) {
		top := testfs.Btrfs(t, 0)
		check(t, top)
		if _, err := exec.LookPath("btrfs"); err != nil {
			t.Skip("SKIPPED: no btrfs(8)")
		}
		sub := filepath.Join(top, "sub")
		if out, err := exec.Command("btrfs", "subvolume", "create", sub).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if stat(t, sub).Dev == stat(t, top).Dev {
			t.Fatal("the subvolume has no device number of its own: the test tests nothing")
		}
		check(t, sub)
	})
	t.Run("minor over 255", func(t *testing.T) {
		check(t, ext4OnDevice(t, 300))
	})
	t.Run("minor over 65535", func(t *testing.T) {
		check(t, ext4OnDevice(t, 70_000))
	})
}

// ext4OnDevice mounts an ext4 whose device number has a minor of at least n.
func ext4OnDevice(t *testing.T, n int) string {
	t.Helper()
	needRoot(t)
	dir := t.TempDir()
	img, mnt := filepath.Join(dir, "img"), filepath.Join(dir, "mnt")
	do := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	do("truncate", "-s", "16M", img)
	do("mkfs.ext4", "-q", img)
	do("mkdir", mnt)
	dev := numbered(t, n, img)
	mounted := false
	t.Cleanup(func() {
		if !mounted {
			do("losetup", "-d", dev)
		} else if err := unix.Unmount(mnt, 0); err != nil {
			t.Error(err)
		}
	})
	do("mount", dev, mnt)
	mounted = true
	do("losetup", "-d", dev) // when it is unmounted
	if unix.Minor(stat(t, mnt).Dev) < uint32(n) {
		t.Fatal("the test tests nothing")
	}
	return mnt
}

// numbered attaches an image to a loop device numbered n or a little more.
// Whatever asks for a free device in the meantime may be given the same.
func numbered(t *testing.T, n int, img string) string {
	t.Helper()
	ctl := open(t, "/dev/loop-control", os.O_RDWR)
	var out []byte
	for end := n + 100; n < end; n++ {
		// One that is there already may be free: a host that has had a thousand
		// mounts has a thousand.
		if err := ioctlInt(ctl, unix.LOOP_CTL_ADD, n); err == nil {
			t.Cleanup(func() { _ = ioctlInt(ctl, unix.LOOP_CTL_REMOVE, n) }) // if nobody else has taken it
		} else if !errors.Is(err, unix.EEXIST) {
			t.Skipf("SKIPPED: no loop device %d: %v", n, err)
		}
		dev := "/dev/loop" + strconv.Itoa(n)
		var err error
		if out, err = exec.Command("losetup", dev, img).CombinedOutput(); err == nil {
			return dev
		}
	}
	t.Fatalf("no loop device was free: %s", out)
	return ""
}

func ioctlInt(f *os.File, req uint, arg int) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(req), uintptr(arg)); e != 0 {
		return e
	}
	return nil
}

func TestLookupAndList(t *testing.T) {
	needRoot(t)
	long := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	testfs.LeakCheck(t, filepath.Dir(long))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	path := image(t, long, "abc")
	d := attach(t, path, loopdev.Options{})
	listed := func() (found []loopdev.Bound) {
		all, err := loopdev.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range all {
			if strings.HasPrefix(b.File, long) {
				found = append(found, b)
			}
		}
		return found
	}
	st := stat(t, path)
	if l := listed(); len(l) != 1 || l[0].File != path || l[0].Index != d.Index || l[0].Path != d.Path ||
		!l[0].SameFile(st) || !l[0].Auto {
		t.Errorf("%+v", l)
	}
	if b, err := loopdev.Lookup(d.Index); err != nil || !strings.HasPrefix(path, b.File) || b.File == "" ||
		b.Path != d.Path {
		t.Errorf("%+v, %v", b, err)
	}
	if b, err := loopdev.LookupNumber(loopdev.DeviceNumber(d.Index)); err != nil || b.Index != d.Index || !b.SameFile(st) {
		t.Errorf("by its number: %+v, %v", b, err)
	}
	for _, dev := range []uint64{0, unix.Mkdev(1, 3), unix.Mkdev(7, 1<<19)} {
		_, err := loopdev.LookupNumber(dev)
		wantKind(t, err, errs.NotFound)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if l := listed(); len(l) != 1 || l[0].File != path+" (deleted)" || !l[0].SameFile(st) {
		t.Errorf("after deleting: %+v", l)
	}
	d.Close()
	_, err := loopdev.Lookup(1 << 19)
	wantKind(t, err, errs.NotFound)
	wantKind(t, loopdev.Clear(1<<19), errs.NotFound)
	if _, err := loopdev.Attached(path); !errs.Is(err, errs.NotFound) {
		t.Errorf("Attached of a missing file: %v", err)
	}
}

// Recovery lists devices while others come and go.
func TestListWhileDevicesComeAndGo(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	var wg sync.WaitGroup
	for i := range 4 {
		path := image(t, dir, "abc"+strconv.Itoa(i))
		wg.Go(func() {
			for range 200 {
				f, err := os.OpenFile(path, os.O_RDWR, 0)
				if err != nil {
					t.Error(err)
					return
				}
				d, err := loopdev.Attach(t.Context(), f, loopdev.Options{KeepOpen: i%2 == 0})
				f.Close()
				if err != nil {
					t.Error(err)
					return
				}
				d.Close()
				if i%2 == 0 {
					if err := loopdev.Clear(d.Index); err != nil {
						t.Error(err)
						return
					}
				}
				detached(t, path) // List has it open for a moment
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for {
		if _, err := loopdev.List(); err != nil {
			t.Error(err)
		}
		for n := range 16 { // caught in the middle of attaching and detaching
			if _, err := loopdev.Lookup(n); err != nil && !errs.Is(err, errs.NotFound) {
				t.Error(err)
			}
		}
		select {
		case <-done:
			return
		default:
		}
	}
}

// Between LOOP_CLR_FD and the last close the kernel lets nobody open a device.
func TestHalfDetached(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	d := attach(t, path, loopdev.Options{KeepOpen: true})
	clearAtEnd(t, d.Index)
	d.Close()
	b, err := loopdev.Lookup(d.Index)
	if err != nil {
		t.Fatal(err)
	}
	user := open(t, d.Path, os.O_RDONLY)
	for end := time.Now().Add(10 * time.Second); err == nil && time.Now().Before(end); {
		if err := ioctlInt(user, unix.LOOP_CLR_FD, 0); err != nil {
			t.Fatal(err)
		}
		_, err = loopdev.Lookup(d.Index) // nil if somebody, listing devices, had it open just then
	}
	wantKind(t, err, errs.NotFound)
	wantKind(t, loopdev.Clear(d.Index), errs.NotFound) // nobody can have taken it: it is open
	wantKind(t, b.Clear(), errs.NotFound)
	if _, err := loopdev.List(); err != nil {
		t.Error(err)
	}
	user.Close()
	detached(t, path)
}

func TestWaitDetached(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	if free, err := loopdev.WaitDetached(t.Context(), path, 0); err != nil || !free {
		t.Errorf("never attached: %v, %v", free, err)
	}
	d := attach(t, path, loopdev.Options{})
	if free, err := loopdev.WaitDetached(t.Context(), path, time.Millisecond); err != nil || free {
		t.Errorf("attached: %v, %v", free, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if free, err := loopdev.WaitDetached(ctx, path, time.Minute); free || !errs.Is(err, errs.Canceled) {
		t.Errorf("canceled: %v, %v", free, err)
	}
	released := make(chan bool)
	go func() {
		free, err := loopdev.WaitDetached(t.Context(), path, time.Minute)
		released <- free && err == nil
	}()
	d.Close()
	if !<-released {
		t.Error("it did not notice")
	}
	if _, err := loopdev.WaitDetached(t.Context(), filepath.Join(dir, "missing"), 0); !errs.Is(err, errs.NotFound) {
		t.Errorf("missing file: %v", err)
	}
}

// TestWriteCacheOfBefore: that somebody has declared away the write cache of a loop
// device does not end the flushes of whoever gets the device next.
func TestWriteCacheOfBefore(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	path := image(t, dir, "first")
	for range 20 { // others take devices, too
		d := attach(t, path, loopdev.Options{})
		n := d.Index
		setting := fmt.Sprintf("/sys/block/loop%d/queue/write_cache", n)
		if err := os.WriteFile(setting, []byte("write through"), 0); err != nil {
			t.Fatal(err)
		}
		d.Close()
		if gone, err := loopdev.WaitDetached(t.Context(), path, 10*time.Second); err != nil || !gone {
			t.Fatal(gone, err)
		}
		d = attach(t, path, loopdev.Options{})
		b, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/queue/write_cache", d.Index))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimSpace(string(b)); got != "write back" {
			t.Fatalf("the write cache of loop%d is %q", d.Index, got)
		}
		d.Close()
		if gone, err := loopdev.WaitDetached(t.Context(), path, 10*time.Second); err != nil || !gone {
			t.Fatal(gone, err)
		}
		if d.Index == n {
			return
		}
		// Not left to those who do not look.
		_ = os.WriteFile(setting, []byte("write back"), 0)
	}
	t.Skip("SKIPPED: others took the device each time")
}
