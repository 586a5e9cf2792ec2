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

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// treePool makes a pool of trees that can be sent.
func treePool(t *testing.T) *engine.Engine {
	t.Helper()
	return newPool(t, testfs.Btrfs(t, 512<<20), engine.InitRequest{Driver: btrfs.Name, MinFreePercent: 1})
}

// stream is what SendStream writes.
func stream(t *testing.T, e *engine.Engine, p engine.Point, base driver.ObjectID) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := e.Transfer().SendStream(t.Context(), engine.ReadRequest{Point: p.ID, Base: base}, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// carryTree is carry of trees.
func carryTree(
	t *testing.T, from, to *engine.Engine, p engine.Point, base, baseThere driver.ObjectID,
	change func(*engine.ReceiveRequest),
) api.Object {
	t.Helper()
	q := request(p)
	q.Base = baseThere
	if change != nil {
		change(&q)
	}
	info, err := to.Transfer().Receive(t.Context(), q, engine.Content{Stream: bytes.NewReader(stream(t, from, p, base))})
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// TestTransferTrees carries a golden, a volume of it and its next state as streams.
func TestTransferTrees(t *testing.T) {
	a, b := treePool(t), treePool(t)
	src := source(t)
	if err := os.WriteFile(filepath.Join(src, "big"), bytes.Repeat([]byte("0123456789abcde\n"), 1<<18),
		0o644); err != nil {
		t.Fatal(err)
	}
	importTree(t, a, "g", src)
	clone(t, a, "g", "job", false)
	for _, n := range []string{"one", "two", "three"} {
		edit(t, a, "job", func(dir string) { write(t, filepath.Join(dir, "file"), n) })
		snapshot(t, a, "job", n)
	}
	g, one, two, three := point(t, a, "g"), point(t, a, "job@one"), point(t, a, "job@two"), point(t, a, "job@three")
	text := func(want string) {
		t.Helper()
		edit(t, b, "job", func(dir string) {
			got, err := os.ReadFile(filepath.Join(dir, "file"))
			if st, serr := os.Stat(filepath.Join(dir, "big")); err != nil || serr != nil || string(got) != want ||
				st.Size() != 4<<20 {
				t.Errorf("%q, %v, %v, want %q", got, err, serr, want)
			}
		})
	}
	if i := carryTree(t, a, b, g, "", "", nil); i.Golden != "g" || i.State != "current" {
		t.Errorf("%+v", i)
	}
	if n := len(stream(t, a, one, g.ID)); n > 1<<20 {
		t.Errorf("the difference takes %d bytes", n)
	}
	there := point(t, b, "g")
	if i := carryTree(t, a, b, one, g.ID, there.ID, func(q *engine.ReceiveRequest) {
		q.OriginID = there.ID
	}); i.Name != "job" || i.Golden != "g" || i.Origin != "g@1" {
		t.Errorf("%+v", i)
	}
	text("one")
	carryTree(t, a, b, two, one.ID, point(t, b, "job@one").ID, func(q *engine.ReceiveRequest) { q.Update = true })
	text("two")
	carryTree(t, a, b, three, two.ID, point(t, b, "job@two").ID, func(q *engine.ReceiveRequest) { q.SnapshotOnly = true })
	text("two")
	for _, what := range []string{"one", "two", "three"} {
		if x, y := list(diff(t, a, "g", "job@"+what)), list(diff(t, b, "g", "job@"+what)); x != y || x == "" {
			t.Errorf("%s: differences here %q, there %q", what, x, y)
		}
	}
	healthy(t, b)

	// What fails leaves nothing, in whichever way of receiving.
	clone(t, b, "g", "v", false)
	whole, part := stream(t, a, three, ""), stream(t, a, two, one.ID)
	mine := errors.New("mine")
	before := dump(t, b.Dir())
	for name, change := range receipts {
		base := driver.ObjectID("")
		q := engine.ReceiveRequest{Volume: ref.MustName("new"), Snapshot: ref.MustName("n"), FS: driver.Native}
		if change(&q, point(t, b, "job@one").ID); q.Base != "" {
			base = q.Base
		}
		data := whole
		if base != "" {
			data = part
		}
		for fault, c := range map[string]struct {
			r    io.Reader
			want func(error) bool
		}{
			"cut short": {bytes.NewReader(data[:len(data)-40]), func(err error) bool { return errs.Is(err, errs.Damaged) }},
			"no stream": {strings.NewReader("this is no stream of a filesystem at all, whatever it says"),
				func(err error) bool {
					return errs.Is(err, errs.Damaged) || errs.Is(err, errs.Invalid)
				}},
			"its own error": {io.MultiReader(bytes.NewReader(data[:len(data)/2]), iotest.ErrReader(mine)), func(err error) bool {
				return errors.Is(err, mine)
			}},
		} {
			if _, err := b.Transfer().Receive(t.Context(), q, engine.Content{Stream: c.r}); err == nil || !c.want(err) {
				t.Errorf("%s, %s: %v", name, fault, err)
			}
			sameDump(t, name+", "+fault, before, dump(t, b.Dir()))
			nothingLeft(t, b)
		}
	}
	healthy(t, b)
}
