package engine_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// TestReceiveRefuses: what cannot be is refused before anything is done.
func TestReceiveRefuses(t *testing.T) {
	e := imagePool(t, "xfs", 400<<20)
	rawGolden(t, e, "g", 1<<20)
	clone(t, e, "g", "v", false)
	snapshot(t, e, "v", "s")
	clone(t, e, "g", "busy", true)
	g := point(t, e, "g")
	before := dump(t, e.Dir())
	ok := receipt{ReceiveRequest: engine.ReceiveRequest{Volume: ref.MustName("new"), Snapshot: ref.MustName("s"),
		FS: driver.None, SizeBytes: 1 << 20}, Content: engine.Content{Image: func(context.Context, engine.Target) error {
		t.Error("it was asked for content")
		return nil
	}}}
	golden := func(q *receipt) {
		q.Volume, q.Snapshot, q.Golden, q.Generation = ref.MustName("new"), ref.Name{}, true, 1
	}
	for name, c := range map[string]struct {
		kind   errs.Kind
		change func(q *receipt)
	}{
		"no name":            {errs.Invalid, func(q *receipt) { q.Volume = ref.Name{} }},
		"no snapshot":        {errs.Invalid, func(q *receipt) { q.Snapshot = ref.Name{} }},
		"no content":         {errs.Invalid, func(q *receipt) { q.Image = nil }},
		"content twice":      {errs.Invalid, func(q *receipt) { q.Stream = strings.NewReader("") }},
		"an image of a tree": {errs.Invalid, func(q *receipt) { q.FS = driver.Native }},
		"a stream of an image": {errs.Invalid, func(q *receipt) {
			q.Image, q.Stream = nil, strings.NewReader("")
		}},
		"a stream": {errs.Unsupported, func(q *receipt) {
			q.Image, q.Stream, q.FS = nil, strings.NewReader(""), driver.Native
		}},
		"an unknown kind":          {errs.Unsupported, func(q *receipt) { q.FS = "ntfs" }},
		"no size":                  {errs.Invalid, func(q *receipt) { q.SizeBytes = 0 }},
		"volume taken":             {errs.Exists, func(q *receipt) { q.Volume = ref.MustName("v") }},
		"volume taken by a golden": {errs.Exists, func(q *receipt) { q.Volume = ref.MustName("g") }},
		"no volume to update":      {errs.NotFound, func(q *receipt) { q.Update = true }},
		"a golden to update": {errs.Invalid, func(q *receipt) {
			q.Volume, q.Update = ref.MustName("g"), true
		}},
		"snapshot taken": {errs.Exists, func(q *receipt) {
			q.Volume, q.Update = ref.MustName("v"), true
		}},
		"snapshot taken, history": {errs.Exists, func(q *receipt) {
			q.Volume, q.SnapshotOnly = ref.MustName("v"), true
		}},
		"no volume for history": {errs.NotFound, func(q *receipt) { q.SnapshotOnly = true }},
		"both":                  {errs.Invalid, func(q *receipt) { q.Update, q.SnapshotOnly = true, true }},
		"mounted": {errs.InUse, func(q *receipt) {
			q.Volume, q.Update = ref.MustName("busy"), true
		}},
		"no such base":  {errs.NotFound, func(q *receipt) { q.Base = driver.NewID() }},
		"a larger base": {errs.Invalid, func(q *receipt) { q.Base, q.SizeBytes = g.ID, 1<<19 }},
		"no room":       {errs.NoSpace, func(q *receipt) { q.NeedBytes = 1 << 40 }},
		"generation 0":  {errs.Invalid, func(q *receipt) { golden(q); q.Generation = 0 }},
		"golden with a snapshot": {errs.Invalid, func(q *receipt) {
			golden(q)
			q.Snapshot = ref.MustName("s")
		}},
		"golden without generation": {errs.Invalid, func(q *receipt) { golden(q); q.SnapshotOnly = true }},
		"golden taken": {errs.Exists, func(q *receipt) {
			golden(q)
			q.Volume = ref.MustName("g")
			q.Generation = 2
		}},
		"golden taken by a volume": {errs.Exists, func(q *receipt) {
			golden(q)
			q.Volume = ref.MustName("v")
		}},
		"generation taken": {errs.Exists, func(q *receipt) {
			golden(q)
			q.Volume, q.Update = ref.MustName("g"), true
		}},
		"a link to nothing": {errs.Invalid, func(q *receipt) { q.Links = []engine.Link{{Repo: "r"}} }},
	} {
		q := ok
		c.change(&q)
		if _, err := q.into(t.Context(), e); !errs.Is(err, c.kind) {
			t.Errorf("%s: %v, want %s", name, err, c.kind)
		}
	}
	sameDump(t, "refused", before, dump(t, e.Dir()))
	healthy(t, e)

	// Where there are no images, and no streams.
	p := newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name})
	if _, err := ok.into(t.Context(), p); !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
		t.Errorf("an image in a pool of trees: %v", err)
	}
	importTree(t, p, "g", source(t))
	err := p.Transfer().SendStream(t.Context(), engine.ReadRequest{Point: point(t, p, "g").ID}, io.Discard)
	if !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
		t.Errorf("the stream of a driver that has none: %v", err)
	}
	if _, err := p.Transfer().OpenImage(t.Context(), engine.ReadRequest{Point: point(t, p, "g").ID}); !errs.Is(err,
		errs.Unsupported) {
		t.Errorf("the image of a tree: %v", err)
	}
	healthy(t, p)
}

// receipts are the ways to receive, into a pool with golden g and volume v.
var receipts = map[string]func(q *engine.ReceiveRequest, base driver.ObjectID){
	"volume":           func(q *engine.ReceiveRequest, _ driver.ObjectID) {},
	"volume from base": func(q *engine.ReceiveRequest, base driver.ObjectID) { q.Base = base },
	"update": func(q *engine.ReceiveRequest, base driver.ObjectID) {
		q.Volume, q.Base, q.Update = ref.MustName("v"), base, true
	},
	"update of another": func(q *engine.ReceiveRequest, _ driver.ObjectID) {
		q.Volume, q.Update = ref.MustName("v"), true
	},
	"snapshot only": func(q *engine.ReceiveRequest, base driver.ObjectID) {
		q.Volume, q.Base, q.SnapshotOnly = ref.MustName("v"), base, true
	},
	"golden": func(q *engine.ReceiveRequest, _ driver.ObjectID) {
		q.Golden, q.Snapshot, q.Generation = true, ref.Name{}, 7
	},
	"generation": func(q *engine.ReceiveRequest, base driver.ObjectID) {
		q.Volume, q.Golden, q.Snapshot, q.Generation, q.Base, q.Update = ref.MustName("g"), true, ref.Name{}, 7, base, true
	},
}

// TestReceiveFails: whatever goes wrong, and in whichever way of receiving, nothing
// has changed.
func TestReceiveFails(t *testing.T) {
	const size = 8 << 20
	e := imagePool(t, "xfs", 400<<20)
	rawGolden(t, e, "g", size)
	clone(t, e, "g", "v", false)
	snapshot(t, e, "v", "s")
	base := point(t, e, "v@s").ID
	mine := errors.New("mine")
	block := bytes.Repeat([]byte("x"), 1<<20)
	for name, change := range receipts {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			for fault, c := range map[string]struct {
				ctx   context.Context
				image func(ctx context.Context, to engine.Target) error
				links []engine.Link
				want  func(error) bool
			}{
				"its own error": {image: func(_ context.Context, to engine.Target) error {
					_, err := to.WriteAt(block, 0)
					return errors.Join(err, mine)
				}, want: func(err error) bool { return errors.Is(err, mine) }},
				"cancelled": {ctx: ctx, image: func(ctx context.Context, to engine.Target) error {
					_, err := to.WriteAt(block, 0)
					cancel()
					return err // and says nothing
				}, want: func(err error) bool { return errors.Is(err, context.Canceled) }},
				"outside": {image: func(_ context.Context, to engine.Target) error {
					_, err := to.WriteAt(block, to.SizeBytes()-1)
					return err
				}, want: func(err error) bool { return errs.Is(err, errs.Invalid) }},
				"zeros outside": {image: func(_ context.Context, to engine.Target) error {
					return to.Zero(-1, 10)
				}, want: func(err error) bool { return errs.Is(err, errs.Invalid) }},
				"a link to nothing": {image: func(_ context.Context, to engine.Target) error { // found in the commit
					return to.Zero(0, to.SizeBytes())
				}, links: []engine.Link{{"r", "m", ""}, {"r", "m", driver.NewID()}}, want: func(err error) bool {
					return errs.Is(err, errs.NotFound)
				}},
			} {
				before, sum := dump(t, e.Dir()), imageSum(t, e, "v")
				q := engine.ReceiveRequest{Volume: ref.MustName("new"), Snapshot: ref.MustName("n"), FS: driver.None,
					SizeBytes: size, Links: c.links}
				change(&q, base)
				if c.ctx == nil {
					c.ctx = t.Context()
				}
				if _, err := e.Transfer().Receive(c.ctx, q, engine.Content{Image: c.image}); err == nil || !c.want(err) {
					t.Errorf("%s: %v", fault, err)
				}
				sameDump(t, fault, before, dump(t, e.Dir()))
				nothingLeft(t, e)
				if imageSum(t, e, "v") != sum {
					t.Errorf("%s: the volume has changed", fault)
				}
				if l, err := e.Transfer().Links(t.Context(), ""); err != nil || len(l) > 0 {
					t.Errorf("%s: links %v, %v", fault, l, err)
				}
			}
		})
	}
	healthy(t, e)
}

// TestReceiveInFullPool: a pool that runs full while it receives is as before.
func TestReceiveInFullPool(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			e := imagePool(t, kind, 400<<20)
			rawGolden(t, e, "g", 8<<20)
			clone(t, e, "g", "v", false)
			snapshot(t, e, "v", "s")
			base := point(t, e, "v@s").ID
			ballast(t, e.Dir())
			before := dump(t, e.Dir())
			for name, change := range receipts {
				rng := rand.NewChaCha8([32]byte{9})
				q := engine.ReceiveRequest{Volume: ref.MustName("new"), Snapshot: ref.MustName("n"), FS: driver.None,
					SizeBytes: 1 << 30}
				image := func(_ context.Context, to engine.Target) error {
					b := make([]byte, 4<<20)
					for off := int64(0); off < 1<<30; off += int64(len(b)) {
						_, _ = rng.Read(b)
						if _, err := to.WriteAt(b, off); err != nil {
							return err
						}
					}
					return nil
				}
				change(&q, base)
				_, err := e.Transfer().Receive(t.Context(), q, engine.Content{Image: image})
				if !errs.Is(err, errs.NoSpace) || errs.HintOf(err) == "" {
					t.Errorf("%s: %v, want NoSpace with a hint", name, err)
				}
				sameDump(t, name, before, dump(t, e.Dir()))
				nothingLeft(t, e)
			}
			healthy(t, e)
		})
	}
}

// ballast takes most of the space of a filesystem, so that less has to be written until it is full.
func ballast(t *testing.T, pool string) {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(pool, &st))
	f, err := os.Create(filepath.Join(filepath.Dir(pool), "ballast"))
	must(t, err)
	defer f.Close()
	must(t, unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize/4*3))
}
