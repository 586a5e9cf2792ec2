package treetest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Build fills the existing directory dir with a tree that has one of
// everything: types, modes, owners, names, times, attributes, hard links,
// holes, sizes around those of buffers. Without root, what root is needed for
// is left out. The content is the same each time. What a filesystem may not
// support makes the test fail.
func Build(t testing.TB, dir string) {
	t.Helper()
	b := &builder{t: t, dir: dir, root: os.Geteuid() == 0, rnd: rand.NewChaCha8([32]byte{1})}
	b.files()
	b.names()
	b.links()
	b.specials()
	b.attributes()
	b.dirs()
	b.times()
}

type builder struct {
	t    testing.TB
	dir  string
	root bool
	rnd  *rand.ChaCha8
}

func (b *builder) path(name string) string { return filepath.Join(b.dir, name) }

func (b *builder) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *builder) mkdir(name string, mode uint32) {
	b.t.Helper()
	b.must(os.MkdirAll(b.path(name), 0o700))
	b.must(unix.Chmod(b.path(name), mode))
}

// file makes a file of random bytes.
func (b *builder) file(name string, size int, mode uint32) {
	b.t.Helper()
	b.must(os.MkdirAll(filepath.Dir(b.path(name)), 0o755))
	data := make([]byte, size)
	b.rnd.Read(data)
	b.must(os.WriteFile(b.path(name), data, 0o600))
	b.must(unix.Chmod(b.path(name), mode))
}

func (b *builder) chown(name string, uid, gid int) {
	b.t.Helper()
	if b.root {
		b.must(unix.Lchown(b.path(name), uid, gid))
	}
}

// sparse makes a file with data of 4 KiB at each of the offsets.
func (b *builder) sparse(name string, size int64, at ...int64) {
	b.t.Helper()
	b.file(name, 0, 0o644)
	f, err := os.OpenFile(b.path(name), os.O_WRONLY, 0)
	b.must(err)
	b.must(f.Truncate(size))
	for _, off := range at {
		data := make([]byte, min(4096, size-off))
		b.rnd.Read(data)
		_, err := f.WriteAt(data, off)
		b.must(err)
	}

	b.must(f.Sync()) // or all of it may look like data
	b.must(f.Close())
}

func (b *builder) files() {
	for _, n := range []int{0, 1, 511, 4095, 4096, 4097, 65535, 65536, 256<<10 - 1, 256 << 10, 256<<10 + 1, 3<<20 + 5} {
		b.file(fmt.Sprintf("size/%d", n), n, 0o644)
	}

	for _, m := range []uint32{0, 0o400, 0o444, 0o600, 0o666, 0o755, 0o777, 0o1777, 0o2755, 0o4755, 0o6711} {
		if m&0o400 == 0 && !b.root {
			continue // it could not be read
		}
		b.file(fmt.Sprintf("mode/%04o", m), 10, m)
	}

	b.mkdir("owner", 0o755)

	for i, o := range [][2]int{{1000, 2000}, {0, 5}, {7, 0}, {1 << 31, 1<<32 - 2}} {
		b.file(fmt.Sprintf("owner/%d", i), 10, 0o640)
		b.chown(fmt.Sprintf("owner/%d", i), o[0], o[1])
		b.file(fmt.Sprintf("owner/setuid%d", i), 10, 0o640)
		b.chown(fmt.Sprintf("owner/setuid%d", i), o[0], o[1])
		b.must(unix.Chmod(b.path(fmt.Sprintf("owner/setuid%d", i)), 0o6755))
	}

	const mb = 1 << 20
	b.sparse("sparse/all", 5*mb)
	b.sparse("sparse/huge", 1<<40, 1<<39)
	b.sparse("sparse/leading", 64<<10, 60<<10)
	b.sparse("sparse/trailing", 64<<10, 0)
	b.sparse("sparse/middle", 20*mb, 0, 8*mb, 8*mb+4096, 20*mb-4096)
	b.sparse("sparse/odd", 3*mb+77, mb, 3*mb)
	b.sparse("sparse/small", 12<<10, 4<<10)
	b.file("sparse/zeros", 0, 0o644) // data, although all of it is zero
	b.must(os.WriteFile(b.path("sparse/zeros"), make([]byte, mb), 0o644))
}

func (b *builder) names() {
	for _, n := range []string{
		"new\nline", "\xff\xfe not UTF-8", "-rf", "--help", " space ", "...", "*", "$(id)", "back\\slash", "\x01\x7f",
		strings.Repeat("n", 255), strings.Repeat("\xc3\xa4", 127), ".pando-import", ".pando-import+", "größe", "=", "a:b",
	} {
		b.file("names/"+n, 5, 0o644)
		b.file("names/dir"+n[:min(len(n), 250)]+"/"+n, 5, 0o644)
		b.must(os.Symlink(n, b.path("names/l"+n[:min(len(n), 250)])))
	}
	b.file(".pando-import/x", 1, 0o644)
	b.mkdir(".pando-import", 0o711)
	b.file(".pando-import+", 1, 0o644)
}

func (b *builder) links() {
	sym := func(target, name string) {
		b.t.Helper()
		b.must(os.MkdirAll(filepath.Dir(b.path(name)), 0o755))
		b.must(os.Symlink(target, b.path(name)))
	}

	sym("../size/1", "links/file")
	sym("../size", "links/dir")
	sym("nowhere", "links/dangling")
	sym("/", "links/root")
	sym("loop", "links/loop")
	sym(strings.Repeat("x", 59), "links/59")
	sym(strings.Repeat("x", 60), "links/60")
	sym(strings.Repeat("/y", 511), "links/1022") // XFS takes 1023 bytes, others 4095
	sym("owned", "links/owned")
	b.chown("links/owned", 12, 34)

	b.file("hard/first", 100, 0o600)
	b.mkdir("hard/a/b/c", 0o755)
	b.mkdir("hard/z", 0o755)
	for _, n := range []string{"hard/second", "hard/a/b/c/third", "hard/z/fourth", "zz-last"} {
		b.must(os.Link(b.path("hard/first"), b.path(n)))
	}

	b.file("hard/big", 1<<20, 0o444)
	for i := range 50 {
		b.must(os.Link(b.path("hard/big"), b.path(fmt.Sprintf("hard/z/big%d", i))))
	}

	sym("target", "hard/symlink")
	b.must(os.Link(b.path("hard/symlink"), b.path("hard/a/symlink")))
	b.must(unix.Mkfifo(b.path("hard/fifo"), 0o640))
	b.must(os.Link(b.path("hard/fifo"), b.path("hard/a/fifo")))
	b.chown("hard/fifo", 3, 4)
}

func (b *builder) specials() {
	b.mkdir("special", 0o755)
	b.must(unix.Mkfifo(b.path("special/fifo"), 0o622))
	b.must(unix.Mknod(b.path("special/socket"), unix.S_IFSOCK|0o755, 0))
	if !b.root {
		return
	}

	for _, d := range []struct {
		name         string
		mode         uint32
		major, minor uint32
	}{
		{"null", unix.S_IFCHR | 0o666, 1, 3},
		{"whiteout", unix.S_IFCHR, 0, 0},
		{"block", unix.S_IFBLK | 0o660, 7, 99},
		{"most", unix.S_IFBLK | 0o600, 511, 1<<18 - 1}, // of XFS; others take 12 and 20 bits
	} {
		b.must(unix.Mknod(b.path("special/"+d.name), d.mode, int(unix.Mkdev(d.major, d.minor))))
		b.must(unix.Chmod(b.path("special/"+d.name), d.mode&0o7777))
	}

	b.chown("special/block", 0, 6)
}

func (b *builder) xattr(name, attr, value string) {
	b.t.Helper()
	if err := unix.Lsetxattr(b.path(name), attr, []byte(value), 0); err != nil {
		b.t.Fatalf("%s: %s: %v", name, attr, err)
	}
}

// ACL is the value of a POSIX ACL attribute with these (tag, permissions, id).
func ACL(entries ...[3]uint32) string {
	out := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		out = binary.LittleEndian.AppendUint16(out, uint16(e[0]))
		out = binary.LittleEndian.AppendUint16(out, uint16(e[1]))
		out = binary.LittleEndian.AppendUint32(out, e[2])
	}
	return string(out)
}

func (b *builder) attributes() {
	b.file("xattr/user", 10, 0o644)
	b.xattr("xattr/user", "user.empty", "")
	b.xattr("xattr/user", "user.binary", "\x00\xff\n")
	b.xattr("xattr/user", "user.long", strings.Repeat("v", 3000))
	b.file("xattr/many", 10, 0o444)
	for i := range 40 {
		_ = unix.Chmod(b.path("xattr/many"), 0o644)
		b.xattr("xattr/many", fmt.Sprintf("user.%d", i), fmt.Sprint(i*i))
	}

	b.must(unix.Chmod(b.path("xattr/many"), 0o444))
	b.mkdir("xattr/dir", 0o755)
	b.xattr("xattr/dir", "user.on a directory", "1")

	const none = 0xffffffff
	acl := ACL([3]uint32{1, 7, none}, [3]uint32{2, 7, 1000}, [3]uint32{2, 0, 1001}, [3]uint32{4, 4, none},
		[3]uint32{8, 5, 50}, [3]uint32{16, 7, none}, [3]uint32{32, 0, none})
	b.file("acl/file", 10, 0o640)
	b.xattr("acl/file", "system.posix_acl_access", acl)
	b.mkdir("acl/dir", 0o750)
	b.file("acl/dir/before", 10, 0o644)
	b.mkdir("acl/dir/sub", 0o700)
	b.xattr("acl/dir", "system.posix_acl_access", acl)
	b.xattr("acl/dir", "system.posix_acl_default", acl)
	b.file("acl/dir/inherits", 10, 0o644)
	b.mkdir("acl/dir/subinherits", 0o755)
	b.file("acl/masked", 10, 0o644)
	b.xattr("acl/masked", "system.posix_acl_access", acl)
	b.must(unix.Chmod(b.path("acl/masked"), 0o614))

	if !b.root {
		return
	}

	b.xattr("xattr/user", "trusted.md5", "x")
	b.must(os.Symlink("x", b.path("xattr/symlink")))
	b.xattr("xattr/symlink", "trusted.on a symlink", "1")
	b.must(unix.Mkfifo(b.path("xattr/fifo"), 0o600))
	b.xattr("xattr/fifo", "trusted.on a fifo", "2")
	b.must(unix.Mknod(b.path("xattr/dev"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	b.xattr("xattr/dev", "security.on a device", "3")

	// A capability: version 2, effective, cap_net_raw permitted.
	capability := binary.LittleEndian.AppendUint32(nil, 0x02000001)
	capability = binary.LittleEndian.AppendUint32(capability, 1<<13)
	capability = append(capability, bytes.Repeat([]byte{0}, 12)...)
	for _, n := range []string{"xattr/ping", "xattr/owned-ping"} {
		b.file(n, 5000, 0o755)
		b.chown(n, 1000*len(n)%77, 5)
		b.xattr(n, "security.capability", string(capability))
	}

	b.xattr("", "trusted.on the root", "yes")
	b.xattr("", "user.on the root", "yes")
}

func (b *builder) dirs() {
	for _, m := range []uint32{0, 0o111, 0o500, 0o555, 0o700, 0o1777, 0o2755, 0o2770, 0o3777, 0o4755} {
		if m&0o500 != 0o500 && !b.root {
			continue
		}
		n := fmt.Sprintf("dirs/%04o", m)
		b.file(n+"/in", 3, 0o644)
		b.mkdir(n+"/empty", 0o755)
		b.chown(n, 42, 43)
		b.must(unix.Chmod(b.path(n), m))
	}

	b.file("dirs/"+strings.Repeat("deep/", 60)+"end", 7, 0o644)
	for i := range 1800 { // more than a buffer of getdents takes
		b.file(fmt.Sprintf("dirs/wide/some name %d", i), i%200, 0o644)
	}

	for i := range 100 {
		b.file(fmt.Sprintf("dirs/bushy/%d/file", i), 9, 0o644)
	}

	b.chown("", 11, 22)
	b.must(unix.Chmod(b.path(""), 0o1751))
}

// times gives every file its own, and last of all the root.
func (b *builder) times() {
	var paths []string
	b.must(filepath.WalkDir(b.dir, func(p string, _ os.DirEntry, err error) error {
		paths = append(paths, p)
		return err
	}))
	for i, p := range paths {
		i := int64(i)

		// Times of access are in the future, or reading a symbolic link would change its.
		atime := unix.Timespec{Sec: 2200000000 + i, Nsec: 999999999 - i}
		mtime := unix.Timespec{Sec: 1500000000 + i*1000, Nsec: i*7919%1e9 + 1}
		switch i % 50 {
		case 7:
			mtime = unix.Timespec{Sec: -1000000 - i, Nsec: 5} // before 1970
		case 8:
			mtime.Sec = 2150000000 // after 2038
		case 9:
			mtime = unix.Timespec{}
		}

		b.must(unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{atime, mtime}, unix.AT_SYMLINK_NOFOLLOW))
	}
}
