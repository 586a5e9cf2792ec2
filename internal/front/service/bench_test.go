package service

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"

	"golang.org/x/sys/unix"
)

// BenchmarkClone compares a clone with its mount, and its destruction, through the service, by a call of the engine,
// and by starting the command. The service may take at most 2 ms more than the engine, and must be at least three times
// as fast as the command. PANDO_TEST_BINARY names the command.
func BenchmarkClone(b *testing.B) {
	s := withGolden(b, reflink.Name)
	ctx := context.Background()
	b.Run("engine", func(b *testing.B) {
		for i := range b.N {
			name := ref.MustName(fmt.Sprint("e", i))
			_, err := s.e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "web"}, Name: name, Mount: true})
			must(b, err)
			must(b, only(s.e.Destroy(ctx, Same{}.destroy(name.Ref()))))
		}
	})
	b.Run("service", func(b *testing.B) {
		for i := range b.N {
			name := fmt.Sprint("s", i)
			_, err := s.c.Clone(ctx, client.CloneRequest{From: "web", Name: name, Key: name, Make: client.Make{Mount: true}})
			must(b, err)
			must(b, s.c.Destroy(ctx, name, ""))
		}
	})
	b.Run("command", func(b *testing.B) {
		pando := os.Getenv("PANDO_TEST_BINARY")
		if pando == "" {
			b.Skip("SKIPPED: PANDO_TEST_BINARY is not set: make build, and set it to bin/pando")
		}
		for i := range b.N {
			name := fmt.Sprint("c", i)
			for _, args := range [][]string{{"clone", "web", name, "--mount"}, {"destroy", name}} {
				cmd := exec.Command(pando, append([]string{"--pool", s.e.Dir(), "-q"}, args...)...)
				if out, err := cmd.CombinedOutput(); err != nil {
					b.Fatalf("%v: %s", err, out)
				}
			}
		}
	})
}

var serial atomic.Int64 // of names

// BenchmarkCloneAtOnce is BenchmarkClone with as many clients as the machine runs at a time, and more.
func BenchmarkCloneAtOnce(b *testing.B) {
	s := withGolden(b, reflink.Name)
	b.SetParallelism(16)
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if err := s.cycle("v" + fmt.Sprint(serial.Add(1))); err != nil {
				b.Error(err)
			}
		}
	})
}

// BenchmarkScrape reads the metrics of a pool with PANDO_BENCH_VOLUMES volumes (default: 1000) in 20 goldens, without
// and with metrics of the 100 largest volumes. 47,000 must take less than 50 ms.
func BenchmarkScrape(b *testing.B) {
	n := 1000
	if text := os.Getenv("PANDO_BENCH_VOLUMES"); text != "" {
		var err error
		n, err = strconv.Atoi(text)
		must(b, err)
	}
	freshScrapes(b)
	s := serve(b, newPool(b, plain.Name))
	for g := range 20 {
		name := ref.MustName(fmt.Sprint("golden-", g))
		_, err := s.c.Import(b.Context(), name.String(), archive(b, map[string]string{"file": "v1"}), client.ImportOptions{})
		must(b, err)
		_, err = s.e.Clone(b.Context(), engine.CloneRequest{From: name.Ref(), Name: ref.MustName(fmt.Sprint("v", g)),
			Count: n / 20})
		must(b, err)
	}
	s.scrape() // which makes the index

	for _, volumes := range []int{0, 100} {
		b.Run(fmt.Sprint("volumes=", volumes), func(b *testing.B) {
			s.MetricsVolumes = volumes
			var took []time.Duration
			before := cpuTime(b)
			for range b.N {
				begun := time.Now()
				if status, text := s.raw("GET", metricsPath, ""); status != 200 || !strings.Contains(text, "pando_objects{") {
					b.Fatalf("status %d: %s", status, text)
				}
				took = append(took, time.Since(begun))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "median-ms")
			b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/1000/float64(b.N), "cpu-ms")
		})
	}
}

// cpuTime returns the processor time of this process so far: it does not depend on what else runs.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	must(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
