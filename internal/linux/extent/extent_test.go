package extent_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/extent"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

const mib = 1 << 20

var mappers = map[string]func(testing.TB, int64) string{"ext4": testfs.Ext4, "xfs": testfs.XFS, "btrfs": testfs.Btrfs}

// onEach runs a test on each filesystem that has extent maps.
func onEach(t *testing.T, test func(t *testing.T, kind, dir string)) {
	for kind, mk := range mappers {
		t.Run(kind, func(t *testing.T) { test(t, kind, mk(t, 128*mib)) })
	}
}

func create(t *testing.T, dir, name string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// fill writes n bytes that do not compress, and that no other call writes.
func fill(t *testing.T, f *os.File, off int64, n int) {
	t.Helper()
	b := make([]byte, n)
	x := uint64(off)*2654435761 + uint64(n) + 1
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}

func sync(t *testing.T, f *os.File) {
	t.Helper()
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

func scan(t *testing.T, f *os.File, doSync bool) (out []extent.Extent) {
	t.Helper()
	if err := extent.Scan(f, doSync, func(x extent.Extent) error { out = append(out, x); return nil }); err != nil {
		t.Fatal(err)
	}
	for i := 1; i < len(out); i++ {
		if out[i].Logical < out[i-1].End() {
			t.Fatalf("extents overlap or are out of order: %+v, %+v", out[i-1], out[i])
		}
	}
	return out
}

func usage(t *testing.T, f *os.File) extent.Usage {
	t.Helper()
	u, err := extent.Measure(f, true)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func wantUsage(t *testing.T, what string, f *os.File, exclusive, shared int64) {
	t.Helper()
	if u := usage(t, f); u.Exclusive != exclusive || u.Shared != shared {
		t.Errorf("%s: %d bytes exclusive, %d shared, want %d, %d", what, u.Exclusive, u.Shared, exclusive, shared)
	}
}

func TestEmptyFile(t *testing.T) {
	onEach(t, func(t *testing.T, _, dir string) {
		f := create(t, dir, "f")
		if x := scan(t, f, true); len(x) != 0 {
			t.Errorf("%+v", x)
		}
		if u := usage(t, f); u != (extent.Usage{}) {
			t.Errorf("%+v", u)
		}
		if err := f.Truncate(1 << 30); err != nil { // nothing but a hole
			t.Fatal(err)
		}
		if x := scan(t, f, true); len(x) != 0 {
			t.Errorf("%+v", x)
		}
	})
}

// More extents than fit in one answer of the kernel, and in two, and in four.
func TestPages(t *testing.T) {
	const n = 2500
	onEach(t, func(t *testing.T, _, dir string) {
		f := create(t, dir, "f")
		for i := range int64(n) {
			fill(t, f, 2*i*block, block)
		}
		x := scan(t, f, true)
		if last := x[len(x)-1]; last.Flags&extent.Last == 0 {
			t.Errorf("the last of %d extents: %+v", len(x), last)
		}
		if u := usage(t, f); u.Extents != int64(len(x)) {
			t.Errorf("%+v, want %d extents", u, len(x))
		}
		// XFS allocates ahead what then turns out to be a hole.
		x = slices.DeleteFunc(x, func(e extent.Extent) bool { return e.Flags&extent.Unwritten != 0 })
		if len(x) != n {
			t.Fatalf("%d extents, want %d", len(x), n)
		}
		for i, e := range x {
			if want := int64(2 * i * block); e.Logical != want || e.Length != block {
				t.Fatalf("extent %d: %+v, want %d bytes at %d", i, e, block, want)
			}
			if i < n-1 && e.Flags&extent.Last != 0 {
				t.Errorf("extent %d of %d is the last: %+v", i, n, e)
			}
		}
	})
}

// The map says where the data really is: the bytes there are those of the file.
func TestPhysical(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} { // of btrfs it is not the offset on the device
		t.Run(kind, func(t *testing.T) {
			dir := mappers[kind](t, 128*mib)
			f := create(t, dir, "f")
			fill(t, f, 0, 3*block)
			fill(t, f, 10*block, block)
			sync(t, f)
			dev := openDevice(t, dir)
			x := scan(t, f, true)
			if len(x) < 2 {
				t.Fatalf("%+v", x)
			}
			for _, e := range x {
				want, got := make([]byte, e.Length), make([]byte, e.Length)
				if _, err := f.ReadAt(want, e.Logical); err != nil {
					t.Fatal(err)
				}
				if _, err := dev.ReadAt(got, e.Physical); err != nil {
					t.Fatal(err)
				}
				if string(got) != string(want) {
					t.Errorf("%+v: other bytes are there", e)
				}
			}
		})
	}
}

// openDevice opens the block device that dir's filesystem is on.
func openDevice(t *testing.T, dir string) *os.File {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(fmt.Sprintf("/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if errors.Is(err, os.ErrNotExist) {
		f, err = os.Open(fmt.Sprintf("/dev/loop%d", unix.Minor(st.Dev)))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestHolesAndFarOffsets(t *testing.T) {
	const far = 3 << 40
	onEach(t, func(t *testing.T, _, dir string) {
		f := create(t, dir, "f")
		fill(t, f, 0, mib)
		fill(t, f, 10*mib, mib)
		fill(t, f, far, mib)
		want := map[int64]int64{0: mib, 10 * mib: mib, far: mib}
		got := map[int64]int64{}
		start := int64(-1)
		for _, e := range scan(t, f, true) {
			if start < 0 || got[start]+start != e.Logical {
				start = e.Logical // a filesystem may split what is contiguous
			}
			got[start] += e.Length
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("data at %v, want %v", got, want)
		}
	})
}

func TestUnwritten(t *testing.T) {
	onEach(t, func(t *testing.T, _, dir string) {
		f := create(t, dir, "f")
		if err := unix.Fallocate(int(f.Fd()), 0, 0, 4*mib); err != nil {
			t.Fatal(err)
		}
		fill(t, f, mib, mib)
		var unwritten, written int64
		for _, e := range scan(t, f, true) {
			if e.Flags&extent.Unwritten != 0 {
				unwritten += e.Length
			} else {
				written += e.Length
			}
		}
		if written != mib || unwritten != 3*mib {
			t.Errorf("%d bytes written, %d unwritten", written, unwritten)
		}
		wantUsage(t, "preallocated", f, 4*mib, 0)
		// Space taken beyond the end of the file is taken.
		if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 4*mib, 2*mib); err != nil {
			t.Fatal(err)
		}
		wantUsage(t, "beyond the end", f, 6*mib, 0)
	})
}

func TestShared(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := mappers[kind](t, 320*mib)
			a := create(t, dir, "a")
			if err := a.Truncate(10 * mib); err != nil { // else XFS allocates ahead
				t.Fatal(err)
			}
			for i := range int64(10) {
				fill(t, a, i*mib, mib)
			}
			wantUsage(t, "before", a, 10*mib, 0)
			b, c := create(t, dir, "b"), create(t, dir, "c")
			for _, clone := range []*os.File{b, c} {
				if err := kernel.Reflink(clone, a); err != nil {
					t.Fatal(err)
				}
			}
			for _, f := range []*os.File{a, b, c} {
				wantUsage(t, f.Name(), f, 0, 10*mib)
			}
			// Writing unshares what is written, of the writer only: two others
			// still have the old blocks.
			fill(t, b, 3*mib, mib)
			wantUsage(t, "the writer", b, mib, 9*mib)
			wantUsage(t, "the origin, which c still shares", a, 0, 10*mib)
			remove(t, dir, c)
			if kind == "xfs" { // btrfs frees whole extents only
				wantUsage(t, "the origin, alone with the overwritten part", a, mib, 9*mib)
			}
			remove(t, dir, a)
			wantUsage(t, "the last one", b, 10*mib, 0)
		})
	}
}

// remove deletes a file and waits until its blocks are free: XFS does that in
// the background, but before it freezes.
func remove(t *testing.T, dir string, f *os.File) {
	t.Helper()
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	f.Close()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := kernel.Freeze(d); err != nil {
		t.Fatal(err)
	}
	if err := kernel.Thaw(d); err != nil {
		t.Fatal(err)
	}
}

// Dirty data has no place yet. With sync it gets one first.
func TestSync(t *testing.T) {
	dir := testfs.XFS(t, 0)
	f := create(t, dir, "f")
	sync(t, f)
	fill(t, f, 0, mib)
	delalloc := func(x []extent.Extent) (n int64) {
		for _, e := range x {
			if e.Flags&extent.Delalloc != 0 {
				n += min(e.End(), mib) - e.Logical // it may be allocated ahead
			}
		}
		return n
	}
	if n := delalloc(scan(t, f, false)); n != mib {
		t.Errorf("%d bytes of dirty data without a place, want all: the test tests nothing", n)
	}
	x := scan(t, f, true)
	if n := delalloc(x); n != 0 || len(x) == 0 {
		t.Errorf("after a sync %d bytes have no place: %+v", n, x)
	}
}

func TestInlineAndEncoded(t *testing.T) {
	dir := testfs.Btrfs(t, 0)
	small := create(t, dir, "small")
	if _, err := small.WriteString("fits into metadata"); err != nil {
		t.Fatal(err)
	}
	x := scan(t, small, true)
	if len(x) != 1 || x[0].Flags&extent.Inline == 0 || x[0].Flags&extent.Last == 0 {
		t.Errorf("%+v", x)
	}
	if u := usage(t, small); u.Exclusive != x[0].Length || u.Shared != 0 {
		t.Errorf("%+v", u)
	}

	packed := create(t, dir, "packed")
	if out, err := exec.Command("chattr", "+c", packed.Name()).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: chattr +c: %v: %s", err, out)
	}
	if _, err := packed.Write(make([]byte, mib)); err != nil {
		t.Fatal(err)
	}
	for _, e := range scan(t, packed, true) {
		if e.Flags&extent.Encoded == 0 {
			t.Errorf("%+v is not marked as encoded", e)
		}
	}
}

func TestScanErrors(t *testing.T) {
	onEach(t, func(t *testing.T, _, dir string) {
		f := create(t, dir, "f")
		for i := range int64(3) {
			fill(t, f, 2*i*block, block)
		}
		stop, calls := errors.New("stop"), 0
		err := extent.Scan(f, true, func(extent.Extent) error {
			if calls++; calls == 2 {
				return stop
			}
			return nil
		})
		if !errors.Is(err, stop) || calls != 2 {
			t.Errorf("%v after %d calls, want the function's own error after 2", err, calls)
		}
	})
	f := create(t, testfs.Tmpfs(t, mib), "f")
	_, err := extent.Measure(f, true)
	if !errors.Is(err, unix.EOPNOTSUPP) || !errs.Is(err, errs.Unsupported) {
		t.Errorf("where there are no maps: %v", err)
	}
	f.Close()
	if _, err := extent.Measure(f, true); err == nil {
		t.Error("a closed file was measured")
	}
}

func TestUsageAdd(t *testing.T) {
	u := extent.Usage{Exclusive: 1, Shared: 2, Extents: 3}
	u.Add(extent.Usage{Exclusive: 10, Shared: 20, Extents: 30})
	if u != (extent.Usage{Exclusive: 11, Shared: 22, Extents: 33}) {
		t.Errorf("%+v", u)
	}
}
