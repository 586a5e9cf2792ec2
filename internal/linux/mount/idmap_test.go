package mount_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// ownerOf returns the owner of a file as UID and GID.
func ownerOf(t *testing.T, path string) [2]uint32 {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	sys := st.Sys().(*syscall.Stat_t)
	return [2]uint32{sys.Uid, sys.Gid}
}

// makeOwned makes a file of an owner.
func makeOwned(t *testing.T, path string, uid, gid int) {
	t.Helper()
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Lchown(path, uid, gid); err != nil {
		t.Fatal(err)
	}
}

// TestMapIDs: two owners are exchanged in the mount, and others stay, in both directions, up to the largest ID.
func TestMapIDs(t *testing.T) {
	needRoot(t)
	const user, group = 4711, 1 << 30
	const last = 1<<32 - 2
	for _, kind := range []string{"ext4", "xfs", "btrfs", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			dir, at := testfs.New(t, kind, 400<<20).Dir(), t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "tree"), 0o755); err != nil {
				t.Fatal(err)
			}
			dir = filepath.Join(dir, "tree")
			makeOwned(t, dir+"/root", 0, 0)
			makeOwned(t, dir+"/user", user, group)
			makeOwned(t, dir+"/other", 1000, 50)
			makeOwned(t, dir+"/last", last, last)

			m, err := mount.Tree(dir, false)
			if err != nil {
				t.Fatal(err)
			}
			if uid, gid, err := m.Owner(); err != nil || uid != 0 || gid != 0 {
				t.Fatalf("owner of the root: %d, %d, %v", uid, gid, err)
			}
			if err := m.MapIDs(mount.IDMap{Users: mount.Exchange{B: user}, Groups: mount.Exchange{A: group}}); err != nil {
				t.Fatal(err)
			}
			if _, err := m.MoveTo(at); err != nil {
				t.Fatal(err)
			}
			m.Close() // or it could not be unmounted
			defer func() {
				if err := mount.Unmount(at); err != nil {
					t.Error(err)
				}
			}()

			// What is there has changed its owner.
			for name, want := range map[string][2]uint32{
				"root": {user, group}, "user": {0, 0}, "other": {1000, 50}, "last": {last, last}, ".": {user, group},
			} {
				if got := ownerOf(t, filepath.Join(at, name)); got != want {
					t.Errorf("%s belongs to %d, wanted %d", name, got, want)
				}
			}

			// What is made there changes it back.
			makeOwned(t, at+"/new", user, group)
			makeOwned(t, at+"/by-root", 0, 0)
			if got := ownerOf(t, dir+"/new"); got != [2]uint32{} {
				t.Errorf("on disk, the user's file belongs to %d", got)
			}
			if got := ownerOf(t, dir+"/by-root"); got != [2]uint32{user, group} {
				t.Errorf("on disk, root's file belongs to %d", got)
			}
		})
	}
}

// TestMapNothing: a map that changes nothing costs nothing, not even a kernel that can do it.
func TestMapNothing(t *testing.T) {
	var never *mount.Detached
	if err := never.MapIDs(mount.IDMap{Users: mount.Exchange{A: 7, B: 7}}); err != nil {
		t.Error(err)
	}
}

// TestMapIDsOfOverlay: the kernel refuses to map an overlay, and takes layers that are mapped.
func TestMapIDsOfOverlay(t *testing.T) {
	needRoot(t)
	ids := mount.IDMap{Users: mount.Exchange{B: 4711}, Groups: mount.Exchange{B: 4712}}
	for name, make := range map[string]func(mount.Overlay) (*mount.Detached, error){
		"as the kernel allows": mount.Overlay.Mount,
		"in a namespace":       mount.OverlayInNamespace,
	} {
		t.Run(name, func(t *testing.T) {
			lower, upper, _, _ := layers(t)
			plain, err := make(mount.Overlay{Lower: lower, Upper: upper, Name: "pando:test"})
			if err != nil {
				t.Fatal(err)
			}
			if err := plain.MapIDs(ids); !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
				t.Errorf("mapping an overlay: %v (hint: %s)", err, errs.HintOf(err))
			}
			plain.Close()

			lower, upper, _, upperDir := layers(t)
			for _, m := range []*mount.Detached{lower, upper} {
				if err := m.MapIDs(ids); err != nil {
					t.Fatal(err)
				}
			}
			m, err := make(mount.Overlay{Lower: lower, Upper: upper, Name: "pando:test", UpperPath: upperDir})
			if err != nil {
				t.Fatal(err)
			}
			at := t.TempDir()
			if _, err := m.MoveTo(at); err != nil {
				t.Fatal(err)
			}
			m.Close() // or it could not be unmounted
			defer func() {
				if err := unix.Unmount(at, 0); err != nil {
					t.Error(err)
				}
			}()

			want := [2]uint32{4711, 4712}
			if got := ownerOf(t, at+"/file"); got != want {
				t.Errorf("a file of the lower layer belongs to %d", got)
			}
			if err := os.WriteFile(at+"/file", []byte("changed"), 0o600); err != nil { // copied up
				t.Fatal(err)
			}
			makeOwned(t, at+"/new", 4711, 4712)
			for _, name := range []string{"file", "new"} {
				if got := ownerOf(t, filepath.Join(at, name)); got != want {
					t.Errorf("%s belongs to %d in the overlay", name, got)
				}
				if got := ownerOf(t, filepath.Join(upperDir, mount.UpperDir, name)); got != [2]uint32{} {
					t.Errorf("%s belongs to %d in the upper layer", name, got)
				}
			}
		})
	}
}

// BenchmarkMapIDs shows what the map adds to a mount.
func BenchmarkMapIDs(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("SKIPPED: mounting needs root")
	}
	dir := b.TempDir()
	for name, ids := range map[string]mount.IDMap{"none": {}, "mapped": {Users: mount.Exchange{B: 4711}}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				m, err := mount.Tree(dir, false)
				if err != nil {
					b.Fatal(err)
				}
				if err := m.MapIDs(ids); err != nil {
					b.Fatal(err)
				}
				m.Close()
			}
		})
	}
}
