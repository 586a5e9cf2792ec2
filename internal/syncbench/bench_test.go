package syncbench

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

var (
	benchPath    = flag.String("bench-path", "", "directory in which to measure; default: a temporary one")
	benchProfile = flag.String("bench-profile", "postgres", "profile to measure")
	benchRounds  = flag.Int("bench-rounds", 5, "rounds, each of one run with all that is measured and one of fio alone")
	benchLength  = flag.Duration("bench-length", 5*time.Second, "of a run")
	benchSize    = flag.Int64("bench-size", 256<<20, "bytes of all files")
)

// BenchmarkAgainstFio lets two take turns: runs as Pando makes them (reports each second, counters at all
// layers, looks at single syncs), and the command line that the report shows, by fio alone, which lays its files out
// itself. It prints both, and the ratio of the medians: the overhead of the measuring.
//
//	go test ./internal/syncbench -run '^$' -bench AgainstFio -benchtime 1x -v
func BenchmarkAgainstFio(b *testing.B) {
	need(b, "fio")
	dir := *benchPath
	if dir == "" {
		dir = b.TempDir()
	}
	for b.Loop() {
		var ours, alone, oursP99, aloneP99, oursP50, aloneP50 []float64
		our := func() {
			r := measure(b, Config{Path: dir, Profile: *benchProfile, Quick: true, Duration: *benchLength, SizeBytes: *benchSize})
			run := r.Runs[0]
			ours, oursP50, oursP99 = append(ours, run.WritesPerSecond), append(oursP50, run.Sync.P50), append(oursP99, run.Sync.P99)
		}
		d, err := define(*benchProfile)
		if err != nil {
			b.Fatal(err)
		}
		p, err := d.plan(*benchSize, d.Writers)
		if err != nil {
			b.Fatal(err)
		}
		fio := func() {
			s, err := newScratch(dir)
			if err != nil {
				b.Fatal(err)
			}
			// Its own layout, made durable: fio begins at once after it.
			command := p.command(s.dir, *benchLength)
			layout := append(command[1:len(command):len(command)], "--create_only=1", "--unlink=0")
			if out, err := exec.Command("fio", layout...).CombinedOutput(); err != nil {
				b.Fatalf("%v: %s", err, out)
			}
			if err := s.syncfs(); err != nil {
				b.Fatal(err)
			}
			out, err := exec.Command("fio", append(command[1:len(command):len(command)], "--output-format=json")...).Output()
			if err != nil {
				b.Fatal(err)
			}
			if err := s.remove(); err != nil {
				b.Fatal(err)
			}
			var r raw
			if err := json.Unmarshal(out[max(0, bytes.IndexByte(out, '{')):], &r); err != nil {
				b.Fatal(err)
			}
			iops, lat := 0.0, r.Jobs[0].Sync.Lat
			if p.Calls.Sync == "" {
				lat = r.Jobs[0].Write.Clat
			}
			for _, j := range r.Jobs {
				iops += j.Write.IOPS
			}
			alone, aloneP50, aloneP99 = append(alone, iops), append(aloneP50, lat.Percentile["50.000000"]/1e9), append(aloneP99, lat.Percentile["99.000000"]/1e9)
		}
		for i := range *benchRounds {
			if i%2 == 0 {
				our()
				fio()
			} else {
				fio()
				our()
			}
			fmt.Fprintf(os.Stderr, "round %d: Pando %.0f writes/s, p50 %s, p99 %s; fio alone %.0f, %s, %s\n",
				i+1, ours[i], words(oursP50[i]), words(oursP99[i]), alone[i], words(aloneP50[i]), words(aloneP99[i]))
		}
		b.ReportMetric(middle(ours), "pando-writes/s")
		b.ReportMetric(middle(alone), "fio-writes/s")
		b.ReportMetric(middle(ours)/middle(alone), "ratio")
		b.ReportMetric(middle(oursP50)/middle(aloneP50), "p50-ratio")
		b.ReportMetric(middle(oursP99)/middle(aloneP99), "p99-ratio")
	}
}
