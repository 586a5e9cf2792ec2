package mount_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// TestResolveTrusts: links of root's are followed, wherever they lead, and those that others
// have put there, or can replace, are not.
func TestResolveTrusts(t *testing.T) {
	needRoot(t)
	top, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	in := func(path string) string { return filepath.Join(top, path) }
	err = errors.Join(
		os.MkdirAll(in("a/b"), 0o755), os.Mkdir(in("theirs"), 0o755), os.Mkdir(in("shared"), 0o755), os.Mkdir(in("tmp"),
			0o755),
		os.Symlink("a", in("link")), os.Symlink(in("link/b"), in("far")), os.Symlink("../a/b/../b",
			in("a/up")), os.Symlink("loop", in("loop")),
		os.Symlink("missing", in("dangling")), os.WriteFile(in("file"), nil, 0o600),
		os.Symlink("../a", in("theirs/link")), os.Symlink("../a", in("shared/link")),
		os.Symlink("../a", in("tmp/ours")), os.Symlink("../a", in("tmp/theirs")), os.Lchown(in("tmp/theirs"), 12, 34),
		os.Chown(in("theirs"), 12, 34), os.Chmod(in("shared"), 0o777), os.Chmod(in("tmp"), 0o777|os.ModeSticky),
	)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"": "", "a/b": "a/b", "a/./b/..": "a", "link": "a", "link/b": "a/b", "far": "a/b", "a/up": "a/b", "tmp/ours/b": "a/b",
	} {
		if got, err := mount.Resolve(in(path)); err != nil || got != in(want) {
			t.Errorf("%s leads to %s, %v, wanted %s", path, got, err, want)
		}
	}
	for path, kind := range map[string]errs.Kind{
		"missing": errs.NotFound, "dangling": errs.NotFound, "file": errs.Invalid, "file/x": errs.Invalid,
		"loop":        errs.Invalid,
		"theirs/link": errs.Permission, "theirs/link/b": errs.Permission, "shared/link": errs.Permission,
		"tmp/theirs": errs.Permission,
	} {
		if got, err := mount.Resolve(in(path)); errs.KindOf(err) != kind {
			t.Errorf("%s leads to %q, %v, wanted an error of kind %s", path, got, err, kind)
		}
	}
	dir, err := mount.OpenDir(in("a/b"))
	if err != nil {
		t.Fatal(err)
	}
	dir.Close()
	for _, path := range []string{"link", "link/b"} {
		_, err := mount.OpenDir(in(path))
		wantKind(t, err, errs.Conflict)
	}
}

// TestAttachByDescriptor: a mount goes on the directory that was opened, wherever that is
// by now, and can be taken back from there; it is unmounted in the directory above it.
func TestAttachByDescriptor(t *testing.T) {
	needRoot(t)
	top := t.TempDir()
	in := func(path string) string { return filepath.Join(top, path) }
	if err := errors.Join(os.MkdirAll(in("home/m"), 0o755), os.MkdirAll(in("other/m"), 0o755),
		os.Mkdir(in("tree"), 0o755)); err != nil {
		t.Fatal(err)
	}
	parent, err := mount.OpenDir(in("home"))
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	dir, err := os.Open(in("home/m"))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := errors.Join(os.Rename(in("home"), in("moved")), os.Symlink("other", in("home"))); err != nil {
		t.Fatal(err)
	}
	for _, back := range []bool{true, false} {
		m, err := mount.Tree(in("tree"), false)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if err := m.Restrict(true, false); err != nil {
			t.Error(err)
		}
		info, err := m.MoveToDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		if !mount.IsMounted(in("moved/m"), info.ID) || mount.IsMounted(in("other/m"), info.ID) {
			t.Error("it is mounted somewhere else")
		}
		var st unix.Statfs_t
		if err := unix.Statfs(in("moved/m"), &st); err != nil || st.Flags&(unix.ST_NOSUID|unix.ST_NODEV) != unix.ST_NOSUID {
			t.Errorf("flags %#x, %v, wanted nosuid and not nodev", st.Flags, err)
		}
		if back {
			err = m.TakeBack()
		} else if err = m.Close(); err == nil {
			err = mount.UnmountIn(parent, "m", false)
		}
		if err != nil || mount.IsMounted(in("moved/m"), info.ID) {
			t.Errorf("taken back %v: %v", back, err)
		}
		if !back {
			wantKind(t, mount.UnmountIn(parent, "m", false), errs.NotFound)
		}
	}
}
