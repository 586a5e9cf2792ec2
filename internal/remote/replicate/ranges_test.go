package replicate

import (
	"errors"
	"iter"
	"slices"
	"testing"

	"pando/internal/engine"
)

// TestRangesAreFoundOnce: a short sequence is run once if that came to its end, and always yields the same.
func TestRangesAreFoundOnce(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		n, stop int // of ranges; after how many the first reader ends, 0: none
		err     error
		runs    int // after three readers
	}{
		{n: 0, runs: 1},
		{n: keptRanges, runs: 1},
		{n: keptRanges + 1, runs: 3},
		{n: 10, stop: 5, runs: 2},
		{n: 10, err: broken, runs: 3},
	} {
		runs := 0
		want := blocksApart(c.n)
		ranges := cacheRanges(func(yield func(engine.Range, error) bool) {
			runs++
			for _, g := range want {
				if !yield(g, nil) {
					return
				}
			}
			if c.err != nil {
				yield(engine.Range{}, c.err)
			}
		})
		for reader := range 3 {
			got, err := readRanges(ranges, c.stop*(1-min(reader, 1)))
			if n := len(got); !slices.Equal(got, want[:n]) || reader > 0 && n != c.n || !errors.Is(err, c.err) {
				t.Errorf("%+v, reader %d: %d ranges, %v", c, reader, n, err)
			}
		}
		if runs != c.runs {
			t.Errorf("%+v: they were found %d times", c, runs)
		}
	}
}

// readRanges reads so many ranges; 0: all.
func readRanges(ranges iter.Seq2[engine.Range, error], most int) (out []engine.Range, err error) {
	for g, err := range ranges {
		if err != nil {
			return out, err
		}
		if out = append(out, g); len(out) == most {
			break
		}
	}
	return out, nil
}
