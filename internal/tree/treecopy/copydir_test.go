package treecopy

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

func TestCopyDirKeepsEverything(t *testing.T) {
	needRoot(t)
	src := build(t)
	before, err := treetest.Fingerprint(src)
	must(t, err)
	for name, opt := range map[string]Options{
		"plain":      {},
		"staging":    {Staging: true},
		"one worker": {Workers: 1, Staging: true},
		"16 workers": {Workers: 16},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			dst := mkdir(t, "dst")
			var files, data atomic.Int64
			opt.Progress = func(f, b int64) { files.Add(f); data.Add(b) }
			n := copyDir(t, src, dst, opt)
			treetest.Compare(t, src, dst, treetest.RootMode)
			checkRoot(t, dst)
			m, err := Measure(bg, src, opt)
			must(t, err)
			if n.Files != m.Files || n.Bytes != m.Bytes || n.Skipped != (Skipped{}) {
				t.Errorf("CopyDir says %+v, Measure %+v", n, m)
			}
			if n.Files != int64(len(before))-1 {
				t.Errorf("%d files of %d", n.Files, len(before)-1)
			}
			if 2*n.Files != files.Load() || 2*n.Bytes != data.Load() { // of both
				t.Errorf("progress is %d files and %d bytes, the totals are %+v", files.Load(), data.Load(), n)
			}
		})
	}
	after, err := treetest.Fingerprint(src)
	must(t, err)
	for _, d := range treetest.Diff(before, after, 0) {
		t.Errorf("the source has changed: %s", d)
	}
}

// The judge itself: each kind of difference must be seen.
func TestCompareSeesDifferences(t *testing.T) {
	needRoot(t)
	a, b := build(t), build(t)
	if d := diff(t, a, b); len(d) > 0 {
		t.Fatalf("two builds differ: %q", d)
	}
	p := func(n string) string { return filepath.Join(b, n) }
	var st unix.Stat_t
	must(t, unix.Lstat(p("size/4096"), &st))
	keepTimes := func(n string) {
		var st unix.Stat_t
		must(t, unix.Lstat(filepath.Join(a, n), &st))
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p(n), []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW))
	}
	for i, c := range []struct {
		word   string
		change func()
	}{
		{"mode", func() { must(t, unix.Chmod(p("size/1"), 0o640)) }},
		{"owner", func() { must(t, unix.Lchown(p("links/dir"), 5, 0)) }},
		{"mtime", func() {
			must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p("size/4096"),
				[]unix.Timespec{st.Atim, {Sec: st.Mtim.Sec, Nsec: st.Mtim.Nsec + 1}}, 0))
		}},
		{"atime", func() {
			must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p("size"), []unix.Timespec{{Sec: 2300000000}, {Nsec: unix.UTIME_OMIT}}, 0))
		}},
		{"attributes", func() { must(t, unix.Lsetxattr(p("xattr/symlink"), "trusted.new", nil, 0)) }},
		{"hard link", func() {
			b := read(t, p("hard/z/big7"))
			must(t, os.Remove(p("hard/z/big7")))
			must(t, os.WriteFile(p("hard/z/big7"), []byte(b), 0o444))
			keepTimes("hard/z/big7")
			keepTimes("hard/z")
		}},
		{"data", func() {
			f, err := os.OpenFile(p("sparse/all"), os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt(make([]byte, 4096), 8192)
			must(t, err)
			f.Close()
			keepTimes("sparse/all")
		}},
		{"content", func() {
			f, err := os.OpenFile(p("size/65536"), os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt([]byte("!"), 60000)
			must(t, err)
			f.Close()
			keepTimes("size/65536")
		}},
		{"only in the first", func() { must(t, os.Remove(p("names/-rf"))); keepTimes("names") }},
		{"only in the second", func() { write(t, p("mode/new"), ""); keepTimes("mode") }},
	} {
		c.change()
		d := diff(t, a, b)
		if len(d) != i+1 || !strings.Contains(strings.Join(d, "\n"), c.word) {
			t.Errorf("after changing %q: %q", c.word, d)
		}
	}
}

func diff(t *testing.T, a, b string) []string {
	t.Helper()
	fa, err := treetest.Fingerprint(a)
	must(t, err)
	fb, err := treetest.Fingerprint(b)
	must(t, err)
	return treetest.Diff(fa, fb, 0)
}

func TestCopyDirToDetachedMount(t *testing.T) {
	needRoot(t)
	src, dst := build(t), mkdir(t, "dst")
	fd, err := unix.OpenTree(unix.AT_FDCWD, dst, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Skipf("SKIPPED: open_tree: %v", err)
	}
	f := os.NewFile(uintptr(fd), "detached")
	defer f.Close()
	for _, d := range []string{"a", "b"} {
		must(t, unix.Mkdirat(fd, d, 0o755))
	}
	for name, opt := range map[string]Options{"a": {Staging: true}, "b": {}} {
		sub, err := unix.Openat(fd, name, unix.O_PATH|unix.O_DIRECTORY, 0) // a descriptor that cannot be read will do
		must(t, err)
		g := os.NewFile(uintptr(sub), name)
		_, err = CopyDir(bg, src, g, opt)
		must(t, err)
		g.Close()
		treetest.Compare(t, src, filepath.Join(dst, name), treetest.RootMode)
	}
}

// On filesystems with reflinks, and between filesystems.
func TestCopyDirOtherFilesystems(t *testing.T) {
	needRoot(t)
	if testing.Short() {
		t.Skip("SKIPPED: -short")
	}
	ext4 := build(t)
	for _, fs := range []string{"xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			mnt := loopMount(t, fs, 512)
			src, dst := filepath.Join(mnt, "src"), filepath.Join(mnt, "dst")
			must(t, os.Mkdir(src, 0o755))
			must(t, os.Mkdir(dst, 0o755))
			// xattr/many does not fit everywhere, and other filesystems allocate otherwise.
			copyDir(t, ext4, src, Options{})
			treetest.Compare(t, ext4, src, treetest.RootMode|treetest.Holes)
			copyDir(t, src, dst, Options{})
			treetest.Compare(t, src, dst, treetest.Holes)
			if !shared(t, filepath.Join(dst, "size/3145733")) {
				t.Error("the copy of a large file does not share its blocks")
			}
			back := mkdir(t, "back")
			copyDir(t, dst, back, Options{Staging: true})
			treetest.Compare(t, ext4, back, treetest.RootMode|treetest.Holes)
			if n, err := unix.Getxattr(back+"/acl/file", "trusted.SGI_ACL_FILE", nil); err != unix.ENODATA {
				t.Errorf("XFS's other name for an ACL became an attribute of its own: %d, %v", n, err)
			}
		})
	}
}

// shared reports whether the first extent of a file is shared with another.
func shared(t *testing.T, name string) bool {
	t.Helper()
	out := run(t, "/", "filefrag", "-s", "-v", name)
	return strings.Contains(out, "shared")
}

func TestCopyDirOtherMounts(t *testing.T) {
	needRoot(t)
	src, dst := mkdir(t, "src"), mkdir(t, "dst")
	for _, d := range []string{"proc", "tmp", "pool", "again"} {
		must(t, os.Mkdir(filepath.Join(src, d), 0o755))
	}
	mountAt(t, "proc", "", filepath.Join(src, "proc"))
	mountAt(t, "tmpfs", "mode=1777", filepath.Join(src, "tmp"))
	write(t, src+"/tmp/a/b", "content")
	must(t, os.Link(src+"/tmp/a/b", src+"/tmp/c"))
	write(t, src+"/pool/image", "huge")
	// The pool once more, mounted elsewhere.
	must(t, unix.Mount(src+"/pool", src+"/again", "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(src+"/again", 0)) })
	var st unix.Stat_t
	must(t, unix.Stat(src+"/pool", &st))
	opt := Options{Exclude: []Inode{{uint64(st.Dev), st.Ino}}}

	n := copyDir(t, src, dst, opt)
	if got, want := listing(t, dst), `["proc" "tmp" "tmp/a" "tmp/a/b" "tmp/c"]`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if n.Skipped != (Skipped{KernelDirs: 1}) {
		t.Errorf("skipped %+v", n.Skipped)
	}
	a, err := treetest.Fingerprint(src + "/tmp")
	must(t, err)
	b, err := treetest.Fingerprint(dst + "/tmp")
	must(t, err)
	for _, d := range treetest.Diff(a, b, treetest.Atime) { // listing has read dst's
		t.Error(d)
	}
	m, err := Measure(bg, src, opt)
	must(t, err)
	if m.Files != n.Files || m.Bytes != n.Bytes || m.Inodes != 4 {
		t.Errorf("Measure %+v, CopyDir %+v", m, n)
	}
	opt.Exclude = nil
	if m, err = Measure(bg, src, opt); err != nil || m.Files != n.Files+4 {
		t.Errorf("without Exclude: %+v, %v", m, err)
	}
}

func TestCopyDirRefuses(t *testing.T) {
	noLeaks(t)
	src := mkdir(t, "src")
	write(t, src+"/d/file", "x")
	must(t, os.Symlink("src", src+"/../link"))
	dst := func() *os.File { return openFile(t, mkdir(t, "dst")) }

	_, err := CopyDir(bg, src+"/nowhere", dst(), Options{})
	wantErr(t, err, errs.NotFound, "nowhere")
	_, err = CopyDir(bg, src+"/d/file", dst(), Options{})
	wantErr(t, err, errs.Invalid, "d/file", "not a directory")
	_, err = Measure(bg, src+"/d/file", Options{})
	wantErr(t, err, errs.Invalid, "d/file", "not a directory")
	_, err = CopyDir(bg, src, openFile(t, src+"/d"), Options{})
	wantErr(t, err, errs.Invalid, src+"/d", "contains the destination")
	var st unix.Stat_t
	must(t, unix.Stat(src, &st))
	_, err = CopyDir(bg, src, dst(), Options{Exclude: []Inode{{uint64(st.Dev), st.Ino}}})
	wantErr(t, err, errs.Invalid, src)
	full := mkdir(t, "full")
	write(t, full+"/d/x", "")
	_, err = CopyDir(bg, src, openFile(t, full), Options{})
	wantErr(t, err, errs.Exists, "/d", "must be empty")

	_, err = CopyDir(bg, src+"/../link/", dst(), Options{}) // the source itself may be a link
	must(t, err)
}

func TestCopyDirLostFound(t *testing.T) {
	needRoot(t)
	for _, staging := range []bool{false, true} {
		src, dst := mkdir(t, "src"), mkdir(t, "dst")
		write(t, src+"/lost+found/file", "x")
		must(t, os.Chmod(src+"/lost+found", 0o751))
		must(t, os.Mkdir(dst+"/lost+found", 0o700))
		copyDir(t, src, dst, Options{Staging: staging})
		treetest.Compare(t, src, dst, 0)
	}
}

func TestNoSpace(t *testing.T) {
	needRoot(t)
	noLeaks(t)
	src := mkdir(t, "src")
	for i := range 40 {
		write(t, fmt.Sprintf("%s/%d/%d", src, i%3, i), strings.Repeat("x", 100<<10))
	}
	_, err := CopyDir(bg, src, openFile(t, mount(t, "tmpfs", "size=1m")), Options{})
	wantErr(t, err, errs.NoSpace, src, `use a larger parameter "size"`)
	_, err = CopyDir(bg, src, openFile(t, mount(t, "tmpfs", "nr_inodes=20")), Options{Staging: true})
	wantErr(t, err, errs.NoSpace, src, `use a larger parameter "size"`)
	var tarball bytes.Buffer
	must(t, tarDir(&tarball, src))
	_, err = Untar(bg, &tarball, openFile(t, mount(t, "tmpfs", "size=1m")), Options{})
	wantErr(t, err, errs.NoSpace, "/", `use a larger parameter "size"`)
}

func TestUnsupportedAttributes(t *testing.T) {
	needRoot(t)
	src := mkdir(t, "src")
	write(t, src+"/file", "x")
	must(t, unix.Setxattr(src+"/file", "user.colour", []byte("red"), 0))
	ramfs := mount(t, "ramfs", "") // it has no attributes
	_, err := CopyDir(bg, src, openFile(t, ramfs), Options{})
	wantErr(t, err, errs.Unsupported, src+"/file", "user.colour", "does not support")
	ramfs = mount(t, "ramfs", "")
	if n := copyDir(t, src, ramfs, Options{Unprivileged: true}); n.Skipped != (Skipped{Xattrs: 1}) {
		t.Errorf("skipped %+v", n.Skipped)
	}

	// More than fits into ext4's block, from a filesystem that takes it.
	big := mount(t, "tmpfs", "")
	write(t, big+"/file", "x")
	must(t, unix.Setxattr(big+"/file", "trusted.big", make([]byte, 30000), 0))
	_, err = CopyDir(bg, big, openFile(t, mkdir(t, "dst")), Options{})
	if err != nil { // ext4 with the ea_inode feature takes it
		wantErr(t, err, errs.Unsupported, big+"/file", "trusted.big", "30000 bytes")
	}
}

func TestTooManyLinks(t *testing.T) {
	needRoot(t)
	src, top := mount(t, "tmpfs", "nr_inodes=0"), testfs.Ext4(t, 64<<20)
	write(t, src+"/0", "x")
	for i := range 65001 { // ext4 allows 65,000
		must(t, os.Link(src+"/0", fmt.Sprintf("%s/l%d", src, i)))
	}
	var archive bytes.Buffer
	_, err := WriteTar(bg, &archive, openFile(t, src), Options{})
	must(t, err)

	for name, fill := range map[string]func(dst *os.File) (Totals, error){
		"tree":    func(dst *os.File) (Totals, error) { return CopyDir(bg, src, dst, Options{}) },
		"archive": func(dst *os.File) (Totals, error) { return Untar(bg, &archive, dst, Options{}) },
	} {
		must(t, os.Mkdir(filepath.Join(top, name), 0o755))
		dst := openFile(t, filepath.Join(top, name))
		_, err := fill(dst)
		wantErr(t, err, errs.Unsupported, "l", "hard links")
		dst.Close()
	}
}

// at calls f once, when so much progress has been made.
func at(files, bytes int64, f func()) func(files, bytes int64) {
	var once sync.Once
	var seenFiles, seenBytes atomic.Int64
	return func(n, b int64) {
		if seenFiles.Add(n) >= files && seenBytes.Add(b) >= bytes {
			once.Do(f)
		}
	}
}

func TestChangeDuringCopy(t *testing.T) {
	needRoot(t)
	big := strings.Repeat("0123456789abcdef", 4<<20/16)
	for _, c := range []struct {
		name   string
		files  int64 // when it happens
		bytes  int64
		change func(src string)
	}{
		{"a file vanishes", 500, 0, func(src string) { os.Remove(src + "/many/3999") }},
		{"all vanish", 500, 0, func(src string) { os.RemoveAll(src + "/many") }},
		{"a file is added", 500, 0, func(src string) { os.WriteFile(src+"/many/new", nil, 0o644) }},
		{"a file grows", 0, 1, func(src string) { must(t, appendTo(src+"/big", "more")) }},
		{"a file shrinks", 0, 1, func(src string) { os.Truncate(src+"/big", 4096) }},
		{"a sparse file shrinks", 0, 4<<20 + 1, func(src string) { os.Truncate(src+"/sparse", 4096) }},
		{"a file is written", 0, 1, func(src string) {
			f, _ := os.OpenFile(src+"/big", os.O_WRONLY, 0)
			f.WriteAt([]byte("!"), 1<<20)
			f.Close()
		}},
		{"a mode changes", 0, 1, func(src string) { os.Chmod(src+"/big", 0o600) }},
		{"a fifo replaces a file", 500, 0, func(src string) {
			os.Remove(src + "/many/3999")
			unix.Mkfifo(src+"/many/3999", 0o644)
		}},
		{"a link replaces a file", 500, 0, func(src string) {
			os.Remove(src + "/many/3999")
			os.Symlink("/etc/passwd", src+"/many/3999")
		}},
		{"a directory replaces a file", 500, 0, func(src string) {
			os.Remove(src + "/many/3999")
			os.Mkdir(src+"/many/3999", 0o755)
		}},
		{"a link replaces a directory", 0, 1, func(src string) {
			os.Rename(src+"/sub", src+"/sub2")
			os.Symlink("/etc", src+"/sub")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			tmp := mount(t, "tmpfs", "")
			src, dst := tmp+"/src", tmp+"/dst"
			must(t, os.Mkdir(dst, 0o755))
			write(t, src+"/big", big)
			f, err := os.Create(src + "/sparse")
			must(t, err)
			must(t, f.Truncate(1<<30))
			_, err = f.WriteAt([]byte(big), 0)
			must(t, err)
			must(t, f.Close())
			write(t, src+"/sub/file", "x")
			must(t, os.Mkdir(src+"/many", 0o755))
			for i := range 4000 {
				write(t, fmt.Sprintf("%s/many/%d", src, i), "x")
			}
			must(t, os.Link(src+"/big", src+"/../other")) // another way to it
			_, err = CopyDir(bg, src, openFile(t, dst), Options{Workers: 1, Progress: at(c.files, c.bytes, func() {
				c.change(src)
			})})
			wantErr(t, err, errs.Conflict, src, hintChanged)
			if m, err := Measure(bg, src, Options{}); c.name != "all vanish" && err != nil {
				t.Errorf("Measure: %+v, %v", m, err)
			}
		})
	}
}

// A directory that is moved while the walk is far below it, and so has closed
// it, must not be mistaken for the one that is above it now.
func TestMoveDuringCopy(t *testing.T) {
	needRoot(t)
	noLeaks(t)
	tmp := mount(t, "tmpfs", "")
	src, dst := tmp+"/src", tmp+"/dst"
	must(t, os.Mkdir(dst, 0o755))
	must(t, os.MkdirAll(src+"/b", 0o755))
	write(t, src+"/a/"+strings.Repeat("d/", 50)+"file", "x")
	_, err := CopyDir(bg, src, openFile(t, dst), Options{Workers: 1, Progress: at(1, 1, func() {
		must(t, os.Rename(src+"/a/d", src+"/b/d"))
	})})
	wantErr(t, err, errs.Conflict, src+"/a", hintChanged)
}

func appendTo(name, s string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(s)
	return err
}

func TestCancel(t *testing.T) {
	needRoot(t)
	tmp := mount(t, "tmpfs", "")
	src := tmp + "/src"
	must(t, os.Mkdir(src, 0o755))
	treetest.Build(t, src)
	m, err := Measure(bg, src, Options{})
	must(t, err)
	for i := int64(0); i < m.Files; i += m.Files/25 + 1 {
		noLeaks(t)
		ctx, cancel := context.WithCancel(bg)
		var files, after atomic.Int64
		dst := fmt.Sprintf("%s/%d", tmp, i)
		must(t, os.Mkdir(dst, 0o755))
		f := openFile(t, dst)
		_, err := CopyDir(ctx, src, f, Options{Progress: func(f, _ int64) {
			if files.Add(f) >= i {
				cancel()
				after.Add(1)
			}
		}})
		cancel()
		wantErr(t, err, errs.Canceled)
		if !strings.Contains(err.Error(), "context canceled") {
			t.Error(err)
		}
		must(t, f.Close())
		if n := after.Load(); n > 1000 {
			t.Errorf("%d pieces of work after the cancellation", n)
		}
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	_, err = Measure(ctx, src, Options{})
	wantErr(t, err, errs.Canceled)
}

func TestCancelInLargeFile(t *testing.T) {
	src, dst := mkdir(t, "src"), mkdir(t, "dst")
	const size = 256 << 20
	write(t, src+"/file", "")
	must(t, os.WriteFile(src+"/file", bytes.Repeat([]byte("pando"), size/5), 0o644))
	ctx, cancel := context.WithCancel(bg)
	defer cancel()
	_, err := CopyDir(ctx, src, openFile(t, dst), Options{Progress: func(_, n int64) {
		if n > rangeSize {
			t.Errorf("a step of %d bytes", n)
		}
		cancel()
	}})
	wantErr(t, err, errs.Canceled)
	st, err := os.Stat(dst + "/file")
	must(t, err)
	if st.Size() > 4*rangeSize {
		t.Errorf("%d bytes were copied before it stopped", st.Size())
	}
}

// A chain of directories whose paths are far longer than the kernel takes,
// with files and hard links along the way.
func TestDeepTree(t *testing.T) {
	needRoot(t)
	const depth = 2000
	name := strings.Repeat("d", 40)
	tmp := mount(t, "tmpfs", "")
	src, dst := tmp+"/src", tmp+"/dst"
	must(t, os.Mkdir(src, 0o755))
	fd, err := unix.Open(src, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	must(t, err)
	first, err := unix.Openat(fd, "first", unix.O_CREAT|unix.O_WRONLY, 0o644)
	must(t, err)
	unix.Close(first)
	var up [8]int // directories on the way
	for i := range depth {
		must(t, unix.Mkdirat(fd, name, 0o755))
		for _, n := range []string{"before", "zafter"} { // some come before and some after the long one
			must(t, unix.Mkdirat(fd, n, 0o755))
			f, err := unix.Openat(fd, n+"/file", unix.O_CREAT|unix.O_WRONLY, 0o640)
			must(t, err)
			unix.Close(f)
		}
		next, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(t, err)
		if i%100 == 99 {
			// To a file seven levels up, from down here.
			must(t, unix.Linkat(up[(i+1)%8], "before/file", next, "link", 0))
		}
		if up[i%8] != 0 {
			unix.Close(up[i%8])
		}
		up[i%8], fd = fd, next
	}
	for _, f := range append(up[:], fd) {
		unix.Close(f)
	}

	for _, workers := range []int{1, 4} {
		must(t, os.RemoveAll(dst))
		must(t, os.Mkdir(dst, 0o755))
		noLeaks(t)
		fds := openFDs(t)
		var seen, most atomic.Int64
		n := copyDir(t, src, dst, Options{Workers: workers, Progress: func(files, _ int64) {
			if seen.Add(1)%20 != 0 {
				return
			}
			if n := int64(openFDs(t) - fds); n > most.Load() {
				most.Store(n)
			}
		}})
		if want := int64(depth*5 + depth/100 + 1); n.Files != want {
			t.Errorf("%d files, want %d", n.Files, want)
		}
		if limit := int64(workers * 75); most.Load() > limit+10 {
			t.Errorf("%d descriptors were open with %d workers", most.Load(), workers)
		}
		a, err := treetest.Fingerprint(src)
		must(t, err)
		b, err := treetest.Fingerprint(dst)
		must(t, err)
		for i, d := range treetest.Diff(a, b, treetest.RootMode) {
			if i < 5 {
				t.Error(d[max(0, len(d)-300):])
			}
		}
		m, err := Measure(bg, src, Options{Workers: workers})
		if err != nil || m.Files != n.Files {
			t.Errorf("Measure: %+v, %v", m, err)
		}
	}

	// A message about something down there must be readable.
	ctx, cancel := context.WithCancel(bg)
	cancel()
	_, err = CopyDir(ctx, src, openFile(t, mkdir(t, "dst2")), Options{})
	if len(fmt.Sprint(err)) > 5000 {
		t.Errorf("an error of %d bytes", len(fmt.Sprint(err)))
	}
}

func TestMeasure(t *testing.T) {
	src := mkdir(t, "src")
	write(t, src+"/a", strings.Repeat("x", 5000))
	must(t, os.Link(src+"/a", src+"/b"))
	write(t, src+"/d/c", "x")
	f, err := os.Create(src + "/sparse")
	must(t, err)
	_, err = f.WriteAt([]byte("x"), 1<<30)
	must(t, err)
	must(t, f.Close())
	must(t, os.Symlink("a", src+"/link"))
	got, err := Measure(bg, src, Options{})
	must(t, err)
	// Directories take a block each: the root and d.
	want := Totals{Files: 6, Bytes: 5000 + 1 + 1, Inodes: 5, Allocated: 8192 + 4096 + 4096 + 2*4096}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestMeasureIsEnough(t *testing.T) {
	needRoot(t)
	src := build(t)
	m, err := Measure(bg, src, Options{})
	must(t, err)
	var used int64
	must(t, filepath.WalkDir(src, func(p string, d os.DirEntry, err error) error {
		if err == nil && p != src {
			var st unix.Stat_t
			if err := unix.Lstat(p, &st); err != nil {
				return err
			}
			used += st.Blocks * 512 / max(1, map[bool]int64{true: int64(st.Nlink), false: 1}[!d.IsDir()])
		}
		return err
	}))
	if r := float64(m.Allocated) / float64(used); r < 0.9 || r > 1.1 {
		t.Errorf("Measure says %d, du says %d: %.2f", m.Allocated, used, r)
	}
}

func TestBufferedReadPath(t *testing.T) {
	// From tmpfs no copy_file_range goes to another filesystem: everything is read and written.
	needRoot(t)
	src, dst := mount(t, "tmpfs", ""), mkdir(t, "dst")
	for _, n := range []int{bufferSize - 1, bufferSize, bufferSize + 1, 3*bufferSize + 7, 20 << 20} {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i * 7 >> 3)
		}
		must(t, os.WriteFile(fmt.Sprintf("%s/%d", src, n), b, 0o644))
	}
	f, err := os.Create(src + "/sparse")
	must(t, err)
	must(t, f.Truncate(40<<20))
	_, err = f.WriteAt(bytes.Repeat([]byte("x"), 1<<20), 13<<20)
	must(t, err)
	must(t, f.Close())
	copyDir(t, src, dst, Options{})
	treetest.Compare(t, src, dst, treetest.RootMode)
}

func TestSameNamesInDifferentDirectories(t *testing.T) {
	// Hard links whose first name lies in a directory that is long done.
	needRoot(t)
	src, dst := mkdir(t, "src"), mkdir(t, "dst")
	for i := range 200 {
		write(t, fmt.Sprintf("%s/a/b%d/c/f", src, i), fmt.Sprint(i))
		must(t, os.MkdirAll(fmt.Sprintf("%s/z/y%d/x", src, 199-i), 0o755))
		must(t, os.Link(fmt.Sprintf("%s/a/b%d/c/f", src, i), fmt.Sprintf("%s/z/y%d/x/f", src, 199-i)))
	}
	for _, workers := range []int{1, 8} {
		must(t, os.RemoveAll(dst))
		must(t, os.Mkdir(dst, 0o755))
		copyDir(t, src, dst, Options{Workers: workers})
		treetest.Compare(t, src, dst, treetest.RootMode)
	}
}

// Copying must not count as reading: the next import would see other times.
func TestSourceAtimes(t *testing.T) {
	needRoot(t) // others may not read without a trace what is not theirs
	src := mkdir(t, "src")
	write(t, src+"/dir/file", "x")
	write(t, src+"/large", strings.Repeat("x", 1<<20))
	old := []unix.Timespec{{Sec: 1000000000}, {Sec: 1700000000}} // relatime would update it
	for _, p := range []string{"/dir/file", "/large", "/dir", ""} {
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, src+p, old, 0))
	}
	dst := mkdir(t, "dst")
	copyDir(t, src, dst, Options{})
	_, err := Measure(bg, src, Options{})
	must(t, err)
	for _, root := range []string{src, dst} {
		for _, p := range []string{"/dir/file", "/large", "/dir", ""} {
			var st unix.Stat_t
			must(t, unix.Stat(root+p, &st))
			if st.Atim != old[0] {
				t.Errorf("the time of access of %s%s is %v", root, p, st.Atim)
			}
		}
	}
}
