package extent

import (
	"math/rand/v2"
	"testing"
)

// TestJoiner: whatever small pieces a map has, each byte that differs is in a range,
// and ranges of zeros hold nothing but zeros that differ. Real filesystems here have
// blocks as large as ranges are rounded to; others have smaller ones.
func TestJoiner(t *testing.T) {
	const unit = 512
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		size := int64(1 + rng.IntN(40*BlockBytes))
		state := make([]byte, (size+unit-1)/unit) // of each unit: same, zero, data
		for i := 0; i < len(state); {
			s, n := byte(rng.IntN(3)), 1+rng.IntN(40)
			for ; n > 0 && i < len(state); n-- {
				state[i] = s
				i++
			}
		}
		var got []Range
		j := &joiner{size: size, yield: func(r Range, _ error) bool { got = append(got, r); return true }}
		for i := 0; i < len(state); {
			k := i
			for k < len(state) && state[k] == state[i] && (k == i || rng.IntN(9) > 0) {
				k++
			}
			if state[i] > 0 {
				j.add(int64(i)*unit, min(int64(k)*unit, size), state[i] == 1)
			}
			i = k
		}
		j.flush()
		in := make([]byte, len(state))
		last := Range{Offset: -1}
		for _, r := range got {
			if r.Length <= 0 || r.Offset%BlockBytes != 0 || r.End()%BlockBytes != 0 && r.End() != size || r.End() > size {
				t.Fatalf("seed %d: %+v of %d bytes", seed, r, size)
			}
			if r.Offset < last.End() || r.Offset == last.End() && r.Zero == last.Zero && last.Offset >= 0 {
				t.Fatalf("seed %d: %+v behind %+v", seed, r, last)
			}
			last = r
			for i := r.Offset / unit; i*unit < r.End(); i++ {
				in[i] = 2
				if r.Zero {
					in[i] = 1
				}
			}
		}
		for i, s := range state {
			switch {
			case s == 2 && in[i] != 2, s == 1 && in[i] == 0, in[i] == 1 && s != 1:
				t.Fatalf("seed %d: unit %d is %d, and in a range of %d: %v\n%v", seed, i, s, in[i], state, got)
			}
			// No more than the block around it.
			const n = BlockBytes / unit
			from := i / n * n
			idle := true
			for _, x := range state[from:min(from+n, len(state))] {
				idle = idle && x == 0
			}
			if idle && in[i] != 0 {
				t.Fatalf("seed %d: unit %d is listed, of a block that is the same: %v\n%v", seed, i, state, got)
			}
		}
	}
}
