package btrfsstream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

// attr is an attribute of a command to be written.
type attr struct {
	typ   int
	value []byte
}

func text(typ int, s string) attr { return attr{typ, []byte(s)} }
func number(typ int, v uint64) attr {
	return attr{typ, binary.LittleEndian.AppendUint64(nil, v)}
}
func path(s string) attr { return text(attrPath, s) }
func stamp(typ int, sec uint64, nsec uint32) attr {
	return attr{typ, binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(nil, sec), nsec)}
}

// frame is a command with these contents, whatever they are.
func frame(typ int, body []byte) []byte {
	var head [headBytes]byte
	binary.LittleEndian.PutUint32(head[0:], uint32(len(body)))
	binary.LittleEndian.PutUint16(head[4:], uint16(typ))
	binary.LittleEndian.PutUint32(head[6:], checksum(checksum(0, head[:]), body))
	return append(head[:], body...)
}

// cmd is a command. In version 2, data is without a length.
func cmd(version, typ int, list ...attr) []byte {
	var body []byte
	for _, a := range list {
		body = binary.LittleEndian.AppendUint16(body, uint16(a.typ))
		if version < 2 || a.typ != attrData {
			body = binary.LittleEndian.AppendUint16(body, uint16(len(a.value)))
		}
		body = append(body, a.value...)
	}
	return frame(typ, body)
}

var (
	ownUUID  = bytes.Repeat([]byte{1}, 16)
	baseUUID = bytes.Repeat([]byte{2}, 16)
)

func header(version int) []byte {
	return binary.LittleEndian.AppendUint32([]byte(magic), uint32(version))
}

// stream is a whole one, of a difference to baseUUID.
func stream(version int, commands ...[]byte) []byte {
	out := header(version)
	out = append(out, cmd(version, cmdSnapshot, path("x"), attr{attrUUID, ownUUID}, number(attrCtransid, 7),
		attr{attrCloneUUID, baseUUID}, number(attrCloneCtransid, 3))...)
	for _, c := range commands {
		out = append(out, c...)
	}
	return append(out, cmd(version, cmdEnd)...)
}

// world is a tree to be changed, with what must not be changed around it.
type world struct {
	t          testing.TB
	dir        string
	root, base *os.File
	outside    map[string]treetest.Entry
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir()}
	for name, content := range map[string]string{
		"outside/secret": "secret", "outside/dir/file": "file", "base/file": "content of the base",
		"tree/file":      "content of the base",
		"tree/dir/inner": "inner", "base/dir/inner": "inner",
	} {
		p := filepath.Join(w.dir, name)
		must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		must(t, os.WriteFile(p, []byte(content), 0o644))
	}
	must(t, os.Symlink("../outside", filepath.Join(w.dir, "tree/up")))
	must(t, os.Symlink(filepath.Join(w.dir, "outside"), filepath.Join(w.dir, "tree/abs")))
	must(t, os.Symlink("../outside/secret", filepath.Join(w.dir, "tree/leak")))
	must(t, os.Symlink("../outside/secret", filepath.Join(w.dir, "base/leak")))
	must(t, unix.Mkfifo(filepath.Join(w.dir, "tree/fifo"), 0o600))
	must(t, unix.Mkfifo(filepath.Join(w.dir, "base/fifo"), 0o600))
	w.root, w.base = open(t, filepath.Join(w.dir, "tree")), open(t, filepath.Join(w.dir, "base"))
	w.outside = w.around()
	return w
}

func open(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// around is all but the tree.
func (w *world) around() map[string]treetest.Entry {
	w.t.Helper()
	all, err := treetest.Fingerprint(w.dir)
	must(w.t, err)
	for p := range all {
		if p == "tree" || strings.HasPrefix(p, "tree/") {
			delete(all, p)
		}
	}
	return all
}

func (w *world) apply(stream []byte) error {
	w.t.Helper()
	s, err := NewReader(bytes.NewReader(stream))
	if err != nil {
		return err
	}
	b, err := s.Begin()
	if err != nil {
		return err
	}
	return Apply(w.t.Context(), s, b, w.root, w.base)
}

func (w *world) intact(what string) {
	w.t.Helper()
	for _, d := range treetest.Diff(w.outside, w.around(), treetest.Atime) {
		w.t.Errorf("%s changed what is outside: %s", what, d)
	}
}

// TestHostile applies streams that whoever made them must not have made. All must
// be refused, and touch nothing outside of the tree.
func TestHostile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: making device nodes needs root")
	}
	long := strings.Repeat("n", 256)
	deep := strings.Repeat("d/", 3000) + "x"
	write := func(p string) []byte {
		return cmd(1, cmdWrite, path(p), number(attrFileOffset, 0), text(attrData, "evil"))
	}
	clone := func(uuid []byte, from string) []byte {
		return cmd(1, cmdClone, path("file"), number(attrFileOffset, 0), number(attrCloneLen, 6), attr{attrCloneUUID, uuid},
			number(attrCloneCtransid, 1), text(attrClonePath, from), number(attrCloneOffset, 0))
	}
	streams := map[string][][]byte{
		"a second subvolume":     {cmd(1, cmdSubvol, path("y"), attr{attrUUID, ownUUID}, number(attrCtransid, 8))},
		"a write to a pipe":      {write("fifo")},
		"a write to a directory": {write("dir")},
		"a write through a link": {write("leak")},
		"a write to the root":    {write("")},
		"a write to a device": {cmd(1, cmdMknod, path("dev"), number(attrMode, unix.S_IFBLK|0o600),
			number(attrRdev, 7<<8)), write("dev")},
		"a regular mknod": {cmd(1, cmdMknod, path("new"), number(attrMode, unix.S_IFREG|0o600),
			number(attrRdev, 0))},
		"chmod through a link":         {cmd(1, cmdChmod, path("leak"), number(attrMode, 0o777))},
		"content of another subvolume": {clone(bytes.Repeat([]byte{9}, 16), "file")},
		"content from outside":         {clone(baseUUID, "../outside/secret")},
		"content through a link":       {clone(baseUUID, "leak")},
		"content through a link here":  {clone(ownUUID, "up/secret")},
		"content of a pipe":            {clone(baseUUID, "fifo")},
		"to remove the root":           {cmd(1, cmdRmdir, path(""))},
		"to rename the root":           {cmd(1, cmdRename, path(""), text(attrPathTo, "x"))},
		"to rename onto the root":      {cmd(1, cmdRename, path("file"), text(attrPathTo, ""))},
		"to link what is outside":      {cmd(1, cmdLink, path("new"), text(attrPathLink, "../outside/secret"))},
		"to link through a link":       {cmd(1, cmdLink, path("new"), text(attrPathLink, "up/secret"))},
		"to rename out":                {cmd(1, cmdRename, path("file"), text(attrPathTo, "../outside/file"))},
		"to rename out by a link":      {cmd(1, cmdRename, path("file"), text(attrPathTo, "up/file"))},
		"to rename in":                 {cmd(1, cmdRename, path("up/secret"), text(attrPathTo, "mine"))},
		"a link, then through it": {cmd(1, cmdSymlink, path("l"), text(attrPathLink, "../outside")),
			cmd(1, cmdMkfile, path("l/new"))},
		"times of what is outside": {cmd(1, cmdUtimes, path("up/secret"), stamp(attrAtime, 1, 0),
			stamp(attrMtime, 1, 0))},
		"an impossible time": {cmd(1, cmdUtimes, path("file"), stamp(attrAtime, 1, 0), stamp(attrMtime, 1, 1e9))},
		"an attribute from outside": {cmd(1, cmdSetXattr, path("up/secret"), text(attrXattrName, "user.x"),
			text(attrXattrData, "y"))},
		"an owner that is none":       {cmd(1, cmdChown, path("file"), number(attrUID, 1<<33), number(attrGID, 0))},
		"a name that is too long":     {cmd(1, cmdMkfile, path(long))},
		"a path that is too deep":     {cmd(1, cmdMkfile, path(deep))},
		"an offset that is too large": {cmd(1, cmdWrite, path("file"), number(attrFileOffset, 1<<63), text(attrData, "x"))},
		"a size that is too large":    {cmd(1, cmdTruncate, path("file"), number(attrSize, 1<<63))},
		"no content": {cmd(1, cmdUpdateExtent, path("file"), number(attrFileOffset, 0),
			number(attrSize, 5))},
		"no path":                {cmd(1, cmdMkfile)},
		"two paths":              {cmd(1, cmdMkfile, path("n"), path("m"))},
		"a short number":         {cmd(1, cmdTruncate, path("file"), attr{attrSize, []byte{1, 2}})},
		"a command that is none": {cmd(1, 99)},
		"a command 0":            {cmd(1, 0)},
		"a command of version 2": {cmd(1, cmdFallocate, path("file"), number(attrFallocateMode, 0),
			number(attrFileOffset, 0), number(attrSize, 5))},
		"an attribute that is none": {cmd(1, cmdMkfile, path("n"), text(77, "x"))},
		"an attribute cut short":    {frame(cmdMkfile, []byte{attrPath, 0, 9, 0, 'x'})},
		"half an attribute":         {frame(cmdMkfile, []byte{attrPath})},
		"two ends":                  {cmd(1, cmdEnd)},
		"what is there":             {cmd(1, cmdMkfile, path("file"))},
		"a change of what is not":   {cmd(1, cmdTruncate, path("nowhere"), number(attrSize, 5))},
	}
	for _, p := range []string{"..", ".", "/", "//", "../outside/new", "/etc/new", "dir/../../outside/new", "dir/./new",
		"dir//new", "dir/", "/", "a\x00b", "up/new", "abs/new", "leak", "file/new"} {
		streams[fmt.Sprintf("a file at %q", p)] = [][]byte{cmd(1, cmdMkfile, path(p))}
		streams[fmt.Sprintf("a directory at %q", p)] = [][]byte{cmd(1, cmdMkdir, path(p))}
		streams[fmt.Sprintf("the removal of %q", p+"secret")] = [][]byte{cmd(1, cmdUnlink, path(p+"secret"))}
	}
	for name, commands := range streams {
		w := newWorld(t)
		err := w.apply(stream(1, commands...))
		if !errs.Is(err, errs.Damaged) && !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s: %v of kind %q", name, err, errs.KindOf(err))
		}
		w.intact(name)
	}
	for name, b := range map[string][]byte{
		"a large command": append(stream(1)[:17], 0xff, 0xff, 0xff, 0x7f, 3, 0, 0, 0, 0, 0),
		"another format":  []byte("zfs-stream----------------------"),
		"a newer version": header(3),
		"version 0":       header(0),
		"no beginning":    append(header(1), cmd(1, cmdMkfile, path("x"))...),
		"no UUID": append(header(1), cmd(1, cmdSubvol, path("x"), attr{attrUUID, make([]byte, 16)},
			number(attrCtransid, 1))...),
		"only a beginning": header(1),
		"compressed data too long": stream(2, cmd(2, cmdEncodedWrite, path("file"), number(attrFileOffset, 0),
			number(attrUnencodedFile, 1<<40),
			number(attrUnencodedLen, 1<<40), number(attrUnencodedOffset, 0), number(attrCompression, 2), text(attrData, "x"))),
		"a piece beyond compressed data": stream(2,
			cmd(2, cmdEncodedWrite, path("file"), number(attrFileOffset, 0), number(attrUnencodedFile, 10),
				number(attrUnencodedLen, 4096), number(attrUnencodedOffset, 1<<64-5), number(attrCompression, 1), text(attrData,
					"x"))),
		"encrypted data": stream(2, cmd(2, cmdEncodedWrite, path("file"), number(attrFileOffset, 0),
			number(attrUnencodedFile, 1),
			number(attrUnencodedLen, 1), number(attrUnencodedOffset, 0), number(attrEncryption, 1), text(attrData, "x"))),
	} {
		w := newWorld(t)
		if err := w.apply(b); !errs.Is(err, errs.Damaged) && !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s: %v of kind %q", name, err, errs.KindOf(err))
		}
		w.intact(name)
	}
}

// TestHarmless: what looks odd and is right, so that the test above does not pass
// because nothing does.
func TestHarmless(t *testing.T) {
	for _, version := range []int{1, 2} {
		w := newWorld(t)
		must(t, w.apply(stream(version,
			cmd(version, cmdMkfile, path("o257-7-0"), number(3, 257)),
			cmd(version, cmdRename, path("o257-7-0"), text(attrPathTo, "dir/..x")),
			cmd(version, cmdWrite, path("dir/..x"), number(attrFileOffset, 3), text(attrData, "data")),
			cmd(version, cmdTruncate, path("dir/..x"), number(attrSize, 6)),
			cmd(version, cmdSymlink, path("l"), number(3, 258), text(attrPathLink, "../../etc/passwd")),
			cmd(version, cmdLink, path("again"), text(attrPathLink, "dir/..x")),
			cmd(version, cmdUnlink, path("leak")),
			cmd(version, cmdUtimes, path(""), stamp(attrAtime, 1, 2), stamp(attrMtime, 3, 4), stamp(9, 5, 6)),
			cmd(version, cmdMkdir, path("new"), number(3, 259)),
		)))
		w.intact("a good stream")
		got, err := os.ReadFile(filepath.Join(w.dir, "tree/again"))
		if err != nil || string(got) != "\x00\x00\x00dat" {
			t.Errorf("content %q, %v", got, err)
		}
		var st unix.Stat_t
		must(t, unix.Stat(filepath.Join(w.dir, "tree"), &st))
		if st.Mtim != (unix.Timespec{Sec: 3, Nsec: 4}) {
			t.Errorf("time of the root %v", st.Mtim)
		}
	}
}

// FuzzApply changes commands, with checksums that are right.
func FuzzApply(f *testing.F) {
	f.Add(uint8(1), []byte{cmdMkfile, attrPath, 3, 'a', '/', 'b'})
	f.Add(uint8(2), []byte{cmdRename, attrPath, 4, 'f', 'i', 'l', 'e', attrPathTo, 2, '.', '.'})
	f.Add(uint8(2), []byte{cmdSymlink, attrPath, 1, 'x', attrPathLink, 2, '.', '.', 0, cmdMkfile, attrPath, 3, 'x', '/',
		'y'})
	f.Add(uint8(1), []byte{cmdUnlink, attrPath, 9, 'u', 'p', '/', 's', 'e', 'c', 'r', 'e', 't'})
	f.Fuzz(func(t *testing.T, version uint8, program []byte) {
		// Bytes become commands: a type, then attributes of a type, a length and a
		// value, up to a type 0.
		v := 1 + int(version%2)
		var commands [][]byte
		for p := program; len(p) > 0; {
			typ := int(p[0]) % (cmdEncodedWrite + 2)
			p = p[1:]
			var list []attr
			for len(p) >= 2 && p[0] != 0 {
				a, n := int(p[0])%(attrs+1), min(int(p[1]), len(p)-2)
				list = append(list, attr{a, p[2 : 2+n]})
				p = p[2+n:]
			}
			if len(p) > 0 {
				p = p[1:]
			}
			commands = append(commands, cmd(v, typ, list...))
		}
		w := newWorld(t)
		err := w.apply(stream(v, commands...))
		if errs.KindOf(err) == errs.Internal {
			var e unix.Errno
			if !errors.As(err, &e) {
				t.Errorf("an error of no kind: %v", err)
			}
		}
		w.intact("a stream")
	})
}

// FuzzDecode decompresses anything.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{21, 0, 0, 0, 13, 0, 0, 0, 17 + 4, 'a', 'b', 'c', 'd', 0x20 | 1, 0, 0, 17, 0, 0}, uint8(3))
	f.Fuzz(func(t *testing.T, data []byte, compression uint8) {
		var d decoder
		defer d.close()
		out, err := d.decode(data, uint32(compression), 10_000)
		if err == nil && len(out) != 10_000 {
			t.Errorf("%d bytes", len(out))
		}
		if err != nil && errs.KindOf(err) != errs.Damaged && errs.KindOf(err) != errs.Unsupported {
			t.Errorf("%v", err)
		}
	})
}
