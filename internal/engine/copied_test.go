package engine_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestCopiedPool: the catalogue of a copied pool records what the original has mounted. No
// command on the copy takes that away.
func TestCopiedPool(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	for _, driver := range []string{"reflink", plain.Name} {
		t.Run(driver, func(t *testing.T) {
			disk := testfs.XFS(t, 512<<20)
			e := newPool(t, disk, engine.InitRequest{Driver: driver, MinFreePercent: 1})
			importTree(t, e, "g", source(t))
			clone(t, e, "g", "a", false)
			clone(t, e, "g", "b", false)
			other := filepath.Join(disk, "other")
			for name, dir := range map[string]string{"a": "", "b": other} {
				if _, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(name), Dir: dir}); err != nil {
					t.Fatal(err)
				}
			}
			mounted := func(when string) {
				t.Helper()
				for _, at := range []string{filepath.Join(e.Dir(), "mnt", "a"), other} {
					if m, err := kernel.MountAt(unix.AT_FDCWD, at); err != nil || !m.Root {
						t.Errorf("%s: %s is not mounted any more (%v)", when, at, err)
					}
				}
			}

			copied := filepath.Join(disk, "copy")
			if out, err := exec.Command("cp", "-ax", "--reflink=auto", e.Dir(), copied).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := os.RemoveAll(filepath.Join(copied, "mnt", "a")); err != nil { // what cp found mounted
				t.Fatal(err)
			}
			c := open(t, copied)
			if _, err := c.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("a")}); err != nil {
				t.Error(err)
			}
			mounted("umount")
			if info, err := c.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("a")}); err != nil ||
				info.Mountpoint != filepath.Join(copied, "mnt", "a") {
				t.Errorf("mount: %+v, %v", info, err)
			}
			destroy(t, c, "a", "b")
			mounted("destroy")
			c.Close()
			if _, err := engine.Deinit(t.Context(), engine.DeinitRequest{Dir: copied, Force: true}, drivers, nil); err != nil {
				t.Error(err)
			}
			mounted("deinit")
			for _, name := range []string{"a", "b"} {
				if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(name)}); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
