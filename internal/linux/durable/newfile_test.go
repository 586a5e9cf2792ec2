package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestNewFile: a file has its name only once it is complete, and replaces another one only if it may.
func TestNewFile(t *testing.T) {
	for name, create := range map[string]func(string) (*NewFile, error){"Create": Create, "createNamed": createNamed} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			put := func(content string, replace, commit bool) error {
				t.Helper()
				n, err := create(path)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := n.WriteString(content); err != nil {
					t.Fatal(err)
				}
				if !commit {
					n.Discard()
					return nil
				}
				return n.Commit(replace)
			}
			is := func(want string, files int) {
				t.Helper()
				b, err := os.ReadFile(path)
				if string(b) != want || want != "" && err != nil {
					t.Errorf("%q, %v, wanted %q", b, err, want)
				}
				all, err := os.ReadDir(dir)
				if err != nil || len(all) != files {
					t.Errorf("%v are left, %v", all, err)
				}
			}

			if err := put("discarded", false, false); err != nil {
				t.Error(err)
			}
			is("", 0)
			if err := put("first", false, true); err != nil {
				t.Error(err)
			}
			is("first", 1)
			if err := put("second", false, true); !errors.Is(err, fs.ErrExist) {
				t.Errorf("an existing file: %v", err)
			}
			is("first", 1)
			if err := put("third", true, true); err != nil {
				t.Error(err)
			}
			is("third", 1)
			if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
				t.Errorf("%v %v", st.Mode(), err)
			}
		})
	}
}
