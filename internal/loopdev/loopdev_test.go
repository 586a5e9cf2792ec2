package loopdev_test

import (
	"bufio"
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
	"syscall"
	"testing"
	"time"

	"pando/internal/errs"
	"pando/internal/loopdev"
	"pando/internal/testfs"

	"golang.org/x/sys/unix"
)

const imageBytes = 256 << 10

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: loop devices need root")
	}
}

// image makes a file whose every 8 bytes say which they are.
func image(t *testing.T, dir, mark string) string {
	t.Helper()
	path := filepath.Join(dir, mark+".img")
	if err := os.WriteFile(path, content(mark), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func content(mark string) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < imageBytes; i++ {
		fmt.Fprintf(&b, "%3.3s%05x", mark, i)
	}
	return b.Bytes()
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
			if _, err := open(t, path, os.O_RDONLY).ReadAt(back, 8192); err != nil || !bytes.Equal(back, bytes.Repeat([]byte("W"), 4096)) {
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
	_, err = loopdev.Lookup(d.Index)
	wantKind(t, err, errs.NotFound)
}

func TestKeepOpen(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	d := attach(t, path, loopdev.Options{KeepOpen: true})
	t.Cleanup(func() { _ = loopdev.Clear(d.Index) })
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
	wantKind(t, loopdev.Clear(d.Index), errs.NotFound)
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
	d := attach(t, path, loopdev.Options{ReadOnly: true})
	f, err := os.OpenFile(d.Path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.Write(make([]byte, 4096))
		err = errors.Join(err, f.Sync())
		f.Close()
	}
	if err == nil {
		t.Error("a read-only device was written")
	}
	b, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(b, content("abc")) {
		t.Error("the image changed")
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
	ctl := open(t, "/dev/loop-control", os.O_RDWR)
	for {
		e := ioctlInt(ctl, unix.LOOP_CTL_ADD, n)
		if e == nil {
			break
		}
		if !errors.Is(e, unix.EEXIST) {
			t.Skipf("SKIPPED: no loop device %d: %v", n, e)
		}
		n++
	}
	t.Cleanup(func() {
		if err := ioctlInt(ctl, unix.LOOP_CTL_REMOVE, n); err != nil {
			t.Error(err)
		}
	})
	for _, args := range [][]string{
		{"truncate", "-s", "16M", img},
		{"mkfs.ext4", "-q", img},
		{"mkdir", mnt},
		{"losetup", "/dev/loop" + strconv.Itoa(n), img},
		{"mount", "/dev/loop" + strconv.Itoa(n), mnt},
		{"losetup", "-d", "/dev/loop" + strconv.Itoa(n)}, // when it is unmounted
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
		if args[0] == "mount" {
			t.Cleanup(func() {
				if err := unix.Unmount(mnt, 0); err != nil {
					t.Error(err)
				}
			})
		}
	}
	if unix.Minor(stat(t, mnt).Dev) < uint32(n) {
		t.Fatal("the test tests nothing")
	}
	return mnt
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
	if l := listed(); len(l) != 1 || l[0].File != path || l[0].Index != d.Index || l[0].Path != d.Path || !l[0].SameFile(st) || !l[0].Auto {
		t.Errorf("%+v", l)
	}
	if b, err := loopdev.Lookup(d.Index); err != nil || !strings.HasPrefix(path, b.File) || b.File == "" || b.Path != d.Path {
		t.Errorf("%+v, %v", b, err)
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
				d, err := loopdev.Attach(t.Context(), f, loopdev.Options{})
				f.Close()
				if err != nil {
					t.Error(err)
					return
				}
				d.Close()
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

// As the test's children:
//
//	attach FILE...   attaches all, says the numbers, waits
//	nocontrol FILE   attaches where there is no /dev/loop-control
//	nonodes FILE     attaches where there is a /dev/loop-control only
func TestMain(m *testing.M) {
	role := os.Getenv("PANDO_TEST_CHILD")
	if role == "" {
		os.Exit(m.Run())
	}
	if err := child(role, os.Args[1:]); err != nil {
		fmt.Printf("failed %s %q %s\n", errs.KindOf(err), errs.HintOf(err), err)
		os.Exit(1)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func child(role string, files []string) error {
	if role != "attach" {
		if err := hideDevices(role); err != nil {
			return fmt.Errorf("hiding devices: %v", err)
		}
	}
	var wg sync.WaitGroup
	devices := make([]*loopdev.Device, len(files))
	failures := make([]error, len(files))
	for i, path := range files {
		wg.Go(func() {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				failures[i] = err
				return
			}
			defer f.Close()
			devices[i], failures[i] = loopdev.Attach(context.Background(), f, loopdev.Options{})
		})
	}
	wg.Wait()
	if err := errors.Join(failures...); err != nil {
		return err
	}
	said := "ready"
	for _, d := range devices {
		said += " " + strconv.Itoa(d.Index)
	}
	fmt.Println(said)
	_, _ = io.Copy(io.Discard, os.Stdin)
	return nil
}

func hideDevices(role string) error {
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", 0, ""); err != nil {
		return err
	}
	if role == "nonodes" {
		return unix.Mknod("/dev/loop-control", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 237)))
	}
	return nil
}

type process struct {
	*exec.Cmd
	in   io.WriteCloser
	said []string
}

func startChild(t *testing.T, role string, prepare func(*exec.Cmd), files ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, files...)
	cmd.Env = append(os.Environ(), "PANDO_TEST_CHILD="+role)
	cmd.Stderr = os.Stderr
	if prepare != nil {
		prepare(cmd)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: cmd, in: in}
	t.Cleanup(p.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("child %s: %v", role, err)
	}
	p.said = strings.Fields(line)
	return p
}

func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait()
	_ = p.in.Close()
}

// All ask the kernel for the same free device at the same time.
func TestAttachersRace(t *testing.T) {
	needRoot(t)
	const processes, each = 8, 5
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	var files [processes][]string
	for i := range processes {
		for j := range each {
			files[i] = append(files[i], image(t, dir, fmt.Sprintf("%d%d_", i, j)))
		}
	}
	var children [processes]*process
	var wg sync.WaitGroup
	for i := range processes {
		wg.Go(func() { children[i] = startChild(t, "attach", nil, files[i]...) })
	}
	wg.Wait()
	taken := map[string]string{}
	for i, c := range children {
		if c == nil || c.said[0] != "ready" || len(c.said) != 1+each {
			t.Fatalf("child %d: %+v", i, c)
		}
		for j, n := range c.said[1:] {
			path := files[i][j]
			if other, twice := taken[n]; twice {
				t.Errorf("device %s was given to %s and %s", n, path, other)
			}
			taken[n] = path
			got, err := os.ReadFile("/dev/loop" + n)
			if err != nil || !bytes.Equal(got, content(fmt.Sprintf("%d%d_", i, j))) {
				t.Errorf("device %s does not show %s: %.16q, %v", n, path, got, err)
			}
		}
	}
	for i, c := range children {
		c.kill() // SIGKILL: nobody detaches
		for _, path := range files[i] {
			detached(t, path)
		}
	}
}

func TestKilledBetweenAttachAndMount(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	c := startChild(t, "attach", nil, path)
	if c.said[0] != "ready" {
		t.Fatal(c.said)
	}
	if attached, err := loopdev.Attached(path); err != nil || !attached {
		t.Fatalf("the child attached nothing: %v, %v", attached, err)
	}
	n, _ := strconv.Atoi(c.said[1])
	c.kill()
	detached(t, path)
	if b, err := loopdev.Lookup(n); err == nil && b.SameFile(stat(t, path)) {
		t.Errorf("%+v", b)
	}
}

func TestWithoutLoopDevices(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	for role, hint := range map[string]string{"nocontrol": "modprobe loop", "nonodes": "mknod /dev/loop"} {
		t.Run(role, func(t *testing.T) {
			c := startChild(t, role, func(cmd *exec.Cmd) {
				cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			}, path)
			said := strings.Join(c.said, " ")
			if !strings.HasPrefix(said, "failed "+string(errs.Unsupported)+" ") || !strings.Contains(said, hint) {
				t.Errorf("the child says %q, want kind unsupported and the hint %q", said, hint)
			}
		})
	}
}

func TestNotRoot(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	c := startChild(t, "attach", func(cmd *exec.Cmd) {
		cmd.Path = "/proc/self/exe" // whatever directory this program is in
		cmd.Args[1] = "/proc/self/fd/3"
		cmd.ExtraFiles = []*os.File{open(t, path, os.O_RDWR)}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1234}}
	}, path)
	if said := strings.Join(c.said, " "); !strings.HasPrefix(said, "failed "+string(errs.Permission)+" ") {
		t.Errorf("the child says %q, want kind permission", said)
	}
}
