package treewalk_test

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/linux/treewalk"
)

// TestReplaceFile: a file is written inside the tree, or not at all, whatever is in its place.
func TestReplaceFile(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	must(os.MkdirAll(at("a/b"), 0o755))
	must(os.WriteFile(filepath.Join(outside, "file"), []byte("precious"), 0o600))
	for _, name := range []string{"a/b/link", "a/b/link.new", "a/b/new.new"} {
		must(os.Symlink(filepath.Join(outside, "file"), at(name)))
	}
	must(os.Symlink(outside, at("out")))
	root, err := os.Open(dir)
	must(err)
	defer root.Close()

	for _, name := range []string{"top", "a/b/new", "a/b/link", "a/b/link"} {
		must(treewalk.ReplaceFile(root, name, []byte("text of "+name), 0o640))
		st, err := os.Lstat(at(name))
		must(err)
		if b, err := os.ReadFile(at(name)); err != nil || string(b) != "text of "+name || st.Mode() != 0o640 {
			t.Errorf("%s: %q, %v, %v", name, b, st.Mode(), err)
		}
		if _, err := os.Lstat(at(name + ".new")); err == nil {
			t.Errorf("%s.new is left", name)
		}
	}
	for _, name := range []string{"out/file", "out/new", "../x", "a/../../x", "none/x", "a/b"} {
		if err := treewalk.ReplaceFile(root, name, []byte("x"), 0o640); err == nil {
			t.Errorf("%s: it was written", name)
		}
	}
	if _, err := os.Lstat(at("a/b.new")); err == nil {
		t.Error("a/b.new is left of a failure")
	}

	entries, err := os.ReadDir(outside)
	must(err)
	if b, err := os.ReadFile(filepath.Join(outside, "file")); len(entries) != 1 || string(b) != "precious" || err != nil {
		t.Errorf("outside is %v, %q, %v", entries, b, err)
	}
}
