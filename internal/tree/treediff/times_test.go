package treediff

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

// TestTimesOfRenamed: where times are in whole seconds, as in ext4 with inodes of 128
// bytes, what was deleted in a directory that was renamed need not have changed its
// times. Doing the same again does, and they are put back.
func TestTimesOfRenamed(t *testing.T) {
	dir := testfs.New(t, "ext4", 64<<20).Dir()
	a, b, onto := filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "onto")
	then := time.Unix(1_700_000_000, 0)
	for _, root := range []string{a, b, onto} {
		for _, d := range []string{"old", "old/sub"} {
			if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for _, f := range []string{"old/sub/gone", "old/sub/kept", "old/gone"} {
			if err := os.WriteFile(filepath.Join(root, f), []byte(f), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, err := range []error{
		os.Rename(filepath.Join(b, "old"), filepath.Join(b, "new")),
		os.Remove(filepath.Join(b, "new/sub/gone")), os.Remove(filepath.Join(b, "new/gone")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	same := func(path string) {
		t.Helper()
		if err := os.Chtimes(path, then, then); err != nil {
			t.Fatal(err)
		}
	}
	for _, root := range []string{a, onto} {
		for _, p := range []string{"old/sub/kept", "old/sub/gone", "old/gone", "old/sub", "old"} {
			same(filepath.Join(root, p))
		}
	}
	for _, p := range []string{"new/sub/kept", "new/sub", "new"} {
		same(filepath.Join(b, p))
	}
	changes := []Change{
		{Op: Renamed, From: "old", Path: "new", Type: Dir, TypeBefore: Dir},
		{Op: Deleted, Path: "old/gone", TypeBefore: File}, {Op: Deleted, Path: "old/sub/gone", TypeBefore: File},
	}
	if err := Apply(t.Context(), changes, openDir(t, b), openDir(t, onto), ApplyOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"new", "new/sub"} {
		st, err := os.Stat(filepath.Join(onto, p))
		if err != nil {
			t.Fatal(err)
		}
		if !st.ModTime().Equal(then) {
			t.Errorf("%s has %v, want %v", p, st.ModTime(), then)
		}
	}
	if _, err := os.Stat(filepath.Join(onto, "new/sub/gone")); !os.IsNotExist(err) {
		t.Errorf("new/sub/gone: %v", err)
	}
}
