package diagnose

import (
	"context"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkOverhead shows what being watched costs a load that syncs: its rate in
// slices of time with and without, in turns, the ratio of the medians, and the
// processor time that the watching takes itself. Run it with -benchtime=40x or so on a
// machine that does little else.
func BenchmarkOverhead(b *testing.B) {
	needTraces(b)
	f := makeFresh(b, "ext4", b.TempDir(), 128*mib, nil)
	startFio(b, "", syncLoad(f.dir)...)
	f.writing(b, 1000)
	var cpu []float64
	rate := func(d time.Duration, watch bool) float64 {
		if watch {
			ctx, cancel := context.WithCancel(b.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				if _, err := Watch(ctx, Request{Path: f.dir, For: time.Hour}); err != nil {
					b.Error(err)
				}
			}()
			defer func() { cancel(); <-done }()
			// Beginning and ending cost something once; this is about what goes on.
			time.Sleep(time.Second)
		}
		before, err := f.dev.Stat()
		if err != nil {
			b.Fatal(err)
		}
		used := processorTime(b)
		start := time.Now()
		time.Sleep(d)
		after, err := f.dev.Stat()
		if err != nil {
			b.Fatal(err)
		}
		if watch {
			cpu = append(cpu, (processorTime(b)-used).Seconds()/time.Since(start).Seconds())
		}
		return float64(after.Flushes-before.Flushes) / time.Since(start).Seconds()
	}
	const slice = 2 * time.Second
	var with, without, ratios []float64
	for range b.N {
		a := rate(slice, false)
		c := rate(slice, true)
		with, without, ratios = append(with, c), append(without, a), append(ratios, c/a)
	}
	median := func(l []float64) float64 {
		slices.Sort(l)
		return l[len(l)/2]
	}
	b.ReportMetric(median(without), "syncs/s")
	b.ReportMetric(median(with), "syncs/s-watched")
	b.ReportMetric(median(with)/median(without), "ratio")
	b.ReportMetric(median(ratios), "ratio-of-pairs")
	b.ReportMetric(100*median(cpu), "%-of-a-processor")
	b.ReportMetric(0, "ns/op")
}

// processorTime is what this process has used.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
