package mount_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// ownerOf returns whom a file belongs to.
func ownerOf(t *testing.T, path string) mount.Owner {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	return mount.Owner{UID: st.Uid, GID: st.Gid}
}

// mapped mounts a tree with two owners swapped.
func mapped(t *testing.T, tree string, a, b mount.Owner) string {
	t.Helper()
	m, err := mount.Tree(tree, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ids, err := mount.SwapOwners(a, b)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.SetIDMap(ids); err != nil {
		t.Fatal(err)
	}
	if err := ids.Close(); err != nil { // the mount keeps it
		t.Fatal(err)
	}
	dir := tempDir(t)
	if _, err := m.MoveTo(dir); err != nil {
		t.Fatal(err)
	}
	unmountAtEnd(t, dir)
	return dir
}

// TestSwapOwners: two owners change places in what a mount shows, and in what is written through it; a user that is not
// one of them stays who they are.
func TestSwapOwners(t *testing.T) {
	needRoot(t)
	for name, tree := range map[string]string{
		"ext4": testfs.Ext4(t, 64<<20), "xfs": testfs.XFS(t, 512<<20), "btrfs": testfs.Btrfs(t, 512<<20),
	} {
		t.Run(name, func(t *testing.T) {
			for _, c := range []struct{ a, b mount.Owner }{
				{mount.Owner{}, mount.Owner{UID: 1001, GID: 1002}},
				{mount.Owner{UID: 1001, GID: 50}, mount.Owner{UID: 7, GID: 50}}, // the group is the same
				{mount.Owner{UID: 1<<32 - 2, GID: 1<<32 - 2}, mount.Owner{UID: 0, GID: 1}},
			} {
				third := mount.Owner{UID: 1234, GID: 5678}
				dir := filepath.Join(tree, "dir")
				if err := os.Mkdir(dir, 0o777); err != nil {
					t.Fatal(err)
				}
				for file, o := range map[string]mount.Owner{".": c.a, "a": c.a, "b": c.b, "third": third} {
					path := filepath.Join(dir, file)
					if file != "." {
						touch(t, path)
					}
					if err := os.Lchown(path, int(o.UID), int(o.GID)); err != nil {
						t.Fatal(err)
					}
				}

				shown := mapped(t, dir, c.a, c.b)
				cmd := exec.Command("touch", filepath.Join(shown, "by b"))
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: c.b.UID, Gid: c.b.GID}}
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("%+v: the owner cannot write: %v: %s", c, err, out)
				}
				for file, want := range map[string][2]mount.Owner{ // stored, shown
					".": {c.a, c.b}, "a": {c.a, c.b}, "b": {c.b, c.a}, "third": {third, third}, "by b": {c.a, c.b},
				} {
					got := [2]mount.Owner{ownerOf(t, filepath.Join(dir, file)), ownerOf(t, filepath.Join(shown, file))}
					if got != want {
						t.Errorf("%+v: %s belongs to %+v, want %+v", c, file, got, want)
					}
				}
				if err := mount.Unmount(shown); err != nil {
					t.Fatal(err)
				}
				if err := os.RemoveAll(dir); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestSetIDMapUnsupported: what cannot show other owners says so.
func TestSetIDMapUnsupported(t *testing.T) {
	needRoot(t)
	m, err := mount.Tree("/proc", true)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ids, err := mount.SwapOwners(mount.Owner{}, mount.Owner{UID: 1, GID: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer ids.Close()
	wantKind(t, m.SetIDMap(ids), errs.Unsupported)
}
