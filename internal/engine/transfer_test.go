package engine_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/linux/extent"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// imagePool makes a pool of images on a filesystem of a kind.
func imagePool(t *testing.T, kind string, size int64) *engine.Engine {
	t.Helper()
	return newPool(t, testfs.New(t, kind, size).Dir(), engine.InitRequest{Driver: reflink.Name, MinFreePercent: 1})
}

// rawGolden makes a golden that is a raw image of size bytes, with content in a
// half of it.
func rawGolden(t *testing.T, e *engine.Engine, name string, size int64) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	b := make([]byte, size/2)
	_, _ = rand.NewChaCha8(sha256.Sum256([]byte(name))).Read(b)
	if err := errors.Join(os.WriteFile(path, b, 0o600), os.Truncate(path, size)); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(name), Source: path,
		FS: driver.None}); err != nil {
		t.Fatal(err)
	}
}

// scribble writes into the image of an idle raw volume.
func scribble(t *testing.T, e *engine.Engine, volume, text string, off int64) {
	t.Helper()
	f, err := os.OpenFile(imageFile(t, e, volume), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(text), off); err != nil {
		t.Fatal(err)
	}
}

// imageFile is the path of the image of anything.
func imageFile(t *testing.T, e *engine.Engine, what string) string {
	t.Helper()
	d, err := e.Show(t.Context(), reference(t, what))
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(e.Dir(), "data", "objects", d.ID+".img")
}

func snapshot(t *testing.T, e *engine.Engine, volume, name string) {
	t.Helper()
	if _, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(volume),
		Name: ref.MustName(name)}); err != nil {
		t.Fatal(err)
	}
}

func point(t *testing.T, e *engine.Engine, what string) engine.Point {
	t.Helper()
	p, err := e.Transfer().Point(t.Context(), reference(t, what))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// imageSum is a hash of the content of anything that is an image.
func imageSum(t *testing.T, e *engine.Engine, what string) string {
	t.Helper()
	f, err := os.Open(imageFile(t, e, what))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

// carried is what was moved by carry.
type carried struct {
	data, zero int64
	ranges     int
	exact      bool
}

// readImage calls fn with the image of a point while it is open.
func readImage(ctx context.Context, e *engine.Engine, q engine.ReadRequest, fn func(*engine.Image) error) error {
	m, err := e.Transfer().OpenImage(ctx, q)
	if err != nil {
		return err
	}
	return errors.Join(fn(m), m.Close(), m.Close())
}

// copyImage writes what OpenImage says of p and base into a target whose content
// begins as base.
func copyImage(
	ctx context.Context, from *engine.Engine, p engine.Point, base driver.ObjectID, fresh bool, to engine.Target,
	c *carried,
) error {
	return readImage(ctx, from, engine.ReadRequest{Point: p.ID, Base: base}, func(m *engine.Image) error {
		c.exact = m.Exact
		buf := make([]byte, 64<<10)
		at := int64(0)
		for r, err := range m.Ranges {
			if err != nil {
				return err
			}
			c.ranges++
			if !m.Exact && !fresh && r.Offset > at {
				if err := to.Zero(at, r.Offset-at); err != nil {
					return err
				}
			}
			at = r.End()
			if r.Zero {
				c.zero += r.Length
				if err := to.Zero(r.Offset, r.Length); err != nil {
					return err
				}
				continue
			}
			c.data += r.Length
			for off := r.Offset; off < r.End(); off += int64(len(buf)) {
				b := buf[:min(int64(len(buf)), r.End()-off)]
				if _, err := m.R.ReadAt(b, off); err != nil {
					return err
				}
				if _, err := to.WriteAt(b, off); err != nil {
					return err
				}
			}
		}
		if !m.Exact && !fresh && at < m.SizeBytes {
			return to.Zero(at, m.SizeBytes-at)
		}
		return nil
	})
}

// request is what makes of p elsewhere what it is here.
func request(p engine.Point) engine.ReceiveRequest {
	q := engine.ReceiveRequest{
		Volume: ref.MustName(p.Volume), Snapshot: ref.MustName(p.Name), Golden: p.Golden, FS: p.FS, SizeBytes: p.SizeBytes,
		Sector:    p.Sector,
		CreatedAt: p.CreatedAt, Consistency: p.Consistency, OriginRef: p.OriginRef,
	}
	if p.Golden {
		q.Snapshot = ref.Name{}
		_, _ = fmt.Sscan(p.Name, &q.Generation)
	}
	return q
}

// receipt is what a pool is asked to receive, with its content.
type receipt struct {
	engine.ReceiveRequest
	engine.Content
}

func (q receipt) into(ctx context.Context, e *engine.Engine) (api.Object, error) {
	return e.Transfer().Receive(ctx, q.ReceiveRequest, q.Content)
}

// carry moves a point from one pool to another, as the difference to base, which is
// baseThere there.
func carry(
	t *testing.T, from, to *engine.Engine, p engine.Point, base, baseThere driver.ObjectID,
	change func(*engine.ReceiveRequest),
) (api.Object, carried) {
	t.Helper()
	var c carried
	q := request(p)
	q.Base = baseThere
	image := func(ctx context.Context, target engine.Target) error {
		return copyImage(ctx, from, p, base, baseThere == "", target, &c)
	}
	if change != nil {
		change(&q)
	}
	info, err := to.Transfer().Receive(t.Context(), q, engine.Content{Image: image})
	if err != nil {
		t.Fatal(err)
	}
	return info, c
}

// healthy fails if a check of the pool finds anything, or something is left behind.
func healthy(t *testing.T, e *engine.Engine) {
	t.Helper()
	nothingLeft(t, e)
	for _, l := range dump(t, e.Dir()) {
		if strings.HasPrefix(l, "mark|") {
			t.Errorf("left: %s", l)
		}
	}
	if r := fsck(t, e.Dir(), false); len(r.Findings) > 0 {
		t.Errorf("fsck: %s", findings(r))
	}
}

// TestTransfer carries a golden, a volume of it with its history, and new states of
// it, from pool to pool: what arrives is what was sent, it shares what it shared, and
// only what changed is moved.
func TestTransfer(t *testing.T) {
	for _, way := range [][2]string{{"xfs", "btrfs"}, {"btrfs", "xfs"}} {
		t.Run(way[0]+" to "+way[1], func(t *testing.T) {
			a, b := imagePool(t, way[0], 600<<20), imagePool(t, way[1], 600<<20)
			src := source(t)
			big := make([]byte, 12<<20)
			_, _ = rand.NewChaCha8([32]byte{5}).Read(big)
			if err := os.WriteFile(filepath.Join(src, "big"), big, 0o644); err != nil {
				t.Fatal(err)
			}
			if _, err := a.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src,
				SizeBytes: 48 << 20}); err != nil {
				t.Fatal(err)
			}
			clone(t, a, "g", "job", false)
			edit(t, a, "job", func(dir string) { write(t, filepath.Join(dir, "file"), "first") })
			snapshot(t, a, "job", "one")
			edit(t, a, "job", func(dir string) {
				write(t, filepath.Join(dir, "file"), "second")
				if err := os.Remove(filepath.Join(dir, "big")); err != nil {
					t.Fatal(err)
				}
			})
			snapshot(t, a, "job", "two")
			g, one, two := point(t, a, "g"), point(t, a, "job@one"), point(t, a, "job@two")
			if one.BaseRef != "g@1" || one.BaseID != g.ID || one.OriginRef != "g@1" || one.Lineage != two.Lineage ||
				g.Lineage == one.Lineage || !driver.ValidID(string(g.Lineage)) {
				t.Errorf("%+v\n%+v\n%+v", g, one, two)
			}

			info, c := carry(t, a, b, g, "", "", func(q *engine.ReceiveRequest) {
				q.Links = []engine.Link{{Repo: "r", Manifest: "mg"}}
			})
			if info.Golden != "g" || info.Generation != 1 || info.State != "current" || c.exact || c.data < int64(len(big)) ||
				c.data > int64(len(big))+8<<20 {
				t.Errorf("golden: %+v, %+v", info, c)
			}
			gThere := point(t, b, "g")
			info, c = carry(t, a, b, one, g.ID, gThere.ID, func(q *engine.ReceiveRequest) {
				q.OriginID, q.Descends = gThere.ID, gThere.ID
				q.Links = []engine.Link{{Repo: "r", Manifest: "m1"}, {Repo: "r", Manifest: "mg2", Object: gThere.ID}}
			})
			if info.Kind != "volume" || info.Name != "job" || info.Golden != "g" || info.Origin != "g@1" || !c.exact ||
				c.data > 4<<20 {
				t.Errorf("volume: %+v, %+v", info, c)
			}
			oneThere := point(t, b, "job@one")
			if oneThere.BaseID != gThere.ID || oneThere.CreatedAt != one.CreatedAt || oneThere.Consistency != one.Consistency {
				t.Errorf("%+v is not as %+v", oneThere, one)
			}
			// The next state: the volume is as it was, so nothing but the two snapshots
			// remains of it.
			first := info.ID
			info, c = carry(t, a, b, two, one.ID, oneThere.ID, func(q *engine.ReceiveRequest) {
				q.Update, q.Descends = true, gThere.ID
				q.Links = []engine.Link{{Repo: "r", Manifest: "m2"}}
			})
			if info.ID == first || info.Name != "job" || !c.exact || c.data > 4<<20 {
				t.Errorf("update: %+v, %+v", info, c)
			}
			if names, err := pooltest.SnapshotNames(t.Context(), b, "job"); err != nil || fmt.Sprint(names) != "[one two]" {
				t.Errorf("snapshots %v, %v", names, err)
			}
			for _, what := range []string{"g@1", "job@one", "job@two"} {
				if x, y := imageSum(t, a, what), imageSum(t, b, what); x != y {
					t.Errorf("%s: %s there, %s here", what, y, x)
				}
			}
			if imageSum(t, b, "job") != imageSum(t, a, "job@two") {
				t.Error("the volume is not its last snapshot")
			}
			links, err := b.Transfer().Links(t.Context(), "r")
			want := []engine.Link{{"r", "mg", gThere.ID}, {"r", "m1", oneThere.ID}, {"r", "mg2", gThere.ID},
				{"r", "m2", point(t, b, "job@two").ID}}
			for _, l := range want {
				if err != nil || !slices.Contains(links, l) || len(links) != len(want) {
					t.Errorf("links %v, %v, want %v", links, err, want)
					break
				}
			}
			edit(t, b, "job", func(dir string) {
				if text, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(text) != "second" {
					t.Errorf("%q, %v", text, err)
				}
				write(t, filepath.Join(dir, "mine"), "local")
			})
			if x, y := list(diff(t, a, "g", "job@one")), list(diff(t, b, "g", "job@one")); x != y || x == "" {
				t.Errorf("differences here %q, there %q", x, y)
			}
			p, err := b.Pool(t.Context(), engine.PoolRequest{Exact: true})
			if err != nil {
				t.Fatal(err)
			}
			if p.PhysicalBytes > int64(len(big))+24<<20 {
				t.Errorf("%d bytes in the pool for a golden of %d", p.PhysicalBytes, len(big))
			}
			healthy(t, b)

			// Now it has been changed here: its state stays.
			edit(t, a, "job", func(dir string) { write(t, filepath.Join(dir, "file"), "third") })
			snapshot(t, a, "job", "three")
			mine := imageSum(t, b, "job")
			carry(t, a, b, point(t, a, "job@three"), two.ID, point(t, b, "job@two").ID, func(q *engine.ReceiveRequest) {
				q.Update = true
			})
			names, err := pooltest.SnapshotNames(t.Context(), b, "job")
			if err != nil || len(names) != 4 || !slices.ContainsFunc(names, func(n string) bool {
				return strings.HasPrefix(n, "before-pull-")
			}) {
				t.Fatalf("snapshots %v, %v", names, err)
			}
			for _, n := range names {
				if strings.HasPrefix(n, "before-pull-") && imageSum(t, b, "job@"+n) != mine {
					t.Error("what was changed here is lost")
				}
			}
			// Another generation, and one that is older.
			publish(t, a, "g", "job")
			edit(t, a, "job", func(dir string) { write(t, filepath.Join(dir, "file"), "fourth") })
			publish(t, a, "g", "job")
			carry(t, a, b, point(t, a, "g@3"), g.ID, gThere.ID, func(q *engine.ReceiveRequest) { q.Update = true })
			info, _ = carry(t, a, b, point(t, a, "g@2"), g.ID, gThere.ID, func(q *engine.ReceiveRequest) { q.Update = true })
			if info.Generation != 2 || info.State != "superseded" {
				t.Errorf("%+v", info)
			}
			for _, what := range []string{"g@1", "g@2", "g@3", "job@three"} {
				if imageSum(t, a, what) != imageSum(t, b, what) {
					t.Errorf("%s differs", what)
				}
			}
			if p := point(t, b, "g"); p.Name != "3" || p.Lineage != gThere.Lineage {
				t.Errorf("%+v", p)
			}
			// The next number is free.
			if p, err := b.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("g"), Volume: ref.MustName("job"),
				Force: true}); err != nil || p.Generation != 4 {
				t.Errorf("%+v, %v", p, err)
			}
			// History only.
			carry(t, a, b, two, one.ID, oneThere.ID, func(q *engine.ReceiveRequest) {
				q.SnapshotOnly, q.Snapshot = true, ref.MustName("again")
			})
			if imageSum(t, b, "job@again") != imageSum(t, a, "job@two") || imageSum(t, b, "job") != imageSum(t, a, "job@three") {
				t.Error("the snapshot, or the volume, is not what it should be")
			}
			healthy(t, b)

			// The pool knows all of it, but what is only a hint.
			before := dump(t, b.Dir())
			b.Close()
			if _, err := engine.Rebuild(t.Context(), b.Dir(), drivers); err != nil {
				t.Fatal(err)
			}
			sameDump(t, "rebuilt", before, dump(t, b.Dir()))
			again := open(t, b.Dir())
			defer again.Close()
			if p := point(t, again, "g@1"); p.Lineage != gThere.Lineage {
				t.Error("a rebuild has changed the lineage of the golden")
			}
			if l, err := again.Transfer().Links(t.Context(), "r"); err != nil || len(l) > 0 {
				t.Errorf("links after a rebuild: %v, %v", l, err)
			}
			destroy(t, again, "job")
			healthy(t, again)
		})
	}
}

// TestReceiveOlderGenerationFirst: when a golden was made is the same after a rebuild,
// whatever the order in which its generations came.
func TestReceiveOlderGenerationFirst(t *testing.T) {
	a, b := imagePool(t, "xfs", 400<<20), imagePool(t, "xfs", 400<<20)
	rawGolden(t, a, "g", 1<<20)
	clone(t, a, "g", "v", false)
	publish(t, a, "g", "v")
	for _, what := range []string{"g@2", "g@1"} {
		carry(t, a, b, point(t, a, what), "", "", func(q *engine.ReceiveRequest) { q.Update = what == "g@1" })
	}
	healthy(t, b)
	before := dump(t, b.Dir())
	b.Close()
	if _, err := engine.Rebuild(t.Context(), b.Dir(), drivers); err != nil {
		t.Fatal(err)
	}
	sameDump(t, "rebuilt", before, dump(t, b.Dir()))
	open(t, b.Dir()).Close()
}

// TestImageRanges: ranges follow the changes, of raw images too; between what is
// not related, they are all of the data; and sizes may differ.
func TestImageRanges(t *testing.T) {
	e := imagePool(t, "xfs", 600<<20)
	const size = 16 << 20
	rawGolden(t, e, "g", size)
	clone(t, e, "g", "v", false)
	snapshot(t, e, "v", "s0")
	scribble(t, e, "v", "changed", 5<<20)
	snapshot(t, e, "v", "s1")
	if _, err := e.Clone(t.Context(), engine.CloneRequest{From: reference(t, "v@s1"), Name: ref.MustName("w"),
		SizeBytes: 2 * size}); err != nil {
		t.Fatal(err)
	}
	scribble(t, e, "w", "grown", 2*size-4096)
	snapshot(t, e, "w", "s")
	rawGolden(t, e, "h", size) // of the same content
	g, s0, s1, w, h := point(t, e, "g").ID, point(t, e, "v@s0").ID, point(t, e, "v@s1").ID, point(t, e, "w@s").ID, point(t,
		e, "h").ID
	for _, c := range []struct {
		name     string
		id, base driver.ObjectID
		exact    bool
		want     string
	}{
		{"all of it", g, "", false, "[{0 8388608 false}]"},
		{"nothing", s0, g, true, "[]"},
		{"itself", s1, s1, true, "[]"},
		{"a block", s1, s0, true, "[{5242880 4096 false}]"},
		{"backwards", s0, s1, true, "[{5242880 4096 false}]"},
		{"a clone that has grown", w, s1, true, "[{33550336 4096 false}]"},
		{"and has shrunk", s1, w, true, "[]"},
		{"a stranger", h, g, true, "[{0 8388608 false}]"},
	} {
		var got []engine.Range
		err := readImage(t.Context(), e, engine.ReadRequest{Point: c.id, Base: c.base}, func(m *engine.Image) error {
			if m.Exact != c.exact {
				t.Errorf("%s: exact is %v", c.name, m.Exact)
			}
			for range 2 { // they can be asked for again
				got = nil
				for r, err := range m.Ranges {
					if err != nil {
						return err
					}
					got = append(got, r)
				}
			}
			if n, err := m.R.ReadAt(make([]byte, 10), m.SizeBytes-5); n != 5 || err != io.EOF {
				t.Errorf("%s: reading over the end: %d, %v", c.name, n, err)
			}
			return nil
		})
		if err != nil || fmt.Sprint(got) != c.want && c.want != "[]" || c.want == "[]" && len(got) > 0 {
			t.Errorf("%s: %v, %v, want %s", c.name, got, err, c.want)
		}
	}
	vol, err := e.Show(t.Context(), reference(t, "v"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		id, base driver.ObjectID
		kind     errs.Kind
	}{{driver.ObjectID(vol.ID), "", errs.Invalid}, {driver.NewID(), "", errs.NotFound}, {g, driver.NewID(),
		errs.NotFound}} {
		err := readImage(t.Context(), e, engine.ReadRequest{Point: c.id, Base: c.base}, func(*engine.Image) error {
			t.Error("called")
			return nil
		})
		if !errs.Is(err, c.kind) {
			t.Errorf("%v, want %s", err, c.kind)
		}
	}
	tr := e.Transfer()
	if _, err := tr.Point(t.Context(), reference(t, "v")); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
		t.Errorf("the point of a volume: %v", err)
	}
	if err := tr.SendStream(t.Context(), engine.ReadRequest{Point: g}, io.Discard); !errs.Is(err, errs.Unsupported) {
		t.Errorf("the stream of an image: %v", err)
	}
	healthy(t, e)
}

// TestReadKeepsWhatItReads: nobody destroys a point, or its base, while it is read.
func TestReadKeepsWhatItReads(t *testing.T) {
	e := imagePool(t, "xfs", 400<<20)
	rawGolden(t, e, "g", 1<<20)
	clone(t, e, "g", "v", false)
	snapshot(t, e, "v", "s")
	snapshot(t, e, "v", "t")
	other := open(t, e.Dir()) // as another process would
	defer other.Close()
	s, v := point(t, e, "v@s").ID, point(t, e, "v@t").ID
	err := readImage(t.Context(), e, engine.ReadRequest{Point: v, Base: s}, func(*engine.Image) error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		for _, what := range []string{"v@s", "v@t", "v"} {
			r, err := other.Destroy(ctx, toDestroy(what))
			if err == nil && len(r.Destroyed) > 0 {
				t.Errorf("%s was destroyed while it was read", what)
			}
		}
		snapshot(t, other, "v", "later") // work goes on
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	destroy(t, other, "v@s", "v")
	healthy(t, e)
}

// TestReceivedGoldenIsQuickToClone: a golden that arrives in pieces, in any order, is
// sealed if it would be slow to clone, and is not copied if it is not.
func TestReceivedGoldenIsQuickToClone(t *testing.T) {
	e := imagePool(t, "xfs", 800<<20)
	const size, piece = 128 << 20, 64 << 10
	pieces := make([]int, size/piece)
	for i := range pieces {
		pieces[i] = i
	}
	dir, err := os.Open(e.Dir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	fill := func(order []int, sync bool) func(ctx context.Context, to engine.Target) error {
		return func(_ context.Context, to engine.Target) error {
			b := make([]byte, piece)
			for n, i := range order {
				_, _ = rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)}).Read(b)
				if _, err := to.WriteAt(b, int64(i)*piece); err != nil {
					return err
				}
				if sync && n%4 == 0 { // what happens while a slow network brings the next
					if err := unix.Syncfs(int(dir.Fd())); err != nil {
						return err
					}
				}
			}
			images, err := filepath.Glob(filepath.Join(e.Dir(), "data", "objects", "*.img"))
			if err != nil || len(images) != 1 {
				return fmt.Errorf("%v, %w", images, err)
			}
			f, err := os.Open(images[0])
			if err != nil {
				return err
			}
			defer f.Close()
			u, err := extent.Measure(f, true)
			t.Logf("%d extents were written", u.Extents)
			if sync && u.Extents < 1000 {
				t.Error("that is too few to test anything")
			}
			return err
		}
	}
	shuffled := slices.Clone(pieces)
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(shuffled), func(i, j int) {
		shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
	})
	sums := map[string]bool{}
	for name, c := range map[string]engine.Content{
		"in-order":  {Image: fill(pieces, false)},
		"scattered": {Image: fill(shuffled, true)},
	} {
		q := engine.ReceiveRequest{Volume: ref.MustName(name), Golden: true, Generation: 1, FS: driver.None, SizeBytes: size}
		info, err := e.Transfer().Receive(t.Context(), q, c)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d extents", name, info.Extents)
		if info.Extents > 300 || info.LogicalBytes != size {
			t.Errorf("%s: %d extents of %d bytes", name, info.Extents, info.LogicalBytes)
		}
		sums[imageSum(t, e, name)] = true
		if _, err := e.RemoveGolden(t.Context(), ref.Ref{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	if len(sums) != 1 {
		t.Error("the contents differ")
	}
	healthy(t, e)
}

// TestLinksAndHeads: hints are kept, go with the object, and are dropped by
// repository.
func TestLinksAndHeads(t *testing.T) {
	e := imagePool(t, "xfs", 400<<20)
	ctx := t.Context()
	rawGolden(t, e, "g", 1<<20)
	clone(t, e, "g", "v", false)
	snapshot(t, e, "v", "s")
	s, g := point(t, e, "v@s"), point(t, e, "g")
	for _, l := range []engine.Link{{"r", "m", s.ID}, {"r", "m", s.ID}, {"r", "m2", g.ID}, {"q", "m", g.ID}} {
		if err := e.Transfer().PutLink(ctx, l); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range []engine.Link{{"", "m", s.ID}, {"r", "", s.ID}, {"r", "m", ""}} {
		if err := e.Transfer().PutLink(ctx, l); !errs.Is(err, errs.Invalid) {
			t.Errorf("%v: %v", l, err)
		}
	}
	nothing := engine.Link{Repo: "r", Manifest: "m", Object: driver.NewID()}
	if err := e.Transfer().PutLink(ctx, nothing); !errs.Is(err, errs.NotFound) {
		t.Errorf("a link to nothing: %v", err)
	}
	at := time.Unix(5, 0).UTC()
	for _, h := range []engine.RemoteHead{{"r", "v", s.Lineage, 3, "m", at, 1}, {"q", "v", s.Lineage, 4, "m", at, 1}} {
		if err := e.Transfer().PutRemoteHead(ctx, h); err != nil {
			t.Fatal(err)
		}
	}
	want := func(what, repo, links, heads string) {
		t.Helper()
		l, err := e.Transfer().Links(ctx, repo)
		h, herr := e.Transfer().RemoteHeads(ctx, repo)
		names := []string{}
		for _, x := range l {
			names = append(names, x.Manifest)
		}
		numbers := []uint64{}
		for _, x := range h {
			numbers = append(numbers, x.Epoch)
		}
		if err != nil || herr != nil || fmt.Sprint(names) != links || fmt.Sprint(numbers) != heads {
			t.Errorf("%s: %v, %v, %v, %v", what, names, numbers, err, herr)
		}
	}
	want("all", "r", "[m m2]", "[3]")
	if err := e.Transfer().PutRemoteHead(ctx, engine.RemoteHead{Repo: "r", Name: "v", Epoch: 9}); err != nil {
		t.Fatal(err)
	}
	destroy(t, e, "v@s")
	want("the object is gone", "r", "[m2]", "[9]")
	if err := e.Transfer().DropLink(ctx, "r", "m2"); err != nil {
		t.Fatal(err)
	}
	if err := e.Transfer().DropRemoteHead(ctx, "r", "v"); err != nil {
		t.Fatal(err)
	}
	want("dropped one by one", "r", "[]", "[]")
	if err := e.Transfer().DropLinks(ctx, "q"); err != nil {
		t.Fatal(err)
	}
	want("dropped", "", "[]", "[]")
	healthy(t, e)
}
