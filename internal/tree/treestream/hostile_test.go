package treestream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/treewalk"
	"pando/internal/testing/testfs"
	"pando/internal/tree/treecopy"
)

// forged is a stream of these records, with a right end.
func forged(t testing.TB, diff bool, records ...record) []byte {
	t.Helper()
	var b bytes.Buffer
	e, err := newEncoder(&b, diff)
	must(t, err)
	for _, r := range records {
		must(t, e.writeRecord(r))
	}
	must(t, e.end())
	return b.Bytes()
}

func attrsOf(path string, mode uint32) record {
	return record{kind: kindAttrs, path: path, attrs: treecopy.Attributes{Mode: mode}}
}

// TestEscapes: nothing in a stream leads out of the tree, by whatever path, nor makes, changes or removes anything that
// is not its own.
func TestEscapes(t *testing.T) {
	needRoot(t)
	top := testfs.Tmpfs(t, 64<<20)
	out := mkdir(t, top, "outside")
	must(t, os.WriteFile(out+"/precious", []byte("precious"), 0o600))
	file := func(p string) record { return record{kind: kindFile, path: p, size: 1} }
	link := record{kind: kindSymlink, path: "s", target: "../outside"}
	abs := record{kind: kindSymlink, path: "s", target: out}
	cases := map[string][]record{
		"up":                       {file("../outside/new")},
		"up from below":            {{kind: kindDir, path: "d"}, file("d/../../outside/new")},
		"absolute":                 {file(out + "/new")},
		"empty component":          {file("a//b")},
		"dot":                      {file("./a")},
		"zero byte":                {file("a\x00b")},
		"long component":           {file(strings.Repeat("x", 256))},
		"through a symbolic link":  {link, file("s/new")},
		"through an absolute one":  {abs, file("s/new")},
		"directory through it":     {link, {kind: kindDir, path: "s/new"}},
		"over it":                  {link, file("s")},
		"link to what is outside":  {link, {kind: kindLink, path: "l", typ: unix.S_IFREG, target: "s/precious"}},
		"link up":                  {{kind: kindLink, path: "l", typ: unix.S_IFREG, target: "../outside/precious"}},
		"attributes through it":    {link, attrsOf("s/precious", unix.S_IFREG|0o777)},
		"attributes of its target": {link, attrsOf("s", unix.S_IFDIR|0o777)},
		"flags through it": {link, {kind: kindFlags, path: "s/precious",
			attrs: treecopy.Attributes{Mode: unix.S_IFREG, Flags: 0x10}}},
		"the root as a file":        {{kind: kindFile, path: ""}},
		"content of nothing":        {{kind: kindData, off: 0, data: []byte("x")}},
		"content behind the end":    {file("a"), {kind: kindData, off: 1, data: []byte("x")}},
		"content far behind":        {file("a"), {kind: kindData, off: maxSize, data: []byte("x")}},
		"a hole behind the end":     {file("a"), {kind: kindZero, off: 0, size: 2}},
		"a file that is impossible": {{kind: kindFile, path: "a", size: -1}},
		"attributes of nothing":     {attrsOf("a", unix.S_IFREG)},
		"another type":              {file("a"), attrsOf("a", unix.S_IFDIR|0o755)},
		"attributes left over":      {file("a"), {kind: kindXattr, target: "user.x", data: []byte("x")}},
		"a link to a directory": {{kind: kindDir, path: "d"}, {kind: kindLink, path: "l", typ: unix.S_IFREG,
			target: "d"}},
		"twice":                      {file("a"), file("a")},
		"a symbolic link to no text": {{kind: kindSymlink, path: "a", target: ""}},
		"a node that is a file":      {{kind: kindNode, path: "a", typ: unix.S_IFREG}},
		"unknown":                    {{kind: 99, path: "a"}},
	}
	diffs := map[string][]record{
		"remove up":             {{kind: kindRemove, path: "../outside/precious", typ: unix.S_IFREG}},
		"remove through a link": {link, {kind: kindRemove, path: "s/precious", typ: unix.S_IFREG}},
		"take from outside":     {link, {kind: kindOut, path: "s/precious", typ: unix.S_IFREG, slot: 1}},
		"put outside": {link, file("a"), {kind: kindOut, path: "a", typ: unix.S_IFREG, slot: 1}, {kind: kindIn,
			path: "s/a", typ: unix.S_IFREG, slot: 1}},
		"put over": {file("a"), file("b"), {kind: kindOut, path: "a", typ: unix.S_IFREG, slot: 1},
			{kind: kindIn, path: "b", typ: unix.S_IFREG, slot: 1}},
		"never put back":     {file("a"), {kind: kindOut, path: "a", typ: unix.S_IFREG, slot: 1}},
		"from an empty slot": {{kind: kindIn, path: "a", typ: unix.S_IFREG, slot: 1}},
		"one slot twice": {file("a"), file("b"), {kind: kindOut, path: "a", typ: unix.S_IFREG, slot: 1},
			{kind: kindOut, path: "b", typ: unix.S_IFREG, slot: 1}},
		"a directory into itself": {{kind: kindDir, path: "d"}, {kind: kindOut, path: "d", typ: unix.S_IFDIR, slot: 1},
			{kind: kindIn, path: "d/d", typ: unix.S_IFDIR, slot: 1}},
		"change through a link": {link, {kind: kindChange, path: "s/precious", before: 8, size: 0}},
		"change a link": {{kind: kindSymlink, path: "s", target: "../outside/precious"}, {kind: kindChange,
			path: "s", before: 8, size: 0}},
		"change a device": {{kind: kindNode, path: "n", typ: unix.S_IFCHR, rdev: unix.Mkdev(1, 3)},
			{kind: kindChange, path: "n"}},
		"unprotect through it":     {link, {kind: kindUnprotect, path: "s/precious"}},
		"remove what is not there": {{kind: kindRemove, path: "a", typ: unix.S_IFREG}},
		"remove what is full": {{kind: kindDir, path: "d"}, file("d/a"), {kind: kindRemove, path: "d",
			typ: unix.S_IFDIR}},
	}
	try := func(name string, diff bool, records []record) {
		dst := mkdir(t, top, "dst")
		_, err := Apply(t.Context(), bytes.NewReader(forged(t, diff, records...)), open(t, dst), ApplyOptions{Diff: diff})
		if !errs.Is(err, errs.Damaged) {
			t.Errorf("%s: %v", name, err)
		}
		must(t, treewalk.Remove(t.Context(), dst))
		all, err := filepath.Glob(out + "/*")
		b, rerr := os.ReadFile(out + "/precious")
		st, serr := os.Stat(out + "/precious")
		if must(t, errors.Join(err, rerr, serr)); len(all) != 1 || string(b) != "precious" || st.Mode() != 0o600 {
			t.Fatalf("%s: outside of the tree there is %q, %q, %v", name, all, b, st.Mode())
		}
	}
	for name, records := range cases {
		try(name, false, records)
	}
	for name, records := range diffs {
		try(name, true, records)
		try(name+" in a tree of its own", false, records)
	}
}

// TestBounds: what claims to be huge is refused before there is memory for it.
func TestBounds(t *testing.T) {
	head := append([]byte(Magic), version, 0)
	body := func(k kind, n uint64, rest ...byte) []byte {
		return append(binary.AppendUvarint(append(bytes.Clone(head), byte(k)), n), rest...)
	}
	path := append(binary.AppendUvarint([]byte{0}, 1<<40), 'x')
	for name, b := range map[string][]byte{
		"a record": body(kindData, 1<<40),
		"a length": append(append(bytes.Clone(head), byte(kindData)), 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
			0x80, 0x80, 0x80, 0x80, 0x80),
		"a path":               body(kindDir, uint64(len(path)), path...),
		"a path of what was":   body(kindDir, 3, 5, 1, 'x'),
		"an empty record":      body(kindFile, 0),
		"a number without end": body(kindChange, 12, 0, 1, 'x', 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff),
	} {
		var before, after runtime.MemStats
		dst := open(t, t.TempDir())
		runtime.ReadMemStats(&before)
		_, err := Apply(t.Context(), bytes.NewReader(b), dst, ApplyOptions{})
		runtime.ReadMemStats(&after)
		if !errs.Is(err, errs.Damaged) {
			t.Errorf("%s: %v", name, err)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 4<<20 {
			t.Errorf("%s: %d bytes of memory", name, n)
		}
	}
	// Attributes that never belong to anything.
	var many []record
	for range 2*maxXattrs/(64<<10) + 1 {
		many = append(many, record{kind: kindXattr, target: "user.x", data: make([]byte, 64<<10)})
	}
	_, err := Apply(t.Context(), bytes.NewReader(forged(t, false, many...)), open(t, t.TempDir()), ApplyOptions{})
	if !errs.Is(err, errs.Damaged) {
		t.Errorf("endless attributes: %v", err)
	}
}

// failing ends with an error after n bytes.
type failing struct {
	n   int
	err error
}

func (f *failing) Write(b []byte) (int, error) {
	if f.n -= len(b); f.n < 0 {
		return 0, f.err
	}
	return len(b), nil
}

// TestWriterFails: an error of who takes the stream ends it, and is returned.
func TestWriterFails(t *testing.T) {
	src := mkdir(t, t.TempDir(), "src")
	must(t, os.WriteFile(src+"/a", make([]byte, 1<<20), 0o644))
	gone := errors.New("gone")
	for _, n := range []int{0, 10, 30, 1000, 600 << 10} {
		if err := Send(t.Context(), &failing{n, gone}, open(t, src), SendOptions{}); !errors.Is(err, gone) {
			t.Errorf("after %d bytes: %v", n, err)
		}
	}
	_, err := Apply(t.Context(), io.MultiReader(bytes.NewReader(send(t, src)[:500]), &broken{gone}), open(t,
		t.TempDir()), ApplyOptions{})
	if !errors.Is(err, gone) {
		t.Errorf("a reader that fails: %v", err)
	}
}

type broken struct{ err error }

func (b *broken) Read([]byte) (int, error) { return 0, b.err }

// FuzzApply: no stream makes Apply crash, or leads out of the tree.
func FuzzApply(f *testing.F) {
	if fuzzing := flag.Lookup("test.fuzz"); os.Geteuid() == 0 && fuzzing != nil && fuzzing.Value.String() != "" {
		f.Skip("SKIPPED: a fuzzer must not make devices or immutable files: run it without root")
	}
	add := func(diff bool, records ...record) { f.Add(forged(f, diff, records...), diff) }
	add(false, record{kind: kindDir, path: "d"}, record{kind: kindFile, path: "d/f", size: 3}, record{kind: kindData,
		data: []byte("abc")},
		record{kind: kindXattr, target: "user.x", data: []byte("y")}, attrsOf("d/f", unix.S_IFREG|0o644),
		record{kind: kindSymlink, path: "s", target: "d"},
		record{kind: kindLink, path: "h", typ: unix.S_IFREG, target: "d/f"}, record{kind: kindNode, path: "p",
			typ: unix.S_IFIFO}, attrsOf("d", unix.S_IFDIR|0o755))
	add(true, record{kind: kindFile, path: "f", size: 9}, record{kind: kindOut, path: "f", typ: unix.S_IFREG, slot: 3},
		record{kind: kindIn, path: "g", typ: unix.S_IFREG, slot: 3},
		record{kind: kindChange, path: "g", before: 9, size: 4}, record{kind: kindZero, off: 1, size: 2},
		record{kind: kindUnprotect, path: "g"},
		record{kind: kindRemove, path: "g", typ: unix.S_IFREG}, record{kind: kindFlags, path: "",
			attrs: treecopy.Attributes{Mode: unix.S_IFDIR}}, attrsOf("", unix.S_IFDIR|0o755))
	f.Fuzz(func(t *testing.T, b []byte, diff bool) {
		top := t.TempDir()
		dst := mkdir(t, top, "dst")
		_, _ = Apply(t.Context(), bytes.NewReader(b), open(t, dst), ApplyOptions{Diff: diff, Unprivileged: true})
		all, err := os.ReadDir(top)
		if err != nil || len(all) != 1 {
			t.Errorf("outside of the tree: %v, %v", all, err)
		}
		must(t, treewalk.Remove(t.Context(), dst))
	})
}

// FuzzDecode: whatever is read, a record that is returned is one that could have been written.
func FuzzDecode(f *testing.F) {
	f.Add(forged(f, false, record{kind: kindDir, path: "d"}, record{kind: kindFile, path: "d/f", size: 3}, attrsOf("d",
		unix.S_IFDIR)))
	f.Add(forged(f, true, record{kind: kindOut, path: "d", typ: unix.S_IFDIR, slot: 1}, record{kind: kindZero, off: 4,
		size: 1 << 40}))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := newDecoder(bytes.NewReader(b))
		for err == nil {
			var r record
			if r, err = d.readRecord(); err != nil || r.kind == kindEnd {
				return
			}
			if checkPath(r.path) != nil || len(r.path) > maxPath || len(r.data) > maxBody ||
				min(r.off, r.size, r.before) < 0 {
				t.Fatalf("%+v", r)
			}
		}
	})
}
