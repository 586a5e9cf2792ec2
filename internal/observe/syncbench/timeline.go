package syncbench

import (
	"fmt"
	"slices"
	"time"
)

// What makes a stretch of the time line a stall.
const (
	// stallRate is the part of the median rate below which an interval is one.
	stallRate = 0.25
	// stallCounts: with fewer syncs than this in a usual interval chance alone makes
	// intervals with none, and rates say nothing.
	stallCounts = 10
	// stallLength: a single sync is a stall if it took so many times the run's
	// p99.9, and at least stallLeast.
	stallLength = 10
	stallLeast  = 50 * time.Millisecond
)

// interval is how often fio reports.
const interval = time.Second

// timeline makes the run's time line of fio's samples, each of which tells about the whole run so
// far. pick chooses the distribution of what syncs.
func timeline(samples []*sample, pick func(*sample) *counts) []Moment {
	out := []Moment{}
	before := &sample{}
	for i, s := range samples {
		length := s.ms - before.ms
		if length <= 0 {
			continue
		}

		// fio's last report comes a moment after the last of its intervals. Too short
		// for a rate of its own, it is part of the one before it.
		if i+1 < len(samples) {
			if last := samples[len(samples)-1].ms - s.ms; i+2 == len(samples) && last < interval.Milliseconds()/2 {
				continue
			}
		}

		d := pick(s).since(pick(before))
		p := d.percentiles(0.50, 0.99)
		out = append(out, Moment{
			At: float64(s.ms) / 1000, Length: float64(length) / 1000, Syncs: float64(d.n) * 1000 / float64(length),
			P50: p[0], P99: p[1], Max: seconds(d.max),
		})
		before = s
	}

	return out
}

// stalls finds the stretches in which next to nothing was synced, or a single sync took far
// longer than nearly all: intervals at less than a quarter of the median rate, if
// a usual one has at least 10 syncs; and those in which a sync ended that took 50 ms or more and over
// 10 times the run's p99.9. What is side by side is one.
func stalls(line []Moment, p999 float64) []Stall {
	out := []Stall{}
	if len(line) < 3 {
		return out // nothing is usual
	}

	rates, counts := make([]float64, len(line)), make([]float64, len(line))
	for i, m := range line {
		rates[i], counts[i] = m.Syncs, m.Syncs*m.Length
	}

	median := middle(rates)
	usual := middle(counts)
	limit := max(stallLength*p999, stallLeast.Seconds())
	slow := func(m Moment) bool { return usual >= stallCounts && m.Syncs < stallRate*median }
	long := func(m Moment) bool { return m.Max > limit }
	for i := 0; i < len(line); i++ {
		if !slow(line[i]) && !long(line[i]) {
			continue
		}

		s := Stall{From: line[i].At - line[i].Length}
		var syncs, slowFor, longest float64
		for ; i < len(line) && (slow(line[i]) || long(line[i])); i++ {
			if slow(line[i]) {
				slowFor += line[i].Length
				syncs += line[i].Syncs * line[i].Length
			}
			longest = max(longest, line[i].Max)
			s.To = line[i].At
		}

		s.From = max(s.From, 0)
		if slowFor > 0 {
			s.Words = fmt.Sprintf("%.1f s at %.0f %% of the median rate; ", slowFor, 100*syncs/slowFor/median)
		}

		s.Words += fmt.Sprintf("the longest sync took %s", words(longest))
		out = append(out, s)
	}

	return out
}

func middle(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if len(v)%2 == 0 {
		return (v[len(v)/2-1] + v[len(v)/2]) / 2
	}
	return v[len(v)/2]
}

// words is a time for people.
func words(s float64) string {
	switch {
	case s >= 1:
		return fmt.Sprintf("%.1f s", s)
	case s >= 0.01:
		return fmt.Sprintf("%.0f ms", s*1e3)
	case s >= 0.001:
		return fmt.Sprintf("%.1f ms", s*1e3)
	}
	return fmt.Sprintf("%.0f µs", s*1e6)
}

// result makes a Run of fio's samples, of which the last one is final.
func (p *plan) result(samples []*sample) Run {
	last := samples[len(samples)-1]
	r := Run{
		Writers: p.Writers, Seconds: float64(last.ms) / 1000,
		Writes: last.writes, Bytes: last.bytes, WritesPerSecond: last.iops,
	}
	pick := func(s *sample) *counts { return &s.sync }
	if p.Calls.Sync == "" {
		pick = func(s *sample) *counts { return &s.write }
	} else {
		w := last.write.latency()
		r.Write = &w
	}

	r.Sync = pick(last).latency()
	r.Syncs = r.Sync.Count
	if r.Seconds > 0 {
		r.SyncsPerSecond = float64(r.Syncs) / r.Seconds
	}

	r.Timeline = timeline(samples, pick)
	r.Stalls = stalls(r.Timeline, r.Sync.P999)
	return r
}
