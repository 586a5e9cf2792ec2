package diagnose

import "math/bits"

// subBuckets divides each power of two: a bucket is about 3 % wide.
const subBuckets = 32

// histogram counts durations in nanoseconds. Its size does not depend on their number.
type histogram struct {
	counts []uint32
	n      int64
	sum    float64
	most   uint64
}

func bucket(ns uint64) int {
	if ns < subBuckets {
		return int(ns)
	}
	shift := bits.Len64(ns) - 6 // so that ns>>shift is from 32 to 63
	return (shift+1)*subBuckets + int(ns>>shift) - subBuckets
}

// middle returns the middle of a bucket.
func middle(b int) float64 {
	if b < subBuckets {
		return float64(b)
	}
	shift := b/subBuckets - 1
	low := uint64(b%subBuckets+subBuckets) << shift
	return float64(low) + float64(uint64(1)<<shift)/2
}

func (h *histogram) add(ns uint64) {
	b := bucket(ns)
	if b >= len(h.counts) {
		more := make([]uint32, b+subBuckets)
		copy(more, h.counts)
		h.counts = more
	}
	h.counts[b]++
	h.n++
	h.sum += float64(ns)
	h.most = max(h.most, ns)
}

// quantile returns a quantile in seconds; 0 if the histogram is empty.
func (h *histogram) quantile(q float64) float64 {
	if h.n == 0 {
		return 0
	}
	rank := int64(q * float64(h.n))
	var seen int64
	for b, c := range h.counts {
		if seen += int64(c); seen > rank {
			return min(middle(b), float64(h.most)) / 1e9
		}
	}
	return float64(h.most) / 1e9
}

func (h *histogram) mean() float64 {
	if h.n == 0 {
		return 0
	}
	return h.sum / float64(h.n) / 1e9
}
