package treetest

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of files, as chattr(1) sets them (linux/fs.h).
const (
	Sync           = 0x8
	Immutable      = 0x10
	Append         = 0x20
	NoDump         = 0x40
	NoAtime        = 0x80
	DirSync        = 0x10000
	ProjectInherit = 0x20000000

	shownFlags = Sync | Immutable | Append | NoDump | NoAtime | DirSync | ProjectInherit
)

// BuildFlags adds a directory "flags" to the tree in dir, with files and directories
// that have the flags among may, and projects if they are to be. At the end of the
// test everything below dir can be removed again.
func BuildFlags(t testing.TB, dir string, may uint32, projects bool) {
	t.Helper()
	b := &builder{t: t, dir: dir, root: true}
	Removable(t, dir)
	flags := map[string]uint32{}
	for name, f := range map[string]uint32{
		"none": 0, "fixed": Immutable, "log": Append, "both": Immutable | Append, "nodump": NoDump, "noatime": NoAtime,
		"sync": Sync, "all": Immutable | Append | NoDump | NoAtime | Sync,
	} {
		flags["flags/"+name] = f
		flags["flags/dir-"+name] = f
		flags["flags/dir-"+name+"/sub"] = f &^ NoDump
		flags["flags/dir-"+name+"/file"] = f &^ Sync
	}

	flags["flags/dir-dirsync"] = DirSync
	flags["flags/dir-inherit"] = ProjectInherit | NoDump
	flags["flags/linked/first"] = Immutable | NoDump
	flags["flags/linked/log"] = Append
	flags["flags/linked"] = Immutable
	flags["flags"] = Append
	names := slices.Sorted(maps.Keys(flags))
	for _, n := range names {
		if base := filepath.Base(n); n == "flags" || n == "flags/linked" || base == "sub" || strings.HasPrefix(base, "dir-") {
			b.must(os.MkdirAll(b.path(n), 0o755))
		} else {
			b.must(os.MkdirAll(filepath.Dir(b.path(n)), 0o755))
			b.must(os.WriteFile(b.path(n), []byte(n), 0o640))
		}
	}

	b.must(os.Symlink("fixed", b.path("flags/symlink")))
	b.must(unix.Mkfifo(b.path("flags/fifo"), 0o600))

	// Linked from directories that come earlier and later, immutable and not.
	for i, n := range []string{"flags/dir-fixed/a", "flags/zz", "0-linked", "flags/linked/again"} {
		b.must(os.Link(b.path([]string{"flags/linked/first", "flags/linked/log"}[i%2]), b.path(n)))
	}

	at := unix.Timespec{Sec: 1234567890, Nsec: 123456789}
	for i, n := range slices.Backward(names) {
		if projects {
			b.must(SetProject(b.path(n), uint32(1000+i)))
		}
		b.must(unix.UtimesNanoAt(unix.AT_FDCWD, b.path(n), []unix.Timespec{{Sec: 2200000000}, at}, 0))
		b.must(SetFlags(b.path(n), flags[n]&may))
	}

	b.must(unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{{Sec: 2200000000}, at}, 0))
}

// SetFlags gives a file or directory these of the flags above, and no others.
func SetFlags(path string, flags uint32) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	have, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	return unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, have&^shownFlags|int(flags))
}

// fsxattr is struct fsxattr.
type fsxattr struct {
	xflags, extent, extents, project, cowExtent uint32
	_                                           [8]byte
}

func fsx(f *os.File, call uintptr, x *fsxattr) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), call, uintptr(unsafe.Pointer(x))); e != 0 {
		return e
	}
	return nil
}

const (
	fsGetXattr = 0x801c581f
	fsSetXattr = 0x401c5820
)

// SetProject gives a file or directory a project ID.
func SetProject(path string, project uint32) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var x fsxattr
	if err := fsx(f, fsGetXattr, &x); err != nil {
		return err
	}
	x.project = project
	return fsx(f, fsSetXattr, &x)
}

// flagsOf returns flags and project of a file or directory that is open.
func flagsOf(f *os.File) (flags, project uint32) {
	if v, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS); err == nil {
		flags = uint32(v) & shownFlags
	}
	var x fsxattr
	if fsx(f, fsGetXattr, &x) == nil {
		project = x.project
	}
	return flags, project
}

// Removable takes the flags that forbid it away from everything below dir, at the
// end of the test.
func Removable(t testing.TB, dir string) {
	t.Helper()
	t.Cleanup(func() {
		err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
			if err == nil && (e.IsDir() || e.Type().IsRegular()) {
				err = SetFlags(p, 0)
			}
			if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}
