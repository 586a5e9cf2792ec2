package syncbench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

// raw is what fio itself says at the end.
type raw struct {
	Jobs []struct {
		Write struct {
			IOPS  float64    `json:"iops"`
			Total int64      `json:"total_ios"`
			Clat  rawLatency `json:"clat_ns"`
		} `json:"write"`
		Sync struct {
			Lat rawLatency `json:"lat_ns"`
		} `json:"sync"`
	} `json:"jobs"`
}

type rawLatency struct {
	Min, Max, Mean float64
	N              int64
	Percentile     map[string]float64
}

// lastObject is the last of the objects that fio printed.
func lastObject(t *testing.T, out []byte) (r raw) {
	t.Helper()
	i := bytes.LastIndex(append([]byte("\n"), out...), []byte("\n{\n")) - 1
	if err := json.Unmarshal(out[i+1:], &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestFiguresAreFios: the report of a run has the figures that fio itself gives for it, of a profile that
// calls fdatasync, one that opens with O_DSYNC, and one of several jobs, which fio is let sum up by itself.
func TestFiguresAreFios(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 64<<20)
	for _, name := range []string{"postgres", "postgres-dsync", "innodb"} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "fio.json")
			script := `"$FIO" "$@" | tee ` + out + `; exit ${PIPESTATUS[0]}`
			if name == "innodb" {
				script = `"$FIO" "$@" --group_reporting=1 | tee ` + out + `; exit ${PIPESTATUS[0]}`
			}
			wrapFio(t, script)
			c := quick(dir, name)
			if name == "postgres" {
				c.Duration = 2 * time.Second // for a time line
			}
			r := measure(t, c)
			text, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			fios := lastObject(t, text)
			if len(fios.Jobs) != 1 {
				t.Fatalf("%d jobs", len(fios.Jobs))
			}
			j, got := fios.Jobs[0], r.Runs[0]
			want := j.Sync.Lat
			if name == "postgres-dsync" {
				want = j.Write.Clat
			} else if got.Write == nil || got.Write.P99 != j.Write.Clat.Percentile["99.000000"]/1e9 {
				t.Errorf("writes: %+v, fio says %+v", got.Write, j.Write.Clat)
			}
			t.Logf("fio: %+v, IOPS %v", want, j.Write.IOPS)
			for _, c := range []struct {
				what      string
				got, want float64
			}{
				{"p50", got.Sync.P50, want.Percentile["50.000000"] / 1e9},
				{"p95", got.Sync.P95, want.Percentile["95.000000"] / 1e9},
				{"p99", got.Sync.P99, want.Percentile["99.000000"] / 1e9},
				{"p99.9", got.Sync.P999, want.Percentile["99.900000"] / 1e9},
				{"min", got.Sync.Min, want.Min / 1e9},
				{"max", got.Sync.Max, want.Max / 1e9},
				{"count", float64(got.Sync.Count), float64(want.N)},
				{"writes", float64(got.Writes), float64(j.Write.Total)},
				{"IOPS", got.WritesPerSecond, j.Write.IOPS},
			} {
				if c.got != c.want || c.got == 0 {
					t.Errorf("%s: %v, fio says %v", c.what, c.got, c.want)
				}
			}
			if math.Abs(got.Sync.Mean-want.Mean/1e9) > 2e-9 {
				t.Errorf("mean: %v, fio says %v", got.Sync.Mean, want.Mean)
			}
			if name == "innodb" {
				return // fio sums up the seconds of the jobs, too: a reason not to let it do this
			}
			if got.SyncsPerSecond < 0.95*j.Write.IOPS || got.SyncsPerSecond > 1.05*j.Write.IOPS {
				t.Errorf("%v syncs a second with %v writes", got.SyncsPerSecond, j.Write.IOPS)
			}
			// The time line is the same syncs, but for those in the moment between two
			// looks of fio at its own jobs.
			sum, at := 0.0, 0.0
			for _, m := range got.Timeline {
				sum += m.Syncs * m.Length
				if m.At <= at || m.P50 > m.P99 || m.Max > got.Sync.Max {
					t.Errorf("%+v after %v", m, at)
				}
				at = m.At
			}
			if math.Abs(sum-float64(got.Syncs)) > 0.5 || at != got.Seconds {
				t.Errorf("a time line of %v syncs until %v, the run has %d until %v", sum, at, got.Syncs, got.Seconds)
			}
		})
	}
}

// TestJobsAreSummed: without group reporting fio shows each job, which must be added up.
func TestJobsAreSummed(t *testing.T) {
	object := func(jobs ...string) string { return "{\n\"jobs\" : [" + strings.Join(jobs, ",") + "]\n}\n" }
	job := func(ms, n1, n2 int) string {
		return fmt.Sprintf(`{"error":0, "job_runtime":%d, "write":{"io_bytes":%d, "iops":10.5, "total_ios":%d,
			"clat_ns":{"min":1,"max":9,"mean":5,"N":2,"bins":{"4":1,"6":1}}},
			"sync":{"lat_ns":{"min":%d, "max":%d, "mean":1500, "N":99, "bins":{"1000":%d, "2000":%d}}}}`,
			ms, 8192*(n1+n2), n1+n2, 1000-n1, 2000+n2, n1, n2)
	}
	var got []*sample
	notes, err := readSamples(strings.NewReader("fio: a note\n"+object(job(990, 3, 1),
		job(1000, 0, 2))+object(job(2000, 30, 10), job(2001, 0, 20))+"the end\n{\n \"jobs\" : [\n"), func(s *sample) error {
		got = append(got, s)
		return nil
	})
	if err != nil || notes != "fio: a note\nthe end\n" || len(got) != 2 {
		t.Fatalf("%d samples, %q, %v", len(got), notes, err)
	}
	s := got[1]
	if s.ms != 2001 || s.writes != 60 || s.bytes != 60*8192 || s.iops != 21 || s.sync.n != 60 || s.sync.min != 970 ||
		s.sync.max != 2020 || s.sync.sum != 60*1500 {
		t.Errorf("%+v", s)
	}
	d := s.sync.since(&got[0].sync)
	if d.n != 54 || d.bins[1000] != 27 || d.bins[2000] != 27 || d.max != 2020 {
		t.Errorf("%+v", d)
	}
	if p := s.sync.percentiles(0.5, 0.51, 1); !slices.Equal(p, []float64{1e-6, 2e-6, 2e-6}) {
		t.Errorf("percentiles %v", p)
	}
	for _, c := range []struct{ text, says string }{
		{object(`{"sync":{"lat_ns":{"bins":{"x":1}}}}`), "is not a latency"},
		{object(`{"job_runtime":"1"}`), "output of fio"},
		{"{\n]\n}\n", "output of fio"},
	} {
		if _, err := readSamples(strings.NewReader(c.text), func(*sample) error {
			return nil
		}); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.text, err)
		}
	}
}

// FuzzSamples: whatever is read, what comes of it is a run that a report can hold.
func FuzzSamples(f *testing.F) {
	if out, err := exec.Command("fio", "--name=x", "--ioengine=null", "--size=1m", "--rw=write", "--bs=64k",
		"--fdatasync=1", "--output-format=json+", "--directory="+f.TempDir()).Output(); err == nil {
		f.Add(out)
		f.Add(out[:len(out)/2])
	}
	f.Add([]byte("{\n\"jobs\":[{\"error\":28,\"job_runtime\":1e300,\"write\":{\"total_ios\":-1," +
		"\"iops\":1e308},\"sync\":{\"lat_ns\":{\"min\":-5,\"max\":1e30,\"mean\":1e308,\"bins\":{" +
		"\"9223372036854775807\":1e18,\"0\":3}}}}]\n}\n{\n\"jobs\":[]\n}\n"))
	f.Add([]byte("{\n\"jobs\":null\n}\n{\n}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var all []*sample
		_, _ = readSamples(bytes.NewReader(b), func(s *sample) error {
			all = append(all, s)
			return nil
		})
		if len(all) == 0 {
			return
		}
		for _, name := range []string{"postgres", "postgres-dsync"} {
			d, err := define(name)
			if err != nil {
				t.Fatal(err)
			}
			p, err := d.plan(0, 1)
			if err != nil {
				t.Fatal(err)
			}
			r := p.result(all)
			if r.Syncs < 0 || r.Writes < 0 || r.Seconds < 0 {
				t.Errorf("%+v", r)
			}
			if l := r.Sync; l.P50 > l.P95 || l.P95 > l.P99 || l.P99 > l.P999 || l.Count > 0 && len(l.Histogram) == 0 {
				t.Errorf("%+v", l)
			}
			for _, m := range r.Timeline {
				if m.Length <= 0 || m.Syncs < 0 {
					t.Errorf("%+v", m)
				}
			}
			if _, err := json.Marshal(r); err != nil { // NaN, infinity
				t.Error(err)
			}
		}
	})
}

func TestStalls(t *testing.T) {
	line := func(rates ...float64) []Moment {
		var out []Moment
		for i, r := range rates {
			out = append(out, Moment{At: float64(i + 1), Length: 1, Syncs: r, Max: 0.002})
		}
		return out
	}
	long := func(at int, max float64, m []Moment) []Moment { m[at].Max = max; return m }
	for _, c := range []struct {
		name string
		line []Moment
		want []string
	}{
		{"none", line(1000, 900, 1100, 260, 1000), nil},
		{"a slow second", line(1000, 1000, 240, 1000, 1000),
			[]string{"2-3 1.0 s at 24 % of the median rate; the longest sync took 2.0 ms"}},
		{"a hang of two seconds", long(3, 2.2, line(1000, 1000, 0, 20, 1000, 1000)),
			[]string{"2-4 2.0 s at 1 % of the median rate; the longest sync took 2.2 s"}},
		{"one long sync", long(1, 0.06, line(1000, 1000, 1000)), []string{"1-2 the longest sync took 60 ms"}},
		{"long, but not for this run", long(1, 0.049, line(1000, 1000, 1000)), nil},
		{"two stalls", line(1000, 0, 1000, 0, 1000),
			[]string{"1-2 1.0 s at 0 % of the median rate; the longest sync took 2.0 ms",
				"3-4 1.0 s at 0 % of the median rate; the longest sync took 2.0 ms"}},
		{"few syncs: chance", line(3, 2, 0, 4, 0, 3), nil},
		{"too short", line(1000, 0), nil},
		{"nothing", nil, nil},
	} {
		var got []string
		for _, s := range stalls(c.line, 0.003) {
			got = append(got, fmt.Sprintf("%v-%v %s", s.From, s.To, s.Words))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if got := stalls(long(1, 0.06, line(1000, 1000, 1000)), 0.007); len(got) != 0 {
		t.Errorf("60 ms with a p99.9 of 7 ms: %v", got)
	}
}

// TestShortEnd: fio's last report comes a moment after the one before it, and has no rate of its own.
func TestShortEnd(t *testing.T) {
	at := func(ms, n int64) *sample {
		return &sample{ms: ms, sync: counts{n: n, max: 1000, bins: map[int64]int64{1000: n}}}
	}
	pick := func(s *sample) *counts { return &s.sync }
	got := timeline([]*sample{at(990, 100), at(990, 100), at(1990, 200), at(2990, 300), at(3150, 303)}, pick)
	var says []string
	for _, m := range got {
		says = append(says, fmt.Sprintf("%v+%v %.1f", m.At, m.Length, m.Syncs))
	}
	if want := []string{"0.99+0.99 101.0", "1.99+1 100.0", "3.15+1.16 88.8"}; !slices.Equal(says, want) {
		t.Errorf("%q, want %q", says, want)
	}
}

// TestIndicative: a percentile needs ten latencies above it.
func TestIndicative(t *testing.T) {
	for n, want := range map[int64]string{
		0: "", 1: "p50 p95 p99 p999", 19: "p50 p95 p99 p999", 20: "p95 p99 p999", 199: "p95 p99 p999", 200: "p99 p999",
		999: "p99 p999", 1000: "p999", 9999: "p999", 10_000: "",
	} {
		if got := strings.Join(indicative(n), " "); got != want {
			t.Errorf("%d latencies: %q are indicative, want %q", n, got, want)
		}
	}
}
