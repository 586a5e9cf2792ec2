package replicate

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// grown is a volume of 64 MiB that has been pushed many times, each time with some blocks changed all over it.
func grown(t testing.TB, points int) *bench {
	t.Helper()
	b := newBench(t)
	rnd := rand.New(rand.NewPCG(7, 7))
	var last *made
	for i := range points {
		c := change{}
		for range 24 {
			c[rnd.Int64N(64<<20/repo.BlockBytes)*repo.BlockBytes] = block(rnd.Uint64())
		}
		last = b.must("v", fmt.Sprintf("p%d", i), 64<<20, last, c, false)
	}
	return b
}

// asked is what a store was asked for.
type asked struct {
	wholes map[string]int // reads of whole segments, by key
	bytes  int64          // of all answers
	parts  int            // reads of parts of segments: pages
}

func askedFor(calls []storetest.Call, size map[string]int64) asked {
	a := asked{wholes: map[string]int{}}
	for _, c := range calls {
		if c.Op != storetest.Get {
			continue
		}
		n := size[c.Key] - c.Offset
		if c.Length >= 0 {
			n = min(n, c.Length)
		}
		a.bytes += n
		switch {
		case !strings.HasPrefix(c.Key, "segments/"):
		case c.Offset == 0 && n == size[c.Key]:
			a.wholes[c.Key]++
		default:
			a.parts++
		}
	}
	return a
}

// verifyCounted verifies through a store that counts.
func (b *bench) verifyCounted(q VerifyRequest) (*Verified, asked) {
	b.t.Helper()
	size := map[string]int64{}
	for _, o := range b.objects() {
		size[o.Key] = o.Bytes
	}
	r, f := b.faulty()
	before := len(f.Calls())
	out, err := verify(b.t.Context(), r, q)
	if err != nil || out.TotalProblems > 0 {
		b.t.Fatalf("verify: %v, %+v", err, out)
	}
	return out, askedFor(f.Calls()[before:], size)
}

// TestVerifyReadsEachSegmentOnce: however many points and volumes use a segment, --read-data asks the store for it
// once, and for maps about as often as a verify without data does.
func TestVerifyReadsEachSegmentOnce(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := grown(t, 40)
	for i := range 8 {
		b.history(rnd, fmt.Sprintf("fork%d", i), b.truth["v"][fmt.Sprintf("p%d", 5*i)], 2)
	}
	_, listed := b.verifyCounted(VerifyRequest{})
	out, read := b.verifyCounted(VerifyRequest{ReadPercent: 100})
	for key, n := range read.wholes {
		if n != 1 {
			t.Errorf("%s was read %d times", key, n)
		}
	}
	if len(read.wholes) != out.ReadSegments || out.ReadSegments != out.Segments || out.Segments < 40 {
		t.Errorf("%d segments were read, of %d; it says %d", len(read.wholes), out.Segments, out.ReadSegments)
	}
	if read.parts > listed.parts*5/4 {
		t.Errorf("maps were read %d times, and %d times without data", read.parts, listed.parts)
	}
	if rest := read.bytes - out.ReadBytes; rest > 2*listed.bytes {
		t.Errorf("%d KiB were read besides segments, and %d KiB without data", rest>>10, listed.bytes>>10)
	}
}

// TestVerifyBlamesEveryPoint: what is read once for many points is reported for each of them: those that come after
// the one it was written for, in the volume and in clones, and no other.
func TestVerifyBlamesEveryPoint(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	const points = 2*shortestSpan + 3
	var last *made
	want := map[string]bool{}
	for i := range points {
		last = b.must("v", fmt.Sprintf("p%d", i), small, last, change{int64(i) * repo.BlockBytes: block(rnd.Uint64())}, false)
		if i >= 2 {
			want["v@"+last.point] = true
		}
	}
	b.must("fork", "p0", small, b.truth["v"]["p1"], nil, true)
	for i := range 2 {
		last = b.must("late", fmt.Sprintf("p%d", i), small, last, change{small - repo.BlockBytes: block(rnd.Uint64())}, true)
		want["late@"+last.point] = true
	}
	pieces := b.pieces(last)
	if pieces[2].Offset != 2*repo.BlockBytes {
		t.Fatal(pieces)
	}
	hit := pieces[2].Frame // of p2

	affected := func(r *repo.Repo) map[string]bool {
		t.Helper()
		out, err := verify(t.Context(), r, VerifyRequest{ReadPercent: 100})
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]bool{}
		for _, p := range out.Problems {
			if p.Object == "segments/"+hit.Segment.String() {
				for _, at := range p.Affected {
					got[at] = true
				}
			}
		}
		return got
	}
	r, _ := b.faulty(flipAt("segments/"+hit.Segment.String(), int64(hit.Offset)))
	if got := affected(r); !maps.Equal(got, want) {
		t.Errorf("a flip is reported for %v, not for %v", got, want)
	}
	if err := b.repo.DeleteSegment(t.Context(), hit.Segment); err != nil {
		t.Fatal(err)
	}
	if got := affected(b.repo); !maps.Equal(got, want) {
		t.Errorf("a missing segment is reported for %v, not for %v", got, want)
	}
}

// processorTime of this process so far.
func processorTime(t testing.TB) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// peakHeap is how many bytes of live and not yet collected objects there were at most while fn ran.
func peakHeap(fn func()) uint64 {
	runtime.GC()
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	begin := sample[0].Value.Uint64()
	var peak atomic.Uint64
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		for tick := time.NewTicker(2 * time.Millisecond); ; {
			metrics.Read(s)
			peak.Store(max(peak.Load(), s[0].Value.Uint64()))
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
		}
	}()
	fn()
	cancel()
	<-done
	return peak.Load() - min(begin, peak.Load())
}

// BenchmarkVerifyGrowth verifies a volume with a number of points and one with ten times as many, and reports how
// many times the processor time, the bytes and the memory that took: of listing (a verify without data), and of
// reading all data. How large the second is against what is stored says whether data is read more than once.
func BenchmarkVerifyGrowth(b *testing.B) {
	testfs.NotShort(b, "it pushes hundreds of points")
	const few = 60
	small, large := grown(b, few), grown(b, 10*few)
	small.truth, large.truth = nil, nil // else the collector would let verify have as much again
	type cost struct{ cpu, read, heap, stored float64 }
	measure := func(w *bench, percent float64) cost {
		var c cost
		begun := processorTime(b)
		c.heap = float64(peakHeap(func() {
			out, asked := w.verifyCounted(VerifyRequest{ReadPercent: percent})
			c.read, c.stored = float64(asked.bytes), float64(out.SegmentBytes)
		}))
		c.cpu = (processorTime(b) - begun).Seconds()
		return c
	}
	for _, mode := range []struct {
		name    string
		percent float64
	}{{"list", 0}, {"read-data", 100}} {
		b.Run(mode.name, func(b *testing.B) {
			var s, l cost
			for b.Loop() {
				s, l = measure(small, mode.percent), measure(large, mode.percent)
			}
			b.ReportMetric(l.cpu*1000, "cpu-ms")
			b.ReportMetric(l.cpu/s.cpu, "x-cpu")
			b.ReportMetric(l.read/mib, "read-MiB")
			b.ReportMetric(l.read/s.read, "x-read")
			b.ReportMetric(l.read/l.stored, "read/stored")
			b.ReportMetric(l.heap/mib, "heap-MiB")
			b.ReportMetric(l.heap/s.heap, "x-heap")
		})
	}
}
