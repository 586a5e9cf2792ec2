package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// DDT is the dedup table of a zpool. It has one entry for each block that was written with dedup, which counts the
// references to the block. Sizes are what ZFS calls DSIZE: on the disks, compressed, with copies, without parity.
type DDT struct {
	// Entries are in the table and in its log. Blocks count twice while the log is written back.
	Entries    int64    `json:"entries"`
	InLog      *int64   `json:"in_log,omitempty"` // of Entries, in the log; nil before OpenZFS 2.3, which has none
	OnDisk     Range    `json:"on_disk_bytes"`    //
	InCore     Range    `json:"in_core_bytes"`    // of memory, if the whole table is in memory
	Blocks     Range    `json:"blocks"`           // with an entry
	Allocated  Range    `json:"allocated_bytes"`  // of these blocks, each once
	Referenced Range    `json:"referenced_bytes"` // of these blocks, once for each reference
	Buckets    []Bucket `json:"buckets"`
}

// Bucket is a line of the histogram: the blocks with at least Refs references, and fewer than twice as many.
type Bucket struct {
	Refs       int64 `json:"refs"` // a power of two
	Blocks     Range `json:"blocks"`
	Allocated  Range `json:"allocated_bytes"`
	Referenced Range `json:"referenced_bytes"`
}

// Once returns the blocks with one reference, whose entries save nothing.
func (d *DDT) Once() (b Bucket) {
	for _, b := range d.Buckets {
		if b.Refs == 1 {
			return b
		}
	}
	return Bucket{Refs: 1}
}

// Saved returns how many more bytes the pool would need without dedup, not counting the table itself.
func (d *DDT) Saved() (sum Range) {
	for _, b := range d.Buckets {
		if b.Refs > 1 {
			sum = sum.plus(b.Referenced.minus(b.Allocated))
		}
	}
	return sum
}

// number is a number in the JSON of zpool, which prints some as strings.
type number int64

func (n *number) UnmarshalJSON(b []byte) error {
	s := strings.Trim(string(b), `"`)
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil || v < 0 {
		return fmt.Errorf("%q is not a number", b)
	}
	*n = number(v)
	return nil
}

// jsonStat is a bucket of the histogram in the JSON of zpool.
type jsonStat struct {
	Blocks     *number `json:"blocks"`
	Allocated  *number `json:"deflated_size"`
	Referenced *number `json:"ref_dsize"`
}

// parseDDTJSON parses the output of `zpool status -D -j -p --json-int POOL` of OpenZFS 2.3 and newer. Its figures are
// exact. An error says how the format differs.
func parseDDTJSON(out []byte, pool string) (*DDT, error) {
	var top struct {
		Pools map[string]struct {
			Stats *struct {
				Entries *number `json:"obj_count"`
				OnDisk  *number `json:"dspace"`
				InCore  *number `json:"mspace"`
				DDT     *struct {
					Histogram map[string]jsonStat `json:"histogram"`
				} `json:"ddt_stats"`
			} `json:"dedup_stats"`
		} `json:"pools"`
	}
	if err := json.Unmarshal(out, &top); err != nil {
		return nil, err
	}

	// Read the totals.
	p, ok := top.Pools[pool]
	if !ok || p.Stats == nil || p.Stats.Entries == nil {
		return nil, fmt.Errorf("no dedup_stats of the pool %q with an obj_count", pool)
	}

	s := p.Stats
	d := &DDT{Entries: int64(*s.Entries)}
	if d.Entries == 0 {
		return d, nil
	}
	if s.OnDisk == nil || s.InCore == nil || s.DDT == nil {
		return nil, fmt.Errorf("dedup_stats without dspace, mspace or ddt_stats")
	}

	// Read the histogram.
	d.OnDisk, d.InCore = exactly(int64(*s.OnDisk)), exactly(int64(*s.InCore))
	for key, b := range s.DDT.Histogram {
		h, err := strconv.Atoi(key)
		if err != nil || h < 0 || h > 62 || strconv.Itoa(h) != key || b.Blocks == nil || b.Allocated == nil ||
			b.Referenced == nil {
			return nil, fmt.Errorf("a bucket %q of the histogram that is not understood", key)
		}
		d.Buckets = append(d.Buckets, Bucket{
			Refs: 1 << h, Blocks: exactly(int64(*b.Blocks)),
			Allocated: exactly(int64(*b.Allocated)), Referenced: exactly(int64(*b.Referenced)),
		})
	}

	slices.SortFunc(d.Buckets, func(a, b Bucket) int { return cmp.Compare(a.Refs, b.Refs) })
	return d, d.sum()
}

// sum adds up the totals of the buckets. It returns an error if the buckets are impossible.
func (d *DDT) sum() error {
	const most = 1 << 60 // no sum of 63 of them can be so large
	for i, b := range d.Buckets {
		if i > 0 && b.Refs <= d.Buckets[i-1].Refs {
			return fmt.Errorf("the buckets of the histogram are not in order")
		}
		for _, r := range []Range{b.Blocks, b.Allocated, b.Referenced} {
			if r.Low < 0 || r.High >= most/64 {
				return fmt.Errorf("a bucket of the histogram that is too large")
			}
		}
		if b.Allocated.Low > b.Referenced.High {
			return fmt.Errorf("blocks that are referenced %d times take more than their references", b.Refs)
		}
		d.Blocks = d.Blocks.plus(b.Blocks)
		d.Allocated = d.Allocated.plus(b.Allocated)
		d.Referenced = d.Referenced.plus(b.Referenced)
	}

	return nil
}

var (
	sizeLine = sync.OnceValue(func() *regexp.Regexp {
		const size = `([0-9.]+[BKMGTPE]?)`
		return regexp.MustCompile(`^DDT entries ([0-9]{1,15}), size ` + size + ` on disk, ` + size + ` in core$`)
	})
	heads = [][]string{
		strings.Fields("bucket allocated referenced"),
		nil, // underscores
		strings.Fields("refcnt blocks LSIZE PSIZE DSIZE blocks LSIZE PSIZE DSIZE"),
		nil, // dashes
	}
)

// parseDDTText parses the output of `zpool status -D POOL` of OpenZFS before 2.3, which has no JSON. It prints three
// digits, so the figures are ranges. The sizes in its first line are averages for one entry
// (ddt_get_dedup_object_stats in module/zfs/ddt.c of 2.1 divides them). From 2.3 on the same words are sums: do not use
// parseDDTText there.
func parseDDTText(out string) (*DDT, error) {
	lines := strings.Split(out, "\n")
	at := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, " dedup: ") })
	if at < 0 {
		return nil, fmt.Errorf("no line that begins with \" dedup: \"")
	}

	d, err := parseDDTSizes(strings.TrimPrefix(lines[at], " dedup: "))
	if err != nil || d.Entries == 0 {
		return d, err
	}

	// Check the head of the histogram.
	rest := lines[at+1:]
	for len(rest) > 0 && rest[0] == "" {
		rest = rest[1:]
	}

	if len(rest) < len(heads) {
		return nil, fmt.Errorf("no histogram")
	}

	for i, want := range heads {
		got := strings.Fields(rest[i])
		if want != nil && !slices.Equal(got, want) || want == nil && strings.Trim(rest[i], "_- ") != "" {
			return nil, fmt.Errorf("the head of the histogram %q is not understood", rest[i])
		}
	}

	// Read its lines, of which the last is the total.
	for _, l := range rest[len(heads):] {
		total, err := d.addLine(l)
		if err != nil {
			return nil, err
		}
		if total {
			return d, nil
		}
	}

	return nil, fmt.Errorf("the histogram has no total")
}

// parseDDTSizes parses the first line about the dedup table, which has the number of entries and their average sizes.
func parseDDTSizes(line string) (*DDT, error) {
	if line == "no DDT entries" {
		return &DDT{}, nil
	}

	m := sizeLine().FindStringSubmatch(line)
	if m == nil {
		return nil, fmt.Errorf("%q is not understood", line)
	}

	d := &DDT{}
	var err error
	if d.Entries, err = strconv.ParseInt(m[1], 10, 64); err != nil || d.Entries == 0 {
		return nil, fmt.Errorf("%q is not a number of entries", m[1])
	}

	for i, to := range []*Range{&d.OnDisk, &d.InCore} {
		each, err := parseNice(m[2+i])
		if err != nil {
			return nil, err
		}
		if *to, err = each.times(d.Entries); err != nil {
			return nil, err
		}
		to.High += d.Entries - 1 // the average was rounded down
	}

	return d, nil
}

// addLine parses a line of the histogram and adds it to the buckets. If the line is the total, it compares it with the
// sum of the buckets, and returns true.
func (d *DDT) addLine(l string) (total bool, err error) {
	f := strings.Fields(l)
	if len(f) != 9 {
		return false, fmt.Errorf("a line of the histogram has %d columns, not 9: %q", len(f), l)
	}

	total = f[0] == "Total"
	var r [9]Range
	for i, s := range f {
		if i == 0 && total {
			continue
		}
		if r[i], err = parseNice(s); err != nil {
			return false, err
		}
	}

	// Check the total.
	if total {
		if err := d.sum(); err != nil {
			return false, err
		}
		if !d.Blocks.overlaps(r[1]) || !d.Allocated.overlaps(r[4]) || !d.Referenced.overlaps(r[8]) {
			return false, fmt.Errorf("the lines of the histogram do not come to its total")
		}
		return true, nil
	}

	// Add a bucket.
	if !r[0].Exact() || r[0].Low&(r[0].Low-1) != 0 || r[0].Low == 0 {
		return false, fmt.Errorf("%q is not a power of two", f[0])
	}

	d.Buckets = append(d.Buckets, Bucket{Refs: r[0].Low, Blocks: r[1], Allocated: r[4], Referenced: r[8]})
	return false, nil
}

// times returns the range n times as large, or an error if it would overflow.
func (r Range) times(n int64) (Range, error) {
	if n > 0 && r.High > math.MaxInt64/4/n {
		return Range{}, fmt.Errorf("%d times %d is too large", r.High, n)
	}
	return Range{r.Low * n, r.High * n}, nil
}

var niceNumber = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([0-9]{1,4})(?:\.([0-9]{1,2}))?([BKMGTPE]?)$`)
})

// parseNice parses a number as zfs_nicenum of libzfs formats it: at most five characters, with a unit that is a power
// of 1024. Rounded numbers become ranges. (A number has no decimals if it is a multiple of its unit, or has three
// digits before them.)
func parseNice(s string) (Range, error) {
	m := niceNumber().FindStringSubmatch(s)
	if m == nil {
		return Range{}, fmt.Errorf("%q is not a number as ZFS writes them", s)
	}

	shift := 10 * strings.Index("BKMGTPE", m[3]) // 0 without a unit
	if shift == 0 && m[2] != "" {
		return Range{}, fmt.Errorf("%q has decimals and no unit", s)
	}

	v, err := strconv.ParseFloat(strings.TrimRight(s, "BKMGTPE"), 64)
	if err != nil {
		return Range{}, err
	}

	unit := float64(int64(1) << shift)
	if v*unit >= 1<<61 {
		return Range{}, fmt.Errorf("%q is too large", s)
	}

	// Find half of the last digit, by which the number may have been rounded.
	half := 0.0
	switch {
	case shift == 0 || m[2] == "" && len(m[1]) < 3:
	case m[2] == "":
		half = 0.5
	default:
		half = 0.5 * math.Pow10(-len(m[2]))
	}

	return Range{int64(math.Ceil((v - half) * unit)), int64(math.Floor((v + half) * unit))}, nil
}
