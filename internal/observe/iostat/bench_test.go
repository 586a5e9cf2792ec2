package iostat

import (
	"math"
	"os"
	"slices"
	"testing"
	"time"

	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// BenchmarkWatching measures what watching costs a program that syncs all the time. Of
// two volumes one is watched, and rounds on both take turns; halfway the other one is watched, so
// that neither a difference between them nor a drift of the disk counts. Rounds are short, so that
// the median is of those that nothing else disturbed. Samples are taken once a round, which
// is far more often than anybody does, and not timed.
//
//	go test ./internal/observe/iostat -run '^$' -bench Watching -benchtime 1000x
func BenchmarkWatching(b *testing.B) {
	pool := testfs.XFS(b, 1<<30)
	for _, kind := range []string{"ext4", "xfs"} {
		dirs := []string{volume(b, pool, kind, kind+"0"), volume(b, pool, kind, kind+"1")}
		files := []*os.File{prepared(b, dirs[0]), prepared(b, dirs[1])}
		b.Run(kind, func(b *testing.B) {
			const n = 50
			w := watcher(b, Target{Name: "v", Path: dirs[0]})
			defer w.Close()
			round := func(i int, watched bool) float64 {
				start := time.Now()
				overwrite(b, files[i], n)
				took := time.Since(start).Seconds()
				if watched {
					if s := target(b, w.Sample(), "v").Syncs; s == nil || s.Count < n {
						b.Fatalf("%d syncs were not all seen: %+v", n, s)
					}
				}
				return took
			}
			ratio, with, without := 1.0, 0.0, 0.0
			for i := range dirs {
				if errs := w.Set(b.Context(), []Target{{Name: "v", Path: dirs[i]}}); len(errs) > 0 {
					b.Fatal(errs)
				}
				round(i, true)
				round(1-i, false)
				var on, off []float64
				for k := range (b.N + 1) / 2 {
					for _, watched := range []bool{k%2 == 0, k%2 != 0} {
						if watched {
							on = append(on, round(i, true))
						} else {
							off = append(off, round(1-i, false))
						}
					}
				}
				ratio *= median(on) / median(off)
				with, without = with+median(on)/2, without+median(off)/2
			}
			b.ReportMetric(n/without, "syncs/s-without")
			b.ReportMetric(n/with, "syncs/s-with")
			b.ReportMetric(100*(math.Sqrt(ratio)-1), "%-overhead")
		})
	}
}

// BenchmarkSyncCost measures the same where it shows: on an ext4 that does not flush
// (barrier=0), a fdatasync of a clean file costs next to nothing but the events. The fastest
// rounds count, so other load does not.
//
//	go test ./internal/observe/iostat -run '^$' -bench SyncCost -benchtime 20x
func BenchmarkSyncCost(b *testing.B) {
	dir := volume(b, testfs.XFS(b, 1<<30), "ext4", "v")
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, "barrier=0"); err != nil {
		b.Fatal(err)
	}
	f := prepared(b, dir)
	const n = 3000
	round := func() float64 {
		start := time.Now()
		for range n {
			if err := unix.Fdatasync(int(f.Fd())); err != nil {
				b.Fatal(err)
			}
		}
		return float64(time.Since(start).Nanoseconds()) / n
	}
	off, on := math.Inf(1), math.Inf(1)
	for range b.N {
		off = min(off, round())
		w := watcher(b, Target{Name: "v", Path: dir})
		round() // the buffers are new
		on = min(on, round())
		if s := target(b, w.Sample(), "v").Syncs; s == nil || s.Count != 2*n {
			b.Fatalf("%d syncs were not all seen: %+v", 2*n, s)
		}
		w.Close()
	}
	b.ReportMetric(off, "ns/sync-without")
	b.ReportMetric(on, "ns/sync-with")
	b.ReportMetric(0, "ns/op")
}

func median(v []float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
