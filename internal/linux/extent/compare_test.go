package extent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"

	"pando/internal/linux/extent"
	"pando/internal/linux/kernel"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// sharers are the filesystems on which files can be compared by address.
var sharers = map[string]func(testing.TB, int64) string{"xfs": testfs.XFS, "btrfs": testfs.Btrfs}

// collect checks the form of a sequence of ranges over size bytes.
func collect(t *testing.T, seq iter.Seq2[extent.Range, error], size int64) (out []extent.Range) {
	t.Helper()
	for r, err := range seq {
		if err != nil {
			t.Fatal(err)
		}
		if n := len(out); n > 0 {
			last := out[n-1]
			if r.Offset < last.End() {
				t.Fatalf("%+v begins before %+v ends", r, last)
			}
			if r.Offset == last.End() && r.Zero == last.Zero {
				t.Errorf("%+v and %+v are not joined", last, r)
			}
		}
		if r.Length <= 0 || r.Offset%block != 0 || r.End() > size || r.End()%block != 0 && r.End() != size {
			t.Fatalf("%+v of %d bytes", r, size)
		}
		out = append(out, r)
	}
	return out
}

// content is all of a file.
func content(t *testing.T, f *os.File) []byte {
	t.Helper()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<62))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// rebuild makes of a what Compare says that b is.
func rebuild(t *testing.T, a, b []byte, ranges []extent.Range) []byte {
	t.Helper()
	out := make([]byte, len(b))
	copy(out, a)
	for _, r := range ranges {
		if r.Zero {
			clear(out[r.Offset:r.End()])
		} else {
			copy(out[r.Offset:r.End()], b[r.Offset:])
		}
	}
	return out
}

func bytesIn(ranges []extent.Range) (n int64) {
	for _, r := range ranges {
		n += r.Length
	}
	return n
}

// firstDifference says where two files differ, for messages.
func firstDifference(a, b []byte) string {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("at byte %d", i)
		}
	}
	return fmt.Sprintf("%d and %d bytes long", len(a), len(b))
}

// mutator changes a file at random, and knows which blocks it has touched.
type mutator struct {
	f       *os.File
	rng     *rand.Rand
	size    int64
	touched map[int64]bool
	log     []string
}

const mutatorMost = 6 * mib

func (m *mutator) touch(off, n int64) {
	for b := off / block; b*block < off+n; b++ {
		m.touched[b] = true
	}
}

func (m *mutator) step() error {
	off := m.rng.Int64N(m.size + 1)
	n := 1 + m.rng.Int64N(1<<m.rng.IntN(20))
	if m.rng.IntN(2) == 0 {
		off, n = off/block*block, (n+block-1)/block*block
	}
	if off+n > mutatorMost {
		return nil
	}
	op := m.rng.IntN(12)
	m.log = append(m.log, fmt.Sprintf("op %d off %d n %d size %d", op, off, n, m.size))
	fd := int(m.f.Fd())
	var err error
	switch op {
	default: // write
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(m.rng.Uint32())
		}
		_, err = m.f.WriteAt(b, off)
		m.size = max(m.size, off+n)
	case 5: // write zeros
		_, err = m.f.WriteAt(make([]byte, n), off)
		m.size = max(m.size, off+n)
	case 6, 7:
		err = unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	case 8:
		err = unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, off, n) // also behind the end
	case 9:
		err = unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	case 10:
		if m.rng.IntN(3) > 0 {
			return nil
		}
		old := m.size
		m.size = 1 + m.rng.Int64N(mutatorMost)
		err = m.f.Truncate(m.size)
		off, n = min(old, m.size)/block*block, max(old, m.size)-min(old, m.size)+2*block
	case 11:
		err = m.f.Sync()
		n = 0
	}
	if errors.Is(err, unix.EOPNOTSUPP) && op == 9 {
		err, n = nil, 0
	}
	m.touch(off, n)
	return err
}

func mutate(t *testing.T, m *mutator, steps int) {
	t.Helper()
	for range steps {
		if err := m.step(); err != nil {
			t.Fatalf("%v after %q", err, m.log)
		}
	}
}

// Whatever is done to a file and to copies of it, what Compare yields turns the one
// into the other, and little of what nobody has touched is in it.
func TestCompareRandom(t *testing.T) {
	for kind, mk := range sharers {
		t.Run(kind, func(t *testing.T) {
			dir := mk(t, 600*mib)
			for round := range 60 {
				randomRound(t, dir, round)
				if t.Failed() {
					return
				}
			}
		})
	}
}

func randomRound(t *testing.T, dir string, round int) {
	t.Helper()
	rng := faulttest.Rand(t, round)
	a, b := create(t, dir, "a"), create(t, dir, "b")
	defer func() {
		a.Close()
		b.Close()
	}()
	base := &mutator{f: a, rng: rng, touched: map[int64]bool{}}
	mutate(t, base, rng.IntN(80))
	if err := kernel.Reflink(b, a); err != nil {
		t.Fatal(err)
	}
	if err := b.Truncate(base.size); err != nil {
		t.Fatal(err)
	}
	next := &mutator{f: b, rng: rng, size: base.size, touched: map[int64]bool{}}
	mutate(t, next, rng.IntN(40))
	if rng.IntN(4) == 0 { // in the origin, too: whichever of the two has new blocks
		late := &mutator{f: a, rng: rng, size: base.size, touched: next.touched}
		mutate(t, late, rng.IntN(10))
		base.log = append(base.log, late.log...)
	}
	old, now := content(t, a), content(t, b)
	ranges := collect(t, extent.Compare(t.Context(), a, b), int64(len(now)))
	if got := rebuild(t, old, now, ranges); !bytes.Equal(got, now) {
		t.Fatalf("round %d: what it says makes another file: %s\nranges %v\nfirst %q\nthen %q", round,
			firstDifference(got, now), ranges, base.log, next.log)
	}
	// The other way round, too.
	back := collect(t, extent.Compare(t.Context(), b, a), int64(len(old)))
	if got := rebuild(t, now, old, back); !bytes.Equal(got, old) {
		t.Fatalf("round %d: backwards: what it says makes another file: %s\n%v\nfirst %q\nthen %q", round,
			firstDifference(got, old), back, base.log, next.log)
	}
	for _, f := range []struct {
		f    *os.File
		have []byte
	}{{a, old}, {b, now}} {
		data := collect(t, extent.Data(t.Context(), f.f), int64(len(f.have)))
		if got := rebuild(t, nil, f.have, data); !bytes.Equal(got, f.have) {
			t.Fatalf("round %d: Data leaves something out: %s, %v", round, firstDifference(got, f.have), data)
		}
	}
	// What was not touched may be listed only at the edges: copying on write and
	// allocating ahead take a few blocks with them.
	var idle int64
	for _, r := range ranges {
		for o := r.Offset; o < r.End(); o += block {
			if !next.touched[o/block] {
				idle++
			}
		}
	}
	if most := int64(32 * (1 + len(next.log))); idle > most {
		t.Errorf("round %d: %d untouched blocks are listed, more than %d: %v\nfirst %q\nthen %q", round, idle, most, ranges,
			base.log, next.log)
	}
}

// Clones of one origin that are compared with each other, not with it.
func TestCompareSiblings(t *testing.T) {
	for kind, mk := range sharers {
		t.Run(kind, func(t *testing.T) {
			dir := mk(t, 400*mib)
			o, a, b := create(t, dir, "o"), create(t, dir, "a"), create(t, dir, "b")
			fill(t, o, 0, 32*mib)
			for _, f := range []*os.File{a, b} {
				if err := kernel.Reflink(f, o); err != nil {
					t.Fatal(err)
				}
			}
			if r := collect(t, extent.Compare(t.Context(), a, b), 32*mib); len(r) != 0 {
				t.Errorf("two fresh clones differ: %v", r)
			}
			fill(t, a, 4*mib, block)
			fill(t, b, 20*mib, mib)
			want := "[{4194304 4096 false} {20971520 1048576 false}]"
			if r := collect(t, extent.Compare(t.Context(), a, b), 32*mib); fmt.Sprint(r) != want {
				t.Errorf("got %v, want %s", r, want)
			}
		})
	}
}

// A hole where data was is a range of zeros; holes and preallocated space are the
// same, whichever of the files has which.
func TestCompareZeros(t *testing.T) {
	for kind, mk := range sharers {
		t.Run(kind, func(t *testing.T) {
			dir := mk(t, 400*mib)
			a, b := create(t, dir, "a"), create(t, dir, "b")
			fill(t, a, 0, 4*mib)
			if err := a.Truncate(16 * mib); err != nil {
				t.Fatal(err)
			}
			if err := kernel.Reflink(b, a); err != nil {
				t.Fatal(err)
			}
			if err := b.Truncate(16 * mib); err != nil {
				t.Fatal(err)
			}
			fd := int(b.Fd())
			if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, mib, mib); err != nil {
				t.Fatal(err)
			}
			if err := unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 8*mib, 2*mib); err != nil { // was a hole
				t.Fatal(err)
			}
			if err := unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 16*mib, 4*mib); err != nil { // behind the end
				t.Fatal(err)
			}
			if r := collect(t, extent.Compare(t.Context(), a, b), 16*mib); fmt.Sprint(r) != "[{1048576 1048576 true}]" {
				t.Errorf("got %v", r)
			}
			if r := collect(t, extent.Compare(t.Context(), b, a), 16*mib); fmt.Sprint(r) != "[{1048576 1048576 false}]" {
				t.Errorf("the other way round: %v", r)
			}
			if r := collect(t, extent.Data(t.Context(), b),
				16*mib); fmt.Sprint(r) != "[{0 1048576 false} {2097152 2097152 false}]" {
				t.Errorf("data: %v", r)
			}
		})
	}
}

// Sizes that are no multiple of a block, and files that grow and shrink.
func TestCompareSizes(t *testing.T) {
	for kind, mk := range sharers {
		t.Run(kind, func(t *testing.T) {
			dir := mk(t, 400*mib)
			for _, from := range []int64{0, 1, block - 1, block, 100*block + 17, mib} {
				for _, to := range []int64{0, 1, block, 100*block + 16, 100*block + 18, mib, 2*mib + 5} {
					a, b := create(t, dir, "a"), create(t, dir, "b")
					fill(t, a, 0, int(from))
					if err := kernel.Reflink(b, a); err != nil {
						t.Fatal(err)
					}
					if err := b.Truncate(to); err != nil {
						t.Fatal(err)
					}
					if to > from+block {
						fill(t, b, to-7, 7)
					}
					old, now := content(t, a), content(t, b)
					r := collect(t, extent.Compare(t.Context(), a, b), to)
					if got := rebuild(t, old, now, r); !bytes.Equal(got, now) {
						t.Errorf("%d to %d bytes: %s: %v", from, to, firstDifference(got, now), r)
					}
					if n := bytesIn(r); n > 3*block {
						t.Errorf("%d to %d bytes: %d bytes are listed: %v", from, to, n, r)
					}
					a.Close()
					b.Close()
				}
			}
		})
	}
}

// Maps of many pages, whose extents are split at other places, and sequences that
// are left early.
func TestComparePages(t *testing.T) {
	for kind, mk := range sharers {
		t.Run(kind, func(t *testing.T) {
			dir := mk(t, 400*mib)
			const n = 3000
			a, b := create(t, dir, "a"), create(t, dir, "b")
			if err := a.Truncate(2 * n * block); err != nil {
				t.Fatal(err)
			}
			for i := range int64(n) {
				fill(t, a, 2*i*block, block)
			}
			if err := kernel.Reflink(b, a); err != nil {
				t.Fatal(err)
			}
			if r := collect(t, extent.Compare(t.Context(), a, b), 2*n*block); len(r) != 0 {
				t.Errorf("clones differ: %v", r)
			}
			// The very last extent: who does not read all pages misses it.
			fill(t, b, 2*(n-1)*block, 100)
			if r := collect(t, extent.Compare(t.Context(), a, b), 2*n*block); len(r) != 1 || r[0].Offset != 2*(n-1)*block ||
				r[0].Length != block {
				t.Errorf("got %v", r)
			}
			for i := range int64(n / 2) {
				fill(t, b, 4*i*block, block)
			}
			r := collect(t, extent.Compare(t.Context(), a, b), 2*n*block)
			if len(r) != n/2+1 {
				t.Errorf("%d ranges", len(r))
			}
			seen := 0
			for range extent.Compare(t.Context(), a, b) {
				if seen++; seen == 3 {
					break
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			seen = 0
			var last error
			for _, err := range extent.Compare(ctx, a, b) {
				if seen++; seen == 3 {
					cancel()
				}
				last = err
			}
			if !errors.Is(last, context.Canceled) {
				t.Errorf("cancelled after 3 of many: %d ranges, %v", seen, last)
			}
		})
	}
}

// Extents that touch in both files, on disk too, but were split elsewhere: XFS splits
// what is written and shared piece by piece.
func TestCompareSplits(t *testing.T) {
	dir := testfs.XFS(t, 400*mib)
	a, b := create(t, dir, "a"), create(t, dir, "b")
	fill(t, a, 0, 8*mib)
	sync(t, a)
	if err := b.Truncate(8 * mib); err != nil {
		t.Fatal(err)
	}
	for off := int64(0); off < 8*mib; off += 96 * 1024 {
		r := unix.FileCloneRange{Src_fd: int64(a.Fd()), Src_offset: uint64(off), Src_length: uint64(min(96*1024, 8*mib-off)),
			Dest_offset: uint64(off)}
		if err := unix.IoctlFileCloneRange(int(b.Fd()), &r); err != nil {
			t.Fatal(err)
		}
	}
	if r := collect(t, extent.Compare(t.Context(), a, b), 8*mib); len(r) != 0 {
		t.Errorf("got %v", r)
	}
}

// What has no address of its own counts as different, even from itself.
func TestCompareInlineAndEncoded(t *testing.T) {
	dir := testfs.Btrfs(t, 0)
	a, b := create(t, dir, "a"), create(t, dir, "b")
	if _, err := a.WriteString("fits into metadata"); err != nil {
		t.Fatal(err)
	}
	if err := kernel.Reflink(b, a); err != nil {
		t.Fatal(err)
	}
	if r := collect(t, extent.Compare(t.Context(), a, b), 18); fmt.Sprint(r) != "[{0 18 false}]" {
		t.Errorf("inline: %v", r)
	}
	c, d := create(t, dir, "c"), create(t, dir, "d")
	if out, err := exec.Command("chattr", "+c", c.Name()).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: chattr +c: %v: %s", err, out)
	}
	if _, err := c.Write(bytes.Repeat([]byte("compressible "), 1<<16)); err != nil {
		t.Fatal(err)
	}
	sync(t, c)
	if err := kernel.Reflink(d, c); err != nil {
		t.Fatal(err)
	}
	size := int64(13 << 16)
	if r := collect(t, extent.Compare(t.Context(), c, d), size); bytesIn(r) != size {
		t.Errorf("compressed: %v", r)
	}
}

func TestCompareRefuses(t *testing.T) {
	first := func(a, b *os.File) error {
		for _, err := range extent.Compare(t.Context(), a, b) {
			return err
		}
		return nil
	}
	x, y, e := testfs.XFS(t, 0), testfs.XFS(t, 0), testfs.Ext4(t, 64*mib)
	for _, c := range []struct {
		name string
		a, b *os.File
		want error
	}{
		{"two filesystems", create(t, x, "f"), create(t, y, "f"), unix.EXDEV},
		{"no sharing", create(t, e, "f"), create(t, e, "g"), unix.EOPNOTSUPP},
		{"one of two", create(t, x, "f"), create(t, e, "f"), unix.EOPNOTSUPP},
	} {
		fill(t, c.a, 0, block)
		fill(t, c.b, 0, block)
		if err := first(c.a, c.b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if err := extent.Comparable(c.a, c.b); !errors.Is(err, c.want) {
			t.Errorf("%s: Comparable: %v, want %v", c.name, err, c.want)
		}
	}
	dir, err := os.Open(x)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := first(dir, dir); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("directories: %v", err)
	}
}

// Where there are no maps, Data asks for holes; of a block device, it yields all.
func TestDataWithoutMaps(t *testing.T) {
	f := create(t, testfs.Tmpfs(t, 16*mib), "f")
	fill(t, f, 0, block)
	fill(t, f, 3*mib, block)
	if err := f.Truncate(6*mib + 100); err != nil {
		t.Fatal(err)
	}
	if r := collect(t, extent.Data(t.Context(), f), 6*mib+100); fmt.Sprint(r) != "[{0 4096 false} {3145728 4096 false}]" {
		t.Errorf("got %v", r)
	}
	dev := openDevice(t, testfs.Ext4(t, 64*mib))
	if r := collect(t, extent.Data(t.Context(), dev), 64*mib); fmt.Sprint(r) != "[{0 67108864 false}]" {
		t.Errorf("a block device: %v", r)
	}
	empty := create(t, testfs.Tmpfs(t, mib), "f")
	if r := collect(t, extent.Data(t.Context(), empty), 0); len(r) != 0 {
		t.Errorf("an empty file: %v", r)
	}
}

// The cost of an extent: two maps of 100,000 extents each, a tenth of which differ.
func BenchmarkCompare(b *testing.B) {
	const n = 100_000
	dir := testfs.XFS(b, 1200*mib)
	files := make([]*os.File, 2)
	for i := range files {
		f, err := os.Create(fmt.Sprintf("%s/%d", dir, i))
		if err != nil {
			b.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	if err := files[0].Truncate(2 * n * block); err != nil {
		b.Fatal(err)
	}
	buf := bytes.Repeat([]byte("x"), block)
	for i := range int64(n) {
		if _, err := files[0].WriteAt(buf, 2*i*block); err != nil {
			b.Fatal(err)
		}
	}
	if err := kernel.Reflink(files[1], files[0]); err != nil {
		b.Fatal(err)
	}
	for i := int64(0); i < n; i += 10 {
		if _, err := files[1].WriteAt(buf, 2*i*block); err != nil {
			b.Fatal(err)
		}
	}
	if err := files[1].Sync(); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		ranges := 0
		for _, err := range extent.Compare(b.Context(), files[0], files[1]) {
			if err != nil {
				b.Fatal(err)
			}
			ranges++
		}
		if ranges != n/10 {
			b.Fatalf("%d ranges", ranges)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(2*n), "ns/extent")
}
