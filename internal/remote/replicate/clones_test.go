package replicate

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

// TestClonesStayClones is what other replication loses: an image and ten clones of
// it, three of which have diverged, take as much where they are pulled to as where
// they were, within 5 %. With PANDO_TEST_FULL=1 it is 2 GB, which diverge by 400 MB,
// in an empty pool of 4 GB.
func TestClonesStayClones(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	image, diverged, pool, source := int64(128*mib), int64(25*mib), int64(480*mib), int64(1<<30)
	if testfs.Full() {
		image, diverged, pool, source = 2<<30, 400*mib, 4<<30, 8<<30
	}
	w := worldOn(t, testfs.XFS(t, source), reflink.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	empty := w.used()
	w.importImage("image", image, func(f *os.File) { noise(t, f, 1, 0, image) })
	names := []string{"image"}
	for i := range 10 {
		name := fmt.Sprint("clone", i)
		w.clone("image", name)
		if i%3 == 0 && i > 0 {
			w.edit(name, func(f *os.File) { noise(t, f, uint64(10+i), int64(i)*mib, diverged) })
		}
		names = append(names, name)
	}
	real := w.used() - empty
	start := time.Now()
	if _, err := Push(t.Context(), w.e, w.r, PushRequest{All: true}); err != nil {
		t.Fatal(err)
	}
	pushed := time.Since(start)
	v, err := Verify(t.Context(), nil, w.r, VerifyRequest{})
	if err != nil || v.Err() != nil {
		t.Fatal(err, v.Err())
	}
	o := w.other(testfs.XFS(t, pool), reflink.Name)
	before := o.used()
	start = time.Now()
	read := int64(0)
	for _, name := range slices.Backward(names) { // the golden comes along with the first
		p := o.pull(name, PullRequest{})
		read += p.ReadBytes
		if name != "image" && (p.Golden != "image" || p.Generation != 1) {
			t.Errorf("%s does not descend from its golden: %+v", name, p)
		}
	}
	pulled := time.Since(start)
	took := o.used() - before
	t.Logf("%d MiB with 10 clones, 3 of which differ by %d MiB: %d MiB in the pool, %d MiB in the remote (push %.1f "+
		"s), %d MiB read and %d MiB in the pool of %d MiB afterwards (pull %.1f s)",
		image/mib, diverged/mib, real/mib, v.SegmentBytes/mib, pushed.Seconds(), read/mib, took/mib, pool/mib,
		pulled.Seconds())
	if d := float64(took-real) / float64(real); d > 0.05 || d < -0.05 {
		t.Errorf("it takes %d bytes where it took %d: %+.1f %%", took, real, d*100)
	}
	if want := image + 3*diverged; v.SegmentBytes > want+want/50 || read > want+want/50 {
		t.Errorf("%d bytes are in the remote and %d were read, of %d", v.SegmentBytes, read, want)
	}
	exclusive := int64(0)
	for i, name := range names {
		at := name
		if i == 0 {
			at = "image@1"
		}
		if o.sum(at) != w.sum(at) {
			t.Errorf("%s is not what was pushed", name)
		}
		if i > 0 {
			d, err := o.e.Show(t.Context(), ref.Ref{Name: name})
			if err != nil {
				t.Fatal(err)
			}
			exclusive += d.ExclusiveBytes // its snapshot has the same
		}
	}
	if exclusive != 0 {
		t.Errorf("%d bytes of volumes are not shared with the snapshots that were pulled", exclusive)
	}
}

// TestPullMemory: what a pull holds in memory does not depend on what it pulls.
func TestPullMemory(t *testing.T) {
	testfs.NotShort(t, "it is about memory")
	w := worldOn(t, testfs.XFS(t, 4<<30), reflink.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	size := int64(512 << 20) // many times the buffers of a pull
	if testfs.Full() {
		size = 2 << 30
	}
	w.importImage("g", size, func(f *os.File) {
		noise(t, f, 1, 0, size/2)
		text(t, f, 2, size/2, size/4) // 8 MiB of a segment are far more of content
	})
	w.push("g")
	o := w.other(testfs.XFS(t, 2<<30), reflink.Name)
	gc := debug.SetGCPercent(100) // as users have it
	defer debug.SetGCPercent(gc)
	debug.FreeOSMemory()
	most := make(chan uint64)
	stop := make(chan bool)
	go func() {
		s := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
		m := uint64(0)
		for {
			metrics.Read(s)
			m = max(m, s[0].Value.Uint64()-s[1].Value.Uint64())
			select {
			case <-stop:
				most <- m
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	}()
	start := time.Now()
	p := o.pull("g", PullRequest{})
	took := time.Since(start)
	close(stop)
	n := <-most
	t.Logf("%d MiB of a volume, %d MiB read, in %.2f s; at most %d MiB of memory, on %d processors", p.WrittenBytes/mib,
		p.ReadBytes/mib, took.Seconds(), n/mib, runtime.GOMAXPROCS(0))
	if n > 256*mib {
		t.Errorf("it took %d MiB of memory", n/mib)
	}
	if o.sum("g@1") != w.sum("g@1") {
		t.Error("it is not what was pushed")
	}
}

// tree imports a directory as a golden, and edits volumes of it as trees.
func (w *world) edits(volume string, fn func(dir string)) {
	w.t.Helper()
	i, err := w.e.Mount(w.t.Context(), engine.MountRequest{Volume: ref.MustName(volume)})
	if err != nil {
		w.t.Fatal(err)
	}
	fn(i.Mountpoint)
	if _, err := w.e.Umount(w.t.Context(), engine.UmountRequest{Volume: ref.MustName(volume)}); err != nil {
		w.t.Fatal(err)
	}
}

// files reads all files of a volume that is a tree.
func (w *world) files(volume string) (out []string) {
	w.t.Helper()
	w.edits(volume, func(dir string) {
		found, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			w.t.Fatal(err)
		}
		for _, p := range found {
			b, err := os.ReadFile(p)
			if err != nil {
				w.t.Fatal(err)
			}
			out = append(out, fmt.Sprintf("%s %d %x", filepath.Base(p), len(b), b[:min(len(b), 20)]))
		}
	})
	return out
}

func writeFile(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestPullTrees: volumes that are trees come as the steps in which they were pushed.
func TestPullTrees(t *testing.T) {
	w := worldOn(t, testfs.Btrfs(t, 1<<30), btrfs.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	src := t.TempDir()
	writeFile(t, src, "a", "of the golden")
	big, err := os.Create(filepath.Join(src, "big"))
	if err != nil {
		t.Fatal(err)
	}
	noise(t, big, 1, 0, 40*mib)
	if err := big.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src}); err != nil {
		t.Fatal(err)
	}
	w.clone("g", "v")
	var points []string
	want := map[string][]string{}
	for i := range 3 {
		w.edits("v", func(dir string) { writeFile(t, dir, fmt.Sprint("step", i), fmt.Sprint("content ", i)) })
		out := w.push("v") // its golden comes first
		p := out[len(out)-1]
		points = append(points, "v@"+p.Point)
		want[points[i]] = w.files("v")
	}
	rp := w.open()
	fresh := func() *world { return w.other(testfs.Btrfs(t, 1<<30), btrfs.Name) }
	o := fresh()
	empty := o.used()
	p := o.pull("v", PullRequest{})
	if got := o.files("v"); !slices.Equal(got, want[points[2]]) {
		t.Errorf("got %q, want %q", got, want[points[2]])
	}
	if !slices.Equal(p.Origins, []string{"g@1"}) || p.Golden != "g" {
		t.Errorf("it says %+v", p)
	}
	if n := o.used() - empty; n > 60*mib {
		t.Errorf("%d bytes are used for 40 MiB that are shared", n)
	}
	// The next step costs itself.
	w.edits("v", func(dir string) { writeFile(t, dir, "next", "step") })
	w.push("v")
	if p := o.pull("v", PullRequest{Update: true}); p.ReadBytes > mib || !slices.Equal(o.files("v"), w.files("v")) {
		t.Errorf("an update: %+v", p)
	}
	// Older points, of which later ones were sent as the difference, under policies
	// and removals.
	o2 := fresh()
	o2.pull(points[1], PullRequest{As: ref.MustName("old")})
	if got := o2.files("old"); !slices.Equal(got, want[points[1]]) {
		t.Errorf("got %q, want %q", got, want[points[1]])
	}
	if _, err := RemoveVolume(t.Context(), w.r, ref.Ref{Name: "g"}); err != nil {
		t.Fatal(err)
	}
	if _, err := RemoveVolume(t.Context(), w.r, refs(t, points[0])); err != nil {
		t.Fatal(err)
	}
	if _, err := Prune(t.Context(), nil, w.r, PruneRequest{Policy: Policy{Last: 1}}); err != nil {
		t.Fatal(err)
	}
	if v, err := Verify(t.Context(), nil, w.r, VerifyRequest{ReadPercent: 100}); err != nil || v.Err() != nil ||
		v.GarbageCount != 0 {
		t.Fatalf("%v %+v", err, v)
	}
	o3 := fresh()
	before := o3.state()
	o3.pull("v", PullRequest{})
	if got := o3.files("v"); !slices.Equal(got, w.files("v")) {
		t.Errorf("after its golden was removed from the remote: %q", got)
	}
	_ = before
	w.noSessions(rp)
	// A stream that was changed, or that ends early, is not received.
	o4 := fresh()
	o4.open()
	before = o4.state()
	for at := range 4 {
		o4.store.Add(storetest.Fault{Match: func(c storetest.Call) bool {
			return c.Op == storetest.Get && len(c.Key) > 9 && c.Key[:9] == "segments/"
		}, At: at, Change: storetest.Flip(9000, 3)})
		_, err := o4.tryPull("v", PullRequest{})
		o4.store.Heal()
		if err == nil {
			break
		}
		if !errs.Is(err, errs.Damaged) {
			t.Errorf("read %d was changed: %v", at, err)
		}
		if at == 0 && o4.state() != before {
			t.Errorf("it left:\n%s", o4.state())
		}
	}
}
