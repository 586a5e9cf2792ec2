package iostat

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"pando/internal/observe/blockdev"
)

// state holds all counts at one moment.
type state struct {
	at     time.Time
	devs   map[uint64]blockdev.Stat
	objs   map[string]objset // by dataset
	xfs    map[string]int64  // bytes written by programs, by target
	syncs  map[syncKey]*tally
	absent map[string]bool // targets whose path is now on another filesystem
}

func (w *Watcher) state() *state {
	s := &state{devs: map[uint64]blockdev.Stat{}, objs: map[string]objset{}, xfs: map[string]int64{},
		absent: map[string]bool{}}
	s.syncs = w.syncs.read()
	s.at = time.Now()
	for n, d := range w.layout.devs {
		if x, err := d.Stat(); err == nil {
			s.devs[n] = x
		}
	}

	for _, p := range w.layout.pools {
		readObjsets(p, s.objs)
	}

	for _, t := range w.layout.targets {
		if t.xfs != "" {
			if n, err := readXFSWritten(t.xfs); err == nil {
				s.xfs[t.Name] = n
			}
		}
		if !t.same() {
			s.absent[t.Name] = true
		}
	}

	return s
}

// sum returns the counts of devices between two states; false if one has been removed.
func (l *layout) sum(from, to *state, devs []blockdev.Device) (Counts, bool) {
	var c Counts
	flushes, counted := int64(0), true
	for _, d := range devs {
		a, ok1 := from.devs[d.Number]
		b, ok2 := to.devs[d.Number]
		if !ok1 || !ok2 || b.Writes < a.Writes {
			return Counts{}, false
		}

		x := b.Minus(a)
		c.WrittenBytes += x.WrittenBytes
		c.Writes += x.Writes
		c.WriteSeconds += x.WriteTime.Seconds()
		c.FlushSeconds += x.FlushTime.Seconds()
		c.DiscardedBytes += x.DiscardedBytes
		c.ReadBytes += x.ReadBytes
		flushes += x.Flushes
		counted = counted && x.Flushes >= 0
	}

	if counted {
		c.Flushes = &flushes
	}

	return c, true
}

// fed returns the amounts that each writer of a group wrote between two states.
func (l *layout) fed(from, to *state, g *group) []From {
	out := []From{}
	for _, f := range g.feeds {
		c, ok := l.sum(from, to, []blockdev.Device{*f.dev})
		if ok {
			out = append(out, From{Name: f.name, File: f.file, WrittenBytes: c.WrittenBytes})
		}
	}

	if g.zpool != "" {
		for name, b := range to.objs {
			a, ok := from.objs[name]
			if ok && poolOf(name) == g.zpool && b.written >= a.written {
				out = append(out, From{Name: name, WrittenBytes: b.written - a.written})
			}
		}
	}

	for i := range out {
		for _, t := range l.targets {
			out[i].Watched = out[i].Watched || t.chain[out[i].Name]
			if t.own != nil && t.own.name == out[i].Name || t.dataset != "" && t.dataset == out[i].Name {
				out[i].Target = t.Name
			}
		}
	}

	return out
}

func poolOf(dataset string) string {
	pool, _, _ := strings.Cut(dataset, "/")
	return pool
}

// diff returns the sample between two states.
func (l *layout) diff(from, to *state) *Sample {
	s := &Sample{Time: to.at, Seconds: to.at.Sub(from.at).Seconds(), Targets: []TargetSample{}, Layers: []LayerSample{}}
	feeds := map[*group][]From{}
	uncounted := map[string]bool{}
	for _, g := range l.groups {
		feeds[g] = l.fed(from, to, g)
		c, ok := l.sum(from, to, g.devs)
		if !ok {
			continue
		}
		x := LayerSample{Name: g.name, Kind: g.kind, On: g.on, Counts: c, From: feeds[g], RestBytes: c.WrittenBytes}
		for _, f := range x.From {
			x.RestBytes -= f.WrittenBytes
		}
		s.Layers = append(s.Layers, x)
	}

	for _, t := range l.targets {
		if from.absent[t.Name] || to.absent[t.Name] {
			continue
		}
		x, ok := l.target(from, to, t, feeds)
		if !ok {
			continue
		}
		s.Targets = append(s.Targets, x)
		if x.ApplicationBytes == nil && !uncounted[x.FSType] && x.FSType != "" {
			uncounted[x.FSType] = true
			s.Missing = append(s.Missing,
				x.FSType+" does not count the writes of programs: the device shows the writes of its filesystem")
		}
	}

	return s
}

// target computes what a volume or path wrote between two states, at each layer below it. feeds has the writes that
// others passed down to each group. It returns false if counters went back.
func (l *layout) target(from, to *state, t *watched, feeds map[*group][]From) (TargetSample, bool) {
	x := TargetSample{Name: t.Name, Path: t.Path, Shared: t.shared, Steps: []Step{}}
	for _, y := range t.stack.Layers {
		x.Layers = append(x.Layers, y.Name)
	}

	if t.fs != nil {
		x.FSType = t.fs.FSType
	}

	// Its own writes and syncs, from the filesystem or from its device; amplification is relative to base.
	var base *int64
	if a, ok := from.xfs[t.Name]; ok {
		if b, ok := to.xfs[t.Name]; ok && b >= a {
			n := b - a
			x.ApplicationBytes, x.ApplicationSource = &n, "xfs"
		}
	}

	if a, ok := from.objs[t.dataset]; ok {
		if b, ok := to.objs[t.dataset]; ok && b.written >= a.written {
			n := b.written - a.written
			x.ApplicationBytes, x.ApplicationSource = &n, "zfs"
			if a.commits >= 0 && b.commits >= a.commits {
				x.Syncs = &Syncs{Source: "zil", Count: b.commits - a.commits}
			}
			base = &n
		}
	}

	if t.own != nil {
		c, ok := l.sum(from, to, t.own.devs)
		if !ok {
			return x, false
		}
		x.Device, x.Own, base = t.own.name, &c, &c.WrittenBytes
		if x.Syncs == nil && c.Flushes != nil {
			x.Syncs = flushSyncs(c)
		}
	}

	if a, b := from.syncs[t.sync], to.syncs[t.sync]; b != nil {
		x.Syncs = b.minus(a)
	}

	ok := l.addSteps(&x, from, to, t, feeds, base)
	return x, ok
}

// addSteps adds what was written at each layer to a target, and its amplification relative to base, or the reason why
// that is unknown. It returns false if counters went back.
func (l *layout) addSteps(x *TargetSample, from, to *state, t *watched, feeds map[*group][]From, base *int64) bool {
	var others, disk, above int64
	known, drowned := true, false
	for _, g := range t.groups {
		c, ok := l.sum(from, to, g.devs)
		if !ok {
			return false
		}

		if g != t.own {
			for _, f := range feeds[g] {
				if !t.chain[f.Name] {
					others += f.WrittenBytes
				}
			}
		}

		step := Step{Layer: g.name, WrittenBytes: c.WrittenBytes, OthersBytes: others}

		// Data passed down by others may not have arrived: then too much is subtracted.
		mine := c.WrittenBytes - others
		if drowned = others > 0 && mine < above; !drowned {
			step.Amplification, above = ratio(mine, base), mine
		}

		x.Steps = append(x.Steps, step)
		if g.last {
			disk += c.WrittenBytes
			known = known && g.kind != string(blockdev.Loop)
		}
	}

	// Without all figures, say which one is missing.
	switch {
	case base == nil:
		x.NoAmplification = "its own writes are unknown: " + t.shared
	case !known:
		x.NoAmplification = "the disk is unknown: " + t.stack.Hidden
	case *base == 0:
		x.NoAmplification = "it wrote nothing"
	case drowned:
		x.NoAmplification = "other writers passed down more than has reached the disk, so the writes cannot be attributed"
	default:
		x.Amplification = ratio(disk-others, base)
	}

	return true
}

// ratio returns n relative to base; nil if base is unknown or 0.
func ratio(n int64, base *int64) *float64 {
	if base == nil || *base == 0 {
		return nil
	}
	r := float64(n) / float64(*base)
	return &r
}

// flushSyncs uses the flushes of a device as its syncs.
func flushSyncs(c Counts) *Syncs {
	s := &Syncs{Source: "flushes", Count: *c.Flushes}
	if s.Count > 0 {
		s.Timed, s.Latency = s.Count, &Latency{Mean: c.FlushSeconds / float64(s.Count)}
	}
	return s
}

// readXFSWritten returns the bytes that programs have written to an XFS, from the line "xpc" of its statistics.
func readXFSWritten(file string) (int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 4 && f[0] == "xpc" {
			return strconv.ParseInt(f[2], 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no line xpc", file)
}

// objset holds the counts of a ZFS dataset.
type objset struct {
	written int64 // bytes written by programs
	commits int64 // of the intent log; -1 before OpenZFS 2.2
}

// kstats is the directory of these counts.
var kstats = "/proc/spl/kstat/zfs"

// readObjsets reads the counts of all datasets of a pool that are in use.
func readObjsets(pool string, into map[string]objset) {
	files, _ := filepath.Glob(filepath.Join(kstats, pool, "objset-*")) // the pattern is good
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has been unmounted
		}
		if name, o, ok := parseObjset(string(b)); ok {
			into[name] = o
		}
	}
}

func parseObjset(text string) (name string, o objset, ok bool) {
	o.commits = -1
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}

		n, err := strconv.ParseInt(f[2], 10, 64)
		switch f[0] {
		case "dataset_name":
			name = strings.Join(f[2:], " ")
		case "nwritten":
			o.written, ok = n, err == nil
		case "zil_commit_count":
			if err == nil {
				o.commits = n
			}
		}
	}

	return name, o, ok && name != ""
}
