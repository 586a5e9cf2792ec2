package bench

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// maxSample is how many durations a Sample keeps. Beyond that it keeps a random
// part of them, all with the same chance, so that memory stays bounded.
const maxSample = 1 << 20

// Sample collects durations. The zero value is ready. It is not safe for
// concurrent use.
type Sample struct {
	ns   []int64
	seen int64
	max  int64
	sum  float64
	rng  *rand.Rand
}

// Add counts one duration.
func (s *Sample) Add(d time.Duration) {
	s.seen++
	s.max = max(s.max, int64(d))
	s.sum += float64(d)
	if len(s.ns) < maxSample {
		s.ns = append(s.ns, int64(d))
		return
	}

	if s.rng == nil {
		s.rng = rand.New(rand.NewPCG(1, 2))
	}

	if i := s.rng.Int64N(s.seen); i < maxSample {
		s.ns[i] = int64(d)
	}
}

// Join adds what another sample has collected.
func (s *Sample) Join(o *Sample) {
	if o == nil {
		return
	}
	for _, n := range o.ns {
		s.Add(time.Duration(n))
	}
}

// Dist describes durations, in seconds. Percentiles are exact (by nearest rank)
// up to a million durations.
type Dist struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"mean"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
	Max   float64 `json:"max"`
}

// Dist sorts and describes what was collected.
func (s *Sample) Dist() Dist {
	if s == nil || s.seen == 0 {
		return Dist{}
	}
	slices.Sort(s.ns)
	return Dist{
		Count: s.seen,
		Mean:  s.sum / float64(s.seen) / 1e9,
		P50:   seconds(quantile(s.ns, 0.50)),
		P99:   seconds(quantile(s.ns, 0.99)),
		Max:   seconds(s.max),
	}
}

// quantile is the nearest-rank quantile of sorted values: the smallest of them
// that at least the part q of all do not exceed.
func quantile(sorted []int64, q float64) int64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

func seconds(ns int64) float64 { return float64(ns) / 1e9 }
