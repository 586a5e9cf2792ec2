package replicate

import (
	"errors"
	"slices"
	"testing"

	"pando/internal/engine"
)

// TestReadAheadAsksForAllInTime: the kernel is asked for every byte that is data, once, in order, before it is read,
// and never for more than aheadBytes that were not read yet.
func TestReadAheadAsksForAllInTime(t *testing.T) {
	last := errors.New("last")
	for name, ranges := range map[string][]engine.Range{
		"one":       {{Offset: mib, Length: 200*mib + 4096}},
		"scattered": blocksApart(5 * aheadRanges),
		"holes": {
			{Offset: 0, Length: 4096}, {Offset: mib, Length: 1 << 40, Zero: true}, {Offset: 1<<40 + mib, Length: 64 * mib},
		},
		"none": nil,
	} {
		t.Run(name, func(t *testing.T) {
			var asked, given []engine.Range
			left, read := slices.Clone(ranges), int64(0)
			a := &readAhead{
				nextRange: func() (engine.Range, error, bool) {
					if len(left) == 0 {
						return engine.Range{}, last, true
					}
					g := left[0]
					left = left[1:]
					return g, nil, true
				},
			}
			a.advise = func(offset, length int64) {
				if n := len(asked); n > 0 && asked[n-1].End() > offset {
					t.Fatalf("%d was asked for after %+v", offset, asked[n-1])
				}
				asked = append(asked, engine.Range{Offset: offset, Length: length})
				if ahead := bytesOf(asked) - read; ahead > aheadBytes+aheadOnce {
					t.Fatalf("%d bytes were asked for that are not needed yet", ahead)
				}
			}
			for {
				g, err, ok := a.next()
				if err != nil || !ok {
					if !errors.Is(err, last) {
						t.Errorf("it ended with %v", err)
					}
					break
				}
				given = append(given, g)
				for at := g.Offset; at < g.End() && !g.Zero; {
					n := min(512<<10, g.End()-at)
					if asked[len(asked)-1].End() < at+n {
						t.Fatalf("%d is read and was not asked for", at)
					}
					read += n
					at += n
					a.markRead(at)
				}
			}

			if !slices.Equal(given, ranges) {
				t.Errorf("it has changed what was to be read: %d ranges instead of %d", len(given), len(ranges))
			}
			data := slices.DeleteFunc(slices.Clone(ranges), func(g engine.Range) bool { return g.Zero })
			if bytesOf(asked) != bytesOf(data) || len(a.asked) > 0 || a.bytes != 0 {
				t.Errorf("%d bytes were asked for, of %d; %d are said to come still", bytesOf(asked), bytesOf(data), a.bytes)
			}
		})
	}
}

// TestReadAheadOfWhatIsSkipped: what is not read, because a journal has it, does not hold up what comes later.
func TestReadAheadOfWhatIsSkipped(t *testing.T) {
	left := blocksApart(100)
	for i := range left {
		left[i].Length = mib
		left[i].Offset = int64(i) * 2 * mib
	}
	end := int64(0)
	a := &readAhead{
		advise: func(offset, length int64) { end = offset + length },
		nextRange: func() (engine.Range, error, bool) {
			if len(left) == 0 {
				return engine.Range{}, nil, false
			}
			g := left[0]
			left = left[1:]
			return g, nil, true
		},
	}
	for i := range 90 {
		if _, _, ok := a.next(); !ok {
			t.Fatalf("there is no range %d", i)
		}
	}
	a.markRead(180 * mib)
	if end != 199*mib {
		t.Errorf("what was asked for ends at %d MiB; all until 199 MiB might have been", end/mib)
	}
}

func blocksApart(n int) []engine.Range {
	out := make([]engine.Range, n)
	for i := range out {
		out[i] = engine.Range{Offset: int64(i) * 3 * 4096, Length: 4096}
	}
	return out
}

func bytesOf(ranges []engine.Range) (n int64) {
	for _, g := range ranges {
		n += g.Length
	}
	return n
}
