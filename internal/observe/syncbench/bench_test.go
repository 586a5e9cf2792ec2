package syncbench

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"pando/internal/observe/stack"
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
// a machine that others use the throughput says little, and the processor time of fio's threads for each
// write, which is where the counting is done, more: its growth, divided by the time of a write with its
// sync, is the overhead.
//
//	go test ./internal/observe/syncbench -run '^$' -bench Overhead -benchtime 1x
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
	if err := s.layout(b.Context(), p.files); err != nil {
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
	x := &bench{Config: Config{Duration: *benchLength}, definition: &d, scratch: s, stack: below}
	x.program, x.named = s.own(program)
	if !x.named {
		b.Log("fio has no name of its own here")
	}
	for b.Loop() {
		runs := make([][]taken, len(benchKinds))
		for round := range *benchRounds {
			line := fmt.Sprintf("round %d:", round+1)
			for i := range benchKinds {
				kind := (i + round) % len(benchKinds)
				r := x.take(b, p, kind)
				runs[kind] = append(runs[kind], r)
				line += fmt.Sprintf(" [%s: %.0f writes/s, p50 %s, p99 %s, %.1f µs of processor time each]", benchKinds[kind],
					r.writes, words(r.p50), words(r.p99), r.cpu*1e6)
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
		least := func(kind int, what func(taken) float64) float64 {
			v := what(runs[kind][0])
			for _, r := range runs[kind] {
				v = min(v, what(r))
			}
			return v
		}
		for kind, name := range benchKinds {
			fmt.Fprintf(os.Stderr, "%s: the least disturbed: p50 %s (%.3f), %.1f µs of processor time each\n", name,
				words(least(kind, p50)), least(kind, p50)/least(0, p50), 1e6*least(kind, cpu))
			fmt.Fprintf(os.Stderr,
				"%s: median of %d: %.0f writes/s (ratio %.3f), p50 %s (%.3f), %.1f µs of processor time each (%+.1f µs: %+.1f "+
					"%% of the time of a write)\n", name, *benchRounds,
				median(kind, writes), median(kind, writes)/median(0, writes), words(median(kind, p50)), median(kind, p50)/median(0,
					p50),
				1e6*median(kind, cpu), 1e6*(median(kind, cpu)-median(0, cpu)), 100*(median(kind, cpu)-median(0, cpu))*median(0,
					writes)/float64(p.Writers))
		}
		b.ReportMetric(median(2, writes)/median(0, writes), "ratio")
		b.ReportMetric(100*(median(2, cpu)-median(0, cpu))*median(0, writes)/float64(p.Writers), "%-by-processor-time")
	}
}

// take makes one run of a kind.
func (x *bench) take(b *testing.B, p *plan, kind int) taken {
	b.Helper()
	var last *sample
	seen := func(s *sample) { last = s }
	switch kind {
	case 0:
		ctx, cancel := context.WithCancel(b.Context())
		defer cancel()
		if p.Calls.Unwritten {
			n, err := newRenewer(x.scratch, p)
			if err != nil {
				b.Fatal(err)
			}
			go func() { _ = n.run(ctx) }()
		}
		cmd := exec.Command(x.program, append(p.arguments(".", x.Duration), "--output-format=json+")...)
		cmd.Dir = x.scratch.dir
		out, err := cmd.Output()
		if err != nil {
			b.Fatal(err)
		}
		if _, err := readSamples(bytes.NewReader(out), func(s *sample) error { seen(s); return nil }); err != nil {
			b.Fatal(err)
		}
	case 1:
		x.seen = seen
		if _, err := x.start(b.Context(), p, x.Duration, "", (*exec.Cmd).Start, nil); err != nil {
			b.Fatal(err)
		}
	case 2:
		x.seen = seen
		if _, err := x.prove(b.Context(), p, ""); err != nil {
			b.Fatal(err)
		}
	}
	l := p.result([]*sample{last})
	return taken{writes: last.iops, p50: l.Sync.P50, p99: l.Sync.P99, cpu: last.cpu / float64(last.writes)}
}
