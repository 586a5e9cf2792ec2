package replicate

import (
	"iter"
	"sync"

	"pando/internal/engine"
)

// keptRanges is how many ranges of an image are kept, at most.
const keptRanges = 4096

// keepRanges is a sequence of ranges that is found out once, if it is short: to compare the maps of two images takes
// long where they have many extents, however few of them differ. What keepRanges returns may be run several times, and
// concurrently.
func cacheRanges(find iter.Seq2[engine.Range, error]) iter.Seq2[engine.Range, error] {
	var mu sync.Mutex
	var kept []engine.Range
	var whole bool // kept is all of them
	known := func() ([]engine.Range, bool) {
		mu.Lock()
		defer mu.Unlock()
		return kept, whole
	}

	return func(yield func(engine.Range, error) bool) {
		if all, ok := known(); ok {
			for _, g := range all {
				if !yield(g, nil) {
					return
				}
			}
			return
		}

		var all []engine.Range
		short := true
		for g, err := range find {
			if !yield(g, err) || err != nil {
				return
			}
			if short = short && len(all) < keptRanges; short {
				all = append(all, g)
			}
		}

		if short {
			mu.Lock()
			defer mu.Unlock()
			kept, whole = all, true
		}
	}
}
