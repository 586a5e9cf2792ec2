package engine_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
	"pando/internal/tree/treestream"
)

// TestTransferTreesIntoImages: a pool of images puts trees that it receives into images, whole or by what differs, in
// each way of receiving; what fails leaves nothing.
func TestTransferTreesIntoImages(t *testing.T) {
	a := newPool(t, testfs.Tmpfs(t, 512<<20), engine.InitRequest{Driver: plain.Name, MinFreePercent: 1})
	b := imagePool(t, "xfs", 800<<20)
	src := filepath.Join(a.Dir(), "..", "everything")
	treetest.Build(t, src)
	importTree(t, a, "g", src)
	clone(t, a, "g", "job", false)
	g := point(t, a, "g")
	carryPortable(t, a, b, g, "", "", nil)
	there := point(t, b, "g")
	if there.FS != driver.Ext4 || there.SizeBytes < 512<<20 {
		t.Errorf("%+v", there)
	}

	rnd := faulttest.Rand(t)
	before, beforeThere := g, there
	for i := range 3 {
		edit(t, a, "job", func(dir string) {
			e := &treetest.Editor{T: t, R: rnd, Dir: dir}
			for range 1 + rnd.IntN(25) {
				e.Edit()
			}
		})
		name := fmt.Sprint("s", i)
		snapshot(t, a, "job", name)
		now := point(t, a, "job@"+name)
		carryPortable(t, a, b, now, before.ID, beforeThere.ID, func(q *engine.ReceiveRequest) { q.Update = i > 0 })
		before, beforeThere = now, point(t, b, "job@"+name)
		for _, d := range treetest.Diff(fingerprints(t, a, "job"), fingerprints(t, b, "job"), treetest.Atime|treetest.Holes) {
			t.Errorf("round %d: %s", i, d)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	info, err := b.Show(t.Context(), reference(t, "job"))
	if err != nil || info.FS != driver.Ext4 || info.SharedBytes == 0 {
		t.Errorf("%+v, %v", info, err)
	}
	healthy(t, b)

	clone(t, b, "g", "v", false)
	carryPortable(t, a, b, point(t, a, "job@s1"), "", "", func(q *engine.ReceiveRequest) {
		q.Volume, q.Snapshot = ref.MustName("one"), ref.MustName("one")
	})
	whole := portable(t, a, point(t, a, "job@s2"), "")
	part := portable(t, a, point(t, a, "job@s2"), point(t, a, "job@s1").ID)
	damagedStreams(t, b, whole, part, point(t, b, "one@one").ID)
	rawGolden(t, b, "raw", 8<<20)
	q := engine.ReceiveRequest{Volume: ref.MustName("new"), Snapshot: ref.MustName("n"), FS: driver.Native, Tree: true,
		Base: point(t, b, "raw").ID}
	content := engine.Content{Stream: bytes.NewReader(part)}
	if _, err := b.Transfer().Receive(t.Context(), q, content); !errs.Is(err, errs.Invalid) {
		t.Errorf("over a raw image: %v", err)
	}
	healthy(t, b)
}

// TestTreeTooLargeForImage: a tree with more files than the image can hold is refused, and leaves nothing.
func TestTreeTooLargeForImage(t *testing.T) {
	e := imagePool(t, "xfs", 400<<20)
	src := testfs.Tmpfs(t, 64<<20)
	for i := range 33000 {
		write(t, filepath.Join(src, fmt.Sprint("file", i)), "")
	}
	root, err := os.Open(src)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var stream bytes.Buffer
	if err := treestream.Send(t.Context(), &stream, root, treestream.SendOptions{}); err != nil {
		t.Fatal(err)
	}

	before := dump(t, e.Dir())
	q := engine.ReceiveRequest{Volume: ref.MustName("v"), Snapshot: ref.MustName("s"), FS: driver.Native, Tree: true}
	_, err = e.Transfer().Receive(t.Context(), q, engine.Content{Stream: &stream})
	if !errs.Is(err, errs.NoSpace) || !strings.Contains(errs.HintOf(err), "plain") {
		t.Errorf("%v, hint %q", err, errs.HintOf(err))
	}
	sameDump(t, "too large", before, dump(t, e.Dir()))
	nothingLeft(t, e)
	healthy(t, e)
}
