package treediff

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
	"pando/internal/tree/treecopy"
)

func openDir(t testing.TB, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// world is where trees can be copied, as one kind of origin does it.
type world struct {
	sameOrigin bool
	empty      func() string                 // a new tree
	copy       func(of string) string        // of a tree that nobody writes
	settle     func(dir string)              // before it is compared or copied
	hints      func(a, b string, o *Options) // adds what can be known
}

// copies are made by copying: nothing is known of them.
func copies(t *testing.T, top string) world {
	n := 0
	fresh := func() string {
		n++
		dir := filepath.Join(top, fmt.Sprint("tree", n))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	return world{
		empty: fresh,
		copy: func(of string) string {
			dir := fresh()
			f, err := os.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := treecopy.CopyDir(t.Context(), of, f, treecopy.Options{OwnRoot: true}); err != nil {
				t.Fatal(err)
			}
			return dir
		},
		settle: func(string) {},
	}
}

// snapshots are subvolumes of a btrfs.
func snapshots(t *testing.T) world {
	top := testfs.Btrfs(t, 300<<20)
	n := 0
	at := func(fn func(dir *os.File, name string) error) string {
		n++
		name := fmt.Sprint("vol", n)
		f, err := os.Open(top)
		if err == nil {
			err = fn(f, name)
			f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		return filepath.Join(top, name)
	}
	return world{
		sameOrigin: true,
		empty:      func() string { return at(kernel.SubvolCreate) },
		copy: func(of string) string {
			src, err := os.Open(of)
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			return at(func(dir *os.File, name string) error { return kernel.SubvolSnapshot(dir, name, src, false) })
		},
		settle: func(dir string) {
			f, err := os.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := unix.Syncfs(int(f.Fd())); err != nil {
				t.Fatal(err)
			}
		},
		hints: func(a, b string, o *Options) {
			var err error
			if o.Hints, err = BtrfsHints(t.Context(), openDir(t, a), openDir(t, b), nil); err != nil {
				t.Fatal(err)
			}
		},
	}
}

// images are filesystems in images on an XFS.
func images(t *testing.T, kind string, mkfs ...string) world {
	host := testfs.XFS(t, 1<<30)
	n := 0
	imageOf := func(dir string) string { return dir + ".img" }
	attach := func(dir string) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(imageOf(dir), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		dev, err := loopdev.Attach(t.Context(), f, loopdev.Options{DirectIO: true, SectorBytes: 4096})
		if err != nil {
			t.Fatal(err)
		}
		defer dev.Close()
		var opts []string
		if kind == "xfs" {
			opts = []string{"nouuid"}
		}
		m, err := mount.Device(kind, dev.Path, opts, false)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if _, err := m.MoveTo(dir); err != nil {
			t.Fatal(err)
		}
	}
	detach := func(dir string) {
		if err := mount.Unmount(dir); err != nil {
			t.Fatal(err)
		}
		if free, err := loopdev.WaitDetached(context.Background(), imageOf(dir), 10*time.Second); err != nil || !free {
			t.Fatal(free, err)
		}
	}
	fresh := func() string {
		n++
		dir := filepath.Join(host, fmt.Sprint("img", n))
		t.Cleanup(func() {
			if m, err := kernel.MountAt(unix.AT_FDCWD, dir); err == nil && m.Root {
				detach(dir)
			}
		})
		return dir
	}
	return world{
		sameOrigin: true,
		empty: func() string {
			dir := fresh()
			if err := os.WriteFile(imageOf(dir), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			size := int64(64 << 20)
			if kind == "xfs" {
				size = 320 << 20
			}
			if err := os.Truncate(imageOf(dir), size); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("mkfs."+kind, append(mkfs, "-q", imageOf(dir))...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			attach(dir)
			return dir
		},
		copy: func(of string) string {
			detach(of)
			dir := fresh()
			src, err := os.Open(imageOf(of))
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			dst, err := os.Create(imageOf(dir))
			if err != nil {
				t.Fatal(err)
			}
			defer dst.Close()
			if err := kernel.Reflink(dst, src); err != nil {
				t.Fatal(err)
			}
			attach(of)
			attach(dir)
			return dir
		},
		settle: func(dir string) { // so that all is in the image
			detach(dir)
			attach(dir)
		},
		hints: func(a, b string, o *Options) {
			detach(a)
			detach(b)
			o.Hints, o.SameBlocks = imageHints(t, imageOf(a), imageOf(b), o.Younger)
			attach(a)
			attach(b)
		},
	}
}

// imageHints are those of two images that are not mounted.
func imageHints(t *testing.T, a, b string, younger time.Time) (*Hints, func(x, y, n int64) (bool, int64)) {
	t.Helper()
	fa, fb := openDir(t, a), openDir(t, b)
	d, ok, err := CompareImages(fa, fb)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	h, err := Ext4Hints(t.Context(), fa, fb, d, younger)
	if err != nil {
		t.Fatal(err)
	}
	return h, d.SameBlocks
}

func compareTrees(t *testing.T, a, b string, o Options) Result {
	t.Helper()
	fa, err := os.Open(a)
	if err != nil {
		t.Fatal(err)
	}
	defer fa.Close()
	fb, err := os.Open(b)
	if err != nil {
		t.Fatal(err)
	}
	defer fb.Close()
	r, err := Compare(t.Context(), fa, fb, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func applyTo(t *testing.T, changes []Change, from, onto string, o ApplyOptions) {
	t.Helper()
	f, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	g, err := os.Open(onto)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := Apply(t.Context(), changes, f, g, o); err != nil {
		t.Fatal(err)
	}
}

// fingerprints of both trees must be the same.
func mustEqual(t *testing.T, want, got string) bool {
	t.Helper()
	a, err := treetest.Fingerprint(want)
	if err != nil {
		t.Fatal(err)
	}
	b, err := treetest.Fingerprint(got)
	if err != nil {
		t.Fatal(err)
	}
	diff := treetest.Diff(a, b, treetest.Atime|treetest.Holes)
	for i, d := range diff {
		if i < 20 {
			t.Error(d)
		}
	}
	return len(diff) == 0
}

// nextTick waits until the clock that files get their times from has moved on. Comparisons
// that are not told when the trees parted, as here, take equal times for no change.
func nextTick() { time.Sleep(slackOfBirth) }

// property: what Compare finds, Apply makes of a copy of the first tree the
// second; and then there is nothing left to find.
func property(t *testing.T, w world, edits int, r *rand.Rand, method string) {
	t.Helper()
	a := w.empty()
	e := &treetest.Editor{T: t, R: r, Dir: a}
	e.Fill()
	w.settle(a)
	nextTick()
	b := w.copy(a)
	onto := w.copy(a)
	e.Dir = b
	for range edits {
		e.Edit()
	}
	w.settle(b)
	o := Options{SameOrigin: w.sameOrigin, Times: true}
	if w.hints != nil {
		w.hints(a, b, &o)
	}
	res := compareTrees(t, a, b, o)
	if res.Stats.Method != method {
		t.Errorf("compared by %q, wanted %q", res.Stats.Method, method)
	}
	applyTo(t, res.Changes, b, onto, ApplyOptions{})
	if !mustEqual(t, b, onto) {
		for _, ch := range res.Changes {
			t.Logf("%+v", ch)
		}
		t.FailNow()
	}
	plain := compareTrees(t, a, b, Options{Times: true})
	if (len(plain.Changes) == 0) != (len(res.Changes) == 0) {
		t.Errorf("a full comparison finds %d changes, this one %d", len(plain.Changes), len(res.Changes))
	}
	if again := compareTrees(t, b, onto, Options{Times: true}); len(again.Changes) > 0 {
		t.Errorf("after Apply there is still %+v", again.Changes)
	}
}
