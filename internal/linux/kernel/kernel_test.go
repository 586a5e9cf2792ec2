package kernel_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

const mib = 1 << 20

func create(t *testing.T, path string, data []byte) *os.File {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	return f
}

func openDir(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestReflink(t *testing.T) {
	for kind, mk := range map[string]func(testing.TB, int64) string{"xfs": testfs.XFS, "btrfs": testfs.Btrfs} {
		t.Run(kind, func(t *testing.T) {
			dir := mk(t, 0)
			data := bytes.Repeat([]byte("0123456789abcdef"), mib/16)
			a, b := create(t, filepath.Join(dir, "a"), data), create(t, filepath.Join(dir, "b"), []byte("replaced"))
			if err := kernel.Reflink(b, a); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(b.Name()); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
			if _, err := b.WriteAt([]byte("changed"), 4096); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(a.Name()); err != nil || !bytes.Equal(got, data) {
				t.Error("writing the clone changed its origin", err)
			}
			elsewhere := create(t, filepath.Join(t.TempDir(), "c"), nil)
			if err := kernel.Reflink(elsewhere, a); !errors.Is(err, unix.EXDEV) || !errs.Is(err, errs.Unsupported) {
				t.Errorf("to another filesystem: %v", err)
			}
		})
	}
	t.Run("ext4", func(t *testing.T) {
		dir := testfs.Ext4(t, 16*mib)
		a, b := create(t, filepath.Join(dir, "a"), []byte("a")), create(t, filepath.Join(dir, "b"), nil)
		if err := kernel.Reflink(b, a); !errors.Is(err, unix.EOPNOTSUPP) || !errs.Is(err, errs.Unsupported) {
			t.Errorf("where there are no reflinks: %v", err)
		}
	})
}

// image is a mounted image, whose parts the tests get at.
type image struct {
	path, dir string
	loop      int
}

func mounted(t *testing.T, fstype string, size int64, o loopdev.Options) image {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	top := t.TempDir()
	testfs.LeakCheck(t, top)
	i := image{path: filepath.Join(top, "image"), dir: filepath.Join(top, "mnt")}
	f := create(t, i.path, nil)
	if err := errors.Join(f.Truncate(size), os.Mkdir(i.dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	args := []string{"-q", i.path}
	if fstype == "xfs" && o.SectorBytes != 0 {
		args = append([]string{"-s", fmt.Sprintf("size=%d", o.SectorBytes)}, args...)
	}
	if out, err := exec.Command("mkfs."+fstype, args...).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: mkfs.%s: %v: %s", fstype, err, out)
	}
	d, err := loopdev.Attach(t.Context(), f, o)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	defer d.Close()
	i.loop = d.Index
	m, err := mount.Device(fstype, d.Path, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(i.dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.Unmount(i.dir); err != nil {
			t.Error(err)
		}
	})
	return i
}

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// Deleted bytes return to the pool.
func TestTrim(t *testing.T) {
	for fstype, size := range map[string]int64{"ext4": 64 * mib, "xfs": 320 * mib} {
		t.Run(fstype, func(t *testing.T) {
			i := mounted(t, fstype, size, loopdev.Options{})
			f := create(t, filepath.Join(i.dir, "f"), bytes.Repeat([]byte("x"), 16*mib))
			if err := f.Sync(); err != nil {
				t.Fatal(err)
			}
			f.Close()
			full := allocated(t, i.path)
			if err := os.Remove(f.Name()); err != nil {
				t.Fatal(err)
			}
			dir := openDir(t, i.dir)
			defer dir.Close()
			// XFS frees in the background, but before it freezes; ext4 trims
			// what its journal has committed.
			if err := errors.Join(kernel.Freeze(dir), kernel.Thaw(dir)); err != nil {
				t.Fatal(err)
			}
			if _, err := kernel.Trim(dir, 1<<40); !errors.Is(err, unix.EINVAL) {
				t.Errorf("no free range can be a terabyte long: %v", err)
			}
			n, err := kernel.Trim(dir, 0)
			if err != nil || n < 16*mib || n > size {
				t.Errorf("trimmed %d bytes, %v", n, err)
			}
			if after := allocated(t, i.path); after > full-15*mib {
				t.Errorf("the image takes %d bytes, before %d", after, full)
			}
		})
	}
	dir := openDir(t, testfs.Tmpfs(t, mib))
	if _, err := kernel.Trim(dir, 0); !errs.Is(err, errs.Unsupported) {
		t.Errorf("on tmpfs: %v", err)
	}
	dir.Close()
}

func TestFreeze(t *testing.T) {
	for fstype, size := range map[string]int64{"ext4": 64 * mib, "xfs": 320 * mib} {
		t.Run(fstype, func(t *testing.T) {
			i := mounted(t, fstype, size, loopdev.Options{})
			if err := os.WriteFile(filepath.Join(i.dir, "before"), []byte("unsynced"), 0o600); err != nil {
				t.Fatal(err)
			}
			dir := openDir(t, i.dir)
			defer dir.Close()
			if err := kernel.Thaw(dir); !errors.Is(err, unix.EINVAL) {
				t.Errorf("thawing what is not frozen: %v", err)
			}
			if err := kernel.Freeze(dir); err != nil {
				t.Fatal(err)
			}
			defer kernel.Thaw(dir)
			if err := kernel.Freeze(dir); !errors.Is(err, unix.EBUSY) || !errs.Is(err, errs.InUse) {
				t.Errorf("freezing twice: %v", err)
			}
			// Writers wait.
			tid, written := make(chan int), make(chan error, 1)
			go func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				tid <- unix.Gettid()
				written <- os.WriteFile(filepath.Join(i.dir, "during"), []byte("x"), 0o600)
			}()
			thread := <-tid
			for state := ""; state != "D"; state = threadState(t, thread) {
				select {
				case err := <-written:
					t.Fatalf("a frozen filesystem was written: %v", err)
				default:
				}
			}
			// What is on the device is complete and clean.
			copied := filepath.Join(t.TempDir(), "copy")
			if out, err := exec.Command("cp", "--sparse=always", i.path, copied).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := kernel.Thaw(dir); err != nil {
				t.Fatal(err)
			}
			if err := <-written; err != nil {
				t.Errorf("the writer that waited: %v", err)
			}
			got := readInside(t, fstype, copied)
			if got["before"] != "unsynced" {
				t.Errorf("what was written before freezing is not on the device: %q", got)
			}
			if _, there := got["during"]; there {
				t.Error("what was written after freezing is on the device")
			}
		})
	}
}

func threadState(t *testing.T, tid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", tid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))[0]
}

// readInside reads the files in an image that is mounted read-only, without
// replaying a journal: it has to be clean.
func readInside(t *testing.T, fstype, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	d, err := loopdev.Attach(t.Context(), f, loopdev.Options{ReadOnly: true})
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	options := map[string][]string{"ext4": {"noload"}, "xfs": {"norecovery", "nouuid"}}[fstype]
	m, err := mount.Device(fstype, d.Path, options, true)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	root, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	out := map[string]string{}
	names, err := root.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/%s", root.Fd(), name))
		out[name] = string(b)
	}
	return out
}

func TestGrow(t *testing.T) {
	for fstype, size := range map[string]int64{"ext4": 64 * mib, "xfs": 320 * mib} {
		t.Run(fstype, func(t *testing.T) {
			grow := map[string]func(*os.File, int64) error{"ext4": kernel.GrowExt4, "xfs": kernel.GrowXFS}[fstype]
			i := mounted(t, fstype, size, loopdev.Options{})
			if err := os.WriteFile(filepath.Join(i.dir, "f"), []byte("kept"), 0o600); err != nil {
				t.Fatal(err)
			}
			dir := openDir(t, i.dir)
			defer dir.Close()
			blocks := func() uint64 {
				var st unix.Statfs_t
				if err := unix.Statfs(i.dir, &st); err != nil {
					t.Fatal(err)
				}
				return st.Blocks * uint64(st.Bsize)
			}
			before := blocks()
			if err := grow(dir, size); fstype == "ext4" && errors.Is(err, unix.EPERM) {
				t.Skipf("SKIPPED: %v", err)
			}
			if err := grow(dir, size); err != nil || blocks() != before {
				t.Errorf("to the size that it has: %v, %d bytes before, %d after", err, before, blocks())
			}
			if err := grow(dir, 2*size); err == nil {
				t.Error("it grew beyond its device")
			}
			if err := os.Truncate(i.path, 2*size); err != nil {
				t.Fatal(err)
			}
			d, err := os.Open(fmt.Sprintf("/dev/loop%d", i.loop))
			if err != nil {
				t.Fatal(err)
			}
			err = unix.IoctlSetInt(int(d.Fd()), unix.LOOP_SET_CAPACITY, 0)
			d.Close()
			if err != nil {
				t.Fatal(err)
			}
			if err := grow(dir, 2*size); err != nil {
				t.Fatal(err)
			}
			if after := blocks(); after < before+uint64(size)*9/10 {
				t.Errorf("%d bytes before, %d after", before, after)
			}
			if b, err := os.ReadFile(filepath.Join(i.dir, "f")); err != nil || string(b) != "kept" {
				t.Errorf("%q, %v", b, err)
			}
			// Nothing shrinks.
			grown := blocks()
			err = grow(dir, size)
			if fstype == "ext4" && !errs.Is(err, errs.Invalid) || fstype == "xfs" && err != nil || blocks() != grown {
				t.Errorf("to a smaller size: %v, %d bytes before, %d after", err, grown, blocks())
			}
		})
	}
	t.Run("wrong filesystem", func(t *testing.T) {
		dir := openDir(t, testfs.Tmpfs(t, mib))
		defer dir.Close()
		for _, grow := range []func(*os.File, int64) error{kernel.GrowExt4, kernel.GrowXFS} {
			if err := grow(dir, mib); !errs.Is(err, errs.Unsupported) {
				t.Errorf("%v", err)
			}
		}
	})
}

func TestMountAt(t *testing.T) {
	dir := testfs.Tmpfs(t, mib)
	at := func(path string) kernel.MountInfo {
		t.Helper()
		m, err := kernel.MountAt(unix.AT_FDCWD, path)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	sub := filepath.Join(dir, "sub")
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	root, below, parent := at(dir), at(sub), at(filepath.Dir(dir))
	var st unix.Stat_t
	if err := unix.Stat(sub, &st); err != nil {
		t.Fatal(err)
	}
	if !root.Root || below.Root || root.ID != below.ID || root.ID == parent.ID || below.Dev != st.Dev ||
		below.Ino != st.Ino {
		t.Errorf("root %+v, below %+v, parent %+v", root, below, parent)
	}
	f := openDir(t, sub)
	if m, err := kernel.MountAt(int(f.Fd()), ""); err != nil || m != below {
		t.Errorf("by descriptor %+v, %v", m, err)
	}
	if m, err := kernel.MountAt(int(openDirOnce(t, dir).Fd()), "sub"); err != nil || m != below {
		t.Errorf("by name in a descriptor %+v, %v", m, err)
	}
	f.Close()
	link := filepath.Join(filepath.Dir(dir), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if m := at(link); m.ID != parent.ID || m.Root {
		t.Errorf("a symbolic link was followed: %+v", m)
	}
	if _, err := kernel.MountAt(unix.AT_FDCWD, filepath.Join(dir, "missing")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("missing: %v", err)
	}
	// Mounted again it is another mount.
	m, err := mount.Tree(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(sub); err != nil {
		t.Fatal(err)
	}
	m.Close()
	if again := at(sub); !again.Root || again.ID == root.ID || again.Dev != root.Dev || again.Ino != root.Ino {
		t.Errorf("%+v, want another ID than %+v", again, root)
	}
	if err := mount.Unmount(sub); err != nil {
		t.Fatal(err)
	}
}

// openDirOnce opens a directory for one look, so that it is not busy later.
func openDirOnce(t *testing.T, path string) *os.File {
	t.Helper()
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { f.Close() })
	return f
}

func TestDirectIOAlign(t *testing.T) {
	for _, sector := range []uint32{512, 4096} {
		i := mounted(t, "xfs", 320*mib, loopdev.Options{SectorBytes: sector})
		f := create(t, filepath.Join(i.dir, "f"), nil)
		if got := directIOAlign(f); got != sector {
			t.Errorf("on a device with sectors of %d bytes: %d", sector, got)
		}
		d, err := unix.Open(f.Name(), unix.O_RDWR|unix.O_DIRECT, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Pwrite(d, make([]byte, sector/2), 0); !errors.Is(err, unix.EINVAL) {
			t.Errorf("half of it may be written: %v", err)
		}
		unix.Close(d)
		f.Close()
		dir := openDir(t, i.dir)
		if got := directIOAlign(dir); got != 0 {
			t.Errorf("of a directory: %d", got)
		}
		dir.Close()
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if got := directIOAlign(r); got != 0 {
		t.Errorf("of a pipe: %d", got)
	}
}

func TestProcStart(t *testing.T) {
	me := kernel.ProcStart(os.Getpid())
	if me == 0 || me != kernel.ProcStart(os.Getpid()) {
		t.Errorf("my own start: %d", me)
	}
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skip("SKIPPED: no sleep(1)")
	}
	// A process may be called anything, also what looks like other fields.
	for _, name := range []string{"sleep", "a b", ") Z 1 (", "1) R 2 3 4", "\n)"} {
		link := filepath.Join(t.TempDir(), name)
		if err := os.Symlink(sleep, link); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(link, "1000")
		cmd.Args[0] = "sleep"
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		pid := cmd.Process.Pid
		start := kernel.ProcStart(pid)
		if start < me || start > me+1000*3600 {
			t.Errorf("a child %q started at %d, its parent at %d", name, start, me)
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		b = bytes.Replace(b, []byte("("+name+")"), []byte("()"), 1)
		if want := strconv.FormatUint(start, 10); err != nil || strings.Fields(string(b))[21] != want {
			t.Errorf("start %s, /proc says %q, %v", want, b, err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		// Dead, but nobody has waited for it yet.
		if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
			t.Fatal(err)
		}
		if got := kernel.ProcStart(pid); got != 0 {
			t.Errorf("a zombie started at %d", got)
		}
		_ = cmd.Wait()
		if got := kernel.ProcStart(pid); got != 0 {
			t.Errorf("nobody started at %d", got)
		}
	}
	if kernel.ProcStart(-1) != 0 || kernel.ProcStart(1<<30) != 0 {
		t.Error("an impossible process has a start")
	}
}

func init() {
	if os.Getenv("PANDO_TEST_CHILD") == "leaderless" {
		runtime.LockOSThread() // main stays on the first thread
	}
}

func TestMain(m *testing.M) {
	if os.Getenv("PANDO_TEST_CHILD") != "leaderless" {
		os.Exit(m.Run())
	}
	go func() {
		pid := os.Getpid()
		for {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if strings.HasPrefix(string(b[bytes.LastIndexByte(b, ')')+1:]), " Z ") {
				break
			}
		}
		fmt.Println("the first thread is dead")
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // of this thread only
}

// The first thread of a process can end before the others.
func TestProcStartWithoutFirstThread(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "PANDO_TEST_CHILD=leaderless")
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
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Errorf("%q, %v", line, err)
	} else if kernel.ProcStart(cmd.Process.Pid) == 0 {
		t.Error("a living process has no start")
	}
	in.Close()
	_ = cmd.Wait()
}

func TestBootID(t *testing.T) {
	id := kernel.BootID()
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	if id != strings.TrimSpace(string(b)) || len(id) != 36 || id != kernel.BootID() {
		t.Errorf("%q, the kernel says %q", id, b)
	}
}

// Another ID is a proof of another boot only for what is older than this boot.
func TestEarlierBoot(t *testing.T) {
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		t.Fatal(err)
	}
	booted := time.Now().Add(-time.Duration(up.Nano()))
	for _, c := range []struct {
		what string
		id   string
		at   time.Time
		want bool
	}{
		{"of this boot", kernel.BootID(), time.Now(), false},
		{"of this boot, before the clock was set", kernel.BootID(), booted.Add(-time.Hour), false},
		{"of this boot, seen from a container", "another", time.Now(), false},
		{"of this boot, soon after it began", "another", booted.Add(time.Second), false},
		{"in the future", "another", time.Now().Add(time.Hour), false},
		{"of an earlier boot", "another", booted.Add(-time.Second), true},
		{"at no known time", "another", time.Time{}, true},
		{"without an ID", "", time.Time{}, true},
	} {
		if got := kernel.EarlierBoot(c.id, c.at); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

func TestMountNamespace(t *testing.T) {
	mine, err := kernel.MountNamespace()
	if err != nil || mine == 0 {
		t.Fatal(mine, err)
	}
	link, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil || link != fmt.Sprintf("mnt:[%d]", mine) {
		t.Errorf("%d, the kernel says %s, %v", mine, link, err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestMountNamespace$", "-test.v")
	if os.Getenv("PANDO_TEST_CHILD") != "" {
		fmt.Println("namespace", mine)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: another mount namespace needs root")
	}
	cmd.Env = append(os.Environ(), "PANDO_TEST_CHILD=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.WaitDelay = time.Minute
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), "namespace ") ||
		strings.Contains(string(out), fmt.Sprintf("namespace %d\n", mine)) {
		t.Errorf("a child in another namespace says %q, %v; mine is %d", out, err, mine)
	}
}

// What filesystems say of how they were made is what they were made with.
func TestGeometry(t *testing.T) {
	xfs := openDir(t, testfs.XFS(t, 320*mib))
	if n, err := kernel.XFSSectorBytes(xfs); err != nil || n != 512 {
		t.Errorf("an XFS on a loop device has sectors of %d bytes, not 512: %v", n, err)
	}
	btrfs := openDir(t, testfs.Btrfs(t, 128*mib))
	total, allocated, err := kernel.BtrfsDeviceBytes(btrfs, 1)
	if err != nil || total != 128*mib || allocated <= 0 || allocated > total {
		t.Errorf("%d of %d bytes of the btrfs are allocated: %v", allocated, total, err)
	}
	if _, _, err := kernel.BtrfsDeviceBytes(btrfs, 2); !errors.Is(err, unix.ENODEV) {
		t.Errorf("a second device: %v", err)
	}
	if _, _, err := kernel.BtrfsDeviceBytes(xfs, 1); !errors.Is(err, unix.ENOTTY) {
		t.Errorf("devices of btrfs on XFS: %v", err)
	}
	if is, err := kernel.BtrfsScrubbing(btrfs, 1); err != nil || is { // a test of doctor has one that is
		t.Errorf("a btrfs is being scrubbed: %v, %v", is, err)
	}
	if _, err := kernel.XFSSectorBytes(btrfs); !errors.Is(err, unix.ENOTTY) {
		t.Errorf("sectors of XFS on btrfs: %v", err)
	}
}

// directIOAlign returns the alignment in bytes that direct I/O on f needs, or 0
// if f does not allow direct I/O or the kernel does not say (before Linux 6.1).
func directIOAlign(f *os.File) uint32 {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err != nil ||
		st.Mask&unix.STATX_DIOALIGN == 0 {
		return 0
	}
	return st.Dio_offset_align
}
