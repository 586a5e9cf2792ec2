package doctor

import (
	"context"
	"math"
	"math/rand/v2"
	"time"

	"pando/internal/base/progress"
)

// Copies describes data that was written more than once: trees that are copies of one another, and volumes with equal
// blocks at equal places. Clones would share this data without a dedup table.
//
// A file counts as a copy if it has the same path in its tree, size and time of modification as a file of the other
// tree, as `cp -a` and `rsync -a` leave them. Blocks of such files, drawn at random by size, are then read and
// compared. Volumes are compared at places drawn at random.
type Copies struct {
	LimitSeconds float64      `json:"limit_seconds"`
	TookSeconds  float64      `json:"took_seconds"`
	Complete     bool         `json:"complete"`    // false: time ran out
	Directories  int64        `json:"directories"` // listed
	Files        int64        `json:"files"`       // compared
	Trees        []TreeCopies `json:"trees"`
	CopiedBytes  int64        `json:"copied_bytes"` // on disk, of files in Trees that are copies, each counted once
	// InsideBytes is the same of files in filesystems inside volumes, which dedup may or may not share.
	InsideBytes  int64         `json:"inside_bytes"`
	Sampled      int           `json:"sampled_blocks"` // of files that are copies: read and compared
	SampledEqual int           `json:"sampled_equal"`
	Volumes      []VolumeGroup `json:"volumes"`
	NotLookedAt  []string      `json:"not_looked_at,omitempty"` // and why
	Explained    Range         `json:"explained_bytes"`         // of the bytes that dedup saves
	// ExplainedIf is the same, on the condition that datasets with dedup off never had it on.
	ExplainedIf Range `json:"explained_bytes_if"`
}

// TreeCopies is a tree and its copies.
type TreeCopies struct {
	Original string     `json:"original"` // path of the oldest
	Copies   []TreeCopy `json:"copies"`
}

// TreeCopy is a copy of a tree.
type TreeCopy struct {
	Path        string `json:"path"`
	Files       int64  `json:"files"`        // compared
	CopiedFiles int64  `json:"copied_files"` // of Files
	CopiedBytes int64  `json:"copied_bytes"` // on disk
	Complete    bool   `json:"complete"`     // the whole tree was compared
	inside      bool   // in a filesystem inside a volume
}

// VolumeGroup is a group of volumes that were compared with each other.
type VolumeGroup struct {
	Volumes      []string `json:"volumes"`
	Places       int      `json:"places"`        // with data in at least one volume
	Blocks       int      `json:"blocks"`        // read, without blocks of zeros
	Equal        int      `json:"equal"`         // of Blocks, equal to one at the same place of an earlier volume
	PresentBytes int64    `json:"present_bytes"` // of all volumes, on disk
	Explained    Range    `json:"copied_bytes"`  // 95 % confidence
}

// skip records what is not examined, and why.
func (c *Copies) skip(what string) { c.NotLookedAt = append(c.NotLookedAt, what) }

// wilson returns the interval that contains the share of things with a property, with a confidence of 95 %, if k of n
// things drawn at random have it (Wilson's score).
func wilson(k, n float64) (low, high float64) {
	if n <= 0 {
		return 0, 1
	}
	const z = 1.96
	p := k / n
	mid := (p + z*z/(2*n)) / (1 + z*z/n)
	half := z / (1 + z*z/n) * math.Sqrt(p*(1-p)/n+z*z/(4*n*n))
	return max(mid-half, 0), min(mid+half, 1)
}

// findCopies looks for copies in the datasets with dedup, or in all if none has it any more, for at most limit.
func (f *Facts) findCopies(ctx context.Context, limit time.Duration) (*Copies, error) {
	began := time.Now()
	part := func(share float64) time.Time {
		return began.Add(time.Duration(share * float64(limit)))
	}
	c := &Copies{LimitSeconds: limit.Seconds(), Complete: true, Trees: []TreeCopies{}, Volumes: []VolumeGroup{}}
	candidates := f.Datasets
	if len(candidates) == 0 {
		candidates = f.datasets
	}

	// Compare volumes first: that is quick, and its share of the time is bounded.
	progress.From(ctx).Start(progress.ComparingVolumes, 0, 0)
	if err := c.compareVolumes(ctx, candidates, part(0.25)); err != nil {
		return nil, err
	}

	// Compare trees of files.
	t := newTrees(c)
	t.tracker = progress.From(ctx)
	defer t.close()

	t.openPlaces(candidates, part(0.3))
	progress.From(ctx).Start(progress.ListingDirectories, 0, 0)
	if err := t.listDirectories(ctx, part(0.5)); err != nil {
		return nil, err
	}

	progress.From(ctx).Start(progress.ComparingTrees, 0, 0)
	if err := t.comparePairs(ctx, part(0.85)); err != nil {
		return nil, err
	}

	if err := t.compareSample(ctx, part(1)); err != nil {
		return nil, err
	}

	// Conclude.
	c.Explained = c.explain(f.DDT.Saved(), f.UnsharedBytes)
	c.ExplainedIf = c.Explained
	if len(f.Datasets) > 0 {
		c.ExplainedIf = c.explain(f.DDT.Saved(), f.unsharedIf())
	}

	c.TookSeconds = time.Since(began).Seconds()
	return c, nil
}

// explain returns how many of the bytes that dedup saves the copies account for. Copies may have been written without
// dedup: unshared is all data without an entry in the dedup table, and each of its bytes can keep at most one byte of a
// copy from being shared. So the lower bound holds whichever data was written with dedup.
func (c *Copies) explain(saved, unshared Range) Range {
	var low, high float64
	if c.Sampled > 0 {
		l, h := wilson(float64(c.SampledEqual), float64(c.Sampled))
		low, high = l*float64(c.CopiedBytes), h*float64(c.CopiedBytes+c.InsideBytes)
	} else {
		high = float64(c.CopiedBytes + c.InsideBytes) // nothing was read, so nothing is proved
	}

	for _, v := range c.Volumes {
		low, high = low+float64(v.Explained.Low), high+float64(v.Explained.High)
	}

	low = max(low-float64(unshared.High), 0)
	return Range{min(int64(low), saved.Low), min(int64(high), saved.High)}
}

// reservoir keeps size of the matches that it is offered, drawn at random by weight, without knowing in advance how
// many there will be (Efraimidis and Spirakis, 2006).
type reservoir struct {
	size int
	keys []float64
	kept []match
}

// offer draws m with a probability that grows with its bytes.
func (r *reservoir) offer(m match) {
	if m.bytes <= 0 {
		return
	}

	key := math.Log(1-rand.Float64()) / float64(m.bytes)
	if len(r.kept) < r.size {
		r.keys, r.kept = append(r.keys, key), append(r.kept, m)
		return
	}

	least := 0
	for i, k := range r.keys {
		if k < r.keys[least] {
			least = i
		}
	}

	if key > r.keys[least] {
		r.keys[least], r.kept[least] = key, m
	}
}
