package treecopy

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

const allFlags = treetest.Sync | treetest.Immutable | treetest.Append | treetest.NoDump | treetest.NoAtime |
	treetest.DirSync | treetest.ProjectInherit

// ext4With mounts an ext4 that was made with options of mkfs.
func ext4With(t testing.TB, options ...string) string {
	t.Helper()
	needRoot(t)
	img := filepath.Join(t.TempDir(), "img")
	must(t, os.WriteFile(img, nil, 0o600))
	must(t, os.Truncate(img, 64<<20))
	run(t, "/", "mkfs.ext4", append(append([]string{"-q", "-F"}, options...), img)...)
	dir := mkdir(t, "mnt")
	run(t, "/", "mount", "-o", "loop,noinit_itable", img, dir)
	t.Cleanup(func() { run(t, "/", "umount", dir) })
	must(t, os.Remove(dir+"/lost+found"))
	return dir
}

// wantLost are the losses that a copy of the tree must have.
func wantLost(t *testing.T, src string, flags uint32, projects bool) map[string]int64 {
	t.Helper()
	tree, err := treetest.Fingerprint(src)
	must(t, err)
	want := map[string]int64{}
	for path, e := range tree {
		if e.Link != "" && e.Link != path {
			continue // it is counted by its first name
		}
		for bit, what := range map[uint32]string{
			treetest.Sync: LostSync, treetest.Immutable: LostImmutable, treetest.Append: LostAppend, treetest.NoDump: LostNoDump,
			treetest.NoAtime: LostNoAtime, treetest.DirSync: LostDirSync, treetest.ProjectInherit: LostProjectInherit,
		} {
			if e.Flags&flags&bit != 0 {
				want[what]++
			}
		}
		if projects && e.Project != 0 {
			want[LostProject]++
		}
	}
	return want
}

func checkLost(t *testing.T, got []NotKept, want map[string]int64) {
	t.Helper()
	counts := map[string]int64{}
	for _, n := range got {
		counts[n.What] = n.Count
		if n.Example == "" {
			t.Errorf("no example of %s", n.What)
		}
	}
	if !reflect.DeepEqual(counts, want) {
		t.Errorf("not kept: %v, want %v", got, want)
	}
}

// TestFlags copies flags and projects to filesystems that can hold all of them, or some.
// Many kernels do not mount an ext4 that has projects.
func TestFlags(t *testing.T) {
	ext4, xfs := ext4With(t), filepath.Join(testfs.XFS(t, 0), "src")
	must(t, os.Mkdir(xfs, 0o755))
	treetest.BuildFlags(t, ext4, allFlags, false)
	treetest.BuildFlags(t, xfs, allFlags&^treetest.DirSync, true)
	for _, c := range []struct {
		name     string
		top      string
		lost     uint32
		projects bool // they are lost
	}{
		{"ext4", ext4With(t), 0, true},
		{"xfs", testfs.XFS(t, 0), treetest.DirSync, false},
		{"btrfs", testfs.Btrfs(t, 0), treetest.ProjectInherit, true},
		{"ramfs, which has none", mount(t, "ramfs", ""), allFlags, true},
	} {
		for from, src := range map[string]string{"ext4": ext4, "xfs": xfs} {
			want := wantLost(t, src, c.lost, c.projects)
			for how, opt := range map[string]Options{"plain": {}, "staging": {Staging: true}, "one worker": {Workers: 1}} {
				t.Run(from+" to "+c.name+" "+how, func(t *testing.T) {
					dst := filepath.Join(c.top, strings.ReplaceAll(from+"-"+how, " ", "-"))
					must(t, os.Mkdir(dst, 0o755))
					treetest.Removable(t, dst)
					n := copyDir(t, src, dst, opt)
					a, err := treetest.Fingerprint(src)
					must(t, err)
					b, err := treetest.Fingerprint(dst)
					must(t, err)
					for p, e := range a {
						e.Flags &^= c.lost
						if c.projects {
							e.Project = 0
						}
						a[p] = e
					}
					for _, d := range treetest.Diff(a, b, treetest.RootMode) {
						t.Error(d)
					}
					checkLost(t, n.NotKept, want)
				})
			}
		}
	}
}

// TestFlagsOfRoot: a root is immutable only if it is a volume's own.
func TestFlagsOfRoot(t *testing.T) {
	src := filepath.Join(testfs.Ext4(t, 32<<20), "src")
	write(t, src+"/file", "x")
	must(t, os.Chmod(src, 0o1750))
	treetest.Removable(t, src)
	must(t, treetest.SetFlags(src, treetest.Immutable|treetest.NoDump))
	for own, want := range map[bool]uint32{false: treetest.NoDump, true: treetest.NoDump | treetest.Immutable} {
		dst := mkdir(t, "dst")
		treetest.Removable(t, dst)
		n, err := CopyStable(bg, src, openFile(t, dst), Options{OwnRoot: own}, 1)
		must(t, err)
		f, err := treetest.Fingerprint(dst)
		must(t, err)
		if f["."].Flags != want {
			t.Errorf("own %v: the root has flags %#x, want %#x", own, f["."].Flags, want)
		}
		if own {
			treetest.Compare(t, src, dst, 0)
			checkLost(t, n.NotKept, map[string]int64{})
		} else {
			checkRoot(t, dst)
			checkLost(t, n.NotKept, map[string]int64{LostRootFlags: 1})
		}
	}
}

// TestFlagsStable: directories and files that are immutable are copied again, and what
// is not kept of them counts once.
func TestFlagsStable(t *testing.T) {
	top := testfs.Ext4(t, 64<<20)
	for name, linked := range map[string]bool{"directories": false, "everything": true} {
		t.Run(name, func(t *testing.T) {
			src, dst := filepath.Join(top, "src-"+name), filepath.Join(top, "dst-"+name)
			must(t, errors.Join(os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755)))
			treetest.BuildFlags(t, src, allFlags, false)
			treetest.Removable(t, dst)
			if !linked { // else everything has to be copied again
				for _, f := range []string{"flags", "flags/linked", "flags/linked/first", "flags/linked/log", "flags/dir-fixed"} {
					must(t, treetest.SetFlags(filepath.Join(src, f), 0))
				}
				for _, f := range []string{"0-linked", "flags/zz", "flags/dir-fixed/a", "flags/linked"} {
					must(t, os.RemoveAll(filepath.Join(src, f)))
				}
				must(t, treetest.SetFlags(src+"/flags/dir-fixed", treetest.Immutable))
			}
			var opt Options
			change := func() {
				dir := src + "/flags/dir-all"
				must(t, errors.Join(treetest.SetFlags(dir, 0), os.WriteFile(dir+"/new", []byte("x"), 0o600),
					os.Mkdir(dir+"/made", 0o700),
					treetest.SetFlags(dir+"/made", treetest.Immutable), treetest.SetFlags(dir, treetest.Append),
					treetest.SetFlags(src+"/flags/log", treetest.Immutable)))
			}
			meddle(&opt, change, func() {})
			r, err := CopyStable(bg, src, openFile(t, dst), opt, 3)
			must(t, err)
			if r.Passes != 2 {
				t.Errorf("%d passes: the test does not test what it says", r.Passes)
			}
			treetest.Compare(t, src, dst, treetest.RootMode)
			checkLost(t, r.NotKept, map[string]int64{})
		})
	}
}

// TestLossesCountOnce: what is copied again is not counted again.
func TestLossesCountOnce(t *testing.T) {
	src, dst := testfs.Ext4(t, 64<<20), mount(t, "ramfs", "")
	must(t, os.Remove(src+"/lost+found"))
	treetest.Removable(t, src)
	for _, f := range []string{"a/1", "a/2", "b/1", "c/d/1", "c/d/2"} {
		write(t, filepath.Join(src, f), f)
		must(t, treetest.SetFlags(filepath.Join(src, f), treetest.NoDump))
	}
	var opt Options
	meddle(&opt, func() {
		must(t, treetest.SetFlags(src+"/a/1", 0))
		must(t, os.RemoveAll(src+"/c/d"))
	}, func() { write(t, src+"/a/3", "3") })
	r, err := CopyStable(bg, src, openFile(t, dst), opt, 4)
	must(t, err)
	if r.Passes < 2 {
		t.Errorf("%d passes: the test does not test what it says", r.Passes)
	}
	want := []NotKept{{LostNoDump, 2, src + "/a/2"}}
	if !reflect.DeepEqual(r.NotKept, want) {
		t.Errorf("not kept: %v, want %v", r.NotKept, want)
	}
}

// TestDates: dates that the destination cannot hold are counted.
func TestDates(t *testing.T) {
	needRoot(t)
	src := mount(t, "tmpfs", "") // which holds any
	must(t, unix.Mount("", src, "", unix.MS_REMOUNT|unix.MS_NOATIME, ""))
	for name, date := range map[string]time.Time{
		"1850": time.Date(1850, 1, 1, 0, 0, 0, 0, time.UTC), "1950": time.Date(1950, 1, 1, 0, 0, 0, 0, time.UTC),
		"2037": time.Date(2037, 1, 1, 0, 0, 0, 0, time.UTC), "2040": time.Date(2040, 1, 1, 0, 0, 0, 0, time.UTC),
		"2460": time.Date(2460, 1, 1, 0, 0, 0, 0, time.UTC), "2500": time.Date(2500, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		must(t, os.Mkdir(filepath.Join(src, name), 0o755))
		must(t, os.Symlink("x", filepath.Join(src, name, "link")))
		write(t, filepath.Join(src, name, "file"), "x")
		at := []unix.Timespec{{Sec: 1600000000}, {Sec: date.Unix()}}
		for _, f := range []string{"link", "file", ""} {
			must(t, unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(src, name, f), at, unix.AT_SYMLINK_NOFOLLOW))
		}
	}
	must(t, os.Chtimes(src, time.Unix(1600000000, 0), time.Unix(1600000000, 0)))
	for name, c := range map[string]struct {
		dst   string
		want  int64
		first string
	}{
		"ext4 with large inodes": {ext4With(t), 3 * 3, "/1850"},
		"ext4 with small inodes": {ext4With(t, "-I", "128"), 4 * 3, "/1850"},
		"xfs":                    {testfs.XFS(t, 0), 2 * 3, "/1850"},
		"btrfs":                  {testfs.Btrfs(t, 0), 0, ""},
	} {
		n := copyDir(t, src, c.dst, Options{})
		var want []NotKept
		if c.want > 0 {
			want = []NotKept{{LostDates, c.want, src + c.first}}
		}
		if !reflect.DeepEqual(n.NotKept, want) {
			t.Errorf("%s: not kept: %v, want %v", name, n.NotKept, want)
		}
	}
	// From an archive, too.
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "d/old", Mode: 0o644,
		ModTime: time.Date(1850, 1, 1, 0, 0, 0, 0, time.UTC)}))
	must(t, w.Close())
	n, err := Untar(bg, &b, openFile(t, ext4With(t)), Options{})
	must(t, err)
	if want := []NotKept{{LostDates, 1, "d/old"}}; !reflect.DeepEqual(n.NotKept, want) {
		t.Errorf("of an archive not kept: %v, want %v", n.NotKept, want)
	}
}

// TestLeftOut: what XFS cannot hold at all is left out and counted, with all its names.
func TestLeftOut(t *testing.T) {
	src := mkdir(t, "src")
	top := testfs.XFS(t, 0)
	must(t, os.Symlink(strings.Repeat("x", 1023), src+"/1023"))
	must(t, os.Symlink(strings.Repeat("x", 1024), src+"/1024"))
	must(t, os.Link(src+"/1024", src+"/again"))
	must(t, os.Symlink(strings.Repeat("/y", 2047), src+"/4094"))
	must(t, unix.Mknod(src+"/device", unix.S_IFBLK|0o600, int(unix.Mkdev(8, 1<<19))))
	write(t, src+"/file", "x")
	want := map[string]int64{LostSymlinks: 3, LostDevices: 1}
	check := func(how string, n Totals, err error, dst string) {
		t.Helper()
		must(t, err)
		if got := listing(t, dst); got != `["1023" "file"]` {
			t.Errorf("%s: the copy has %s", how, got)
		}
		checkLost(t, n.NotKept, want)
	}
	for _, how := range []string{"copy", "tar"} {
		dst := filepath.Join(top, how)
		must(t, os.Mkdir(dst, 0o755))
		if how == "copy" {
			n, err := CopyDir(bg, src, openFile(t, dst), Options{})
			check(how, n, err, dst)
			continue
		}
		archive := run(t, src, "tar", "--create", "--file=-", "--format=posix", ".")
		n, err := Untar(bg, strings.NewReader(archive), openFile(t, dst), Options{})
		check(how, n, err, dst)
	}

	// A later entry of the archive may take the name.
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []*tar.Header{
		{Typeflag: tar.TypeSymlink, Name: "a", Linkname: strings.Repeat("x", 2000)},
		{Typeflag: tar.TypeLink, Name: "b", Linkname: "a"},
		{Typeflag: tar.TypeReg, Name: "a", Mode: 0o644},
		{Typeflag: tar.TypeLink, Name: "c", Linkname: "a"},
	} {
		must(t, w.WriteHeader(h))
	}
	must(t, w.Close())
	dst := filepath.Join(top, "later")
	must(t, os.Mkdir(dst, 0o755))
	_, err := Untar(bg, &b, openFile(t, dst), Options{})
	must(t, err)
	if got := listing(t, dst); got != `["a" "c"]` {
		t.Errorf("the copy has %s", got)
	}
}

// TestUntarFlags reads the flags that bsdtar writes.
func TestUntarFlags(t *testing.T) {
	top := testfs.Ext4(t, 64<<20)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(typ byte, name, flags, link string) {
		h := &tar.Header{Typeflag: typ, Name: name, Mode: 0o755, Linkname: link, ModTime: time.Unix(1000, 0)}
		if flags != "" {
			h.PAXRecords = map[string]string{"SCHILY.fflags": flags}
		}
		must(t, w.WriteHeader(h))
	}
	add(tar.TypeDir, "./", "schg,nodump", "")
	add(tar.TypeDir, "dir/", "schg", "")
	add(tar.TypeReg, "dir/fixed", "schg,nodump,noatime", "")
	add(tar.TypeReg, "dir/log", "sappnd", "")
	add(tar.TypeLink, "again", "", "dir/log")
	add(tar.TypeReg, "replaced", "schg", "")
	add(tar.TypeReg, "replaced", "", "")
	add(tar.TypeReg, "mac", "uchg,hidden", "")
	must(t, w.Close())
	want := map[string]uint32{
		".": treetest.NoDump, "dir": treetest.Immutable, "dir/fixed": treetest.Immutable | treetest.NoDump | treetest.NoAtime,
		"dir/log": treetest.Append, "again": treetest.Append, "replaced": 0, "mac": 0,
	}
	for _, staging := range []bool{false, true} {
		dst := filepath.Join(top, fmt.Sprintf("staging-%v", staging))
		must(t, os.Mkdir(dst, 0o755))
		treetest.Removable(t, dst)
		n, err := Untar(bg, bytes.NewReader(b.Bytes()), openFile(t, dst), Options{Staging: staging})
		must(t, err)
		tree, err := treetest.Fingerprint(dst)
		must(t, err)
		got := map[string]uint32{}
		for name, e := range tree {
			got[name] = e.Flags
			if name != "." && e.Mtime.Sec != 1000 {
				t.Errorf("%s is of %v", name, e.Mtime)
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("flags %v, want %v", got, want)
		}
		checkLost(t, n.NotKept, map[string]int64{LostRootFlags: 1, LostOtherFlags: 1})
	}
}

// TestProjectOfSpecial: symbolic links, and what else cannot be opened, have projects.
func TestProjectOfSpecial(t *testing.T) {
	src := filepath.Join(testfs.XFS(t, 0), "src")
	dst := filepath.Join(filepath.Dir(src), "dst")
	must(t, errors.Join(os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755), os.Symlink("x", src+"/symlink"),
		unix.Mkfifo(src+"/fifo", 0o600), os.Link(src+"/fifo", src+"/again")))
	names := []string{"symlink", "fifo", "again"}
	for i, name := range names[:2] {
		err := kernel.SetSpecialProject(unix.AT_FDCWD, filepath.Join(src, name), uint32(70+i))
		if errors.Is(err, unix.ENOSYS) {
			t.Skip("this kernel has no file_setattr, which is of Linux 6.17")
		}
		must(t, err)
	}
	n := copyDir(t, src, dst, Options{Staging: true})
	for i, name := range names {
		p, err := kernel.SpecialProject(unix.AT_FDCWD, filepath.Join(dst, name))
		if want := []uint32{70, 71, 71}[i]; err != nil || p != want {
			t.Errorf("%s has project %d, %v; want %d", name, p, err, want)
		}
	}
	checkLost(t, n.NotKept, map[string]int64{})
	checkLost(t, copyDir(t, src, testfs.Ext4(t, 16<<20), Options{}).NotKept, map[string]int64{LostProject: 2})
}
