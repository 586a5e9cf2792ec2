package replicate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// other is another pool that knows the same remote.
func (w *world) other(dir, driverName string) *world { return w.otherIn(w.t, dir, driverName) }

// otherIn is other, for a part of a test.
func (w *world) otherIn(t *testing.T, dir, driverName string) *world {
	t.Helper()
	return w.otherOf(t, newEngine(t, dir, driverName))
}

func (w *world) otherOf(t *testing.T, e *engine.Engine) *world {
	t.Helper()
	o := &world{t: t, e: e, dir: e.Dir()}
	if _, err := Add(w.t.Context(), o.e, AddRequest{Name: "r", URL: w.r.URL, Identity: w.r.identity,
		MustExist: true}, Access{}); err != nil {
		w.t.Fatal(err)
	}
	o.load()
	return o
}

func refs(t testing.TB, s string) ref.Ref {
	t.Helper()
	r, err := ref.Parse("", s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (w *world) tryPull(s string, q PullRequest) (Pulled, error) {
	w.t.Helper()
	q.Ref = refs(w.t, s)
	return Pull(w.t.Context(), w.e, w.r, q)
}

func (w *world) pull(s string, q PullRequest) Pulled {
	w.t.Helper()
	out, err := w.tryPull(s, q)
	if err != nil {
		w.t.Fatalf("pull %s: %v (hint: %s)", s, err, errs.HintOf(err))
	}
	return out
}

// sum is a hash of size and bytes of the image of a volume, snapshot or generation, read
// as it lies in the pool.
func (w *world) sum(name string) string {
	w.t.Helper()
	f, err := os.Open(w.image(name))
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		w.t.Fatal(err)
	}
	var h maphash.Hash
	h.SetSeed(hashSeed)
	fmt.Fprintln(&h, st.Size())
	buf := make([]byte, mib)
	for at := int64(0); at < st.Size(); {
		data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // holes up to the end
		}
		if err != nil {
			w.t.Fatal(err)
		}
		n, err := f.ReadAt(buf, data/4096*4096)
		if err != nil && err != io.EOF {
			w.t.Fatal(err)
		}
		at = data / 4096 * 4096
		for i := 0; i < n; i += 4096 {
			if b := buf[i:min(i+4096, n)]; !bytes.Equal(b, zeroBlock[:len(b)]) {
				fmt.Fprintln(&h, at+int64(i))
				h.Write(b)
			}
		}
		at += int64(n)
	}
	return fmt.Sprintf("%x", h.Sum64())
}

var hashSeed = maphash.MakeSeed()

// state is all that a pool has: names, contents, and the files of objects.
func (w *world) state() string {
	w.t.Helper()
	ctx := context.Background()
	var b strings.Builder
	vols, err := w.e.Volumes(ctx, engine.VolumesRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, v := range vols {
		names, err := pooltest.SnapshotNames(ctx, w.e, v.Name)
		if err != nil {
			w.t.Fatal(err)
		}
		fmt.Fprintln(&b, "volume", v.Name, v.ID, v.State, names)
	}
	goldens, err := w.e.Goldens(ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, g := range goldens {
		fmt.Fprintln(&b, "golden", g.Name, g.Current.Generation, g.GenerationCount)
	}
	entries, err := os.ReadDir(filepath.Join(w.dir, "data", "objects"))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range entries {
		fmt.Fprintln(&b, "object", e.Name())
	}
	return b.String()
}

// used is how much of the filesystem of the pool is used.
func (w *world) used() int64 {
	w.t.Helper()
	if err := w.e.Sync(context.Background()); err != nil {
		w.t.Fatal(err)
	}
	p, err := w.e.Pool(context.Background(), engine.PoolRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p.UsedBytes
}

// shapes fills an image with all kinds of content.
func shapes(t *testing.T, seed uint64) func(*os.File) {
	return func(f *os.File) {
		noise(t, f, seed, 0, 3*mib)
		text(t, f, seed+1, 8*mib, 3*mib)
		noise(t, f, seed+2, 20*mib+4096, 12288)
		if _, err := f.WriteAt(make([]byte, 2*mib), 24*mib); err != nil {
			t.Fatal(err)
		}
		noise(t, f, seed+3, 1024*mib-8192, 16384) // over the border of a region
		noise(t, f, seed+4, 1100*mib-4096, 4096)
	}
}

const shaped = 1100 * mib

// TestPullRestores pulls everything of a remote, in several orders, into pools of
// every kind.
func TestPullRestores(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", shaped, shapes(t, 1))
	w.clone("g", "v")
	want := map[string]string{"g@1": w.sum("g@1")}
	for i := range 3 {
		w.edit("v", func(f *os.File) {
			noise(t, f, uint64(20+i), int64(i)*mib, mib/2)
			punch(t, f, int64(8+i)*mib, mib/2)
			noise(t, f, uint64(30+i), int64(900+i)*mib, 4096)
		})
		out := w.push("v") // its golden comes first
		p := out[len(out)-1]
		want[fmt.Sprint("v", i)] = w.sum("v")
		want["v@"+p.Point] = w.sum("v")
	}
	w.importImage("g", shaped, func(f *os.File) { shapes(t, 1)(f); noise(t, f, 99, 500*mib, mib) })
	w.push("g")
	want["g@2"] = w.sum("g@2")
	rp := w.open()
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	var points []string
	for _, p := range h.Recent {
		points = append(points, "v@"+p.Name)
	}
	for _, kind := range []struct{ name, fs, driver string }{
		{"reflink on XFS", "xfs", reflink.Name}, {"reflink on btrfs", "btrfs", reflink.Name},
	} {
		t.Run(kind.name, func(t *testing.T) {
			o := w.otherIn(t, testfs.New(t, kind.fs, 3<<30).Dir(), kind.driver)
			// The newest: the golden comes first.
			p := o.pull("v", PullRequest{})
			if got := o.sum("v"); got != want["v2"] {
				t.Error("the volume is not what was pushed")
			}
			if p.Volume != "v" || "v@"+p.Point != points[2] || p.Snapshot != points[2] ||
				!slices.Equal(p.Origins, []string{"g@1"}) || p.Base != "g@1" || p.Golden != "g" || p.Generation != 1 ||
				p.Origin != "g@1" || p.FS != "none" || p.SizeBytes != shaped || len(p.Notes) != 0 {
				t.Errorf("it says %+v", p)
			}
			if got := o.sum("g@1"); got != want["g@1"] {
				t.Error("the golden is not what was pushed")
			}
			if got := o.sum(points[2]); got != want["v2"] {
				t.Error("the snapshot is not what was pushed")
			}
			// An older one, beside it; it begins as the newer.
			p = o.pull(points[0], PullRequest{As: ref.MustName("old")})
			if got := o.sum("old"); got != want["v0"] || p.Base == "" || p.ReadBytes > 4*mib {
				t.Errorf("the older point is not what was pushed, or not by what was here: %+v", p)
			}
			// The same again reads no data.
			p = o.pull(points[0], PullRequest{As: ref.MustName("again")})
			if got := o.sum("again"); got != want["v0"] || p.ReadBytes != 0 || p.WrittenBytes != 0 {
				t.Errorf("what is here was read again: %+v", p)
			}
			// Another generation of the golden that came from there.
			p = o.pull("g", PullRequest{})
			if got := o.sum("g@2"); got != want["g@2"] || p.Base != "g@1" || p.Kind != api.KindGeneration || p.Generation != 2 {
				t.Errorf("the second generation is not what was pushed: %+v", p)
			}
			// Pulling what is here changes nothing.
			before := o.state()
			if p := o.pull("g", PullRequest{}); !p.Unchanged {
				t.Errorf("it says %+v", p)
			}
			if p := o.pull("v", PullRequest{Update: true}); !p.Unchanged || p.Name != "v" {
				t.Errorf("it says %+v", p)
			}
			if after := o.state(); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
			// Without its origin it is the same.
			o2 := w.otherIn(t, testfs.New(t, kind.fs, 3<<30).Dir(), kind.driver)
			p = o2.pull(points[1], PullRequest{As: ref.MustName("x"), NoOrigin: true})
			if got := o2.sum("x"); got != want["v1"] || len(p.Origins) != 0 || p.Base != "" {
				t.Errorf("without its origin: %+v", p)
			}
			if st, err := os.Stat(o2.image("x")); err != nil || st.Size() != shaped {
				t.Error(err)
			}
			if n := o2.used(); n > 128*mib+testfsOverhead {
				t.Errorf("%d bytes are used of a sparse volume", n)
			}
			// Sessions are gone.
			w.noSessions(rp)
		})
	}
}

// testfsOverhead is what an empty filesystem in a test takes.
const testfsOverhead = 128 * mib

// TestPullIntoTaken: names that are taken, and what the errors say.
func TestPullIntoTaken(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.push("v")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	o.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 2, 0, mib) })
	o.importImage("base", 64*mib, func(f *os.File) { noise(t, f, 2, 0, mib) })
	o.clone("base", "v")
	before := o.state()
	refuse := func(s string, q PullRequest, kind errs.Kind, hint string) {
		t.Helper()
		_, err := o.tryPull(s, q)
		if !errs.Is(err, kind) || !strings.Contains(errs.HintOf(err), hint) {
			t.Errorf("pull %s %+v: %v (hint %q), want %s", s, q, err, errs.HintOf(err), kind)
		}
		if after := o.state(); after != before {
			t.Fatalf("a refused pull changed the pool:\n%s\n%s", before, after)
		}
	}
	refuse("v", PullRequest{}, errs.Exists, `parameter "as"`)
	refuse("g", PullRequest{}, errs.Exists, `parameter "as"`)
	refuse("g", PullRequest{Update: true}, errs.Exists, `parameter "as"`)
	refuse("v", PullRequest{TakeOver: true}, errs.Exists, `parameter "update"`)
	refuse("none", PullRequest{}, errs.NotFound, "remote ls")
	refuse("v@none", PullRequest{}, errs.NotFound, "use the newest")
	refuse("g@7", PullRequest{}, errs.NotFound, "use the newest, 1")
	refuse("v@x", PullRequest{TakeOver: true}, errs.Invalid, "remove @x")
	if h, _, err := w.open().Head(t.Context(), "v"); err != nil || h.Epoch != 1 {
		t.Errorf("a refused take-over raised the epoch to %d", h.Epoch)
	}
	// Its golden gets a name of its own.
	p := o.pull("v", PullRequest{As: ref.MustName("v2")})
	if o.sum("v2") != w.sum("v") || !slices.Equal(p.Origins, []string{"g.r@1"}) || p.Origin != "g.r@1" {
		t.Errorf("got %+v", p)
	}
	// A second volume uses it.
	w.clone("g", "w")
	w.edit("w", func(f *os.File) { noise(t, f, 7, 0, 4096) })
	w.push("w")
	if p := o.pull("w", PullRequest{}); len(p.Origins) != 0 || p.Base != "g.r@1" || o.sum("w") != w.sum("w") {
		t.Errorf("got %+v", p)
	}
	// Update: the state before stays.
	was := o.sum("v")
	p = o.pull("v", PullRequest{Update: true})
	if o.sum("v") != w.sum("v") || p.Name != "v" {
		t.Errorf("got %+v", p)
	}
	names, err := pooltest.SnapshotNames(t.Context(), o.e, "v")
	if err != nil || len(names) != 2 {
		t.Fatalf("snapshots after an update: %v, %v", names, err)
	}
	kept := slices.DeleteFunc(names, func(n string) bool { return n == p.Point })
	if o.sum("v@"+kept[0]) != was {
		t.Error("the state before the update is not kept")
	}
	// A snapshot of the same name that is another.
	w.e.Destroy(t.Context(), toDestroy("w"))
	o.clone("base", "z")
	if _, err := o.e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("z"),
		Name: ref.MustName(p.Point)}); err != nil {
		t.Fatal(err)
	}
	before = o.state()
	if _, err := Pull(t.Context(), o.e, o.r, PullRequest{Ref: refs(t, "v"), As: ref.MustName("z"),
		Update: true}); !errs.Is(err, errs.Exists) {
		t.Errorf("a snapshot of the name is there: %v", err)
	}
	if after := o.state(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// TestTakeOver: a volume goes from one host to another and back.
func TestTakeOver(t *testing.T) {
	a := newWorld(t)
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 4*mib) })
	a.clone("g", "v")
	a.push("v")
	b := a.other(testfs.XFS(t, 1<<30), reflink.Name)
	p := b.pull("v", PullRequest{TakeOver: true})
	if !p.TookOver || p.Epoch != 2 || b.sum("v") != a.sum("v") {
		t.Errorf("got %+v", p)
	}
	if p := b.pull("v", PullRequest{TakeOver: true}); p.TookOver || p.Epoch != 2 || !p.Unchanged {
		t.Errorf("a second time: %+v", p)
	}
	// The old writer is refused, and loses nothing.
	a.edit("v", func(f *os.File) { noise(t, f, 2, mib, 8192) })
	was := a.sum("v")
	if _, err := a.tryPush("v"); !errs.Is(err, errs.Conflict) || !strings.Contains(errs.HintOf(err), `parameter "as"`) {
		t.Errorf("the old writer: %v", err)
	}
	if a.sum("v") != was {
		t.Error("the refused volume was changed")
	}
	// The new one goes on, with what it changed only.
	b.edit("v", func(f *os.File) { noise(t, f, 3, 2*mib, 8192) })
	if out := b.push("v")[0]; out.UploadedBytes > 64<<10 || out.Full || out.Epoch != 2 {
		t.Errorf("the new writer pushed %+v", out)
	}
	// Back again: the volume is here, and is another now.
	if _, err := a.tryPull("v", PullRequest{TakeOver: true}); !errs.Is(err, errs.Exists) {
		t.Errorf("without --update: %v", err)
	}
	p = a.pull("v", PullRequest{TakeOver: true, Update: true})
	if !p.TookOver || p.Epoch != 3 || a.sum("v") != b.sum("v") || p.ReadBytes > 64<<10 {
		t.Errorf("back again: %+v", p)
	}
	if _, err := b.tryPush("v"); !errs.Is(err, errs.Conflict) {
		t.Errorf("the writer of epoch 2: %v", err)
	}
	a.edit("v", func(f *os.File) { noise(t, f, 4, 3*mib, 8192) })
	a.push("v")
	if v, err := Verify(t.Context(), nil, a.r, VerifyRequest{ReadPercent: 100}); err != nil || v.Err() != nil {
		t.Errorf("%v, %v", err, v)
	}
}

// TestTakeOverEveryFault: a take-over that fails at any operation of the store can be
// repeated; the epoch is raised once, and never two hosts may write.
func TestTakeOverEveryFault(t *testing.T) {
	a := newWorld(t)
	a.importImage("g", 16*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.push("v")
	b := a.other(testfs.XFS(t, 1<<30), reflink.Name)
	rp := a.open()
	epoch := uint64(1)
	for i := 0; ; i++ {
		from, to := a, b
		if i%2 == 1 {
			from, to = b, a
		}
		if i > 0 {
			from.edit("v", func(f *os.File) { noise(t, f, uint64(i), mib, 4096) })
			from.push("v")
		}
		q := PullRequest{TakeOver: true, Update: i > 0}
		when := []storetest.When{storetest.Before, storetest.After}[i/2%2]
		to.open() // so that there is a store
		to.store.Add(storetest.Fault{At: i / 4, When: when, Err: storetest.Permanent(errs.IO)})
		n := to.store.Fired()
		_, err := to.tryPull("v", q)
		struck := to.store.Fired() > n
		to.store.Heal()
		if !struck && err != nil {
			t.Fatal(err)
		}
		if h, _, herr := rp.Head(t.Context(), "v"); herr != nil || h.Epoch > epoch+1 {
			t.Fatalf("fault %d: epoch %d after %d: %v", i, h.Epoch, epoch, herr)
		}
		if err != nil {
			if _, err = to.tryPull("v", q); err != nil {
				t.Fatalf("fault %d, and again: %v", i, err)
			}
		}
		h, _, herr := rp.Head(t.Context(), "v")
		if herr != nil || h.Epoch != epoch+1 || h.Writer.Pool != to.e.PoolID() || h.Lineage == "" {
			t.Fatalf("fault %d: %v, %+v", i, herr, h)
		}
		epoch = h.Epoch
		if to.sum("v") != from.sum("v") {
			t.Fatalf("fault %d: the volume is not what was pushed", i)
		}
		if _, err := from.tryPush("v"); !errs.Is(err, errs.Conflict) {
			t.Fatalf("fault %d: the old writer was not refused: %v", i, err)
		}
		if !struck && i%4 == 3 {
			break
		}
	}
	t.Logf("%d take-overs", epoch-1)
}

// TestPullEveryFault: whatever operation of the store fails, nothing is left but
// origins that were restored, and a second pull does it.
func TestPullEveryFault(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 5*mib) })
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, mib, 8192) })
	w.push("v")
	want := w.sum("v")
	rp := w.open()
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	o.open()
	struck := true
	for i := 0; struck; i++ {
		for _, when := range []storetest.When{storetest.Before, storetest.After} {
			before := o.state()
			n := o.store.Fired()
			o.store.Add(storetest.Fault{At: i, When: when, Err: storetest.Permanent(errs.IO)})
			p, err := o.tryPull("v", PullRequest{})
			struck = o.store.Fired() > n
			o.store.Heal()
			switch {
			case err == nil && o.sum("v") != want:
				t.Fatalf("fault %d: the volume is not what was pushed", i)
			case err != nil && !struck:
				t.Fatal(err)
			case err != nil:
				if after := o.state(); after != before && !strings.Contains(after, "golden g 1 1") ||
					strings.Contains(after, "volume") {
					t.Fatalf("fault %d left something:\n%s", i, after)
				}
				if p, err = o.tryPull("v", PullRequest{}); err != nil || o.sum("v") != want {
					t.Fatalf("fault %d, and again: %v", i, err)
				}
			}
			_ = p
			if again, r := maintained(t, o.dir); r.Undone != 0 || len(r.Warnings) != 0 {
				t.Errorf("fault %d left marks: %+v", i, r)
				again.Close()
			} else {
				again.Close()
			}
			if r, err := o.e.Destroy(t.Context(), toDestroy("v")); err != nil || len(r.Failed) > 0 {
				t.Fatal(err, r)
			}
			if _, err := o.e.RemoveGolden(t.Context(), refs(t, "g")); err != nil {
				t.Fatal(err)
			}
			if _, err := prune(t.Context(), rp, PruneRequest{Patience: -1}); err != nil {
				t.Fatal(err)
			}
			if _, err := prune(t.Context(), rp, PruneRequest{Patience: -1}); err != nil {
				t.Fatal(err)
			}
			w.noSessions(rp)
		}
	}
}

// TestPullRefusesWhatWasChanged: a bit that was changed anywhere ends the pull with
// the range that it is in, and the pool is as it was.
func TestPullRefusesWhatWasChanged(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 2*mib); text(t, f, 2, 8*mib, 2*mib) })
	w.push("g")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	rp := o.open()
	before := o.state()
	segments := 0
	for ob, err := range rp.Objects(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		kind, _, _ := strings.Cut(ob.Key, "/")
		for at := int64(0); at < ob.Bytes; at += max(1, ob.Bytes/7) {
			o.store.Add(flipAt(ob.Key, at))
			_, err := o.tryPull("g", PullRequest{})
			o.store.Heal()
			switch {
			case err == nil && (kind == "segments" || kind == "manifests" || kind == "heads"):
				// The index at the end of a segment is not read.
				if kind != "segments" || at < ob.Bytes*6/7 {
					t.Errorf("byte %d of %s was changed, and the pull says nothing", at, ob.Key)
				}
			case err != nil && !errs.Is(err, errs.Damaged) && !errs.Is(err, errs.TooNew) && kind != "config":
				t.Errorf("byte %d of %s: %v", at, ob.Key, err)
			case errs.Is(err, errs.Damaged) && kind == "segments" && at > 100:
				segments++
				if !strings.Contains(err.Error(), "g@1") || !strings.Contains(err.Error(), "bytes ") ||
					!strings.Contains(errs.HintOf(err), `"verify" of `+o.r.Name) {
					t.Errorf("the error does not say what is affected: %v (hint: %s)", err, errs.HintOf(err))
				}
			}
			if err == nil {
				if o.sum("g@1") != w.sum("g@1") {
					t.Fatalf("byte %d of %s: what was changed was restored", at, ob.Key)
				}
				if _, err := o.e.RemoveGolden(t.Context(), refs(t, "g")); err != nil {
					t.Fatal(err)
				}
			}
			if after := o.state(); after != before {
				t.Fatalf("byte %d of %s left:\n%s", at, ob.Key, after)
			}
		}
	}
	if segments < 5 {
		t.Errorf("only %d bytes of segments were changed", segments)
	}
}

// TestPullWithoutWriting: a remote that cannot be written, and one that loses what is
// being pulled.
func TestPullWithoutWriting(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 2*mib) })
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 0, 2*mib) })
	w.push("v")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	rp := o.open()
	readOnly := storetest.Fault{Match: storetest.Ops(storetest.Put, storetest.Delete), Times: -1,
		Err: storetest.Permanent(errs.Permission)}
	o.store.Add(readOnly)
	p := o.pull("v", PullRequest{As: ref.MustName("x")})
	if len(p.Notes) != 1 || !strings.Contains(p.Notes[0], "read-only") || o.sum("x") != w.sum("v") {
		t.Errorf("got %+v", p)
	}
	if _, err := o.tryPull("v", PullRequest{TakeOver: true}); !errs.Is(err, errs.Permission) {
		t.Errorf("a take-over: %v", err)
	}
	if p := o.pull("v", PullRequest{As: ref.MustName("y"), NoOrigin: true}); o.sum("y") != w.sum("v") {
		t.Errorf("got %+v", p)
	}
	for _, v := range []string{"x", "y"} {
		if r, err := o.e.Destroy(t.Context(), toDestroy(v)); err != nil || len(r.Failed) > 0 {
			t.Fatal(err, r)
		}
	}
	before := o.state()
	// Somebody removes the volume, and prunes, when the manifest has been read.
	done := false
	o.store.Add(storetest.Fault{Times: -1, Match: func(c storetest.Call) bool {
		if !done && c.Op == storetest.Get && strings.HasPrefix(c.Key, "segments/") {
			done = true
			for _, err := range []error{
				func() error { _, err := RemoveVolume(t.Context(), w.r, ref.Ref{Name: "v"}); return err }(),
				func() error { _, err := Prune(t.Context(), nil, w.r, PruneRequest{}); return err }(),
			} {
				if err != nil {
					t.Error(err)
				}
			}
		}
		return false
	}})
	_, err := o.tryPull("v", PullRequest{})
	if !done || !errs.Is(err, errs.Conflict) && !errs.Is(err, errs.NotFound) {
		t.Errorf("what is pulled was removed: %v", err)
	}
	if after := o.state(); after != before {
		t.Errorf("left:\n%s", after)
	}
	w.noSessions(rp)
}

// TestPullKeepsWhatItReads: the same with a session: the volume is removed, and a
// prune waits for the pull.
func TestPullKeepsWhatItReads(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 2*mib) })
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 0, 2*mib) })
	w.push("v")
	want := w.sum("v")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	o.open()
	done := false
	o.store.Add(storetest.Fault{Times: -1, Match: func(c storetest.Call) bool {
		if !done && c.Op == storetest.Get && strings.HasPrefix(c.Key, "segments/") {
			done = true
			for _, name := range []string{"v", "g"} {
				if _, err := RemoveVolume(t.Context(), w.r, ref.Ref{Name: name}); err != nil {
					t.Error(err)
				}
			}
			if _, err := Prune(t.Context(), nil, w.r, PruneRequest{}); err != nil {
				t.Error(err)
			}
		}
		return false
	}})
	p := o.pull("v", PullRequest{})
	if !done || o.sum("v") != want {
		t.Errorf("got %+v", p)
	}
	o.store.Heal()
	if out, err := Prune(t.Context(), nil, w.r, PruneRequest{}); err != nil || out.UsedBytes != 0 || out.FreedBytes == 0 {
		t.Errorf("afterwards: %v, %+v", err, out)
	}
}

// TestPullCanceled leaves nothing.
func TestPullCanceled(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 20*mib) })
	w.push("g")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	rp := o.open()
	before := o.state()
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	o.store.Add(storetest.Fault{Times: -1, Match: func(c storetest.Call) bool {
		if c.Op == storetest.Get && strings.HasPrefix(c.Key, "segments/") {
			if n++; n == 3 {
				cancel()
			}
		}
		return false
	}})
	_, err := Pull(ctx, o.e, o.r, PullRequest{Ref: refs(t, "g")})
	if !errs.Is(err, errs.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	if after := o.state(); after != before {
		t.Errorf("left:\n%s", after)
	}
	w.noSessions(rp)
}

// TestPullIntoFullPool: no room is said at once, or when it shows, and nothing is left.
func TestPullIntoFullPool(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 512*mib, func(f *os.File) { noise(t, f, 1, 0, 400*mib) })
	w.push("g")
	o := w.other(testfs.XFS(t, 400*mib), reflink.Name)
	before := o.state()
	if _, err := o.tryPull("g", PullRequest{}); !errs.Is(err, errs.NoSpace) || errs.HintOf(err) == "" {
		t.Errorf("a pool that is too small: %v", err)
	}
	if after := o.state(); after != before {
		t.Errorf("left:\n%s", after)
	}
}

// TestPullIntoFullPlainPool: where nothing is shared, the room for point and volume is checked before either is read.
func TestPullIntoFullPlainPool(t *testing.T) {
	w := worldOn(t, t.TempDir(), plain.Name, "file:"+t.TempDir())
	w.importTree("g", 16*mib)
	w.push("g")
	w.clone("g", "v")
	w.push("v")
	o := w.other(testfs.Ext4(t, 56*mib), plain.Name)
	if _, err := o.tryPull("g", PullRequest{}); err != nil {
		t.Fatal(err)
	}
	before := o.state()
	_, err := o.tryPull("v", PullRequest{})
	if !errs.Is(err, errs.NoSpace) || !strings.Contains(err.Error(), "this needs about 32 MiB") {
		t.Errorf("a pull that does not fit: %v", err)
	}
	if after := o.state(); after != before {
		t.Errorf("left:\n%s", after)
	}
}

// TestTakeOverOfWhatDoesNotFit: a pool that cannot hold a volume does not take it over either: its writer goes on.
func TestTakeOverOfWhatDoesNotFit(t *testing.T) {
	image, tree := newWorld(t), worldOn(t, testfs.New(t, "btrfs", 1<<30).Dir(), btrfs.Name, "file:"+t.TempDir())
	image.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	tree.importTree("g", mib)
	for _, c := range []struct {
		of     *world
		driver string
	}{{image, plain.Name}, {tree, plain.Name}, {tree, reflink.Name}} {
		w := c.of
		volume := "v-" + c.driver
		w.clone("g", volume)
		w.push(volume)
		dir := t.TempDir()
		if c.driver == reflink.Name {
			dir = testfs.XFS(t, 512*mib)
		}
		o := w.other(dir, c.driver)
		if _, err := o.tryPull(volume, PullRequest{TakeOver: true}); !errs.Is(err, errs.Unsupported) ||
			errs.HintOf(err) == "" {
			t.Errorf("%s in a %s pool: %v", volume, c.driver, err)
		}
		h, _, err := w.open().Head(t.Context(), volume)
		if err != nil || h.Epoch != 1 || h.Writer.Pool != w.e.PoolID() {
			t.Errorf("%s: epoch %d, written by %s, %v", volume, h.Epoch, h.Writer.Host, err)
		}
		if _, err := w.tryPush(volume); err != nil {
			t.Errorf("%s cannot be pushed any more: %v", volume, err)
		}
	}
}

// TestPullIntoTreesOnly: a pool that has no images says so, before anything is read.
func TestPullIntoTreesOnly(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.push("v")
	o := w.other(t.TempDir(), plain.Name)
	o.open()
	if _, err := o.tryPull("v", PullRequest{}); !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
		t.Errorf("images in a plain pool: %v", err)
	}
	for _, c := range o.store.Calls() {
		if c.Op == storetest.Get && strings.HasPrefix(c.Key, "segments/") {
			t.Errorf("it read %s", c.Key)
		}
	}
}
