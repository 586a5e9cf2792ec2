package reflink

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// TestPlanPieces checks on random maps that a plan covers all data in order,
// shares only what has a place on disk, and has few pieces.
func TestPlanPieces(t *testing.T) {
	const block = 4096
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var data, fixed []span
		off := int64(0)
		for range 1 + rng.IntN(3000) {
			off += int64(rng.IntN(4)) * block * int64(1+rng.IntN(64))
			end := off + block*int64(1+rng.IntN(300))
			if rng.IntN(3) > 0 {
				data = append(data, span{off, end})
				if rng.IntN(4) > 0 {
					mid := off + (end-off)/2/block*block
					if mid > off {
						fixed = append(fixed, span{off, mid})
					}
					fixed = append(fixed, span{mid, end})
				}
			} else {
				fixed = append(fixed, span{off, end}) // on disk, but not data
			}
			off = end
		}
		size := off + block
		l := layout{data, fixed, size}
		plan := l.plan(l.fewExtents())
		var total, copied int64
		for _, d := range data {
			total += d.len()
		}
		last := int64(0)
		i := 0
		covered := int64(0)
		for _, p := range plan {
			if p.off < last || p.end <= p.off || p.end > size {
				t.Fatalf("seed %d: pieces overlap or are empty: %v", seed, p)
			}
			last = p.end
			if p.share && !inside(fixed, p.span) {
				t.Fatalf("seed %d: shares %v, which has no place on disk", seed, p)
			}
			if !p.share {
				copied += p.len()
			}
			for ; i < len(data) && data[i].off < p.end; i++ {
				d := data[i]
				covered += min(d.end, p.end) - max(d.off, p.off)
				if d.end > p.end {
					break // goes on in the next piece
				}
			}
		}
		if covered != total {
			t.Fatalf("seed %d: covers %d of %d bytes of data", seed, covered, total)
		}
		if limit := l.fewExtents(); len(plan) > limit &&
			copied-total > max(minFillBytes, total/maxFillPart) {
			t.Fatalf("seed %d: %d pieces, %d allowed, and %d bytes of holes filled", seed, len(plan), limit, copied-total)
		}
	}
}

func inside(all []span, s span) bool {
	for _, a := range all {
		if a.off <= s.off && s.end <= a.end {
			return true
		}
	}
	return false
}

func TestPlanKeepsLongExtentsShared(t *testing.T) {
	const mb = 1 << 20
	data := []span{{0, 1024 * mb}}
	var fixed []span
	for off := int64(0); off < 512*mb; off += 4096 { // fragmented half
		fixed = append(fixed, span{off, off + 4096})
	}
	fixed = append(fixed, span{512 * mb, 1024 * mb})
	l := layout{data, fixed, 1024 * mb}
	plan := l.plan(l.fewExtents())
	want := []piece{{span{0, 512 * mb}, false}, {span{512 * mb, 1024 * mb}, true}}
	if len(plan) != 2 || plan[0] != want[0] || plan[1] != want[1] {
		t.Errorf("plan %v, wanted %v", plan, want)
	}
}

// TestCopyRangeFails: what cannot be read or written is not left out.
func TestCopyRangeFails(t *testing.T) {
	open := func(name string, flag int) *os.File {
		f, err := os.OpenFile(filepath.Join(t.TempDir(), name), flag|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	whole := open("whole", os.O_RDWR)
	if err := whole.Truncate(8192); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ dst, src *os.File }{
		"unreadable": {open("dst", os.O_RDWR), open("src", os.O_WRONLY)},
		"too short":  {open("dst", os.O_RDWR), open("src", os.O_RDWR)},
		"unwritable": {open("dst", os.O_RDONLY), whole},
	} {
		if err := copyRange(t.Context(), c.dst, c.src, span{0, 8192}, make([]byte, 4096), func(int64) {}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := copyRange(t.Context(), open("dst", os.O_RDWR), whole, span{0, 8192}, make([]byte, 4096),
		func(int64) {}); err != nil {
		t.Error(err)
	}
}
