package diagnose

import (
	"context"
	"fmt"
	"path/filepath"
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
	l := startFio(b, "", syncLoad(f.dir)...)
	f.writing(b, 1000)
	// What a sync costs its thread in processor time does not depend on who else is
	// waiting for a processor.
	onCPU := func() float64 {
		sum := 0.0
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", l.pid()))
		if err != nil {
			b.Fatal(err)
		}
		for _, p := range tasks {
			var ns float64
			if _, err := fmt.Sscan(slurp(p), &ns); err == nil {
				sum += ns
			}
		}
		return sum
	}
	var cpu []float64
	perSync := map[bool][]float64{}
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
		start, fio := time.Now(), onCPU()
		time.Sleep(d)
		after, err := f.dev.Stat()
		if err != nil {
			b.Fatal(err)
		}
		perSync[watch] = append(perSync[watch], (onCPU()-fio)/float64(max(after.Flushes-before.Flushes, 1)))
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
	b.ReportMetric(median(perSync[false]), "fio-ns/sync")
	b.ReportMetric(median(perSync[true]), "fio-ns/sync-watched")
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
