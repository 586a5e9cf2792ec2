package proof

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// Load is the work that the load generator reports.
type Load struct {
	Call          string  // "fdatasync", "fsync", "msync", "write (O_DSYNC)"
	Syncs         int64   //
	Writers       int     // programs or threads that synced at the same time
	P50           float64 // the median of a sync, in seconds; 0: unknown
	WritesPerSync int     // 0: unknown
}

// A device is not quiet above these rates of others, per second.
const (
	noisyBytes   = 1e6
	noisyFlushes = 20
)

// dsync is the Call of writes to files opened with O_DSYNC.
const dsync = "write (O_DSYNC)"

// tolerated is the tolerated error, as a part of the flushes needed, in the estimate of flushes by others.
const tolerated = 0.05

// Judge compares the flushes that arrived with those that the load's syncs need.
// A flush serves all syncs that wait when it begins, at most one for each writer: filesystems commit in groups (jbd2,
// the log of XFS, ZFS's ZIL), and the kernel merges waiting flushes. So the syncs need at least ceil(syncs/writers)
// flushes, on every layer. Syncs that the load reports but only began (callSlack) need none.
func (e *Evidence) Judge(load Load) Proof {
	load.Writers = max(1, load.Writers)
	j := &judge{Evidence: e, load: load}
	writers := int64(load.Writers)
	j.needed = (j.syncs() + writers - 1) / writers
	j.proof = Proof{Method: e.method, NoTraces: e.noTraces, Sample: e.sample, Hidden: e.stack.Hidden, Seconds: e.seconds,
		Layers: []LayerProof{}, Reasons: []string{}}
	for _, l := range e.stack.Layers {
		j.proof.Layers = append(j.proof.Layers, LayerProof{Name: l.Name, Kind: string(l.Kind), Depth: l.Depth, Role: l.Role,
			Device: l.Device != nil, Flushes: -1, FUA: -1})
	}

	j.remedies = make([]string, len(e.stack.Layers))
	j.labels = make([]string, len(e.stack.Layers))
	j.derived = make([]string, len(e.stack.Layers))
	for i := range e.stack.Layers {
		if x, ok := j.evidenceAt(i); ok {
			j.device(i, x)
		}
	}

	for i, l := range e.stack.Layers {
		if l.Kind == stack.Zpool {
			j.pool(i)
		}
	}

	// The facts of a layer without counts explain flushes missing below it.
	for _, f := range e.facts {
		if _, ok := j.evidenceAt(f.layer); !ok {
			j.fact(f)
		}
	}

	// From the bottom up: a layer without counts is judged by those directly under it.
	for i := len(e.stack.Layers) - 1; i >= 0; i-- {
		if j.proof.Layers[i].Result == "" {
			j.through(i)
		}
	}

	j.sampled()
	for _, f := range e.facts {
		if _, ok := j.evidenceAt(f.layer); ok {
			j.fact(f)
		}
	}

	j.hidden()
	j.calls()
	j.speed()
	j.conclude()
	return j.proof
}

type judge struct {
	*Evidence
	load   Load
	needed int64
	proof  Proof

	remedies []string // by layer
	derived  []string // the same, for a layer that fails because of the layers under it
	labels   []string // by layer: another name for it
	words    []string // to add at the end
}

func (j *judge) evidenceAt(i int) (evidence, bool) {
	l := j.stack.Layers[i]
	if l.Device == nil {
		return evidence{}, false
	}
	x, ok := j.devices[l.Name]
	return x, ok
}

// arrived counts requests of the load at a device: flushes and FUA writes, or, without a volatile cache, writes.
type arrived struct {
	total   int64 // of all programs
	others  int64 // certainly of others
	perhaps int64 // of the rest, at most this many are of others
	blind   string
}

func (a arrived) most() int64  { return max(0, a.total-a.others) }
func (a arrived) least() int64 { return max(0, a.most()-a.perhaps) }

// flushes counts the flushes of the load.
// Flushes sent by programs are told apart by their sender. Those sent by kernel threads may be for the load or for
// others. At a lower device, where all requests come from one filesystem or device above, that does not matter: if that
// layer dropped flushes, it would drop all of them, and none would arrive. So only others beside it count: other
// partitions and volumes on the disk. At the topmost device, other programs may also sync files of the same filesystem.
func (j *judge) flushes(x evidence) arrived {
	if j.method == Tracepoints {
		a := arrived{total: x.flush + x.fua}
		a.others = max(0, a.total-x.kernel-x.own)
		a.perhaps = x.beside
		if x.dev.top {
			// At most as many as others have synced; and programs that sync have written.
			more := max(0, j.othersSyncs-a.others)
			if x.dev.direct {
				more = min(more, max(0, x.userWrites-x.ownWrites))
			}
			a.perhaps += more
		}
		a.perhaps = min(a.perhaps, max(0, a.most()-x.own))
		return a
	}

	if !statisticsHaveFlushes(x.dev.dev) || x.stat.Flushes < 0 {
		return arrived{blind: "the block statistics of " + x.dev.name + " do not count flushes"}
	}

	a := arrived{total: x.stat.Flushes, perhaps: int64(x.rate.flushes * j.seconds)}
	if !x.dev.top {
		a.perhaps = min(a.perhaps, x.beside)
	}
	if a.total < j.needed && x.dev.dev.FUA {
		a.blind = "the block statistics do not count forced writes (FUA), which " + x.dev.name + " supports"
	}

	return a
}

// writes counts the writes of the load.
func (j *judge) writes(x evidence) arrived {
	a := arrived{total: x.stat.Writes}
	a.perhaps = min(int64(x.rate.writes*j.seconds), max(0, a.total-x.ownWrites))
	if !x.dev.top {
		a.perhaps = min(a.perhaps, x.beside)
	}
	return a
}

func (j *judge) device(i int, x evidence) {
	p := &j.proof.Layers[i]
	p.Writes, p.WrittenBytes = x.stat.Writes, x.stat.WrittenBytes
	p.OthersBytesPerSecond = x.rate.bytes
	p.VolatileCache = x.dev.dev.VolatileCache
	if x.rate.bytes > noisyBytes || x.rate.flushes > noisyFlushes {
		j.words = append(j.words,
			fmt.Sprintf("%s was not quiet before the run: others wrote %.1f MB/s and flushed %.0f times per second, so the "+
				"figures are those of a shared device", x.dev.name, x.rate.bytes/1e6, x.rate.flushes))
	}

	f := j.flushes(x)
	switch {
	case j.method == Tracepoints:
		p.Flushes, p.FUA, p.OthersFlushes = x.flush, x.fua, f.others
	case f.blind == "" || x.stat.Flushes > 0:
		p.Flushes, p.OthersFlushes = x.stat.Flushes, min(f.perhaps, x.stat.Flushes)
	}

	if x.stat.Flushes > 0 && statisticsHaveFlushes(x.dev.dev) {
		p.FlushSeconds = x.stat.FlushTime.Seconds() / float64(x.stat.Flushes)
	}

	if k, inPool := poolOf(j.stack.Layers, i); inPool && len(leaves(j.stack.Layers, k)) > 1 {
		return // judged with its pool
	}

	if p.VolatileCache {
		p.Needed = j.needed
		if f.blind != "" {
			p.Words = f.blind
			if !statisticsHaveFlushes(x.dev.dev) && len(below(j.stack.Layers, i)) > 0 {
				return // the layers below cover it
			}
			p.Result = Unknown
			j.remedies[i] = "run it as root, so that tracepoints can count them"
			return
		}
		p.Result, p.Words = j.enough(f, "flushes and forced writes")
		return
	}

	p.Result, p.Words = j.enough(j.writes(x), "writes")
	if p.Result == OK {
		p.Result, p.Words = NotNeeded, "no volatile cache: nothing to flush; "+p.Words
	}
}

// enough compares the requests that arrived with those needed.
func (j *judge) enough(a arrived, what string) (Result, string) {
	text := fmt.Sprintf("%s %s arrived, %s needed", count(a.total), what, count(j.needed))
	if a.others > 0 {
		text += fmt.Sprintf("; %s are from other programs", count(a.others))
	}

	switch {
	case j.needed == 0:
		return Unknown, fmt.Sprintf("%s %s arrived, but there were no syncs", count(a.total), what)
	case a.most() < j.needed:
		return Fail, text
	case float64(a.least()) < float64(j.needed)*(1-tolerated):
		return Unknown, text + fmt.Sprintf("; up to %s may be from other programs that sync at the same "+
			"time", count(a.perhaps))
	}

	return OK, text
}

// through judges a layer without counts of its own, such as a filesystem or a partition, by the requests that arrive
// directly under it.
func (j *judge) through(i int) {
	p := &j.proof.Layers[i]
	l := j.stack.Layers[i]
	under := children(j.stack.Layers, i)
	if len(under) == 0 {
		p.Result = Unknown
		if p.Words == "" {
			p.Words = "nothing could be counted below it"
		}
		return
	}

	worst, at := NotNeeded, under[0]
	for _, k := range under {
		if r := j.proof.Layers[k].Result; rank(r) > rank(worst) {
			worst, at = r, k
		}
	}

	if l.Kind == stack.Kind(blockdev.Partition) {
		p.Result, p.Words = worst, "flushes are counted for its disk, "+j.proof.Layers[at].Name
		p.VolatileCache = l.Device.VolatileCache
		return
	}

	p.Result = worst
	if worst == NotNeeded {
		p.Result = OK
	}

	if j.explained(at) {
		p.Result, p.Words = OK, "the flushes it passes on are lost at "+j.proof.Layers[at].Name
		return
	}

	for !j.counted(at) { // down to a layer with figures
		more := children(j.stack.Layers, at)
		k := slices.IndexFunc(more, func(k int) bool { return j.proof.Layers[k].Result == worst })
		if k < 0 {
			break
		}
		at = more[k]
	}

	first := j.proof.Layers[at]
	switch p.Result {
	case OK:
		p.Words = "the flushes it must pass on arrived at " + first.Name
	case Fail:
		if k, ok := j.above(i); ok && j.proof.Layers[k].Result == Fail {
			p.Result, p.Words = Unknown, fmt.Sprintf("too few flushes came from %s to tell whether it passes them on",
				j.proof.Layers[k].Name)
			return
		}
		p.Words = fmt.Sprintf("it does not pass syncs on: at %s, %s", first.Name, first.Words)
		j.derived[i] = "check its mount options and settings"
	default:
		p.Words = fmt.Sprintf("at %s, %s", first.Name, first.Words)
	}
}

// above returns the next layer above that has counts.
func (j *judge) above(i int) (int, bool) {
	depth := j.stack.Layers[i].Depth
	for k := i - 1; k >= 0; k-- {
		if j.stack.Layers[k].Depth >= depth {
			continue
		}
		depth = j.stack.Layers[k].Depth
		if _, ok := j.evidenceAt(k); ok {
			return k, true
		}
	}
	return 0, false
}

// counted reports whether a layer has figures of its own.
func (j *judge) counted(i int) bool {
	_, ok := j.evidenceAt(i)
	return ok || j.stack.Layers[i].Kind == stack.Zpool && j.proof.Layers[i].Needed > 0
}

// explained reports whether a layer without counts, or one under it down to the first with counts, has a fact that
// explains a failure.
func (j *judge) explained(i int) bool {
	if slices.ContainsFunc(j.facts, func(f fact) bool { return f.layer == i && f.result == Fail }) {
		_, counted := j.evidenceAt(i)
		return !counted
	}
	if j.counted(i) {
		return false
	}
	return slices.ContainsFunc(children(j.stack.Layers, i), j.explained)
}

// rank orders results from good to bad; a certain failure is worse than an unknown result.
func rank(r Result) int {
	return slices.Index([]Result{"", NotNeeded, OK, Unknown, Fail}, r)
}

// fact applies a fact of a layer.
func (j *judge) fact(f fact) {
	p := &j.proof.Layers[f.layer]
	if f.result == "" {
		j.words = append(j.words, f.words)
		return
	}
	// If there are two failures, the fact is the better explanation.
	if rank(f.result) >= rank(p.Result) {
		p.Result, p.Words = f.result, f.words
		j.remedies[f.layer], j.labels[f.layer] = f.remedy, f.label
	}
}

// hidden applies that the stack ends above the disk.
func (j *judge) hidden() {
	n := len(j.proof.Layers)
	if j.stack.Hidden == "" || n == 0 {
		return
	}

	for _, f := range j.facts {
		if f.result != "" {
			return // already reported
		}
	}

	p := &j.proof.Layers[n-1]
	if rank(Unknown) > rank(p.Result) {
		p.Result, p.Words = Unknown, j.stack.Hidden
	}
}

// uncoveredPart is the share of sampled syncs that may lack a flush: the clocks of CPUs and the order of events are not
// perfect.
const uncoveredPart = 0.02

// sampled applies the results of single syncs.
func (j *judge) sampled() {
	s := j.sample
	if s == nil || s.Syncs == 0 {
		return
	}

	for i := range j.proof.Layers {
		p := &j.proof.Layers[i]
		n := s.Uncovered[p.Name]
		if n == 0 || float64(n) <= max(2, uncoveredPart*float64(s.Syncs)) || rank(p.Result) >= rank(Fail) {
			continue
		}
		p.Result = Fail
		p.Words += fmt.Sprintf("; but of %s sampled syncs, %s returned before a flush or forced write reached "+
			"it", count(s.Syncs), count(n))
	}
}

// conclude sums up the results of all layers.
func (j *judge) conclude() {
	p := &j.proof
	worst := OK
	note := func(r Result) {
		if r != NotNeeded && rank(r) > rank(worst) {
			worst = r
		}
	}

	note(p.Calls.Result)
	for _, l := range p.Layers {
		note(l.Result)
	}

	p.Result = OK
	if worst == OK {
		p.Reasons = append(p.Reasons, j.praise())
		p.Reasons = append(p.Reasons, j.words...)
		return
	}

	p.Result = Fail
	if p.Calls.Result == worst {
		p.Layer = "system call"
		p.Reasons = append(p.Reasons, p.Calls.Words)
	}

	for i, l := range p.Layers {
		if l.Result != worst && (l.Result != Unknown || p.Layer != "") {
			continue
		}

		name := l.Name
		if j.labels[i] != "" {
			name = j.labels[i]
		}

		if p.Layer == "" && l.Result == worst {
			p.Layer = name
		} else if j.labels[i] == "" && j.remedies[i] == "" && worst == Fail {
			continue // it only fails because of a layer above
		}

		text := name + ": " + l.Words
		if l.Result == Unknown {
			text = name + ": could not prove that it passes syncs on: " + l.Words
		}

		if r := j.remedies[i] + j.derived[i]; r != "" {
			text += ": " + r
		}

		p.Reasons = append(p.Reasons, text)
	}

	p.Reasons = append(p.Reasons, j.words...)
}

// praise describes what has been proved.
func (j *judge) praise() string {
	var at []string
	for i, l := range j.proof.Layers {
		if l.Device && (l.Result == OK || l.Result == NotNeeded) && len(children(j.stack.Layers, i)) == 0 {
			at = append(at, l.Name)
		}
	}
	return fmt.Sprintf("the data of %s syncs of %s reached %s", count(j.load.Syncs), errs.Plural(j.load.Writers, "writer"),
		strings.Join(at, ", "))
}

// count writes a number with commas.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
