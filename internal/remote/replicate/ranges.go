package replicate

import (
	"iter"
	"sync"

	"pando/internal/engine"
)

// keptRanges is the maximum number of ranges that cacheRanges keeps.
const keptRanges = 4096

// cacheRanges returns a sequence that finds its ranges only once, if they are few: comparing the maps of two images
// takes long if they have many extents, however few of those differ. The sequence may be iterated several times and
// concurrently.
func cacheRanges(find iter.Seq2[engine.Range, error]) iter.Seq2[engine.Range, error] {
	var mu sync.Mutex
	var kept []engine.Range
	var whole bool // kept has all ranges
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

		// Find the ranges, and keep them as long as they are few.
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
