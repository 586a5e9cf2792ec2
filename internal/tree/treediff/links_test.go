package treediff

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/testing/testfs"
)

// TestApplyToLinks: a change of a file with several names is found under each of
// them, and Apply makes it under all of them at once. What the file has lost is
// taken away by one, and not missed by the others.
func TestApplyToLinks(t *testing.T) {
	w := copies(t, testfs.New(t, "xfs", 320<<20).Dir())
	const names, attributes = 16, 30
	fill := func(attributes int) string {
		dir := w.empty()
		first := filepath.Join(dir, "0")
		err := os.WriteFile(first, []byte("x"), 0o644)
		for i := 0; i < attributes && err == nil; i++ {
			err = unix.Setxattr(first, fmt.Sprint("user.", i), []byte("x"), 0)
		}
		for i := 1; i < names && err == nil; i++ {
			err = os.Link(first, filepath.Join(dir, fmt.Sprint(i)))
		}
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	b := fill(0)
	for range 10 {
		a := fill(attributes)
		changes := compareTrees(t, a, b, Options{Times: true}).Changes
		linked := 0
		for _, ch := range changes {
			if ch.Metadata && ch.Type == File {
				linked++
			}
		}
		if linked != names {
			t.Fatalf("%d names have changed, want %d: %+v", linked, names, changes)
		}
		applyTo(t, changes, b, a, ApplyOptions{})
		if !mustEqual(t, b, a) {
			return
		}
	}
}

// TestKeptDirectoryInTheWayOfLink: a directory became another name of a fifo. On
// the other side it holds something else, and so, with Keep, it stays.
func TestKeptDirectoryInTheWayOfLink(t *testing.T) {
	w := copies(t, t.TempDir())
	base, mine, theirs := w.empty(), w.empty(), w.empty()
	must := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{base, mine, theirs} {
		must(unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	}
	must(os.Mkdir(filepath.Join(base, "dir"), 0o700), os.Link(filepath.Join(mine, "fifo"), filepath.Join(mine, "dir")),
		os.Mkdir(filepath.Join(theirs, "dir"), 0o700), os.WriteFile(filepath.Join(theirs, "dir/own"), nil, 0o600))
	changes := compareTrees(t, base, mine, Options{}).Changes
	if i := slices.IndexFunc(changes, func(ch Change) bool {
		return ch.Path == "dir"
	}); i < 0 || changes[i].TypeBefore != Dir || changes[i].Link != "fifo" {
		t.Fatalf("the changes are %+v", changes)
	}
	applyTo(t, changes, mine, theirs, ApplyOptions{Keep: true})
	if _, err := os.Lstat(filepath.Join(theirs, "dir/own")); err != nil {
		t.Error(err)
	}
	// What has nothing in its way is done.
	must(os.Remove(filepath.Join(theirs, "dir/own")))
	applyTo(t, changes, mine, theirs, ApplyOptions{Keep: true})
	a, errA := os.Lstat(filepath.Join(theirs, "dir"))
	b, errB := os.Lstat(filepath.Join(theirs, "fifo"))
	must(errA, errB)
	if !os.SameFile(a, b) {
		t.Error("dir is not a link to fifo")
	}
}

// TestForceOnLinks: files that were changed each for itself are one on the other
// side. With Force each is changed there, and not while another is.
func TestForceOnLinks(t *testing.T) {
	w := copies(t, t.TempDir())
	base, mine := w.empty(), w.empty()
	write := func(dir string, i, size int) {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const names = 8
	for i := range names {
		write(base, i, 100<<10)
		write(mine, i, i*50<<10+1)
	}
	changes := compareTrees(t, base, mine, Options{}).Changes
	for range 50 {
		onto := w.empty()
		write(onto, 0, 400<<10)
		for i := 1; i < names; i++ {
			if err := os.Link(filepath.Join(onto, "0"), filepath.Join(onto, fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
		applyTo(t, changes, mine, onto, ApplyOptions{Force: true})
	}
}
