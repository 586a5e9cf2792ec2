// Package treetest makes and compares directory trees with everything that a
// Linux filesystem can hold. It is for tests; it shares no code with treecopy,
// which it judges.
package treetest

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sort"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Field is something that Compare may ignore.
type Field uint

// The fields, to be combined with |.
const (
	Atime    Field = 1 << iota // times of access
	Owners                     // users and groups
	Holes                      // where data is and where holes are
	RootMode                   // the mode of the root directory
	Root                       // the root directory altogether
	Xattrs                     // extended attributes and ACLs
	Times                      // times of modification and access
	Flags                      // flags (chattr)
	Projects                   // project IDs
)

// Entry describes one file, but for its name.
type Entry struct {
	Mode    uint32 // as st_mode
	UID     uint32
	GID     uint32
	Rdev    uint64
	Size    int64 // of regular files and symbolic links
	Mtime   unix.Timespec
	Atime   unix.Timespec
	Target  string            // of a symbolic link
	Xattrs  map[string]string // all that can be listed
	Link    string            // the first name, in order of bytes, of the file, if there are several in the tree
	Data    string            // the ranges that are not holes, as from-to, in bytes
	Sum     string            // SHA-256 of the content, whatever is a hole of it
	Flags   uint32            // of a file or directory: those of flags.go
	Project uint32
}

// Fingerprint describes the tree below dir by the path of each file relative
// to dir; the root is ".". It does not change times of access, except those of
// symbolic links that are not in the future.
func Fingerprint(dir string) (map[string]Entry, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return FingerprintFile(f)
}

// FingerprintFile is Fingerprint of an open directory.
func FingerprintFile(f *os.File) (map[string]Entry, error) {
	r := reader{out: make(map[string]Entry), links: make(map[[2]uint64][]string)}
	if err := r.dir(int(f.Fd()), ".", "."); err != nil {
		return nil, err
	}

	for _, paths := range r.links {
		sort.Strings(paths)
		for _, p := range paths {
			if len(paths) > 1 {
				e := r.out[p]
				e.Link = paths[0]
				r.out[p] = e
			}
		}
	}

	return r.out, nil
}

type reader struct {
	out   map[string]Entry
	links map[[2]uint64][]string
}

func (r *reader) dir(at int, name, path string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("stat %q: %w", path, err)
	}

	fd, err := open(at, name, unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("open %q: %w", path, err)
	}

	f := os.NewFile(uintptr(fd), path)
	defer f.Close()

	e, err := entry(at, name, &st)
	if err != nil {
		return fmt.Errorf("%q: %w", path, err)
	}

	e.Flags, e.Project = flagsOf(f)
	r.out[path] = e
	names, err := f.Readdirnames(-1)
	if err != nil {
		return err
	}

	for _, n := range names {
		p := path + "/" + n
		if path == "." {
			p = n
		}

		if err := unix.Fstatat(fd, n, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("stat %q: %w", p, err)
		}

		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			if err := r.dir(fd, n, p); err != nil {
				return err
			}
			continue
		}

		if r.out[p], err = entry(fd, n, &st); err != nil {
			return fmt.Errorf("%q: %w", p, err)
		}

		if st.Nlink > 1 {
			id := [2]uint64{uint64(st.Dev), st.Ino}
			r.links[id] = append(r.links[id], p)
		}
	}

	return nil
}

func open(at int, name string, flags int) (int, error) {
	flags |= unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(at, name, flags|unix.O_NOATIME, 0)
	if err == unix.EPERM {
		fd, err = unix.Openat(at, name, flags, 0)
	}
	return fd, err
}

func entry(at int, name string, st *unix.Stat_t) (Entry, error) {
	e := Entry{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Mtime: st.Mtim, Atime: st.Atim}
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		e.Size = st.Size
		if err := e.content(at, name, st.Size); err != nil {
			return e, err
		}
	case unix.S_IFLNK:
		e.Size = st.Size
		buf := make([]byte, 8192)
		n, err := unix.Readlinkat(at, name, buf)
		if err != nil {
			return e, err
		}
		e.Target = string(buf[:n])
	case unix.S_IFCHR, unix.S_IFBLK:
		e.Rdev = st.Rdev
	}

	e.Xattrs, err = xattrs(fmt.Sprintf("/proc/self/fd/%d/%s", at, name))
	return e, err
}

func (e *Entry) content(at int, name string, size int64) error {
	fd, err := open(at, name, 0)
	if err != nil {
		return err
	}

	f := os.NewFile(uintptr(fd), name)
	defer f.Close()

	e.Flags, e.Project = flagsOf(f)
	var data []string
	h := sha256.New()
	for off := int64(0); off < size; {
		from, err := unix.Seek(fd, off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break
		}
		if err != nil {
			return err
		}

		if off, err = unix.Seek(fd, from, unix.SEEK_HOLE); err != nil {
			return err
		}

		data = append(data, fmt.Sprintf("%d-%d", from, min(off, size)))
		if err := hashData(h, io.NewSectionReader(f, from, off-from), from); err != nil {
			return err
		}
	}

	e.Data = strings.Join(data, " ")
	e.Sum = fmt.Sprintf("%x", h.Sum(nil))
	return nil
}

// hashData hashes the blocks of r that are not all zero, and where they are:
// so holes may be as large as they like and where the filesystem likes.
func hashData(h io.Writer, r io.Reader, off int64) error {
	buf := make([]byte, 4096)
	zero := make([]byte, 4096)
	for {
		n, err := io.ReadFull(r, buf)
		if n > 0 && !bytes.Equal(buf[:n], zero[:n]) {
			fmt.Fprintf(h, "%d:", off)
			h.Write(buf[:n])
		}
		off += int64(n)
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func xattrs(path string) (map[string]string, error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err == unix.EOPNOTSUPP || err == nil && n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	out := make(map[string]string)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		if strings.HasPrefix(name, "trusted.SGI_ACL_") {
			continue // XFS lists POSIX ACLs by that name too
		}
		v := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, v)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out[name] = string(v[:n])
	}

	if len(out) == 0 {
		return nil, nil
	}

	return out, nil
}

// Compare fails the test if the trees below a and b differ in anything but the
// fields to ignore.
func Compare(t testing.TB, a, b string, ignore Field) {
	t.Helper()
	fa, err := Fingerprint(a)
	if err != nil {
		t.Fatalf("reading %s: %v", a, err)
	}

	fb, err := Fingerprint(b)
	if err != nil {
		t.Fatalf("reading %s: %v", b, err)
	}

	for i, d := range Diff(fa, fb, ignore) {
		if i == 20 {
			t.Error("and more")
			break
		}
		t.Error(d)
	}
}

// Diff lists the differences between two fingerprints.
func Diff(a, b map[string]Entry, ignore Field) []string {
	var out []string
	paths := make(map[string]bool)
	for p := range a {
		paths[p] = true
	}

	for p := range b {
		paths[p] = true
	}

	for _, p := range slices.Sorted(maps.Keys(paths)) {
		x, inA := a[p]
		y, inB := b[p]
		switch {
		case p == "." && ignore&Root != 0:
		case !inA:
			out = append(out, fmt.Sprintf("%q is only in the second", p))
		case !inB:
			out = append(out, fmt.Sprintf("%q is only in the first", p))
		default:
			for _, d := range x.diff(y, p, ignore) {
				out = append(out, fmt.Sprintf("%q: %s", p, d))
			}
		}
	}

	return out
}

func (e Entry) diff(o Entry, path string, ignore Field) []string {
	var out []string
	check := func(what string, unless bool, x, y any) {
		if !unless && fmt.Sprint(x) != fmt.Sprint(y) {
			out = append(out, fmt.Sprintf("%s: %v, but %v", what, x, y))
		}
	}

	type octal = string
	check("mode", path == "." && ignore&RootMode != 0, octal(fmt.Sprintf("%o", e.Mode)), octal(fmt.Sprintf("%o", o.Mode)))
	check("owner", ignore&Owners != 0, [2]uint32{e.UID, e.GID}, [2]uint32{o.UID, o.GID})
	check("device", false, e.Rdev, o.Rdev)
	check("size", false, e.Size, o.Size)
	check("mtime", ignore&Times != 0, e.Mtime, o.Mtime)
	check("atime", ignore&(Times|Atime) != 0, e.Atime, o.Atime)
	check("target", false, e.Target, o.Target)
	check("hard link to", false, e.Link, o.Link)
	check("data", ignore&Holes != 0, e.Data, o.Data)
	check("content", false, e.Sum, o.Sum)
	check("flags", ignore&Flags != 0, octal(fmt.Sprintf("%#x", e.Flags)), octal(fmt.Sprintf("%#x", o.Flags)))
	check("project", ignore&Projects != 0, e.Project, o.Project)
	if ignore&Xattrs == 0 && !maps.Equal(e.Xattrs, o.Xattrs) {
		out = append(out, fmt.Sprintf("attributes: %q, but %q", e.Xattrs, o.Xattrs))
	}

	return out
}
