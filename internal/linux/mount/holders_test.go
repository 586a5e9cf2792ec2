package mount_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

func init() {
	childRoles["mmap"] = func(args []string, ready func(string)) error {
		f, err := os.Open(args[0])
		if err != nil {
			return err
		}
		// At an address that /proc/PID/maps writes with a leading zero.
		const addr, n = 0x8000000, 4096
		if _, _, e := unix.Syscall6(unix.SYS_MMAP, addr, n, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE, f.Fd(),
			0); e != 0 {
			return e
		}
		f.Close()
		ready("")
		return nil
	}
	childRoles["chroot"] = func(args []string, ready func(string)) error {
		if err := unix.Chroot(args[0]); err != nil {
			return err
		}
		if err := unix.Chdir("/"); err != nil {
			return err
		}
		ready("")
		return nil
	}
	childRoles["threadcwd"] = func(args []string, ready func(string)) error {
		return onThread(func() error {
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Chdir(args[0]); err != nil {
				return err
			}
			ready(strconv.Itoa(unix.Gettid()))
			return nil
		})
	}
	childRoles["wait"] = func(args []string, ready func(string)) error {
		ready("")
		return nil
	}
	childRoles["holders"] = func(args []string, ready func(string)) error {
		dev, err := strconv.ParseUint(args[0], 10, 64)
		if err != nil {
			return err
		}
		hs, err := mount.Holders(context.Background(), mount.Query{Dev: dev})
		said := string(errs.KindOf(err))
		for _, h := range hs {
			said += fmt.Sprintf(" %d:%s", h.PID, h.How[0])
		}
		ready(said)
		return nil
	}
}

// held is a volume that something can hold, in each of the two forms.
type held struct {
	volume
	query mount.Query
	image bool
}

// forms runs a test on an image's mount and on a bind mount of a tree.
func forms(t *testing.T, test func(t *testing.T, h held)) {
	needRoot(t)
	t.Run("image", func(t *testing.T) {
		v := mountImage(t, newImage(t, "ext4"), "ext4")
		test(t, held{volume: v, query: mount.Query{Dev: v.dev, At: v.dir}, image: true})
	})
	t.Run("tree", func(t *testing.T) {
		tree, dir := mountTree(t, false)
		test(t, held{volume: volume{dir: dir}, query: mount.Query{Tree: tree, At: dir}})
	})
}

func (h held) holders(t *testing.T) []mount.Holder {
	t.Helper()
	hs, err := mount.Holders(t.Context(), h.query)
	_, hidden := os.Readlink("/proc/1/cwd")
	if err != nil && !(errors.Is(hidden, os.ErrPermission) && strings.HasSuffix(err.Error(), " "+onlyFirst)) {
		t.Error(err)
	}
	return ours(hs)
}

// ours leaves out other people's processes: on this machine, maybe in other
// tests, somebody lists loop devices or makes a mount namespace, and for a
// moment really holds what this test holds.
func ours(hs []mount.Holder) []mount.Holder {
	return slices.DeleteFunc(hs, func(h mount.Holder) bool {
		for pid := h.PID; pid != os.Getpid(); {
			if pid == 0 {
				return h.PID != 0
			}
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err != nil {
				return true
			}
			pid, _ = strconv.Atoi(strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))[1])
		}
		return false
	})
}

// onlyFirst is how Holders says that it could not look at the first process, which
// in some containers and virtual machines is not for root to look at.
var onlyFirst = func() string {
	comm, _ := os.ReadFile("/proc/1/comm")
	return "pid 1 (" + strings.TrimSpace(string(comm)) + ")"
}()

// none fails the test if something holds h, and then unmounts it.
func (h held) none(t *testing.T) {
	t.Helper()
	if hs := h.holders(t); len(hs) != 0 {
		t.Errorf("nothing holds it, but %s", mount.FormatHolders(hs))
	}
	if err := mount.Unmount(h.dir); err != nil {
		t.Error(err)
	}
	if h.image {
		h.gone(t)
	}
}

// one fails the test unless exactly one thing holds h, and returns it.
func (h held) one(t *testing.T) mount.Holder {
	t.Helper()
	hs := h.holders(t)
	if len(hs) != 1 {
		t.Fatalf("%d holders, want 1: %+v", len(hs), hs)
	}
	return hs[0]
}

func wantHow(t *testing.T, h mount.Holder, want ...string) {
	t.Helper()
	if !slices.Equal(h.How, want) {
		t.Errorf("How is %q, want %q", h.How, want)
	}
}

func TestHoldersNone(t *testing.T) {
	forms(t, func(t *testing.T, h held) { h.none(t) })
}

// Each of these makes umount say EBUSY.
func TestHoldersProcesses(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skip("SKIPPED: no sleep(1)")
	}
	for _, c := range []struct {
		name  string
		start func(t *testing.T, dir string) (*child, []string)
	}{
		{"cwd", func(t *testing.T, dir string) (*child, []string) {
			cmd := exec.Command(sleep, "1000")
			cmd.Dir = dir
			return start(t, cmd), []string{"cwd"}
		}},
		{"cwd below", func(t *testing.T, dir string) (*child, []string) {
			cmd := exec.Command(sleep, "1000")
			cmd.Dir = filepath.Join(dir, "sub")
			return start(t, cmd), []string{"cwd"}
		}},
		{"fd", func(t *testing.T, dir string) (*child, []string) {
			f, err := os.Open(filepath.Join(dir, "file"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			cmd := exec.Command(sleep, "1000")
			cmd.Dir = "/"
			cmd.ExtraFiles = []*os.File{f}
			return start(t, cmd), []string{"fd 3 " + filepath.Join(dir, "file")}
		}},
		{"deleted file", func(t *testing.T, dir string) (*child, []string) {
			path := touch(t, filepath.Join(dir, "deleted"))
			f, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(sleep, "1000")
			cmd.Dir = "/"
			cmd.ExtraFiles = []*os.File{f}
			return start(t, cmd), []string{"fd 3 " + path + " (deleted)"}
		}},
		{"mmap", func(t *testing.T, dir string) (*child, []string) {
			path := filepath.Join(dir, "file")
			return startRole(t, "mmap", nil, path), []string{"mmap " + path}
		}},
		{"exe", func(t *testing.T, dir string) (*child, []string) {
			exe := filepath.Join(dir, "program")
			if out, err := exec.Command("cp", sleep, exe).CombinedOutput(); err != nil {
				t.Fatalf("cp: %v: %s", err, out)
			}
			cmd := exec.Command(exe, "1000")
			cmd.Dir = "/"
			return start(t, cmd), []string{"exe"}
		}},
		{"root", func(t *testing.T, dir string) (*child, []string) {
			return startRole(t, "chroot", nil, dir), []string{"cwd", "root"}
		}},
		{"thread's cwd", func(t *testing.T, dir string) (*child, []string) {
			c := startRole(t, "threadcwd", nil, dir)
			return c, []string{"cwd of thread " + c.said}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			forms(t, func(t *testing.T, h held) {
				if err := os.Mkdir(filepath.Join(h.dir, "sub"), 0o755); err != nil {
					t.Fatal(err)
				}
				touch(t, filepath.Join(h.dir, "file"))
				p, how := c.start(t, h.dir)
				wantKind(t, mount.Unmount(h.dir), errs.InUse)
				got := h.one(t)
				wantHow(t, got, how...)
				if got.PID != p.pid() {
					t.Errorf("PID %d, want %d", got.PID, p.pid())
				}
				comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.pid()))
				if err != nil || got.Command != strings.TrimSpace(string(comm)) {
					t.Errorf("Command %q, want %q, %v", got.Command, comm, err)
				}
				if own := namespace(t, "self"); got.MountNS != own {
					t.Errorf("MountNS %d, want %d", got.MountNS, own)
				}
				p.stop()
				h.none(t)
			})
		})
	}
}

func namespace(t *testing.T, pid string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat("/proc/"+pid+"/ns/mnt", &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func TestHoldersSeesOwnProcess(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		f, err := os.Create(filepath.Join(h.dir, "mine"))
		if err != nil {
			t.Fatal(err)
		}
		got := h.one(t)
		wantHow(t, got, fmt.Sprintf("fd %d %s", f.Fd(), f.Name()))
		if got.PID != os.Getpid() {
			t.Errorf("PID %d, want my own", got.PID)
		}
		f.Close()
		h.none(t)
	})
}

func TestHoldersUID(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		if err := os.Chmod(h.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sleep", "1000")
		cmd.Dir = h.dir
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1234}}
		p := start(t, cmd)
		got := h.one(t)
		if got.UID != 1234 || got.PID != p.pid() {
			t.Errorf("%+v, want UID 1234 and PID %d", got, p.pid())
		}
	})
}

// A bind mount's holders are those of that mount, not everybody who works in
// the filesystem that it is a part of.
func TestHoldersOfTreeAreNotThoseOfItsFilesystem(t *testing.T) {
	tree, dir := mountTree(t, false)
	cmd := exec.Command("sleep", "1000")
	cmd.Dir = tree // the original, not the mount
	start(t, cmd)
	other, otherDir := mountTree(t, false)
	cmd = exec.Command("sleep", "1000")
	cmd.Dir = otherDir
	p := start(t, cmd)
	held{volume: volume{dir: dir}, query: mount.Query{Tree: tree, At: dir}}.none(t)
	got := held{query: mount.Query{Tree: other, At: otherDir}}.one(t)
	if got.PID != p.pid() {
		t.Errorf("%+v, want PID %d", got, p.pid())
	}
}

func TestHoldersNestedMount(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		sub := filepath.Join(h.dir, "with space", "sub")
		if err := os.MkdirAll(sub, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", sub, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
		unmountAtEnd(t, sub)
		wantKind(t, mount.Unmount(h.dir), errs.InUse)
		got := h.one(t)
		wantHow(t, got, "mount at "+sub+" below it")
		if got.PID != 0 || got.Mountpoint != sub || got.MountNS != namespace(t, "self") {
			t.Errorf("%+v", got)
		}
		if err := mount.Unmount(sub); err != nil {
			t.Fatal(err)
		}
		h.none(t)
	})
}

// A directory of the volume bound to somewhere else does not hold the mount,
// but what is under it.
func TestHoldersOtherBindMount(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		sub, elsewhere := filepath.Join(h.dir, "sub"), tempDir(t)
		if err := os.Mkdir(sub, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(sub, elsewhere, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		unmountAtEnd(t, elsewhere)
		if err := mount.Unmount(h.dir); err != nil {
			t.Fatal(err)
		}
		got := h.one(t)
		wantHow(t, got, "mounted at "+elsewhere)
		if err := mount.Unmount(elsewhere); err != nil {
			t.Fatal(err)
		}
		if hs := h.holders(t); len(hs) != 0 {
			t.Errorf("%+v", hs)
		}
	})
}

// An overlay keeps the filesystem of its layers even after that is unmounted:
// what a dead Docker leaves behind.
func TestHoldersOverlay(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		for _, d := range []string{"lower", "upper", "work"} {
			if err := os.Mkdir(filepath.Join(h.dir, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		merged := tempDir(t)
		opts := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", h.dir)
		if err := unix.Mount("overlay", merged, "overlay", 0, opts); err != nil {
			t.Skipf("SKIPPED: no overlays here: %v", err)
		}
		unmountAtEnd(t, merged)
		if err := mount.Unmount(h.dir); err != nil {
			t.Fatal(err)
		}
		if h.image && !h.bound(t) {
			t.Error("the loop device is free: the test tests nothing")
		}
		got := h.one(t)
		wantHow(t, got, "overlay at "+merged+" with layers in "+h.dir+"/lower")
	})
}

func TestHoldersLoopDevice(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		file := filepath.Join(h.dir, "disk.img")
		if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		d := testfs.Loop(t, file, 0, loopdev.Options{KeepOpen: true})
		d.Close()
		b, err := loopdev.Lookup(d.Index)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = b.Clear() })
		wantKind(t, mount.Unmount(h.dir), errs.InUse)
		got := h.one(t)
		wantHow(t, got, "loop device "+d.Path+" on "+file)
		if err := b.Clear(); err != nil {
			t.Fatal(err)
		}
		if free, err := loopdev.WaitDetached(t.Context(), file, 10*time.Second); err != nil || !free {
			t.Fatal(free, err)
		}
		h.none(t)
	})
}

func TestHoldersSwapFile(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		file := filepath.Join(h.dir, "swap file")
		if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("mkswap", file).CombinedOutput(); err != nil {
			t.Skipf("SKIPPED: mkswap: %v: %s", err, out)
		}
		if err := swap(unix.SYS_SWAPON, file); err != nil {
			t.Skipf("SKIPPED: this kernel does not swap on it: %v", err)
		}
		t.Cleanup(func() { _ = swap(unix.SYS_SWAPOFF, file) })
		wantKind(t, mount.Unmount(h.dir), errs.InUse)
		got := h.one(t)
		wantHow(t, got, "swap file "+file)
		if err := swap(unix.SYS_SWAPOFF, file); err != nil {
			t.Fatal(err)
		}
		h.none(t)
	})
}

func swap(call uintptr, path string) error {
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	if _, _, e := unix.Syscall(call, uintptr(ptr(p)), 0, 0); e != 0 {
		return e
	}
	return nil
}

// A raw volume is a block device: its holders have the device open.
func TestHoldersOfBlockDevice(t *testing.T) {
	needRoot(t)
	image := newImage(t, "none")
	d := testfs.Loop(t, image, 0, loopdev.Options{})
	f, err := os.Open(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = []*os.File{f}
	p := start(t, cmd)
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	f.Close()
	d.Close()
	v := volume{image: image, loop: d.Index}
	if !v.bound(t) {
		t.Fatal("the child does not hold the device")
	}
	hs, _ := mount.Holders(t.Context(), mount.Query{Dev: st.Rdev})
	if !slices.ContainsFunc(hs, func(h mount.Holder) bool {
		return h.PID == p.pid() && slices.Equal(h.How, []string{"fd 3 " + d.Path})
	}) {
		t.Errorf("%+v, want pid %d", hs, p.pid())
	}
	p.stop()
	v.gone(t)
}

func TestHoldersAreBounded(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		for range 70 {
			cmd := exec.Command("sleep", "1000")
			cmd.Dir = h.dir
			start(t, cmd)
		}
		if hs, _ := mount.Holders(t.Context(), h.query); len(hs) != 64 {
			t.Errorf("%d holders, want 64", len(hs))
		}
	})
}

func TestHoldersCanceled(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := mount.Holders(ctx, h.query)
		wantKind(t, err, errs.Canceled)
	})
}

func TestHoldersNothingAsked(t *testing.T) {
	_, err := mount.Holders(t.Context(), mount.Query{})
	wantKind(t, err, errs.Invalid)
	_, err = mount.Holders(t.Context(), mount.Query{Dev: 1, Tree: "/"})
	wantKind(t, err, errs.Invalid)
	_, err = mount.Holders(t.Context(), mount.Query{Tree: "/pando-no-such-tree"})
	wantKind(t, err, errs.NotFound)
}

// Somebody who is not root gets what is visible, and is told that it is not all.
func TestHoldersNotPermitted(t *testing.T) {
	v := mountImage(t, newImage(t, "ext4"), "ext4")
	if err := os.Chmod(v.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "1000")
	cmd.Dir = v.dir
	hidden := start(t, cmd) // root's
	cmd = exec.Command("sleep", "1000")
	cmd.Dir = v.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1234}}
	visible := start(t, cmd)
	self := copySelf(t)
	c := startRole(t, "holders", func(c *exec.Cmd) {
		c.Path = self
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1234}}
	}, strconv.FormatUint(v.dev, 10))
	if !strings.HasPrefix(c.said, "permission ") || !strings.Contains(c.said, fmt.Sprintf(" %s:cwd", visible)) ||
		strings.Contains(c.said, fmt.Sprintf(" %s:", hidden)) {
		t.Errorf("it found %q, want pid %s, not %s, and an error of kind permission", c.said, visible, hidden)
	}
	if !strings.Contains(c.said, "mounted at "+v.dir) {
		t.Errorf("it found %q, want the mount, which everybody may see", c.said)
	}
	if hs := (held{query: mount.Query{Dev: v.dev, At: v.dir}}).holders(t); len(hs) != 2 {
		t.Errorf("root sees %+v, want both processes", hs)
	}
}

// copySelf copies this program to where everybody may run it.
func copySelf(t *testing.T) string {
	t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(tempDir(t), "program")
	if err := testfs.WriteProgram(to, self); err != nil {
		t.Fatal(err)
	}
	return to
}

// TestEndedProcessIsNotDenied: the kernel answers EACCES for a process that has just ended, which hides nothing.
func TestEndedProcessIsNotDenied(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	base := fmt.Sprintf("/proc/%d", cmd.Process.Pid)
	if !mount.IsDenied(base, unix.EACCES) {
		t.Error("a process that lives is not denied")
	}
	if mount.IsDenied(base, unix.ESRCH) {
		t.Error("another error is a denial")
	}

	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if mount.IsDenied(base, unix.EACCES) {
		t.Error("a process that has ended is denied")
	}
}
