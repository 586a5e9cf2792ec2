package syncbench

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"pando/internal/stack"
)

var (
	benchPath    = flag.String("bench-path", "", "directory in which to measure; default: a temporary one")
	benchProfile = flag.String("bench-profile", "postgres", "profile to measure")
	benchRounds  = flag.Int("bench-rounds", 15, "rounds, each of one run of every kind")
	benchLength  = flag.Duration("bench-length", 2*time.Second, "of a run")
	benchSize    = flag.Int64("bench-size", 64<<20, "bytes of all files")
)

// kinds of runs that take turns.
var benchKinds = []string{"fio alone", "its reports each second", "and the proof"}

// taken is what one run came to.
type taken struct{ writes, p50, p99, cpu float64 }

// BenchmarkOverhead lets three take turns on the same files: the profile's fio alone, as its command line
// is; fio with its reports each second; and all that is done for a report: counters at all
// layers and looks at single syncs, too. It prints each run, and the ratios of the medians to those of fio alone. On
// a machine that others use the throughput says little, and the processor time of fio for each write,
// which is where the counting is done, more: its growth, divided by the time of a write with its sync,
// is the overhead.
//
//	go test ./internal/syncbench -run '^$' -bench Overhead -benchtime 1x
func BenchmarkOverhead(b *testing.B) {
	need(b, "fio")
	dir := *benchPath
	if dir == "" {
		dir = b.TempDir()
	}
	d, err := define(*benchProfile)
	if err != nil {
		b.Fatal(err)
	}
	p, err := d.plan(*benchSize, d.Writers)
	if err != nil {
		b.Fatal(err)
	}
	s, err := newScratch(dir)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := s.remove(); err != nil {
			b.Error(err)
		}
	}()
	if err := s.layout(b.Context(), p.files, nil); err != nil {
		b.Fatal(err)
	}
	program, _, err := fioVersion(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	below, err := stack.Of(b.Context(), dir)
	if err != nil {
		b.Fatal(err)
	}
	x := &bench{Config: Config{Duration: *benchLength}, definition: &d, program: program, scratch: s, stack: below}
	for b.Loop() {
		runs := make([][]taken, len(benchKinds))
		for round := range *benchRounds {
			line := fmt.Sprintf("round %d:", round+1)
			for i := range benchKinds {
				kind := (i + round) % len(benchKinds)
				r := x.take(b, p, kind)
				runs[kind] = append(runs[kind], r)
				line += fmt.Sprintf(" [%s: %.0f writes/s, p50 %s, p99 %s, %.1f µs of processor time each]", benchKinds[kind], r.writes, words(r.p50), words(r.p99), r.cpu*1e6)
			}
			fmt.Fprintln(os.Stderr, line)
		}
		median := func(kind int, what func(taken) float64) float64 {
			var v []float64
			for _, r := range runs[kind] {
				v = append(v, what(r))
			}
			return middle(v)
		}
		writes := func(r taken) float64 { return r.writes }
		p50 := func(r taken) float64 { return r.p50 }
		cpu := func(r taken) float64 { return r.cpu }
		for kind, name := range benchKinds {
			fmt.Fprintf(os.Stderr, "%s: median of %d: %.0f writes/s (ratio %.3f), p50 %s (%.3f), %.1f µs of processor time each (%+.1f µs: %+.1f %% of the time of a write)\n", name, *benchRounds,
				median(kind, writes), median(kind, writes)/median(0, writes), words(median(kind, p50)), median(kind, p50)/median(0, p50),
				1e6*median(kind, cpu), 1e6*(median(kind, cpu)-median(0, cpu)), 100*(median(kind, cpu)-median(0, cpu))*median(0, writes)/float64(p.Writers))
		}
		b.ReportMetric(median(2, writes)/median(0, writes), "ratio")
		b.ReportMetric(100*(median(2, cpu)-median(0, cpu))*median(0, writes)/float64(p.Writers), "%-by-processor-time")
	}
}

// take makes one run of a kind.
func (x *bench) take(b *testing.B, p *plan, kind int) taken {
	b.Helper()
	before := childrenTime(b)
	var r taken
	switch kind {
	case 0:
		if p.Calls.Unwritten {
			n, err := newRenewer(x.scratch, p)
			if err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			go func() { _ = n.run(ctx) }()
		}
		cmd := exec.Command(x.program, append(p.arguments(".", x.Duration), "--output-format=json")...)
		cmd.Dir = x.scratch.dir
		out, err := cmd.Output()
		if err != nil {
			b.Fatal(err)
		}
		var said raw
		if err := json.Unmarshal(out[max(0, bytes.IndexByte(out, '{')):], &said); err != nil {
			b.Fatal(err)
		}
		lat := said.Jobs[0].Sync.Lat
		if p.Calls.Sync == "" {
			lat = said.Jobs[0].Write.Clat
		}
		r.p50, r.p99 = lat.Percentile["50.000000"]/1e9, lat.Percentile["99.000000"]/1e9
		var total int64
		for _, j := range said.Jobs {
			r.writes += j.Write.IOPS
			total += j.Write.Total
		}
		r.cpu = (childrenTime(b) - before) / float64(total)
		return r
	case 1:
		samples, err := x.start(b.Context(), p, x.Duration, "", (*exec.Cmd).Start, nil)
		if err != nil {
			b.Fatal(err)
		}
		run := p.result(samples)
		r = taken{writes: run.WritesPerSecond, p50: run.Sync.P50, p99: run.Sync.P99, cpu: (childrenTime(b) - before) / float64(run.Writes)}
	case 2:
		run, err := x.prove(b.Context(), p, "")
		if err != nil {
			b.Fatal(err)
		}
		r = taken{writes: run.WritesPerSecond, p50: run.Sync.P50, p99: run.Sync.P99, cpu: (childrenTime(b) - before) / float64(run.Writes)}
	}
	return r
}

// childrenTime is the processor time, in seconds, of all children that have been waited for.
func childrenTime(b *testing.B) float64 {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
