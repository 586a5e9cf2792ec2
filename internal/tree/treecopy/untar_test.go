package treecopy

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/testing/treetest"
)

// tarDir writes the directories and regular files below dir.
func tarDir(w io.Writer, dir string) error {
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		hdr, err := tar.FileInfoHeader(info, "")
		if err != nil {
			return err
		}
		hdr.Name = strings.TrimPrefix(p, dir+"/")
		if err := tw.WriteHeader(hdr); err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		_, err = tw.Write(data)
		return err
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

// ent is an entry of an archive: a header and, for regular files, its data.
type ent struct {
	tar.Header
	data string
}

func fileEnt(name, data string) ent {
	return ent{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Uid: os.Geteuid(), Gid: os.Getegid()}, data}
}

func folder(name string) ent {
	return ent{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755, Uid: os.Geteuid(), Gid: os.Getegid()}, ""}
}

func symlink(name, target string) ent {
	return ent{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777, Uid: os.Geteuid(),
		Gid: os.Getegid()}, ""}
}

func hardlink(name, target string) ent {
	return ent{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target, Mode: 0o644}, ""}
}

// tarball makes an archive. It writes what it is told, however hostile.
func tarball(t testing.TB, entries ...ent) []byte {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.data))
		if h.ModTime.IsZero() && h.Typeflag != tar.TypeXGlobalHeader {
			h.ModTime = time.Unix(1700000000, 0)
		}
		must(t, tw.WriteHeader(&h))
		_, err := io.WriteString(tw, e.data)
		must(t, err)
	}
	must(t, tw.Close())
	return b.Bytes()
}

func compress(t testing.TB, how string, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	switch how {
	case "gzip":
		w := gzip.NewWriter(&b)
		w.Write(data)
		must(t, w.Close())
	case "zstd":
		w, err := zstd.NewWriter(&b)
		must(t, err)
		w.Write(data)
		must(t, w.Close())
	default:
		return data
	}
	return b.Bytes()
}

// jail is a place for archives that try to get out: dst, and beside it things
// that must not change.
type jail struct {
	t      testing.TB
	dir    string
	dst    string
	before map[string]treetest.Entry
}

func newJail(t testing.TB) *jail {
	t.Helper()
	j := &jail{t: t, dir: t.TempDir()}
	j.dst = j.dir + "/dst"
	must(t, os.Mkdir(j.dst, 0o755))
	write(t, j.dir+"/outside/sentinel", "untouched")
	must(t, os.Symlink("dst", j.dir+"/link"))
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, j.dir+"/link", []unix.Timespec{{Sec: 2200000000}, {Sec: 1}},
		unix.AT_SYMLINK_NOFOLLOW))
	j.before = j.outside()
	return j
}

func (j *jail) outside() map[string]treetest.Entry {
	j.t.Helper()
	f, err := treetest.Fingerprint(j.dir)
	must(j.t, err)
	for p := range f {
		if p == "dst" || strings.HasPrefix(p, "dst/") {
			delete(f, p)
		}
	}
	return f
}

func (j *jail) untar(archive []byte, opt Options) (Totals, error) {
	j.t.Helper()
	f, err := os.Open(j.dst)
	must(j.t, err)
	defer f.Close()
	n, err := Untar(bg, bytes.NewReader(archive), f, opt)
	j.check()
	return n, err
}

func (j *jail) check() {
	j.t.Helper()
	for _, d := range treetest.Diff(j.before, j.outside(), treetest.Atime) {
		j.t.Errorf("OUTSIDE the destination: %s", d)
	}
}

// GNU tar reads the nasty tree, in several formats; we write it.
func TestUntarKeepsEverything(t *testing.T) {
	needRoot(t)
	needTool(t, "tar")
	src := build(t)
	for _, name := range []string{
		"/special/socket", // tar cannot
		"/hard/a/fifo",    // tar does not see that it is linked
		"/sparse/huge",    // it takes long
	} {
		must(t, os.Remove(src+name))
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Dir(src+name),
			[]unix.Timespec{{Sec: 2200000000}, {Sec: 7, Nsec: 8}}, 0))
	}
	common := []string{"--create", "--file=-", "--numeric-owner", "--sparse", "--no-check-device"}
	for _, c := range []struct {
		name   string
		args   []string
		opt    Options
		ignore treetest.Field
	}{
		{"pax", []string{"--format=posix", "--xattrs", "--xattrs-include=*", "--acls"}, Options{}, 0},
		{"pax sparse 0.1", []string{"--format=posix", "--sparse-version=0.1", "--xattrs", "--xattrs-include=*"},
			Options{Staging: true}, 0},
		{"pax sparse 0.0", []string{"--format=posix", "--sparse-version=0.0", "--acls", "--xattrs", "--xattrs-include=*"},
			Options{}, 0},
		{"gnu gzip", []string{"--format=gnu", "--gzip"}, Options{Staging: true}, treetest.Times | treetest.Xattrs},
		{"gnu zstd", []string{"--format=gnu", "--zstd"}, Options{}, treetest.Times | treetest.Xattrs},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			j := newJail(t)
			archive := filepath.Join(t.TempDir(), "a.tar")
			args := append(append([]string{}, common...), c.args...)
			run(t, src, "sh", append([]string{"-c", `out=$1; shift; tar "$@" . >"$out"`, "sh", archive}, args...)...)
			b, err := os.ReadFile(archive)
			must(t, err)
			n, err := j.untar(b, c.opt)
			must(t, err)
			treetest.Compare(t, src, j.dst, c.ignore|treetest.RootMode)
			checkRoot(t, j.dst)
			m, err := Measure(bg, src, Options{})
			must(t, err)
			if n.Files != m.Files || n.Skipped != (Skipped{}) {
				t.Errorf("Untar %+v, Measure %+v", n, m)
			}
		})
	}
}

func TestUntarFormats(t *testing.T) {
	plain := tarball(t, folder("d/"), fileEnt("d/f", "content"))
	gz, zst := compress(t, "gzip", plain), compress(t, "zstd", plain)
	cut := len(plain) / 3
	skippable := []byte{0x5d, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 'x', 'y', 'z'}
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for name, b := range map[string][]byte{
		"plain":                  plain,
		"gzip":                   gz,
		"zstd":                   zst,
		"gzip members":           join(compress(t, "gzip", plain[:cut]), compress(t, "gzip", plain[cut:])),
		"zstd frames":            join(compress(t, "zstd", plain[:cut]), compress(t, "zstd", plain[cut:])),
		"zstd skippable frame":   join(skippable, zst),
		"garbage after plain":    join(plain, bytes.Repeat([]byte("garbage"), 999)),
		"zeros after plain":      join(plain, make([]byte, 1<<20)),
		"garbage after gzip":     join(gz, []byte("garbage")),
		"zeros after gzip":       join(gz, make([]byte, 1000)),
		"garbage after zstd":     join(zst, []byte("garbage")),
		"a lone zero block":      plain[:len(plain)-512],
		"garbage inside gzip":    compress(t, "gzip", join(plain, []byte("garbage"))),
		"one byte at a time":     plain,
		"one byte of gzip":       gz,
		"an error after the end": plain,
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			var r io.Reader = bytes.NewReader(b)
			if strings.HasPrefix(name, "one byte") {
				r = oneByte{r}
			}
			dst := mkdir(t, "dst")
			n, err := Untar(bg, r, openFile(t, dst), Options{})
			if err != nil {
				t.Fatal(err, errs.HintOf(err))
			}
			if !reflect.DeepEqual(n, Totals{Files: 2, Bytes: 7}) || read(t, dst+"/d/f") != "content" {
				t.Errorf("%+v %s", n, listing(t, dst))
			}
		})
	}

	dst := mkdir(t, "empty")
	n, err := Untar(bg, bytes.NewReader(make([]byte, 10240)), openFile(t, dst), Options{})
	if err != nil || !reflect.DeepEqual(n, Totals{}) {
		t.Errorf("an empty archive: %+v, %v", n, err)
	}
}

type oneByte struct{ r io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.r.Read(p[:min(1, len(p))]) }

func TestUntarNotATar(t *testing.T) {
	text := bytes.Repeat([]byte("This is no archive. "), 100)
	for name, c := range map[string]struct {
		data  []byte
		kind  errs.Kind
		words string
	}{
		"nothing":      {nil, errs.Invalid, "empty"},
		"text":         {text, errs.Invalid, "not a tar"},
		"short":        {[]byte("x"), errs.Invalid, "not a tar"},
		"gzipped text": {compress(t, "gzip", text), errs.Invalid, "not a tar"},
		"xz":           {append([]byte("\xfd7zXZ\x00"), text...), errs.Invalid, "compressed with xz"},
		"bzip2":        {append([]byte("BZh91AY&SY"), text...), errs.Invalid, "compressed with bzip2"},
		"twice":        {compress(t, "gzip", compress(t, "gzip", bytes.Repeat(text, 99))), errs.Invalid, "twice"},
		"bad gzip":     {append([]byte("\x1f\x8b\x08"), text...), errs.Damaged, "the compressed archive"},
		"bad zstd":     {append([]byte("\x28\xb5\x2f\xfd\x20\x10\xff\xff"), text...), errs.Damaged, "the compressed archive"},
		"huge window":  {append([]byte("\x28\xb5\x2f\xfd\x00\xa0"), text...), errs.Unsupported, "without `--long`"},
		"two archives": {append(tarball(t, fileEnt("a", "x")), tarball(t, fileEnt("b", "x"))...), errs.Invalid,
			"another archive"},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			_, err := newJail(t).untar(c.data, Options{})
			wantErr(t, err, c.kind, c.words)
		})
	}
}

func TestUntarHostile(t *testing.T) {
	needRoot(t)
	huge := func(name string, size string) []byte { // a header that promises more than there is
		b := tarball(t, fileEnt(name, "x"))
		copy(b[124:136], size)
		fixChecksum(b)
		return b
	}
	for name, c := range map[string]struct {
		entries []ent
		raw     []byte
		kind    errs.Kind
		words   string
	}{
		"absolute":           {entries: []ent{fileEnt("/etc/evil", "x")}, words: "/etc/evil"},
		"absolute directory": {entries: []ent{folder("/evil/")}, words: "absolute"},
		"dotdot":             {entries: []ent{fileEnt("../outside/evil", "x")}, words: "../outside/evil"},
		"dotdot inside":      {entries: []ent{folder("a/"), fileEnt("a/../../outside/sentinel", "x")}, words: `".."`},
		"dotdot at the end":  {entries: []ent{folder("a/..")}, words: `".."`},
		"only dotdot":        {entries: []ent{folder("..")}, words: `".."`},
		"harmless dotdot":    {entries: []ent{folder("a/"), fileEnt("a/../b", "x")}, words: `".."`},
		"root is a file":     {entries: []ent{fileEnt(".", "x")}, words: "root"},
		"root is a link":     {entries: []ent{symlink(".", "/etc")}, words: "root"},
		"through a symlink": {entries: []ent{symlink("l", "../outside"), fileEnt("l/sentinel", "x")},
			words: `through "l", a symbolic link`},
		"through an absolute one": {entries: []ent{symlink("l", "/tmp"), folder("l/evil/")}, words: "symbolic link"},
		"through a chain": {entries: []ent{symlink("a", ".."), symlink("b", "a/outside"),
			fileEnt("b/sentinel", "x")}, words: "symbolic link"},
		"a symlink in a symlink": {entries: []ent{symlink("a", ".."), symlink("a/evil", "x")}, words: "symbolic link"},
		"deep symlink": {entries: []ent{folder("x/y/"), symlink("x/y/z", "../../../outside"),
			fileEnt("x/y/z/n/evil", "x")}, words: "symbolic link"},
		"through a file":        {entries: []ent{fileEnt("f", "x"), fileEnt("f/g", "x")}, words: "not a directory"},
		"hard link out":         {entries: []ent{hardlink("h", "../outside/sentinel")}, words: `".."`},
		"hard link to absolute": {entries: []ent{hardlink("h", "/etc/passwd")}, words: "absolute"},
		"hard link via symlink": {entries: []ent{symlink("l", "../outside"), hardlink("h", "l/sentinel")},
			words: "not in the archive"},
		"hard link to nothing": {entries: []ent{hardlink("h", "nothing")},
			words: `"nothing", which is not in the archive`},
		"hard link to a directory": {entries: []ent{folder("d/"), hardlink("h", "d")}, words: "a directory"},
		"hard link to the root":    {entries: []ent{hardlink("h", ".")}, words: "not in the archive"},
		"hard link in a symlink": {entries: []ent{fileEnt("f", "x"), symlink("l", "../outside"), hardlink("l/h", "f")},
			words: "symbolic link"},
		"empty symlink":            {entries: []ent{symlink("l", "")}, words: "symbolic link"},
		"long name":                {entries: []ent{fileEnt(strings.Repeat("n", 256), "x")}, words: "nnn"},
		"file over full directory": {entries: []ent{fileEnt("d/f", "x"), fileEnt("d", "x")}, words: "not empty"},
		"link over full directory": {entries: []ent{fileEnt("d/f", "x"), symlink("d", "..")}, words: "not empty"},
		"owner -1": {entries: []ent{{tar.Header{Name: "f", Typeflag: tar.TypeReg, Uid: 1<<32 - 1,
			Format: tar.FormatGNU}, ""}}, words: "owner"},
		"negative owner": {entries: []ent{{tar.Header{Name: "f", Typeflag: tar.TypeReg, Gid: -5,
			Format: tar.FormatGNU}, ""}}, words: "owner"},
		"huge owner": {entries: []ent{{tar.Header{Name: "f", Typeflag: tar.TypeReg, Gid: 1 << 40,
			Format: tar.FormatGNU}, ""}}, words: "owner"},
		"impossible device": {entries: []ent{{tar.Header{Name: "f", Typeflag: tar.TypeBlock, Devmajor: 1 << 13,
			Format: tar.FormatGNU}, ""}}, words: "device number"},
		"bad ACL": {entries: []ent{acl("user:::rwx")}, words: "ACL"},
		"ACL of nobody here": {entries: []ent{acl("user::rw-,user:no-such-user:r--,group::r--,mask::r--,other::---")},
			words: "--numeric-owner"},
		"ACL the kernel refuses": {entries: []ent{acl("user::rw-,user:5:r--")}, words: "system.posix_acl_access"},
		"unknown type": {entries: []ent{{tar.Header{Name: "f", Typeflag: 'Q'}, ""}}, kind: errs.Unsupported,
			words: "'Q'"},
		"global header": {raw: globalTar(t, "uid", "0"), kind: errs.Unsupported, words: "uid"},
		"size of exabytes": {raw: huge("f", "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff"), kind: errs.Damaged,
			words: "truncated"},
		"negative size": {raw: huge("f", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), kind: errs.Damaged,
			words: "corrupt"},
		"size of gibibytes":  {raw: huge("f", "77777777777\x00"), kind: errs.Damaged, words: "truncated"},
		"sparse of exabytes": {raw: sparseTar(t, 1<<62), words: "4611686018427387904 bytes"},
		// ext4 takes 16
		"sparse of tebibytes": {raw: sparseTar(t, 63<<40), kind: errs.NoSpace, words: `parameter "size"`},
		"checksum of a later entry": {raw: flip(tarball(t, fileEnt("a", "x"), fileEnt("b", "x")), 1024+3), kind: errs.Damaged,
			words: "corrupt"},
		"no end marker": {raw: tarball(t, fileEnt("a", "x"))[:1024], kind: errs.Damaged, words: "truncated"},
		"zeros but no end marker": {raw: tarball(t, fileEnt("a", strings.Repeat("\x00", 512)))[:1024], kind: errs.Damaged,
			words: "truncated"},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			if c.raw == nil {
				c.raw = tarball(t, c.entries...)
			}
			if c.kind == "" {
				c.kind = errs.Invalid
			}
			for _, staging := range []bool{false, true} {
				_, err := newJail(t).untar(c.raw, Options{Staging: staging})
				wantErr(t, err, c.kind, c.words)
			}
		})
	}
}

func acl(text string) ent {
	return ent{tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o640, Format: tar.FormatPAX,
		PAXRecords: map[string]string{"SCHILY.acl.access": text}}, ""}
}

func globalTar(t testing.TB, key, value string) []byte {
	return tarball(t, ent{tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{key: value}}, ""},
		fileEnt("f", "x"))
}

// fixChecksum makes the first header valid again.
func fixChecksum(b []byte) {
	copy(b[148:156], "        ")
	sum := 0
	for _, c := range b[:tarBlock] {
		sum += int(c)
	}
	copy(b[148:156], fmt.Sprintf("%06o\x00 ", sum))
}

func flip(b []byte, i int) []byte {
	b[i] ^= 0x20
	return b
}

// sparseTar is a file that GNU tar calls sparse and size bytes long, with no
// data but at its end.
func sparseTar(t testing.TB, size int64) []byte {
	b := tarball(t, ent{tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Uid: os.Geteuid(), Gid: os.Getegid(),
		Format: tar.FormatGNU}, strings.Repeat("d", 512)})
	b[156] = 'S'
	number := func(off int, n int64) {
		b[off] = 0x80
		for i := range 8 {
			b[off+4+i] = byte(n >> (56 - 8*i))
		}
	}
	number(386, size-512) // of the first range
	number(398, 512)
	number(483, size)
	fixChecksum(b)
	return b
}

func TestUntarSparse(t *testing.T) {
	const size = 3<<30 + 512
	dst := mkdir(t, "dst")
	n, err := Untar(bg, bytes.NewReader(sparseTar(t, size)), openFile(t, dst), Options{})
	must(t, err)
	var st unix.Stat_t
	must(t, unix.Stat(dst+"/f", &st))
	if st.Size != size || st.Blocks*512 > 64<<10 || n.Bytes > 64<<10 {
		t.Errorf("size %d, %d bytes allocated, %d counted", st.Size, st.Blocks*512, n.Bytes)
	}
	f := openFile(t, dst+"/f")
	tail := make([]byte, 1024)
	_, err = f.ReadAt(tail, size-1024)
	must(t, err)
	if string(tail) != strings.Repeat("\x00", 512)+strings.Repeat("d", 512) {
		t.Error("the end of the file is wrong")
	}
}

// Later entries win.
func TestUntarDuplicates(t *testing.T) {
	needRoot(t)
	owned := func(e ent, mode int64, uid int) ent {
		e.Mode, e.Uid = mode, uid
		return e
	}
	for _, staging := range []bool{false, true} {
		j := newJail(t)
		entries := []ent{
			fileEnt("f", "old"), hardlink("other", "f"), fileEnt("./f", "new"),
			folder("d/"), fileEnt("d/keep", "x"), owned(folder("./d"), 0o700, 42),
			fileEnt("was-file", "x"), folder("was-file/"), fileEnt("was-file/in", "x"),
			folder("was-dir/"), fileEnt("was-dir", "x"),
			folder("was-dir2/sub/"), fileEnt("was-dir2/sub", "x"),
			symlink("was-link", "../outside"), folder("was-link/"), fileEnt("was-link/sentinel", "inside"),
			symlink("link-to-file", "../outside/sentinel"), fileEnt("link-to-file", "inside"),
			fileEnt("implicit/a/b/c", "x"), owned(folder("implicit/a"), 0o711, 7),
			hardlink("self", "f"), hardlink("self", "f"), hardlink("f", "self"), hardlink("self", "./self"),
			ent{tar.Header{Name: "fifo", Typeflag: tar.TypeFifo, Mode: 0o600}, ""}, fileEnt("fifo", "x"),
			symlink("sl", "a"), hardlink("sl2", "sl"),
			owned(folder("./"), 0o700, 99),
			folder(stageName + "/"), fileEnt(stageName+"/f", "x"),
			fileEnt("a//b///c", "x"), fileEnt("./././e", "x"),
		}
		n, err := j.untar(tarball(t, entries...), Options{Staging: staging})
		must(t, err)
		for name, want := range map[string]string{
			"f": "new", "other": "old", "self": "new", "d/keep": "x", "was-dir": "x", "was-file/in": "x", "fifo": "x",
			"was-dir2/sub": "x", "was-link/sentinel": "inside", "link-to-file": "inside", stageName + "/f": "x", "a/b/c": "x",
			"e": "x",
		} {
			if got := read(t, j.dst+"/"+name); got != want {
				t.Errorf("%s is %q, not %q", name, got, want)
			}
		}
		f, err := treetest.Fingerprint(j.dst)
		must(t, err)
		for name, want := range map[string][2]uint32{
			".": {0o40755, 99}, "d": {0o40700, 42}, "implicit": {0o40755, 0}, "implicit/a": {0o40711,
				7}, "implicit/a/b": {0o40755, 0},
			"was-file": {0o40755, 0}, "was-link": {0o40755, 0}, "fifo": {0o100644, 0}, "sl2": {0o120777, 0},
		} {
			if got := [2]uint32{f[name].Mode, f[name].UID}; got != want {
				t.Errorf("%s is %o, not %o", name, got, want)
			}
		}
		if f["sl"].Link != "sl" || f["sl2"].Link != "sl" || f["self"].Link != "f" {
			t.Error("hard links are not")
		}
		if f["d"].Mtime.Sec != 1700000000 || f["implicit/a"].Mtime.Sec != 1700000000 || f["."].Atime.Sec != 1700000000 {
			t.Error("times of directories are wrong")
		}
		if n.Files != int64(len(entries))-1 { // the root does not count
			t.Errorf("%d of %d entries", n.Files, len(entries)-1)
		}
	}
}

func TestUntarAttributes(t *testing.T) {
	needRoot(t)
	const none = 0xffffffff
	binary := treetest.ACL([3]uint32{1, 7, none}, [3]uint32{2, 6, 1}, [3]uint32{4, 4, none}, [3]uint32{16, 7, none},
		[3]uint32{32, 0, none})
	j := newJail(t)
	_, err := j.untar(tarball(t,
		ent{tar.Header{Name: "d", Typeflag: tar.TypeDir, Mode: 0o750, Format: tar.FormatPAX, PAXRecords: map[string]string{
			"SCHILY.acl.default":  "user::rwx,user:1000:r-x,group::r-x,mask::r-x,other::---",
			"SCHILY.xattr.user.x": "\x00\xff=\n",
		}}, ""},
		fileEnt("d/plain", "x"),
		ent{tar.Header{Name: "d/text", Typeflag: tar.TypeReg, Mode: 0o670, Format: tar.FormatPAX,
			PAXRecords: map[string]string{
				"SCHILY.acl.access": "user::rw-\nuser:root:rwx\t#effective:r-x\n" +
					"user:joe:r--:4711\ngroup::r--\ngroup:9:--x\nmask::rwx\nother::---\n",
			}}, "x"},
		ent{tar.Header{Name: "d/both", Typeflag: tar.TypeReg, Mode: 0o770, Format: tar.FormatPAX,
			PAXRecords: map[string]string{
				"SCHILY.acl.access":                    "user::rw-,group::r--,other::---",
				"SCHILY.xattr.system.posix_acl_access": binary,
				"SCHILY.xattr.system.nfs4_acl":         "foreign",
			}, AccessTime: time.Unix(12, 34), ModTime: time.Unix(-5, 67)}, "x"},
	), Options{})
	must(t, err)
	f, err := treetest.Fingerprint(j.dst)
	must(t, err)
	check := func(name, attr, want string) {
		t.Helper()
		if got := f[name].Xattrs[attr]; got != want {
			t.Errorf("%s of %s is %q, not %q", attr, name, got, want)
		}
	}
	check("d", "user.x", "\x00\xff=\n")
	check("d", aclDefault, treetest.ACL([3]uint32{1, 7, none}, [3]uint32{2, 5, 1000}, [3]uint32{4, 5, none},
		[3]uint32{16, 5, none}, [3]uint32{32, 0, none}))
	check("d/text", aclAccess, treetest.ACL([3]uint32{1, 6, none}, [3]uint32{2, 7, 0}, [3]uint32{2, 4, 4711},
		[3]uint32{4, 4, none},
		[3]uint32{8, 1, 9}, [3]uint32{16, 7, none}, [3]uint32{32, 0, none}))
	check("d/both", aclAccess, binary)
	check("d/both", "system.nfs4_acl", "")
	if len(f["d/plain"].Xattrs) != 0 {
		t.Errorf("a file inherited %q", f["d/plain"].Xattrs)
	}
	if f["d/both"].Atime != (unix.Timespec{Sec: 12, Nsec: 34}) || f["d/both"].Mtime != (unix.Timespec{Sec: -5, Nsec: 67}) {
		t.Errorf("times are %v and %v", f["d/both"].Atime, f["d/both"].Mtime)
	}
	if f["d/plain"].Atime != f["d/plain"].Mtime {
		t.Error("without a time of access it is not that of modification")
	}
}

func TestUntarGitComment(t *testing.T) {
	_, err := newJail(t).untar(globalTar(t, "comment", "0123456789abcdef"), Options{})
	must(t, err)
}

// However an archive is cut off, it is never taken for a whole one.
func TestUntarTruncated(t *testing.T) {
	needRoot(t)
	rnd := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 3000)
	for i := range noise {
		noise[i] = byte(rnd.Uint32())
	}
	plain := tarball(t, folder("d/"), fileEnt("d/"+strings.Repeat("long/", 40)+"name", "x"),
		fileEnt("zeros", strings.Repeat("\x00", 2048)),
		fileEnt("noise", string(noise)), symlink("l", "x"), acl("user::rw-,group::r--,other::---"), fileEnt("last", "x"))
	tmp := mount(t, "tmpfs", "")
	n := 0
	for _, how := range []string{"plain", "gzip", "zstd"} {
		b := compress(t, how, plain)
		step := max(1, len(b)/400)
		end := len(b)
		if how == "plain" {
			end -= 1024 // the marker
		}
		for i := 0; i < end; i += step {
			cut := i
			if how == "plain" && i%3 == 1 {
				cut = i / 512 * 512 // between blocks
			}
			n++
			dst := fmt.Sprintf("%s/%d", tmp, n)
			must(t, os.Mkdir(dst, 0o755))
			f := openFile(t, dst)
			_, err := Untar(bg, bytes.NewReader(b[:cut]), f, Options{})
			f.Close()
			switch {
			case err == nil:
				t.Fatalf("%s cut off after %d of %d bytes was taken", how, cut, len(b))
			case how == "plain" && cut < 512 || cut < 4:
				wantErr(t, err, errs.Invalid)
			default:
				wantErr(t, err, errs.Damaged, "truncated", hintTruncated)
			}
			if t.Failed() {
				t.Fatalf("%s, %d of %d bytes", how, cut, len(b))
			}
		}
		// And one flipped bit in compressed data is found by its checksum.
		if how != "plain" {
			must(t, os.Mkdir(tmp+"/"+how, 0o755))
			_, err := Untar(bg, bytes.NewReader(flip(bytes.Clone(b), len(b)-6)), openFile(t, tmp+"/"+how), Options{})
			wantErr(t, err, errs.Damaged, "corrupt")
		}
	}
}

func TestUntarReadError(t *testing.T) {
	noLeaks(t)
	b := tarball(t, fileEnt("f", strings.Repeat("x", 1<<20)))
	for _, cause := range []error{unix.EIO, errors.New("connection lost")} {
		r := io.MultiReader(bytes.NewReader(b[:600000]), errReader{cause})
		_, err := Untar(bg, r, openFile(t, mkdir(t, "dst")), Options{})
		wantErr(t, err, errs.IO, "reading the archive", cause.Error())
		if !errors.Is(err, cause) {
			t.Errorf("the cause is lost: %v", err)
		}
	}
}

type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) { return 0, e.err }

// A reader that never returns must not keep Untar from being canceled.
func TestUntarCancel(t *testing.T) {
	noLeaks(t)
	b := tarball(t, fileEnt("f", strings.Repeat("x", 1<<20)))
	for _, n := range []int{0, 100, 512, 600, 700000, len(b)} {
		r, w, err := os.Pipe()
		must(t, err)
		go func() { w.Write(b[:n]) }()
		ctx, cancel := context.WithTimeout(bg, 20*time.Millisecond)
		_, err = Untar(ctx, r, openFile(t, mkdir(t, "dst")), Options{})
		cancel()
		wantErr(t, err, errs.Canceled, "context deadline exceeded")
		w.Close()
		r.Close()
	}
	// In the middle of work.
	ctx, cancel := context.WithCancel(bg)
	many := make([]ent, 500)
	for i := range many {
		many[i] = fileEnt(fmt.Sprint(i), "x")
	}
	dst := mkdir(t, "dst")
	_, err := Untar(ctx, bytes.NewReader(tarball(t, many...)), openFile(t, dst), Options{Progress: func(n, _ int64) {
		cancel()
	}})
	wantErr(t, err, errs.Canceled)
	if l, _ := os.ReadDir(dst); len(l) > 2 {
		t.Errorf("%d files were made after the cancellation", len(l))
	}
}

func TestUntarDeep(t *testing.T) {
	needRoot(t)
	noLeaks(t)
	const depth = 1500
	var entries []ent
	path := ""
	for i := range depth {
		path += fmt.Sprintf("directory%d/", i%7)
		e := folder(path)
		e.Mode = 0o711
		if i%3 != 0 {
			entries = append(entries, e)
		}
		if i%100 == 50 {
			entries = append(entries, fileEnt(path+"file", "x"))
		}
	}
	entries = append(entries, fileEnt(path+"file", "end"), hardlink("link", path+"file"), hardlink(path+"link", "link"))
	dst := mount(t, "tmpfs", "")
	n, err := Untar(bg, bytes.NewReader(tarball(t, entries...)), openFile(t, dst), Options{})
	must(t, err)
	if n.Files != int64(len(entries)) {
		t.Errorf("%d of %d entries", n.Files, len(entries))
	}
	f, err := treetest.Fingerprint(dst)
	must(t, err)
	if len(f) != depth+1+15+3 || f["link"].Link == "" {
		t.Errorf("%d files", len(f))
	}
	for p, e := range f {
		i := strings.Count(p, "/")
		want := uint32(0o40711)
		if i%3 == 0 {
			want = 0o40755
		}
		if e.Mode&unix.S_IFMT == unix.S_IFDIR && p != "." &&
			(e.Mode != want || want == 0o40711 && e.Mtime.Sec != 1700000000) {
			t.Fatalf("level %d: mode %o, time %v", i, e.Mode, e.Mtime)
		}
	}
}

// No archive may write outside of the destination, panic, or leak.
func FuzzUntar(f *testing.F) {
	for _, how := range []string{"plain", "gzip", "zstd"} {
		f.Add(compress(f, how, tarball(f, folder("d/"), fileEnt("d/f", "x"), symlink("l", "../outside"),
			hardlink("h", "d/f"))))
	}
	f.Add(tarball(f, symlink("l", "../outside"), fileEnt("l/sentinel", "x")))
	f.Add(tarball(f, fileEnt("../outside/sentinel", "x")))
	f.Add(tarball(f, hardlink("h", "../outside/sentinel"), fileEnt("h", "x")))
	f.Add(tarball(f, fileEnt("a", "x"), folder("a"), symlink("a/b", ".."), folder("a/b"), fileEnt("a", "y")))
	f.Add(tarball(f, acl("user::rwx,user:5:r-x,group::r-x,mask::r-x,other::---")))
	f.Add(tarball(f, ent{tar.Header{Name: "fifo", Typeflag: tar.TypeFifo}, ""},
		ent{tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o7777, Uid: 5}, ""}))
	f.Add(tarball(f, folder(strings.Repeat("d/", 300)), fileEnt(strings.Repeat("d/", 300)+strings.Repeat("n", 200), "x")))
	f.Add(sparseTar(f, 1<<20))
	f.Add(globalTar(f, "comment", "x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		fuzzUntar(t, b)
		if fixed := fixChecksums(bytes.Clone(b)); !bytes.Equal(fixed, b) {
			fuzzUntar(t, fixed) // or few mutations would get far
		}
	})
}

// fixChecksums makes every block that looks like a header a valid one.
func fixChecksums(b []byte) []byte {
	for h := range slices.Chunk(b, tarBlock) {
		if len(h) == tarBlock && string(h[257:262]) == "ustar" {
			fixChecksum(h)
		}
	}
	return b
}

func fuzzUntar(t *testing.T, b []byte) {
	j := newJail(t)
	fds := openFDs(t)
	dst, err := os.Open(j.dst)
	must(t, err)
	ctx, cancel := context.WithTimeout(bg, 200*time.Millisecond) // a tiny archive can be a huge sparse file
	defer cancel()
	opt := Options{Staging: len(b)%2 == 0, Unprivileged: os.Geteuid() != 0}
	_, err = Untar(ctx, bytes.NewReader(b), dst, opt)
	var e *errs.Error
	if err != nil && (!errors.As(err, &e) || e.Op != op) {
		t.Errorf("not an error of ours: %#v", err)
	}
	if errs.KindOf(err) == errs.Internal {
		t.Errorf("an internal error: %v", err)
	}
	dst.Close()
	j.check()
	if n := openFDs(t); n > fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
}
