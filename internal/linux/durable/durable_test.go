package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	// What a killed call has left is in nobody's way.
	if err := os.WriteFile(path+".new", []byte("half of something longer"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"first", "second, which is longer", ""} {
		if err := WriteFile(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != text {
			t.Errorf("%q instead of %q (%v)", b, text, err)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	if err := WriteFile(filepath.Join(dir, "none", "file"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("in no directory: %v", err)
	}
	// What cannot be put in place does not stay.
	if err := os.MkdirAll(filepath.Join(dir, "taken", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(dir, "taken"), []byte("x")); err == nil {
		t.Error("a directory was replaced")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("it leaves %v (%v)", entries, err)
	}
	if err := SyncDir(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory was synced: %v", err)
	}
}

// TestWriteFileOfOthers: what root replaces stays the file of whom it was, and what they
// put beside it leads nowhere.
func TestWriteFileOfOthers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root gives files to others: run the tests as root")
	}
	dir := t.TempDir()
	path, victim := filepath.Join(dir, "file"), filepath.Join(dir, "victim")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chown(path, 1234, 5678),
		os.WriteFile(victim, []byte("theirs"), 0o600), os.Symlink(victim, path+".new")); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("new")); err != nil {
		t.Fatal(err)
	}
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	if s := st.Sys().(*syscall.Stat_t); s.Uid != 1234 || s.Gid != 5678 || st.Mode() != 0o600 {
		t.Errorf("%d:%d %v", s.Uid, s.Gid, st.Mode())
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "theirs" {
		t.Errorf("the victim has %q, %v", b, err)
	}
}
