package treecopy

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/testing/treetest"
)

// sameFile compares two files but for their names.
func sameFile(t *testing.T, src, srcName, dst, dstName string) {
	t.Helper()
	one := func(dir, name string) map[string]treetest.Entry {
		all, err := treetest.Fingerprint(dir)
		must(t, err)
		e := all[name]
		e.Link = ""
		return map[string]treetest.Entry{dstName: e}
	}
	for _, d := range treetest.Diff(one(src, srcName), one(dst, dstName), treetest.Atime) {
		t.Error(d)
	}
}

// TestCopyAttributesOfOneFile: several at once give one file its attributes, by
// its names, and come upon attributes that another has taken away just now.
func TestCopyAttributesOfOneFile(t *testing.T) {
	needRoot(t)
	src, dst := mkdir(t, "src"), mkdir(t, "dst")
	write(t, src+"/f", "x")
	must(t, unix.Setxattr(src+"/f", "user.kept", []byte("new"), 0))
	must(t, os.Chown(src+"/f", 1000, 2000))
	must(t, unix.Chmod(src+"/f", 0o6755))
	from, to := openFile(t, src), openFile(t, dst)
	const names = 8
	for round := 0; round < 20 && !t.Failed(); round++ {
		first := filepath.Join(dst, "0")
		for i := range names {
			_ = os.Remove(filepath.Join(dst, fmt.Sprint(i)))
		}
		write(t, first, "x")
		must(t, unix.Setxattr(first, "user.kept", []byte("old"), 0))
		for i := range 30 {
			must(t, unix.Setxattr(first, fmt.Sprintf("user.%d", i), []byte("gone"), 0))
		}
		for i := 1; i < names; i++ {
			must(t, os.Link(first, filepath.Join(dst, fmt.Sprint(i))))
		}
		var wg sync.WaitGroup
		start := make(chan struct{})
		for i := range names {
			wg.Go(func() {
				<-start
				if err := CopyAttributes(bg, from, "f", to, fmt.Sprint(i)); err != nil {
					t.Error(err)
				}
			})
		}
		close(start)
		wg.Wait()
		sameFile(t, src, "f", dst, "0")
	}
}

// TestCopyAttributesKeepsSetuid: a new owner makes the kernel drop these bits,
// also of a file that has the right mode already.
func TestCopyAttributesKeepsSetuid(t *testing.T) {
	needRoot(t)
	src, dst := mkdir(t, "src"), mkdir(t, "dst")
	from, to := openFile(t, src), openFile(t, dst)
	for i, own := range [][2]int{{1000, 2000}, {1000, 0}, {0, 2000}, {0, 0}} {
		name := fmt.Sprint(i)
		for _, dir := range []string{src, dst} {
			write(t, filepath.Join(dir, name), "x")
			if dir == src {
				must(t, os.Chown(filepath.Join(dir, name), own[0], own[1]))
			}
			must(t, unix.Chmod(filepath.Join(dir, name), 0o6755))
		}
		must(t, CopyAttributes(bg, from, name, to, name))
		sameFile(t, src, name, dst, name)
	}
}

// TestCopyAttributesToAnotherType: nothing is done to what cannot have them all.
func TestCopyAttributesToAnotherType(t *testing.T) {
	needRoot(t)
	src, dst := mkdir(t, "src"), mkdir(t, "dst")
	write(t, src+"/f", "x")
	must(t, unix.Setxattr(src+"/f", "user.1", []byte("x"), 0))
	must(t, os.Chown(src+"/f", 1000, 2000))
	must(t, os.Symlink("x", dst+"/symlink"))
	must(t, unix.Mkfifo(dst+"/fifo", 0o600))
	must(t, os.Mkdir(dst+"/dir", 0o700))
	from, to := openFile(t, src), openFile(t, dst)
	for _, name := range []string{"symlink", "fifo", "dir", "nothing"} {
		wantErr(t, CopyAttributes(bg, from, "f", to, name), errs.Conflict)
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dst, name), &st); err == nil && st.Uid != 0 {
			t.Errorf("%s has another owner", name)
		}
	}
}
