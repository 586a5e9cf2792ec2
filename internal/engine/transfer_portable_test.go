package engine_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

// portable is what SendTree writes.
func portable(t *testing.T, e *engine.Engine, p engine.Point, base driver.ObjectID) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := e.Transfer().SendTree(t.Context(), engine.ReadRequest{Point: p.ID, Base: base}, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// carryPortable is carryTree in the form that every driver with trees can read.
func carryPortable(t *testing.T, from, to *engine.Engine, p engine.Point, base, baseThere driver.ObjectID,
	change func(*engine.ReceiveRequest)) {
	t.Helper()
	q := request(p)
	q.Base, q.Tree = baseThere, true
	content := engine.Content{Stream: bytes.NewReader(portable(t, from, p, base))}
	if change != nil {
		change(&q)
	}
	if _, err := to.Transfer().Receive(t.Context(), q, content); err != nil {
		t.Fatal(err)
	}
}

// fingerprints describes the tree of a volume.
func fingerprints(t *testing.T, e *engine.Engine, volume string) (out map[string]treetest.Entry) {
	t.Helper()
	edit(t, e, volume, func(dir string) {
		var err error
		if out, err = treetest.Fingerprint(dir); err != nil {
			t.Fatal(err)
		}
	})
	return out
}

// travelPortably carries a golden, a volume of it and its next states from one pool to another, and one back.
func travelPortably(t *testing.T, a, b *engine.Engine) {
	t.Helper()
	src := source(t)
	write(t, filepath.Join(src, "sub/big"), strings.Repeat("0123456789abcde\n", 1<<18))
	importTree(t, a, "g", src)
	clone(t, a, "g", "job", false)
	for _, n := range []string{"one", "two", "three"} {
		edit(t, a, "job", func(dir string) {
			write(t, filepath.Join(dir, "file"), n)
			if err := os.Rename(filepath.Join(dir, "sub"), filepath.Join(dir, "sub."+n)); err != nil && n == "one" {
				t.Fatal(err)
			}
			if err := os.Mkdir(filepath.Join(dir, "sub"), 0o750); err != nil {
				t.Fatal(err)
			}
		})
		snapshot(t, a, "job", n)
	}
	g, one, two, three := point(t, a, "g"), point(t, a, "job@one"), point(t, a, "job@two"), point(t, a, "job@three")
	same := func(volume string) {
		t.Helper()
		for _, d := range treetest.Diff(fingerprints(t, a, "job"), fingerprints(t, b, volume),
			treetest.Atime|treetest.Holes) {
			t.Error(d)
		}
	}
	carryPortable(t, a, b, g, "", "", nil)
	there := point(t, b, "g")
	if n := len(portable(t, a, one, g.ID)); n > 1<<20 && a.Caps().Sharing {
		t.Errorf("the difference takes %d bytes", n)
	}
	carryPortable(t, a, b, one, g.ID, there.ID, func(q *engine.ReceiveRequest) { q.OriginID = there.ID })
	carryPortable(t, a, b, two, one.ID, point(t, b, "job@one").ID, func(q *engine.ReceiveRequest) { q.Update = true })
	carryPortable(t, a, b, three, two.ID, point(t, b, "job@two").ID,
		func(q *engine.ReceiveRequest) { q.SnapshotOnly = true })
	last := engine.CloneRequest{From: reference(t, "job@three"), Name: ref.MustName("last")}
	if _, err := b.Clone(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	same("last")

	edit(t, b, "job", func(dir string) { write(t, filepath.Join(dir, "back"), "x") })
	snapshot(t, b, "job", "back")
	carryPortable(t, b, a, point(t, b, "job@back"), point(t, b, "job@two").ID, two.ID,
		func(q *engine.ReceiveRequest) { q.Update = true })
	same("job")
	for _, e := range []*engine.Engine{a, b} {
		if e.Caps().Name != zfs.Name { // whose objects lie elsewhere
			healthy(t, e)
		}
	}
}

// TestTransferPortably: trees travel between drivers; what fails leaves nothing, in whichever way of receiving.
func TestTransferPortably(t *testing.T) {
	a := newPool(t, testfs.Ext4(t, 512<<20), engine.InitRequest{Driver: plain.Name, MinFreePercent: 1})
	b := treePool(t)
	travelPortably(t, a, b)
	for _, e := range []*engine.Engine{a, b} {
		clone(t, e, "g", "v", false)
		whole := portable(t, e, point(t, e, "job@two"), "")
		part := portable(t, e, point(t, e, "job@two"), point(t, e, "job@one").ID)
		damagedStreams(t, e, whole, part, point(t, e, "job@one").ID)
		healthy(t, e)
	}
}

// damagedStreams wants that receiving what is wrong leaves nothing, in whichever way of receiving: streams of a tree,
// and
// of what differs from a base, into a pool with a golden g and a volume v.
func damagedStreams(t *testing.T, e *engine.Engine, whole, part []byte, base driver.ObjectID) {
	t.Helper()
	mine := errors.New("mine")
	is := func(kind errs.Kind) func(error) bool { return func(err error) bool { return errs.Is(err, kind) } }
	before := dump(t, e.Dir())
	for name, change := range receipts {
		q := engine.ReceiveRequest{Volume: ref.MustName("new"), Snapshot: ref.MustName("n"), FS: driver.Native, Tree: true}
		change(&q, base)
		data, other := whole, part
		if q.Base != "" {
			data, other = part, whole
		}
		damaged := bytes.Clone(data)
		damaged[len(damaged)-1] ^= 1
		for fault, c := range map[string]struct {
			r    io.Reader
			want func(error) bool
		}{
			"cut short":      {bytes.NewReader(data[:len(data)-1]), is(errs.Damaged)},
			"cut in half":    {bytes.NewReader(data[:len(data)/2]), is(errs.Damaged)},
			"damaged":        {bytes.NewReader(damaged), is(errs.Damaged)},
			"no stream":      {strings.NewReader("this is no stream"), is(errs.Damaged)},
			"the other kind": {bytes.NewReader(other), is(errs.Conflict)},
			"an error of its": {
				io.MultiReader(bytes.NewReader(data[:len(data)/2]), iotest.ErrReader(mine)),
				func(err error) bool { return errors.Is(err, mine) },
			},
		} {
			if _, err := e.Transfer().Receive(t.Context(), q, engine.Content{Stream: c.r}); err == nil || !c.want(err) {
				t.Errorf("%s, %s: %v", name, fault, err)
			}
			sameDump(t, name+", "+fault, before, dump(t, e.Dir()))
			nothingLeft(t, e)
		}
	}
}

// TestTransferZFSPortably: as TestTransferPortably, to ZFS and from there; streams of other drivers are refused.
func TestTransferZFSPortably(t *testing.T) {
	zpool := testfs.ZFS(t, 2<<30)
	drivers[zfs.Name] = zfs.Open
	defer delete(drivers, zfs.Name)
	t.Run("from plain", func(t *testing.T) {
		a := newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name, MinFreePercent: 1})
		b := newPool(t, t.TempDir(), engine.InitRequest{Driver: zfs.Name, Dataset: zpool + "/to", MinFreePercent: 1})
		travelPortably(t, a, b)
	})
	t.Run("to btrfs", func(t *testing.T) {
		a := newPool(t, t.TempDir(), engine.InitRequest{Driver: zfs.Name, Dataset: zpool + "/from", MinFreePercent: 1})
		b := newPool(t, testfs.Btrfs(t, 512<<20), engine.InitRequest{Driver: btrfs.Name, MinFreePercent: 1})
		travelPortably(t, a, b)
		q := request(point(t, b, "g"))
		q.Volume, q.Generation = ref.MustName("other"), 1
		content := engine.Content{Stream: bytes.NewReader(stream(t, b, point(t, b, "g"), ""))}
		_, err := a.Transfer().Receive(t.Context(), q, content)
		if !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "btrfs") {
			t.Errorf("a stream of btrfs into ZFS: %v", err)
		}
	})
}
