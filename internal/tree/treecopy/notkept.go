package treecopy

import (
	"cmp"
	"maps"
	"slices"
	"sync"
)

// NotKept counts the files of a source that are not in the copy as they are there,
// in one respect, because the destination cannot hold it or the caller may not set it.
type NotKept struct {
	What    string `json:"what"`
	Count   int64  `json:"count"`
	Example string `json:"example"` // one of them, fit for a message
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
	LostOtherFlags     = "other-flags" // those of other systems, in an archive
	LostRootFlags      = "root-flags"  // the root directory is not immutable or append-only
	LostProject        = "project-id"
	LostDates          = "dates"    // of modification or access
	LostSymlinks       = "symlinks" // left out: their targets are too long
	LostDevices        = "devices"  // left out: their numbers are too large
)

// losses collects what is not kept. CopyStable copies some directories several times,
// so counts are kept by directory, of which only the last copy counts.
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

// mostExamples are kept of each kind, as directories that are copied again take
// theirs away.
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

// forget drops what was counted of a directory, which is copied again.
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

// list sums up, in order of kinds. Directories for which is is false do not count;
// nil: all of them do.
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
