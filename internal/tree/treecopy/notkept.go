package treecopy

import (
	"cmp"
	"maps"
	"slices"
	"sync"
)

// NotKept counts the files of a source whose copy lacks one property, because the destination
// does not support it or the caller may not set it.
type NotKept struct {
	What    string `json:"what"`    // property that was not kept
	Count   int64  `json:"count"`   // number of files that lack it
	Example string `json:"example"` // path of one of them, quoted for messages
}

// Things that a copy may not keep. Flags have the names that chattr(1) uses.
const (
	LostImmutable      = "immutable"
	LostAppend         = "append-only"
	LostNoDump         = "no-dump"
	LostNoAtime        = "no-atime"
	LostSync           = "sync"
	LostDirSync        = "dirsync"
	LostProjectInherit = "project-inherit"
	LostEncrypted      = "encrypted"
	LostVerity         = "verity"
	LostCasefold       = "casefold"
	LostOtherFlags     = "other-flags" // in an archive, flags of other operating systems
	LostRootFlags      = "root-flags"  // the root directory is not immutable or append-only
	LostProject        = "project-id"
	LostDates          = "dates"    // of modification or access
	LostSymlinks       = "symlinks" // left out: their targets are too long
	LostDevices        = "devices"  // left out: their numbers are too large
)

// losses collects what a copy does not keep. Because CopyStable copies some directories several times
// and only the last copy counts, it counts by directory.
type losses struct {
	mu    sync.Mutex
	kinds map[string]*loss
}

type loss struct {
	counts   map[uint64]int64 // by the key of the directory
	examples []example        // the first few, in order of paths
}

type example struct {
	path string
	key  uint64
}

// mostExamples is how many examples of each kind are kept. More than one is needed because the examples
// of a directory are removed when it is copied again.
const mostExamples = 8

// addLoss counts a file of the directory with this key.
func (l *losses) addLoss(what string, key uint64, path string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.kinds == nil {
		l.kinds = make(map[string]*loss)
	}

	k := l.kinds[what]
	if k == nil {
		k = &loss{counts: make(map[uint64]int64)}
		l.kinds[what] = k
	}

	k.counts[key]++
	e := example{path, key}
	i, _ := slices.BinarySearchFunc(k.examples, e, func(a, b example) int { return cmp.Compare(a.path, b.path) })
	if i < mostExamples {
		k.examples = slices.Insert(k.examples, i, e)
		k.examples = k.examples[:min(len(k.examples), mostExamples)]
	}
}

// forget removes the counts and examples of a directory that is copied again.
func (l *losses) forget(key uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.kinds {
		if _, ok := k.counts[key]; ok {
			delete(k.counts, key)
			k.examples = slices.DeleteFunc(k.examples, func(e example) bool { return e.key == key })
		}
	}
}

// forgetAll forgets everything.
func (l *losses) forgetAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kinds = nil
}

// list returns the sums, sorted by kind. Only directories for which is returns true count;
// nil: all directories.
func (l *losses) list(is func(key uint64) bool) []NotKept {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []NotKept
	for _, what := range slices.Sorted(maps.Keys(l.kinds)) {
		n := NotKept{What: what}
		for key, count := range l.kinds[what].counts {
			if is == nil || is(key) {
				n.Count += count
			}
		}

		for _, e := range l.kinds[what].examples {
			if is == nil || is(e.key) {
				n.Example = quote(e.path)
				break
			}
		}

		if n.Count > 0 {
			out = append(out, n)
		}
	}

	return out
}
