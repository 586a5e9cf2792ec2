package mount_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

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
			d := testfs.Loop(t, image, 0, loopdev.Options{})
			m, err := mount.Device("ext4", d.Path, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			info, err := m.MoveTo(dir)
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
			if hs, _ := mount.Holders(t.Context(), mount.Query{Dev: info.Dev}); len(ours(hs)) != 2 {
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
			p := keepable(t, pin)
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
