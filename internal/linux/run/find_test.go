package run_test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"pando/internal/linux/run"
)

// A program is looked for in the PATH that it gets, not in that of this process.
func TestFind(t *testing.T) {
	here, other := t.TempDir(), t.TempDir()
	write := func(dir string, mode os.FileMode) string {
		path := filepath.Join(dir, "pando-test-program")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ours, theirs := write(here, 0o755), write(other, 0o755)
	t.Setenv("PATH", here)
	for _, c := range []struct {
		env  []string
		want string
		err  error
	}{
		{[]string{"PATH=" + here}, ours, nil},
		{[]string{"PATH=" + other}, theirs, nil},
		{[]string{"PATH=" + here, "X=1", "PATH=" + other}, theirs, nil},
		{[]string{"PATH=.::relative:" + other}, theirs, nil},
		{[]string{"PATH="}, "", exec.ErrNotFound},
		{[]string{"PATH=."}, "", exec.ErrNotFound},
		{nil, "", exec.ErrNotFound},
	} {
		got, err := run.Find("pando-test-program", c.env)
		if got != c.want || !errors.Is(err, c.err) {
			t.Errorf("%q: %q, %v; want %q, %v", c.env, got, err, c.want, c.err)
		}
	}
	if _, err := run.Find("sh", nil); err != nil {
		t.Errorf("without a PATH: %v", err)
	}

	if err := os.Chmod(ours, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := run.Find("pando-test-program", []string{"PATH=" + here}); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("not executable: %v", err)
	}
	if got, err := run.Find("pando-test-program", []string{"PATH=" + here + ":" + other}); got != theirs || err != nil {
		t.Errorf("not executable in the first directory: %q, %v", got, err)
	}
}
