package objdir_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"pando/internal/driver"
)

// TestOwner: in a user's pool all identities are the user's, even if root writes them, or
// the user could not read them any more.
func TestOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root gives files to others: run the tests as root")
	}
	dir := t.TempDir()
	d := open(t, dir)
	if err := os.Chown(d.Path(), 1234, 5678); err != nil {
		t.Fatal(err)
	}
	d.Close()
	d = open(t, dir)
	id := volume("web")
	check := func(when string) {
		t.Helper()
		st, err := os.Lstat(metaPath(d, id.ID))
		if err != nil {
			t.Fatal(err)
		}
		if s := st.Sys().(*syscall.Stat_t); s.Uid != 1234 || s.Gid != 5678 {
			t.Errorf("%s: it belongs to %d:%d", when, s.Uid, s.Gid)
		}
	}
	put(t, d, id)
	check("made")
	if err := errors.Join(d.Commit(id.ID), d.Replace(id)); err != nil {
		t.Fatal(err)
	}
	check("replaced")
}

// TestOddModes: only the mode that an identity is made with says that its object may not
// have been committed. Any other is a copy's, or of a filesystem without modes.
func TestOddModes(t *testing.T) {
	d := open(t, t.TempDir())
	id := volume("web")
	put(t, d, id)
	for mode, want := range map[os.FileMode]bool{0o600: false, 0o400: true, 0o644: true, 0o700: true, 0o444: true,
		0o660: true} {
		if err := os.Chmod(metaPath(d, id.ID), mode); err != nil {
			t.Fatal(err)
		}
		if is, err := d.Committed(id.ID); is != want || err != nil {
			t.Errorf("mode %04o: committed %v, %v", mode, is, err)
		}
	}
}

// TestCommitFollowsNothing: who owns a pool cannot have root change the mode of another file.
func TestCommitFollowsNothing(t *testing.T) {
	d := open(t, t.TempDir())
	victim := filepath.Join(t.TempDir(), "victim")
	link, hard := driver.NewID(), driver.NewID()
	if err := errors.Join(os.WriteFile(victim, nil, 0o600), os.Chmod(victim, 0o755),
		os.Symlink(victim, metaPath(d, link)), os.Link(victim, metaPath(d, hard))); err != nil {
		t.Fatal(err)
	}
	for _, id := range []driver.ObjectID{link, hard} {
		if err := d.Commit(id); err == nil {
			t.Error("it was noted")
		}
	}
	if st, err := os.Stat(victim); err != nil || st.Mode() != 0o755 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
}
