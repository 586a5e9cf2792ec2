package replicate

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

// importDir makes a golden of what fill puts into a directory.
func (w *world) importDir(name string, fill func(dir string)) {
	w.t.Helper()
	src, err := os.MkdirTemp(filepath.Dir(w.dir), "import")
	if err != nil {
		w.t.Fatal(err)
	}
	defer os.RemoveAll(src)
	fill(src)
	q := engine.ImportRequest{Name: ref.MustName(name), Source: src} // in the kind of filesystem that the driver prefers
	if _, err := w.e.Import(w.t.Context(), q); err != nil {
		w.t.Fatal(err)
	}
}

// sameTree compares two trees, as they lie in their pools, in everything but times of access and holes.
func sameTree(t *testing.T, a *world, nameA string, b *world, nameB string) {
	t.Helper()
	treetest.Compare(t, a.image(nameA), b.image(nameB), treetest.Atime|treetest.Holes)
	if t.Failed() {
		t.FailNow()
	}
}

func (w *world) pushPortable(names ...string) []Pushed {
	w.t.Helper()
	q := PushRequest{Portable: true}
	for _, n := range names {
		q.Refs = append(q.Refs, refs(w.t, n))
	}
	out, err := Push(w.t.Context(), w.e, w.r, q)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// whole wants everything on the remote to be whole.
func (w *world) whole() {
	w.t.Helper()
	v, err := Verify(w.t.Context(), nil, w.r, VerifyRequest{ReadPercent: 100})
	if err != nil || v.Err() != nil {
		w.t.Fatalf("%v, %+v", err, v)
	}
}

// TestIdleTreeIsNotSentWhole: a tree whose next difference would not be worth it, as the last ones were larger than the
// tree, gets no new point either if nothing has changed.
func TestIdleTreeIsNotSentWhole(t *testing.T) {
	w := worldOn(t, t.TempDir(), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	whole := 0
	for i := range uint64(4) {
		w.write("v", "file", 10+i, mib)
		if out := w.pushPortable("v"); out[len(out)-1].Full {
			whole++
		}
		for range 2 {
			if out := w.pushPortable("v"); !out[0].Unchanged || len(w.pushSnapshots("v")) != 1 {
				t.Errorf("round %d: %+v, %v", i, out, w.pushSnapshots("v"))
			}
		}
	}
	if whole == 0 {
		t.Error("no tree was sent whole: this tests nothing")
	}
}

// TestTreesTravel: trees of one driver come out of another as they went in, golden, clone and what changes, file by
// file; random changes, a seed that is printed. Then the other pool goes on, and the first one pulls that back.
func TestTreesTravel(t *testing.T) {
	r := faulttest.Rand(t)
	url := func() string { return "file:" + filepath.Join(t.TempDir(), "remote") }
	pools := map[string]func() string{
		plain.Name: func() string { return testfs.Ext4(t, 800<<20) },
		btrfs.Name: func() string { return testfs.Btrfs(t, 800<<20) },
	}
	for _, c := range [][2]string{{plain.Name, btrfs.Name}, {btrfs.Name, plain.Name}, {plain.Name, plain.Name},
		{btrfs.Name, btrfs.Name}} {
		t.Run(c[0]+" to "+c[1], func(t *testing.T) {
			w := worldOn(t, pools[c[0]](), c[0], url())
			o := w.otherIn(t, pools[c[1]](), c[1])
			e := &treetest.Editor{T: t, R: r}
			w.importDir("g", func(dir string) {
				e.Dir = dir
				e.Fill()
				f, err := os.Create(dir + "/large") // so that differences are worth it
				if err != nil {
					t.Fatal(err)
				}
				noise(t, f, 1, 0, 20*mib)
				if err := f.Close(); err != nil {
					t.Fatal(err)
				}
			})
			w.clone("g", "v")
			round := 0
			change := func(x *world) {
				e.Dir = x.image("v")
				round++ // the others may change nothing
				if err := os.WriteFile(fmt.Sprint(e.Dir, "/round", round), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				for range 1 + r.IntN(25) {
					e.Edit()
				}
			}
			change(w)
			out := w.pushPortable("v")
			if len(out) != 2 || !out[0].Full || out[1].Full || out[0].Content != "tree" || out[1].Content != "tree" ||
				out[1].Base != "g@1" {
				t.Fatalf("%+v", out)
			}
			got := o.pull("v", PullRequest{})
			if got.Unchanged || len(got.Origins) != 1 {
				t.Errorf("%+v", got)
			}
			sameTree(t, w, "g@1", o, "g@1")
			sameTree(t, w, "v", o, "v")
			// A tree is sent whole only if what differed since it last was has come to more than that.
			whole, since := out[0].UploadedBytes, out[1].UploadedBytes
			worth := func(p Pushed) {
				t.Helper()
				if p.Content != "tree" || p.Full != (since > whole) {
					t.Errorf("%d bytes since a whole tree of %d: %+v", since, whole, p)
				}
				if since += p.UploadedBytes; p.Full {
					whole, since = p.UploadedBytes, 0
				}
			}
			for range 4 {
				change(w)
				pushed := w.pushPortable("v")[0]
				worth(pushed)
				if out := w.pushPortable("v"); !out[0].Unchanged || len(w.pushSnapshots("v")) != 1 {
					t.Errorf("nothing has changed: %+v, %v", out, w.pushSnapshots("v"))
				}
				if p := o.pull("v", PullRequest{Update: true}); (p.Base == "") != pushed.Full {
					t.Errorf("%+v", p)
				}
				sameTree(t, w, "v", o, "v")
			}

			o.pull("v", PullRequest{TakeOver: true, Update: true})
			for range 3 {
				change(o)
				worth(o.pushPortable("v")[0])
				w.pull("v", PullRequest{Update: true})
				sameTree(t, o, "v", w, "v")
			}
			w.whole()
		})
	}
}

// TestTreeOfEverything: what a filesystem can hold of files travels from a plain pool to one of btrfs.
func TestTreeOfEverything(t *testing.T) {
	w := worldOn(t, testfs.XFS(t, 600<<20), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	o := w.other(testfs.Btrfs(t, 600<<20), btrfs.Name)
	w.importDir("g", func(dir string) { treetest.Build(t, dir) })
	out := w.push("g")
	if len(out) != 1 || out[0].Content != "tree" {
		t.Errorf("%+v", out)
	}
	o.pull("g", PullRequest{})
	treetest.Compare(t, w.image("g@1"), o.image("g@1"), treetest.Atime)
	w.noSessions(w.open())
}

// TestWrongDriver: a stream of one driver is refused by another with a hint, before anything is done; pushed again for
// all, it can be pulled.
func TestWrongDriver(t *testing.T) {
	w := worldOn(t, testfs.Btrfs(t, 600<<20), btrfs.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	w.write("v", "new", 1, 8192)
	if out := w.push("v"); out[1].Content != "stream" {
		t.Errorf("%+v", out)
	}
	o := w.other(t.TempDir(), plain.Name)
	before := o.state()
	_, err := o.tryPull("v", PullRequest{})
	wantKind(t, err, errs.Unsupported, "btrfs")
	if hint := errs.HintOf(err); !strings.Contains(hint, "portable") {
		t.Errorf("hint %q", hint)
	}
	if o.state() != before {
		t.Errorf("a refused pull leaves\n%s", o.state())
	}

	// The same snapshot and the same generation again.
	snap := w.pushSnapshots("v")[0]
	for _, p := range w.pushPortable("g", "v@"+snap) {
		if p.Content != "tree" || p.Unchanged {
			t.Errorf("%+v", p)
		}
	}
	if out := w.pushPortable("g", "v@"+snap); !out[0].Unchanged || !out[1].Unchanged {
		t.Errorf("%+v", out)
	}
	again, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{refs(t, "v@"+snap)}, Full: true})
	if err != nil || again[len(again)-1].Content != "tree" {
		t.Errorf("what is sent again has another form: %+v, %v", again, err)
	}
	o.pull("v", PullRequest{})
	sameTree(t, w, "v", o, "v")
	w.whole()

	w.clearLost(w.open())
}

// TestLongChainOfTrees: a chain of differences begins anew after a while, and all points can be pulled; pruning keeps
// what is needed.
func TestLongChainOfTrees(t *testing.T) {
	w := worldOn(t, testfs.Ext4(t, 500<<20), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	full := 0
	want := map[string]string{}
	for i := range maxChain + 3 {
		w.write("v", "new", uint64(i), 4096)
		out := w.push("v")
		last := out[len(out)-1]
		if last.Full {
			full++
		}
		b, err := os.ReadFile(filepath.Join(w.image("v"), "new"))
		if err != nil {
			t.Fatal(err)
		}
		want[last.Point] = string(b)
	}
	if full == 0 {
		t.Error("the chain has no end")
	}
	for range 2 {
		if _, err := Prune(t.Context(), nil, w.r, PruneRequest{Policy: Policy{Last: 2}, Patience: -1}); err != nil {
			t.Fatal(err)
		}
	}
	w.whole()
	rp := w.open()
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	o := w.other(testfs.Ext4(t, 500<<20), plain.Name)
	for i, p := range h.Recent {
		as := fmt.Sprint("v", i)
		o.pull("v@"+p.Name, PullRequest{As: ref.MustName(as)})
		b, err := os.ReadFile(filepath.Join(o.image(as), "new"))
		if err != nil || string(b) != want[p.Name] {
			t.Errorf("%s: %v", p.Name, err)
		}
	}
	w.noSessions(rp)
}

// TestTreeKilled: pushes and pulls of trees are killed at each operation of the store, or a sample of them. What is
// then pushed or pulled is the volume, and nothing is left over.
func TestTreeKilled(t *testing.T) {
	testfs.NotShort(t, "other processes do the work")
	for _, kinds := range [][2]string{{plain.Name, btrfs.Name}, {btrfs.Name, plain.Name}} {
		dir := func(kind string) string {
			if kind == btrfs.Name {
				return testfs.Btrfs(t, 500<<20)
			}
			return testfs.Ext4(t, 500<<20)
		}
		w := worldOn(t, dir(kinds[0]), kinds[0], "file:"+filepath.Join(t.TempDir(), "remote"))
		o := w.other(dir(kinds[1]), kinds[1])
		w.importTree("g", mib)
		w.clone("g", "v")
		killed := 0
		for at := faulttest.Draw(t, 4, kinds[0]); ; at += faulttest.DrawStep(4) {
			w.write("v", "new", uint64(at+1), 64<<10)
			// A pool of btrfs pushes its own streams unless it is told: what the child began, this ends.
			dead := kill(t, "push", w.dir, "v", strconv.Itoa(at), "after")
			again := openEngine(t, w.dir) // which cleans up
			again.Close()
			w.write("v", "new", uint64(at+100), 64<<10)
			w.pushPortable("v")
			dead = kill(t, "pull", o.dir, strconv.Itoa(at), "before") || dead
			again = openEngine(t, o.dir)
			again.Close()
			o.pull("v", PullRequest{Update: at >= 0 && o.has("v")})
			sameTree(t, w, "v", o, "v")
			w.pull("v", PullRequest{TakeOver: true, Update: true})
			if r, err := o.e.Destroy(t.Context(), toDestroy("v")); err != nil || len(r.Failed) > 0 {
				t.Fatal(err, r)
			}
			// A chain that has begun anew does not need its golden.
			if _, err := o.e.RemoveGolden(t.Context(), refs(t, "g")); err != nil && !errs.Is(err, errs.NotFound) {
				t.Fatal(err)
			}
			if n := o.state(); n != "" {
				t.Fatalf("killed at %d: left\n%s", at, n)
			}
			if !dead {
				break
			}
			killed++
		}
		t.Logf("%s to %s: %d were killed", kinds[0], kinds[1], killed)
		for range 2 { // seen, and then ended
			if _, err := Prune(t.Context(), nil, w.r, PruneRequest{Patience: -1}); err != nil {
				t.Fatal(err)
			}
		}
		w.whole()
		w.noSessions(w.open())
	}
}

// has reports whether there is a volume of this name.
func (w *world) has(volume string) bool {
	_, err := pooltest.SnapshotNames(w.t.Context(), w.e, volume)
	return err == nil
}
