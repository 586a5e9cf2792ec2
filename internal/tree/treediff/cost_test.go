package treediff

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/testing/testfs"
)

// grow makes a tree of n files in directories of 50.
func grow(tb testing.TB, dir string, n int) {
	tb.Helper()
	for i := range n {
		d := filepath.Join(dir, fmt.Sprintf("%d", i/1000), fmt.Sprintf("%d", i/50))
		if i%50 == 0 {
			if err := os.MkdirAll(d, 0o755); err != nil {
				tb.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(d, fmt.Sprint(i)), []byte("some content"), 0o644); err != nil {
			tb.Fatal(err)
		}
	}
}

// touch makes ten changes, in ten files of the first thousand.
func touch(tb testing.TB, dir string) {
	tb.Helper()
	for i := range 10 {
		p := filepath.Join(dir, "0", fmt.Sprint(i), fmt.Sprint(i*50))
		if err := os.WriteFile(p, []byte("other content"), 0o644); err != nil {
			tb.Fatal(err)
		}
	}
}

// changedTree is a tree of n files, and a copy with ten changes.
func changedTree(t *testing.T, w world, n int) (a, b string, o Options) {
	a = w.empty()
	grow(t, a, n)
	w.settle(a)
	b = w.copy(a)
	touch(t, b)
	w.settle(b)
	o.SameOrigin = w.sameOrigin
	if w.hints != nil {
		w.hints(a, b, &o)
	}
	return a, b, o
}

// TestCostFollowsTheChange: ten times the files, the same changes: what is asked
// for and read stays the same.
func TestCostFollowsTheChange(t *testing.T) {
	for _, c := range []struct {
		name  string
		world func(t *testing.T) world
		dirs  bool // directories are read, but no more than once
	}{
		{"btrfs", snapshots, false},
		{"ext4", func(t *testing.T) world { return images(t, "ext4", blockArgs["ext4"]...) }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := c.world(t)
			var stats []Stats
			for _, n := range []int{500, 5000} {
				a, b, o := changedTree(t, w, n)
				r := compareTrees(t, a, b, o)
				if len(r.Changes) != 10 {
					t.Fatalf("%d changes, wanted 10: %+v", len(r.Changes), r.Changes)
				}
				if dirs := int64(n/50 + n/1000 + 3); c.dirs && r.Stats.DirsRead > dirs {
					t.Errorf("%d directories read, there are %d", r.Stats.DirsRead, dirs)
				}
				stats = append(stats, r.Stats)
			}
			small, large := stats[0], stats[1]
			if !c.dirs && large.DirsRead > small.DirsRead {
				t.Errorf("directories read: %d, and %d of the larger tree", small.DirsRead, large.DirsRead)
			}
			if large.Statted > small.Statted || large.Statted > 60 {
				t.Errorf("inodes asked for: %d, and %d of the larger tree", small.Statted, large.Statted)
			}
			if small.FilesRead != 10 || large.FilesRead != 10 || large.BytesRead != small.BytesRead || large.BytesRead == 0 {
				t.Errorf("read: %+v, and of the larger tree %+v", small, large)
			}
		})
	}
}

// TestWalkReadsOnlyWhatChanged: also where all inodes have to be asked for, no
// file is read that has not changed, and nothing is of equal images.
func TestWalkReadsOnlyWhatChanged(t *testing.T) {
	w := images(t, "xfs", blockArgs["xfs"]...)
	w.hints = nil
	a, b, o := changedTree(t, w, 500)
	if r := compareTrees(t, a, b, o); r.Stats.FilesRead != 10 || len(r.Changes) != 10 {
		t.Errorf("%d changes, %+v", len(r.Changes), r.Stats)
	}
	if r := compareTrees(t, a, b, Options{}); r.Stats.FilesRead != 500 || len(r.Changes) != 10 {
		t.Errorf("not knowing of an origin: %d changes, %+v", len(r.Changes), r.Stats)
	}
}

// TestSharedBlocksAreNotRead: of a large file on one filesystem only what was
// written is read, and the bytes that changed are exact.
func TestSharedBlocksAreNotRead(t *testing.T) {
	w := snapshots(t)
	a := w.empty()
	if err := os.WriteFile(filepath.Join(a, "big"), bytes.Repeat([]byte("0123456789abcdef"), 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	w.settle(a)
	b := w.copy(a)
	f, err := os.OpenFile(filepath.Join(b, "big"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{5000, 8 << 20} {
		if _, err := f.WriteAt([]byte("changed"), off); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.WriteAt([]byte("0123456789abcdef"), 12<<20); err != nil { // the same again
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	w.settle(b)
	o := Options{SameOrigin: true, SameBlocks: func(x, y, n int64) (bool, int64) { return x == y, n }}
	r := compareTrees(t, a, b, o)
	if len(r.Changes) != 1 || r.Changes[0].ChangedBytes != 2*blockSize {
		t.Fatalf("%+v", r.Changes)
	}
	if want := []Range{{4096, 8192}, {8 << 20, 8<<20 + 4096}}; fmt.Sprint(r.Changes[0].ranges) != fmt.Sprint(want) {
		t.Errorf("ranges %v, wanted %v", r.Changes[0].ranges, want)
	}
	if r.Stats.BytesRead > 2*(3*64<<10) {
		t.Errorf("%d bytes were read", r.Stats.BytesRead)
	}
}

// TestSameBytesAgain: a file rewritten with what was in it has not changed.
func TestSameBytesAgain(t *testing.T) {
	w := copies(t, testfs.New(t, "tmpfs", 64<<20).Dir())
	a := w.empty()
	grow(t, a, 10)
	b := w.copy(a)
	if err := os.WriteFile(filepath.Join(b, "0/0/3"), []byte("some content"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := compareTrees(t, a, b, Options{}); len(r.Changes) > 0 {
		t.Errorf("%+v", r.Changes)
	}
	r := compareTrees(t, a, b, Options{Times: true})
	if len(r.Changes) != 1 || !r.Changes[0].TimesOnly() {
		t.Errorf("with times: %+v", r.Changes)
	}
}

// BenchmarkCompare compares trees with ten changes, of 2,000 and of 20,000 files,
// by what btrfs knows and by walking. It reports what was asked for: with btrfs
// the same for both.
func BenchmarkCompare(b *testing.B) {
	for _, n := range []int{2000, 20000} {
		for _, method := range []string{"btrfs", "walk"} {
			b.Run(fmt.Sprintf("%s/%d", method, n), func(b *testing.B) {
				x, y := benchTrees(b, n)
				var r Result
				for b.Loop() {
					o := Options{SameOrigin: true}
					var err error
					if method == "btrfs" {
						if o.Hints, err = BtrfsHints(b.Context(), x, y, nil); err != nil {
							b.Fatal(err)
						}
					}
					if r, err = Compare(b.Context(), x, y, o); err != nil || len(r.Changes) != 10 {
						b.Fatal(len(r.Changes), err)
					}
				}
				b.ReportMetric(float64(r.Stats.Statted), "inodes")
				b.ReportMetric(float64(r.Stats.DirsRead), "dirs")
			})
		}
	}
}

// TestReusedInode: a new file that has got the number of a deleted one is not
// that file under another name.
func TestReusedInode(t *testing.T) {
	for _, hints := range []bool{true, false} {
		w := images(t, "ext4", blockArgs["ext4"]...)
		if !hints {
			w.hints = nil
		}
		a := w.empty()
		grow(t, a, 3)
		w.settle(a)
		b := w.copy(a)
		number := func(name string) uint64 {
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(b, "0/0", name), &st); err != nil {
				t.Fatal(err)
			}
			return st.Ino
		}
		old := number("2")
		if err := os.Remove(filepath.Join(b, "0/0/2")); err != nil {
			t.Fatal(err)
		}
		w.settle(b)
		if err := os.WriteFile(filepath.Join(b, "0/0/new"), []byte("some content"), 0o644); err != nil {
			t.Fatal(err)
		}
		if number("new") != old {
			t.Fatal("the number was not used again: this test shows nothing")
		}
		w.settle(b)
		o := Options{SameOrigin: true}
		if w.hints != nil {
			w.hints(a, b, &o)
		}
		r := compareTrees(t, a, b, o)
		if len(r.Changes) != 2 || r.Changes[0].Op != Deleted || r.Changes[1].Op != Added {
			t.Errorf("hints %v: %+v", hints, r.Changes)
		}
	}
}
