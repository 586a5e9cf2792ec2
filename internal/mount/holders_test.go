package mount_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/errs"
	"pando/internal/loopdev"
	"pando/internal/mount"

	"golang.org/x/sys/unix"
)

func init() {
	childRoles["mmap"] = func(args []string, ready func(string)) error {
		f, err := os.Open(args[0])
		if err != nil {
			return err
		}
		m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
		if err != nil {
			return err
		}
		f.Close()
		ready("")
		return unix.Munmap(m)
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
		ready(fmt.Sprintf("%d %s", len(hs), errs.KindOf(err)))
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
	return hs
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

// A process in another mount namespace keeps a copy of the mount after it was
// unmounted here, as a container does: nobody has a file open.
func TestHoldersOtherNamespace(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		p := startRole(t, "wait", func(c *exec.Cmd) {
			c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		})
		check := func(when string) {
			t.Helper()
			got := h.one(t)
			ns := namespace(t, p.String())
			if ns == namespace(t, "self") {
				t.Fatal("the child is not in a mount namespace of its own")
			}
			wantHow(t, got, fmt.Sprintf("mounted at %s in mount namespace %d (pid %d, %s)", h.dir, ns, p.pid(), got.Command))
			if got.MountNS != ns || got.Mountpoint != h.dir || got.PID != p.pid() || got.Command == "" {
				t.Errorf("%s: %+v", when, got)
			}
		}
		check("mounted here too")
		if err := mount.Unmount(h.dir); err != nil {
			t.Fatal(err)
		}
		check("unmounted here")
		if h.image && !h.bound(t) {
			t.Error("the loop device is free: the test tests nothing")
		}
		p.stop()
		if hs := h.holders(t); len(hs) != 0 {
			t.Errorf("the namespace is gone, but %+v", hs)
		}
		if h.image {
			h.gone(t)
		}
	})
}

// The same, with a process that works in its copy.
func TestHoldersProcessInOtherNamespace(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		p := startRole(t, "wait", func(c *exec.Cmd) {
			c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			c.Dir = h.dir
		})
		if err := mount.Unmount(h.dir); err != nil {
			t.Fatal(err)
		}
		hs := h.holders(t)
		if len(hs) != 2 {
			t.Fatalf("%+v, want the process and the mount", hs)
		}
		wantHow(t, hs[0], "cwd")
		if hs[0].PID != p.pid() || hs[1].Mountpoint != h.dir {
			t.Errorf("%+v", hs)
		}
		p.stop()
	})
}

// Where mounts propagate, the copies in other namespaces go with ours: they are
// not what holds it.
func TestHoldersPropagatedCopies(t *testing.T) {
	needRoot(t)
	shared := tempDir(t)
	if err := unix.Mount(shared, shared, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	unmountAtEnd(t, shared)
	if err := unix.Mount("", shared, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	for _, propagation := range []uintptr{unix.MS_SHARED, unix.MS_SLAVE} {
		name := map[uintptr]string{unix.MS_SHARED: "shared", unix.MS_SLAVE: "slave"}[propagation]
		t.Run(name, func(t *testing.T) {
			p := startRole(t, "namespace", nil, shared, strconv.Itoa(int(propagation)))
			dir := filepath.Join(shared, name)
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			image := newImage(t, "ext4")
			d := attach(t, image, loopdev.Options{})
			m, err := mount.Device("ext4", d.Path, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			info, err := m.Attach(dir)
			if err != nil {
				t.Fatal(err)
			}
			m.Close()
			d.Close()
			unmountAtEnd(t, dir)
			v := volume{image: image, dir: dir, loop: d.Index}
			table, err := os.ReadFile("/proc/" + p.String() + "/mountinfo")
			if err != nil || !strings.Contains(string(table), " "+dir+" ") {
				t.Fatalf("the mount did not propagate: the test tests nothing (%v)", err)
			}
			h := held{volume: v, query: mount.Query{Dev: info.Dev, At: dir}, image: true}
			if hs := h.holders(t); len(hs) != 0 {
				t.Errorf("propagated copies were reported: %+v", hs)
			}
			if hs, _ := mount.Holders(t.Context(), mount.Query{Dev: info.Dev}); len(hs) != 2 {
				t.Errorf("without At, %+v, want both mounts", hs)
			}
			h.none(t)
		})
	}
}

func init() {
	// A mount namespace of its own, in which one directory still propagates.
	childRoles["namespace"] = func(args []string, ready func(string)) error {
		flags, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		return onThread(func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", args[0], "", uintptr(flags), ""); err != nil {
				return err
			}
			ready("")
			return nil
		})
	}
}

// A namespace can live in one thread, and without any process, pinned by a file.
func TestHoldersOddNamespaces(t *testing.T) {
	t.Run("thread", func(t *testing.T) {
		forms(t, func(t *testing.T, h held) {
			p := startRole(t, "nsthread", nil)
			if err := mount.Unmount(h.dir); err != nil {
				t.Fatal(err)
			}
			got := h.one(t)
			if got.PID != p.pid() || got.Mountpoint != h.dir || strconv.FormatUint(got.MountNS, 10) != p.said {
				t.Errorf("%+v, want pid %d, namespace %s", got, p.pid(), p.said)
			}
		})
	})
	t.Run("bind mount", func(t *testing.T) {
		forms(t, func(t *testing.T, h held) {
			dir := tempDir(t)
			if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			unmountAtEnd(t, dir)
			if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
				t.Fatal(err)
			}
			pin := touch(t, filepath.Join(dir, "pin"))
			p := startRole(t, "wait", func(c *exec.Cmd) {
				c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			})
			ns := namespace(t, p.String())
			if err := unix.Mount("/proc/"+p.String()+"/ns/mnt", pin, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			unmountAtEnd(t, pin)
			p.stop()
			if err := mount.Unmount(h.dir); err != nil {
				t.Fatal(err)
			}
			got := h.one(t)
			wantHow(t, got, fmt.Sprintf("mounted at %s in mount namespace %d (kept by %s)", h.dir, ns, pin))
			if own := namespace(t, "thread-self"); own != namespace(t, "self") {
				t.Error("looking into the namespace changed our own")
			}
			if err := mount.Unmount(pin); err != nil {
				t.Fatal(err)
			}
			if hs := h.holders(t); len(hs) != 0 {
				t.Errorf("unpinned, but %+v", hs)
			}
		})
	})
	t.Run("descriptor", func(t *testing.T) {
		forms(t, func(t *testing.T, h held) {
			p := startRole(t, "wait", func(c *exec.Cmd) {
				c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			})
			f, err := os.Open("/proc/" + p.String() + "/ns/mnt")
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			p.stop()
			if err := mount.Unmount(h.dir); err != nil {
				t.Fatal(err)
			}
			got := h.one(t)
			if !strings.Contains(got.How[0], fmt.Sprintf("(kept by pid %d, ", os.Getpid())) {
				t.Errorf("%+v, want this process named", got)
			}
		})
	})
}

func init() {
	childRoles["nsthread"] = func(args []string, ready func(string)) error {
		return onThread(func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Stat("/proc/thread-self/ns/mnt", &st); err != nil {
				return err
			}
			ready(strconv.FormatUint(st.Ino, 10))
			return nil
		})
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
		d := attach(t, file, loopdev.Options{KeepOpen: true})
		d.Close()
		t.Cleanup(func() { _ = loopdev.Clear(d.Index) })
		wantKind(t, mount.Unmount(h.dir), errs.InUse)
		got := h.one(t)
		wantHow(t, got, "loop device "+d.Path+" on "+file)
		if err := loopdev.Clear(d.Index); err != nil {
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
	d := attach(t, image, loopdev.Options{})
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
	h := held{volume: v, query: mount.Query{Dev: st.Rdev}}
	got := h.one(t)
	wantHow(t, got, "fd 3 "+d.Path)
	if got.PID != p.pid() {
		t.Errorf("%+v, want pid %d", got, p.pid())
	}
	p.stop()
	h.gone(t)
}

func TestHoldersAreBounded(t *testing.T) {
	forms(t, func(t *testing.T, h held) {
		for range 70 {
			cmd := exec.Command("sleep", "1000")
			cmd.Dir = h.dir
			start(t, cmd)
		}
		if hs := h.holders(t); len(hs) != 64 {
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
	start(t, cmd) // root's: not visible
	visible := exec.Command("sleep", "1000")
	visible.Dir = v.dir
	visible.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1234}}
	start(t, visible)
	self := copySelf(t)
	c := startRole(t, "holders", func(c *exec.Cmd) {
		c.Path = self
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1234}}
	}, strconv.FormatUint(v.dev, 10))
	// Its own kind, and the mount, which every process of this namespace shows.
	if c.said != "2 permission" {
		t.Errorf("it found %q, want two holders and an error of kind permission", c.said)
	}
	if hs := (held{query: mount.Query{Dev: v.dev, At: v.dir}}).holders(t); len(hs) != 2 {
		t.Errorf("root sees %+v, want both processes", hs)
	}
}

// copySelf copies this program to where everybody may run it.
func copySelf(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(tempDir(t), "program")
	in, err := os.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(out.Sync(), out.Close()); err != nil {
		t.Fatal(err)
	}
	return to
}
