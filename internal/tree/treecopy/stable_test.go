package treecopy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

func stamp(t *testing.T, dir string, before *Stamp) *Stamp {
	t.Helper()
	s, _, err := TakeStamp(bg, dir, before, Options{})
	must(t, err)
	return s
}

// TestStampSeesEveryChange: each kind of change to one thing is seen, and named;
// and no change is none.
func TestStampSeesEveryChange(t *testing.T) {
	needRoot(t)
	noLeaks(t)
	dir := filepath.Join(testfs.XFS(t, 320<<20), "tree") // the root's own names are lost+found and the like
	must(t, os.Mkdir(dir, 0o755))
	must(t, os.MkdirAll(filepath.Join(dir, "a/b/c"), 0o755))
	must(t, os.MkdirAll(filepath.Join(dir, "quiet/deep"), 0o755))
	for _, f := range []string{"f", "a/f", "a/b/f", "a/b/c/f", "quiet/f", "quiet/deep/f"} {
		write(t, filepath.Join(dir, f), "content")
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	var held *os.File
	old := time.Date(2001, 2, 3, 4, 5, 6, 7, time.UTC)
	for _, c := range []struct {
		what   string
		change func() error
		named  string // among what has changed
		dirs   int64
	}{
		{"nothing", func() error { return nil }, "", 0},
		{"reading", func() error { read(t, at("a/b/c/f")); return nil }, "", 0},
		{"content", func() error { return os.WriteFile(at("a/b/c/f"), []byte("CONTENT"), 0o644) }, "a/b/c/f", 1},
		{"content, with the old time", func() error {
			if err := os.WriteFile(at("a/b/c/f"), []byte("cONTENT"), 0o644); err != nil {
				return err
			}
			return os.Chtimes(at("a/b/c/f"), old, old)
		}, "a/b/c/f", 1},
		{"content by a descriptor that was open before", func() (err error) {
			if held, err = os.OpenFile(at("a/b/f"), os.O_RDWR, 0); err == nil {
				_, err = held.WriteAt([]byte("x"), 3)
			}
			return err
		}, "a/b/f", 1},
		{"mode", func() error { return os.Chmod(at("f"), 0o600) }, "f", 1},
		{"owner", func() error { return os.Chown(at("f"), 7, 7) }, "f", 1},
		{"attribute", func() error { return unix.Setxattr(at("a/f"), "user.x", []byte("1"), 0) }, "a/f", 1},
		{"attribute of a directory", func() error { return unix.Setxattr(at("a/b"), "user.x", []byte("1"), 0) }, "a/b", 1},
		{"attribute of the root", func() error { return unix.Setxattr(dir, "user.x", []byte("1"), 0) }, "", 1},
		{"new file", func() error { return os.WriteFile(at("a/new"), nil, 0o644) }, "a/new", 1},
		{"new empty directory", func() error { return os.Mkdir(at("a/newdir"), 0o755) }, "a/newdir", 2},
		{"file gone", func() error { return os.Remove(at("a/new")) }, "a", 1},
		{"directory gone", func() error { return os.Remove(at("a/newdir")) }, "a", 1},
		{"link", func() error { return os.Link(at("f"), at("a/b/c/link")) }, "a/b/c/link", 2},
		{"file renamed", func() error { return os.Rename(at("a/f"), at("a/g")) }, "a/g", 1},
		{"directory renamed", func() error { return os.Rename(at("a/b"), at("a/B")) }, "a/B", 3},
		{"file replaced", func() error {
			if err := os.WriteFile(at("f.new"), []byte("content"), 0o600); err != nil {
				return err
			}
			return os.Rename(at("f.new"), at("f"))
		}, "f", 2},
		{"directory for a file", func() error {
			if err := os.Remove(at("a/g")); err != nil {
				return err
			}
			return os.Mkdir(at("a/g"), 0o755)
		}, "a/g", 2},
	} {
		before := stamp(t, dir, nil)
		must(t, c.change())
		after := stamp(t, dir, before)
		paths := after.Paths(before, 10)
		if after.Changed() != c.dirs || (c.dirs > 0 && !slices.Contains(paths, filepath.Join(dir, c.named))) {
			t.Errorf("%s: %d directories changed, such as %v; wanted %d with %s", c.what, after.Changed(), paths, c.dirs,
				c.named)
		}
		if again := stamp(t, dir, after); again.Changed() != 0 {
			t.Errorf("%s: and once more, although nothing was done: %v", c.what, again.Paths(after, 10))
		}
	}
	held.Close()
	before := stamp(t, dir, nil)
	must(t, os.Rename(dir, dir+"2"))
	if s := stamp(t, dir+"2", before); s.Changed() != 1 {
		t.Errorf("a rename of the root changes %d directories, wanted 1: its ctime", s.Changed())
	}
	if s := stamp(t, dir+"2", before.Moved()); s.Changed() != 0 {
		t.Errorf("moved: %v", s.Paths(before, 10))
	}
	write(t, filepath.Join(dir+"2", "a/h"), "x")
	if s := stamp(t, dir+"2", before.Moved()); s.Changed() != 1 {
		t.Errorf("moved and changed: %d", s.Changed())
	}
}

// TestStampSeesMappedWrites: a page that was dirty before the stamp and is
// written to again after it, through the same mapping.
func TestStampSeesMappedWrites(t *testing.T) {
	needRoot(t)
	dir := testfs.Ext4(t, 64<<20)
	f, err := os.OpenFile(filepath.Join(dir, "f"), os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	defer f.Close()
	must(t, f.Truncate(1<<16))
	m, err := unix.Mmap(int(f.Fd()), 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	defer func() { must(t, unix.Munmap(m)) }()
	m[0] = 1
	before := stamp(t, dir, nil)
	m[0] = 2
	if s := stamp(t, dir, before); s.Changed() == 0 {
		t.Error("not seen")
	}
}

// meddler changes a tree between the copies of CopyStable, by its own calls.
func meddle(opt *Options, changes ...func()) {
	i := 0
	next := func() {
		if i < len(changes) {
			i++
			changes[i-1]()
		}
	}
	var once sync.Once
	opt.Progress = func(int64, int64) { once.Do(next) } // in the first copy
	opt.Pass = func(int, int64) { next() }              // before the others
}

// TestCopyStableCatchesUp: what changes during the first copy is copied again,
// and only that; the result is the source, whatever the change was.
func TestCopyStableCatchesUp(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct {
		change func(t *testing.T, src string)
		again  int64 // directories; 0: any number
	}{
		"one file": {func(t *testing.T, src string) { write(t, filepath.Join(src, "plain/d1/f"), "changed") }, 1},
		"type": {func(t *testing.T, src string) {
			must(t, os.RemoveAll(filepath.Join(src, "plain/d2")))
			write(t, filepath.Join(src, "plain/d2"), "a file now")
		}, 1},
		"file to directory": {func(t *testing.T, src string) {
			must(t, os.Remove(filepath.Join(src, "plain/f")))
			must(t, os.MkdirAll(filepath.Join(src, "plain/f/deep/er"), 0o711))
			write(t, filepath.Join(src, "plain/f/deep/er/x"), "x")
		}, 4},
		"exchange": {func(t *testing.T, src string) {
			must(t, unix.Renameat2(-1, filepath.Join(src, "plain/d1"), -1, filepath.Join(src, "plain/d2"), unix.RENAME_EXCHANGE))
		}, 0},
		"attributes and inheritance": {func(t *testing.T, src string) {
			d := filepath.Join(src, "plain/d1")
			must(t, unix.Setxattr(d, aclDefault,
				[]byte(treetest.ACL([3]uint32{1, 7, 0xffffffff}, [3]uint32{2, 7, 1234}, [3]uint32{4, 5, 0xffffffff},
					[3]uint32{16, 7, 0xffffffff}, [3]uint32{32, 5, 0xffffffff})), 0))
			must(t, os.Chmod(d, 0o2751))
			must(t, os.Chown(filepath.Join(d, "f"), 5, 6))
		}, 1},
		"linked files": {func(t *testing.T, src string) {
			must(t, os.Link(filepath.Join(src, "plain/d1/f"), filepath.Join(src, "plain/d2/link")))
		}, 2},
		"root": {func(t *testing.T, src string) { write(t, filepath.Join(src, "in the root"), "new") }, 1},
	} {
		for _, staging := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s staging=%v", name, staging), func(t *testing.T) {
				noLeaks(t)
				src := mkdir(t, "src")
				if name == "one file" && staging { // once with everything in it
					src = build(t)
				} else {
					must(t, os.MkdirAll(filepath.Join(src, "plain"), 0o755))
					must(t, unix.Mkfifo(filepath.Join(src, "plain/fifo"), 0o604))
					must(t, os.Symlink("../nowhere", filepath.Join(src, "plain/symlink")))
					write(t, filepath.Join(src, "first"), "linked")
					must(t, os.Link(filepath.Join(src, "first"), filepath.Join(src, "second")))
				}
				for _, d := range []string{"plain/d1/sub/subsub", "plain/d2"} {
					must(t, os.MkdirAll(filepath.Join(src, d), 0o755))
					write(t, filepath.Join(src, d, "f"), "content of "+d)
				}
				write(t, filepath.Join(src, "plain/d1/f"), "content")
				write(t, filepath.Join(src, "plain/f"), "content")
				// A second change of the same, during the second copy: a third mends it.
				opt := Options{Staging: staging}
				meddle(&opt, func() { c.change(t, src) }, func() { write(t, filepath.Join(src, "plain/later"), "x") })
				dst := mkdir(t, "dst")
				d := openFile(t, dst)
				r, err := CopyStable(bg, src, d, opt, 3)
				must(t, err)
				treetest.Compare(t, src, dst, treetest.RootMode)
				checkRoot(t, dst)
				if r.Passes < 2 || c.again > 0 && r.Again > c.again+1 {
					t.Errorf("%d passes, %d directories again", r.Passes, r.Again)
				}
				m, err := Measure(bg, src, Options{})
				must(t, err)
				if r.Files != m.Files || r.Bytes != m.Bytes {
					t.Errorf("says %+v, there are %+v", r.Totals, m)
				}
			})
		}
	}
}

// TestCopyStableOfQuiet makes one copy.
func TestCopyStableOfQuiet(t *testing.T) {
	needRoot(t)
	noLeaks(t)
	src, dst := build(t), mkdir(t, "dst")
	r, err := CopyStable(bg, src, openFile(t, dst), Options{}, 3)
	must(t, err)
	treetest.Compare(t, src, dst, treetest.RootMode)
	if r.Passes != 1 || r.Again != 0 {
		t.Errorf("%+v", r)
	}
}

// TestCopyStableGivesUp names what does not come to rest.
func TestCopyStableGivesUp(t *testing.T) {
	noLeaks(t)
	src, dst := mkdir(t, "src"), mkdir(t, "dst")
	must(t, os.MkdirAll(filepath.Join(src, "a/b"), 0o755))
	write(t, filepath.Join(src, "a/quiet"), "x")
	n := 0
	busy := func() { n++; write(t, filepath.Join(src, "a/b/busy"), strings.Repeat("x", n)) }
	busy()
	opt := Options{Unprivileged: os.Geteuid() != 0}
	meddle(&opt, busy, busy, busy)
	_, err := CopyStable(bg, src, openFile(t, dst), opt, 3)
	wantErr(t, err, errs.Conflict, filepath.Join(src, "a/b/busy"), "3 copies")
	if errs.HintOf(err) == "" {
		t.Error("no hint")
	}
	if strings.Contains(err.Error(), "quiet") {
		t.Errorf("names what did not change: %v", err)
	}
}

// TestCopyStableUnderFire copies a tree that is changed all the time, at random,
// until that stops; what it says is stable must be the tree.
func TestCopyStableUnderFire(t *testing.T) {
	needRoot(t)
	noLeaks(t)
	top := testfs.XFS(t, 320<<20)
	src := filepath.Join(top, "src")
	must(t, os.Mkdir(src, 0o755))
	rnd := faulttest.Rand(t)
	name := func() string {
		p := src
		for range 1 + rnd.IntN(4) {
			p = filepath.Join(p, fmt.Sprintf("n%d", rnd.IntN(4)))
		}
		return p
	}
	op := func() { // most of these fail, as they should
		switch rnd.IntN(8) {
		case 0, 1, 2:
			_ = os.MkdirAll(filepath.Dir(name()), 0o755)
		case 3:
			_ = os.RemoveAll(name())
		case 4:
			_ = os.Rename(name(), name())
		case 5:
			_ = os.Symlink("x", name())
		default:
			_ = os.WriteFile(name(), []byte(strings.Repeat("y", rnd.IntN(100_000))), 0o644)
		}
	}
	for range 500 {
		op()
	}
	compared := 0
	for round := range 12 {
		dst := filepath.Join(top, fmt.Sprintf("dst%d", round))
		must(t, os.Mkdir(dst, 0o755))
		d, err := os.Open(dst)
		must(t, err)
		stop, stopped := make(chan struct{}), make(chan struct{})
		var once sync.Once
		end := func() { once.Do(func() { close(stop); <-stopped }) }
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
					op()
				}
			}
		}()
		ended := false
		opt := Options{Pass: func(pass int, _ int64) {
			if pass >= 2+round%4 {
				end()
				ended = true
			}
		}}
		r, err := CopyStable(bg, src, d, opt, 10)
		end()
		must(t, err)
		if ended { // else the writer got no processor for as long as it took, and has gone on since
			treetest.Compare(t, src, dst, treetest.RootMode)
			compared++
		}
		t.Logf("%d passes, %d directories again, %d files", r.Passes, r.Again, r.Files)
		d.Close()
		must(t, os.RemoveAll(dst))
	}
	if compared == 0 {
		t.Error("nothing was compared")
	}
}
