package treestream

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
	"pando/internal/tree/treecopy"
	"pando/internal/tree/treediff"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root")
	}
}

func open(t testing.TB, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func mkdir(t testing.TB, parts ...string) string {
	t.Helper()
	dir := filepath.Join(parts...)
	must(t, os.MkdirAll(dir, 0o755))
	return dir
}

// send is the stream of a tree.
func send(t testing.TB, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	must(t, Send(t.Context(), &b, open(t, dir), SendOptions{}))
	return b.Bytes()
}

func sendDiff(t testing.TB, base, dir string, how treediff.Options) []byte {
	t.Helper()
	var b bytes.Buffer
	must(t, SendDiff(t.Context(), &b, open(t, base), open(t, dir), how, SendOptions{}))
	return b.Bytes()
}

func apply(t testing.TB, stream []byte, dir string, diff bool) treecopy.Totals {
	t.Helper()
	n, err := Apply(t.Context(), bytes.NewReader(stream), open(t, dir), ApplyOptions{Diff: diff})
	must(t, err)
	return n
}

// copyTree makes a copy of a tree, as a driver makes one that is to be changed.
func copyTree(t testing.TB, from, to string) {
	t.Helper()
	must(t, os.Mkdir(to, 0o755))
	_, err := treecopy.CopyDir(t.Context(), from, open(t, to), treecopy.Options{OwnRoot: true})
	must(t, err)
}

// TestWholeTree: a tree with everything in it that a filesystem can hold comes out as it went in, on every kind of
// filesystem that knows the same.
func TestWholeTree(t *testing.T) {
	needRoot(t)
	for kind, at := range map[string]func(testing.TB, int64) string{"tmpfs": testfs.Tmpfs, "btrfs": testfs.Btrfs,
		"xfs": testfs.XFS} {
		t.Run(kind, func(t *testing.T) {
			top := at(t, 400<<20)
			src, dst := mkdir(t, top, "src"), mkdir(t, top, "dst")
			treetest.Build(t, src)
			stream := send(t, src)
			if n := apply(t, stream, dst, false); n.Skipped.Any() {
				t.Errorf("left out: %+v", n)
			}
			treetest.Compare(t, src, dst, 0)
		})
	}
}

// TestFlags: flags and project IDs come last, also those of files with several names.
func TestFlags(t *testing.T) {
	needRoot(t)
	top := testfs.Ext4(t, 200<<20)
	src, dst := mkdir(t, top, "src"), mkdir(t, top, "dst")
	treetest.Removable(t, top)
	treetest.BuildFlags(t, src,
		treetest.Immutable|treetest.Append|treetest.NoDump|treetest.NoAtime|treetest.Sync|treetest.DirSync, false)
	apply(t, send(t, src), dst, false)
	treetest.Compare(t, src, dst, treetest.Atime)
}

// TestDeepPath: paths that are longer than system calls take travel too, and those that are longer than the format
// allows are refused.
func TestDeepPath(t *testing.T) {
	needRoot(t)
	top := testfs.Tmpfs(t, 100<<20)
	src, dst := mkdir(t, top, "src"), mkdir(t, top, "dst")
	name := strings.Repeat("d", 200)
	deepen := func(levels int) {
		at, err := unix.Open(src, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(t, err)
		for range levels {
			if err := unix.Mkdirat(at, name, 0o755); err != nil && err != unix.EEXIST {
				t.Fatal(err)
			}
			next, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
			must(t, err)
			unix.Close(at)
			at = next
		}
		f, err := unix.Openat(at, "file", unix.O_CREAT|unix.O_WRONLY, 0o640)
		must(t, err)
		unix.Close(f)
		unix.Close(at)
	}
	deepen(300)
	apply(t, send(t, src), dst, false)
	treetest.Compare(t, src, dst, treetest.Atime)
	deepen(1400)
	err := Send(t.Context(), io.Discard, open(t, src), SendOptions{})
	if !errs.Is(err, errs.Unsupported) {
		t.Errorf("a path of 280,000 bytes: %v", err)
	}
}

// TestDifferences: random changes to random trees, one after the other: what differs makes of a copy of the tree
// before the tree after. Seeds are printed.
func TestDifferences(t *testing.T) {
	needRoot(t)
	r := faulttest.Rand(t)
	top := testfs.Ext4(t, 600<<20)
	treetest.Removable(t, top)
	rounds := 12
	if testfs.Full() {
		rounds = 200
	}
	for i := range rounds {
		dir := mkdir(t, top, fmt.Sprint(i))
		src, old, dst := mkdir(t, dir, "src"), filepath.Join(dir, "old"), mkdir(t, dir, "dst")
		e := &treetest.Editor{T: t, R: r, Dir: src}
		e.Fill()
		apply(t, send(t, src), dst, false)
		treetest.Compare(t, src, dst, treetest.Atime)
		for step := range 4 {
			copyTree(t, src, old)
			for range 1 + r.IntN(40) {
				e.Edit()
			}
			stream := sendDiff(t, old, src, treediff.Options{})
			apply(t, stream, dst, true)
			treetest.Compare(t, src, dst, treetest.Atime|treetest.Holes)
			if t.Failed() {
				t.Fatalf("round %d, step %d, a stream of %d bytes", i, step, len(stream))
			}
			must(t, os.RemoveAll(old))
		}
		must(t, os.RemoveAll(dir))
	}
}

// TestDifferencesOfSnapshots: as TestDifferences, of subvolumes of btrfs, where renames are recognised and the
// filesystem says what has changed.
func TestDifferencesOfSnapshots(t *testing.T) {
	needRoot(t)
	r := faulttest.Rand(t)
	top := testfs.Btrfs(t, 600<<20)
	pool := open(t, top)
	n := 0
	vol := func(of string) string {
		n++
		name := fmt.Sprint("vol", n)
		if of == "" {
			must(t, kernel.SubvolCreate(pool, name))
		} else {
			must(t, kernel.SubvolSnapshot(pool, name, open(t, of), false))
		}
		return filepath.Join(top, name)
	}
	for range 6 {
		src := vol("")
		dst := mkdir(t, top, fmt.Sprint("dst", n))
		e := &treetest.Editor{T: t, R: r, Dir: src}
		e.Fill()
		apply(t, send(t, src), dst, false)
		for range 4 {
			time.Sleep(20 * time.Millisecond) // a tick of the clock of the filesystem: see treediff.Options.Younger
			old := vol(src)
			for range 1 + r.IntN(40) {
				e.Edit()
			}
			o := treediff.Options{SameOrigin: true}
			var err error
			o.Hints, err = treediff.BtrfsHints(t.Context(), open(t, old), open(t, src), nil)
			must(t, err)
			apply(t, sendDiff(t, old, src, o), dst, true)
			treetest.Compare(t, src, dst, treetest.Atime|treetest.Holes)
			if t.Failed() {
				t.FailNow()
			}
		}
	}
}

// TestSmallDifference: of a large file only what has changed is sent, even if that is in more places than a list holds.
func TestSmallDifference(t *testing.T) {
	top := t.TempDir()
	src, old, dst := mkdir(t, top, "src"), mkdir(t, top, "old"), mkdir(t, top, "dst")
	content := make([]byte, 80<<20)
	for i := 0; i < len(content); i += 64 {
		content[i] = byte(i >> 12)
	}
	must(t, os.WriteFile(src+"/db", content, 0o600))
	must(t, os.WriteFile(old+"/db", content, 0o600))
	apply(t, send(t, src), dst, false)
	write := func(off int64) {
		f, err := os.OpenFile(src+"/db", os.O_RDWR, 0)
		must(t, err)
		_, err = f.WriteAt([]byte("new"), off)
		must(t, err)
		must(t, f.Close())
	}
	write(33 << 20)
	stream := sendDiff(t, old, src, treediff.Options{})
	if len(stream) > 5000 {
		t.Errorf("3 changed bytes make a stream of %d", len(stream))
	}
	apply(t, stream, dst, true)
	copyFile(t, src+"/db", old+"/db")
	for i := range int64(5000) {
		write(i * 16384)
	}
	stream = sendDiff(t, old, src, treediff.Options{})
	if len(stream) > 25<<20 {
		t.Errorf("5000 changed blocks make a stream of %d bytes", len(stream))
	}
	apply(t, stream, dst, true)
	treetest.Compare(t, src, dst, treetest.Atime|treetest.Owners|treetest.Holes)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	must(t, err)
	must(t, os.WriteFile(to, b, 0o600))
}

// TestProtectedNames: an immutable file loses one of its names, and is still immutable under the other.
func TestProtectedNames(t *testing.T) {
	needRoot(t)
	top := testfs.Ext4(t, 100<<20)
	treetest.Removable(t, top)
	src, old, dst := mkdir(t, top, "src"), filepath.Join(top, "old"), mkdir(t, top, "dst")
	must(t, os.WriteFile(src+"/p", []byte("x"), 0o644))
	must(t, os.Link(src+"/p", src+"/q"))
	must(t, os.Mkdir(src+"/closed", 0o755))
	must(t, os.WriteFile(src+"/closed/f", []byte("x"), 0o644))
	must(t, treetest.SetFlags(src+"/p", treetest.Immutable))
	must(t, treetest.SetFlags(src+"/closed", treetest.Immutable))
	apply(t, send(t, src), dst, false)
	treetest.Compare(t, src, dst, treetest.Atime)
	copyTree(t, src, old)

	must(t, treetest.SetFlags(src+"/p", 0))
	must(t, os.Remove(src+"/p"))
	must(t, treetest.SetFlags(src+"/q", treetest.Immutable))
	must(t, treetest.SetFlags(src+"/closed", 0))
	must(t, os.Remove(src+"/closed/f"))
	must(t, os.Rename(src+"/closed", src+"/moved"))
	must(t, treetest.SetFlags(src+"/moved", treetest.Append))
	apply(t, sendDiff(t, old, src, treediff.Options{}), dst, true)
	treetest.Compare(t, src, dst, treetest.Atime)
}

// TestCutShort: whatever is missing at the end of a stream, or wrong in it, is noticed.
func TestCutShort(t *testing.T) {
	needRoot(t)
	top := testfs.Tmpfs(t, 200<<20)
	src := mkdir(t, top, "src")
	must(t, os.WriteFile(src+"/a", []byte("content"), 0o644))
	must(t, os.Mkdir(src+"/d", 0o755))
	must(t, os.Symlink("a", src+"/d/l"))
	must(t, os.Link(src+"/a", src+"/d/b"))
	stream := send(t, src)
	try := func(b []byte) error {
		dst := mkdir(t, top, "dst")
		_, err := Apply(t.Context(), bytes.NewReader(b), open(t, dst), ApplyOptions{})
		must(t, treewalk.Remove(t.Context(), dst))
		return err
	}
	must(t, try(stream))
	for n := range stream {
		if err := try(stream[:n]); !errs.Is(err, errs.Damaged) {
			t.Fatalf("cut after %d of %d bytes: %v", n, len(stream), err)
		}
	}
	if err := try(append(bytes.Clone(stream), 0)); !errs.Is(err, errs.Damaged) {
		t.Errorf("a byte too many: %v", err)
	}
	for i := range stream {
		b := bytes.Clone(stream)
		b[i] ^= 0x10
		if try(b) == nil {
			t.Errorf("a wrong byte at %d of %d was not noticed", i, len(b))
		}
	}
	newer := bytes.Clone(stream)
	newer[len(Magic)]++
	if err := try(newer); !errs.Is(err, errs.TooNew) {
		t.Errorf("another version: %v", err)
	}
}

// TestWrongBase: a difference is not made to a tree that it is not about, nor a whole tree to one that is there.
func TestWrongBase(t *testing.T) {
	top := t.TempDir()
	src, old, other := mkdir(t, top, "src"), mkdir(t, top, "old"), mkdir(t, top, "other")
	must(t, os.WriteFile(old+"/a", []byte("content"), 0o644))
	must(t, os.WriteFile(src+"/a", []byte("changed, and longer"), 0o644))
	must(t, os.WriteFile(other+"/a", []byte("another length"), 0o644))
	diff := sendDiff(t, old, src, treediff.Options{})
	for _, c := range []struct {
		name   string
		stream []byte
		diff   bool
		want   errs.Kind
	}{
		{"a difference to nothing", diff, false, errs.Conflict},
		{"a whole tree as a difference", send(t, src), true, errs.Conflict},
		{"a difference to another tree", diff, true, errs.Damaged},
		{"a tree where one is", send(t, src), false, errs.Damaged},
	} {
		_, err := Apply(t.Context(), bytes.NewReader(c.stream), open(t, other), ApplyOptions{Diff: c.diff})
		if !errs.Is(err, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if b, err := os.ReadFile(other + "/a"); err != nil || string(b) != "another length" {
		t.Errorf("%q, %v", b, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Apply(ctx, bytes.NewReader(diff), open(t, old), ApplyOptions{Diff: true}); !errs.Is(err, errs.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}
