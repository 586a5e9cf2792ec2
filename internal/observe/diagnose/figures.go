package diagnose

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/observe/tracepoint"
)

// Lists in a report have at most this many rows.
const (
	mostListed = 20
)

// finish turns the samples and events into the report.
func (w *watch) finish(ctx context.Context) {
	w.syncFigures()
	w.deviceFigures()
	w.writerFigures()
	w.hostFigures()
	if w.uring != nil {
		if n, err := w.uring.Read(); err == nil && n > 0 {
			w.missing("syncs through io_uring",
				"%d on this host: they have no system call of their own, so their durations are not visible", n)
		}
	}

	if t := w.tracer; t != nil && t.unknown > 0 {
		w.missing("some syncs",
			"%d recorded syncs were of processes that ended, or of files that were closed, before diagnose could examine "+
				"them", t.unknown)
	}

	if w.zfs != nil {
		w.findZpoolScan(ctx, w.zfs.pool)
	}

	w.causes()
	w.verdict()
}

// total returns the time of all recorded syncs, in nanoseconds.
func (w *watch) total() float64 {
	if w.tracer == nil {
		return 0
	}
	return w.tracer.here.sum
}

// share returns the part of the time of the syncs that was spent at a place; 0 if there were no syncs.
func (w *watch) share(place int) float64 {
	if total := w.total(); total > 0 {
		return min(1, max(0, w.tracer.whereSum[place]/total))
	}
	return 0
}

// syncFigures reports the syncs below the path: how many, how long they took, where, and of which processes.
func (w *watch) syncFigures() {
	t, s := w.tracer, &w.report.Syncs
	if t == nil {
		return
	}

	// Their number and durations.
	seconds, traced := w.elapsed.Seconds(), t.traced.Seconds()
	w.report.Traced = min(seconds, traced)
	s.Sampled, s.Mean, s.Max = t.here.n, t.here.mean(), float64(t.here.most)/1e9
	s.P50, s.P99 = t.here.quantile(0.5), t.here.quantile(0.99)
	s.Pending, s.Lost = float64(t.oldest())/1e9, t.lost
	if s.Exact = t.always && t.lost == 0; s.Exact {
		s.Count = t.here.n
	} else {
		s.Count = t.estimate(traced, seconds)
	}

	if seconds > 0 {
		s.PerSecond = float64(s.Count) / seconds
	}

	// Where their time went.
	if t.here.n > 0 {
		first := "the devices"
		if len(t.flight.devices) > 0 {
			first, _ = t.top()
		}

		s.Where = append(s.Where, Part{"above " + first, w.share(placeNowhere)})
		for depth := range t.flight.depths {
			var names []string
			for _, d := range t.flight.devices {
				if d.depth == depth {
					names = append(names, d.name)
				}
			}
			if names != nil {
				s.Where = append(s.Where, Part{strings.Join(names, ", "), w.share(placeDepths + depth)})
			}
		}
	}

	// The processes, the busiest of those that sync here first.
	scale := 1.0
	if t.here.n > 0 {
		scale = float64(s.Count) / float64(t.here.n)
	} else if traced > 0 {
		scale = seconds / traced
	}

	for _, p := range t.procs {
		io, memory := -1.0, -1.0
		if g := w.pressures[pressureDir(p.groups)]; g != nil {
			io, memory = g.shares()
		}
		s.Processes = append(s.Processes, Process{
			IOPressure: io, MemoryPressure: memory,
			PID: p.pid, Command: p.command, CGroup: p.cgroup, Relation: p.rel, File: most(p.files), Call: most(p.calls),
			Sampled:   p.hist.n,
			PerSecond: float64(p.hist.n) * scale / max(seconds, 1e-3),
			Mean:      p.hist.mean(), P50: p.hist.quantile(0.5), P99: p.hist.quantile(0.99), Max: float64(p.hist.most) / 1e9,
		})
	}

	order := map[Relation]int{Here: 0, Filesystem: 1, Devices: 2}
	slices.SortFunc(s.Processes, func(a, b Process) int {
		return cmp.Or(cmp.Compare(order[a.Relation], order[b.Relation]), cmp.Compare(b.Sampled, a.Sampled),
			cmp.Compare(a.PID, b.PID))
	})
	s.Processes = s.Processes[:min(len(s.Processes), 3*mostListed)]
}

// estimate returns the number of syncs of the path during the watch. For threads known to sync the path, it is the
// number of their counted calls, times the share of calls in the windows that were of the path; the time before a
// thread was known counts at the same rate. Other syncs are assumed to be as frequent between the windows as in them.
func (t *tracer) estimate(traced, seconds float64) int64 {
	t.countHere()
	n := 0.0
	counted := t.counted(true)
	since := t.since.Seconds()
	if !t.counting.IsZero() {
		since += time.Since(t.counting).Seconds()
	}

	for call, seen := range t.callSeen {
		switch {
		case seen[1] == 0:
		case since > 0 && counted != nil && slices.Contains(syncCalls, call):
			n += float64(counted[call]) * float64(seen[1]) / float64(seen[1]+seen[2]) * max(1, seconds/since)
		case traced > 0:
			n += float64(seen[1]) * seconds / traced
		}
	}

	return int64(n)
}

// countHere starts counting the calls of the threads known to sync the path, even while no events are recorded.
func (t *tracer) countHere() {
	const mostThreads = 64
	tids := map[int]bool{}
	for key, p := range t.procs {
		if key.rel == Here {
			for tid := range p.tids {
				tids[tid] = true
			}
		}
	}

	if len(tids) == 0 || len(tids) > mostThreads {
		return
	}

	filter := anyOf("common_pid", tids)
	if filter == t.countFilter {
		return
	}

	t.countFilter = filter
	t.counted(false)
	if !t.counting.IsZero() {
		t.since += time.Since(t.counting)
	}

	t.closeCounters()
	t.counting = time.Now()
	for _, c := range syncCalls {
		if n, err := tracepoint.Count("syscalls:sys_enter_"+c, filter, tracepoint.Everything); err == nil {
			t.counters[c] = n
		}
	}
}

// counted adds up the counters; with peek it leaves the sums unchanged.
func (t *tracer) counted(peek bool) map[string]int64 {
	out := map[string]int64{}
	for _, c := range syncCalls {
		n := int64(0)
		if k := t.counters[c]; k != nil {
			v, err := k.Read()
			if err != nil {
				return nil
			}
			n = int64(v)
		}
		out[c] = t.countedSoFar[c] + n
	}

	if !peek {
		t.countedSoFar = out
	}

	return out
}

func most(m map[string]int) string {
	best := ""
	for k, n := range m {
		if best == "" || n > m[best] || n == m[best] && k < best {
			best = k
		}
	}
	return best
}

func (w *watch) deviceFigures() {
	seconds := max(w.elapsed.Seconds(), 1e-3)
	for _, l := range w.stack.Devices() {
		d := Device{Name: l.Name, Kind: string(l.Kind), Depth: l.Depth, Role: l.Role, NrRequests: l.Device.QueueRequests,
			MostQueued: w.most[l.Name], Errors: -1, FlushesPerSecond: -1}
		a, ok1 := w.start.devices[l.Name]
		b, ok2 := w.stop.devices[l.Name]
		if ok1 && ok2 {
			s := b.Minus(a)
			d.ReadsPerSecond, d.WritesPerSecond, d.DiscardsPerSecond = float64(s.Reads)/seconds, float64(s.Writes)/seconds,
				float64(s.Discards)/seconds
			d.WrittenBytes, d.DiscardedBytes = s.WrittenBytes, s.DiscardedBytes
			d.WriteAwait = perEach(s.WriteTime, s.Writes)
			if s.Flushes >= 0 {
				d.FlushesPerSecond, d.FlushAwait = float64(s.Flushes)/seconds, perEach(s.FlushTime, s.Flushes)
			}
			d.Busy, d.Queue = min(1, s.BusyTime.Seconds()/seconds), s.QueueTime.Seconds()/seconds
		}

		if c := w.errors[l.Name]; c != nil {
			if n, err := c.Read(); err == nil {
				d.Errors = int64(n)
			}
		}

		if t := w.tracer; t != nil {
			if i, _ := t.deviceOf(l.Device.Number); i >= 0 {
				d.SyncShare, d.FlushShare, d.OthersShare = w.share(t.flight.of(i, sumBusy)), w.share(t.flight.of(i,
					sumFlush)), w.share(t.flight.of(i, sumOthers))
			}
		}

		w.report.Devices = append(w.report.Devices, d)
	}
}

func perEach(sum time.Duration, n int64) float64 {
	if n <= 0 {
		return 0
	}
	return sum.Seconds() / float64(n)
}

// bottom reports whether a device has no device of the stack below it.
func (w *watch) bottom(name string) bool {
	layers := w.stack.Layers
	for i, l := range layers {
		if l.Device == nil || l.Name != name {
			continue
		}
		for _, m := range layers[i+1:] {
			if m.Depth <= l.Depth {
				break
			}
			if m.Device != nil {
				return false
			}
		}
		return true
	}

	return false
}

// top returns the uppermost traced devices (a zpool or a btrfs has several), and their traffic.
func (t *tracer) top() (names string, f traffic) {
	all := t.flight.devices
	var list []string
	for _, d := range all {
		if d.depth == all[0].depth {
			x := t.traffic[d]
			f.requests, f.flushes, f.bytes = f.requests+x.requests, f.flushes+x.flushes, f.bytes+x.bytes
			list = append(list, d.name)
		}
	}
	return strings.Join(list, ", "), f
}

// writerFigures reports the busiest writers: processes, control groups, and loop devices on the same disks.
func (w *watch) writerFigures() {
	seconds := max(w.elapsed.Seconds(), 1e-3)
	byPID := map[int]*Writer{}
	at := func(pid int, id *identity) *Writer {
		x := byPID[pid]
		if x == nil {
			x = &Writer{Kind: "process", Name: id.command, PID: pid, CGroup: id.cgroup}
			byPID[pid] = x
		}
		return x
	}

	// Add up by process what was written, and what the tracer saw of requests and syncs.
	for tid, n := range w.stop.procs {
		pid := w.stop.leaders[tid]
		if more := n - w.start.procs[tid]; more > 0 && pid != os.Getpid() {
			id := identify(pid)
			if id.kernel {
				pid, id = 0, kernelThreads
			}
			if id.command != "" {
				at(pid, id).WrittenBytes += more
			}
		}
	}

	if t := w.tracer; t != nil {
		traced := max(t.traced.Seconds(), 1e-3)
		for key, s := range t.senders {
			if !w.bottom(key.dev.name) {
				continue
			}
			x := at(key.pid, s.identity)
			x.Requests += float64(s.requests) / traced
			x.Flushes += float64(s.flushes) / traced
			x.Device = key.dev.name
		}

		for _, p := range w.report.Syncs.Processes {
			x := at(p.PID, &identity{command: p.Command, cgroup: p.CGroup})
			x.Syncs += p.PerSecond
			x.Here = x.Here || p.Relation == Here
		}
	}

	// List the busiest processes.
	var list []Writer
	for _, x := range byPID {
		list = append(list, *x)
	}

	weight := func(x Writer) float64 {
		return x.Requests + x.Flushes + x.Syncs + float64(x.WrittenBytes)/seconds/4096
	}
	busiest := func(a, b Writer) int { return cmp.Or(cmp.Compare(weight(b), weight(a)), cmp.Compare(a.PID, b.PID)) }
	slices.SortFunc(list, busiest)
	w.report.Writers = append(w.report.Writers, list[:min(len(list), mostListed)]...)

	// Then control groups and loop devices.
	w.report.Writers = append(w.report.Writers, w.groupWriters(seconds)...)
	for name, b := range w.stop.beside {
		s := b.stat.Minus(w.start.beside[name].stat)
		if w.start.beside[name].file == "" || s.Writes+max(s.Flushes, 0) == 0 {
			continue
		}
		w.report.Writers = append(w.report.Writers, Writer{
			Kind: "device", Name: name + " (" + b.file + ")", WrittenBytes: s.WrittenBytes,
			Requests: float64(s.Writes) / seconds, Flushes: float64(s.Flushes) / seconds,
		})
	}
}

// groupWriters returns the control groups that wrote to the devices.
func (w *watch) groupWriters(seconds float64) (out []Writer) {
	here := map[string]bool{}
	h := groupRoots()
	if w.tracer != nil {
		for key, p := range w.tracer.procs {
			if key.rel == Here {
				here[filepath.Join(h.unified, p.groups.unified)], here[filepath.Join(h.blkio, p.groups.blkio)] = true, true
			}
		}
	}

	names := map[string]string{}
	for _, l := range w.stack.Devices() {
		names[l.Device.ID()] = l.Name
	}

	for key, io := range w.stop.groups {
		was := w.start.groups[key]
		if io.bytes <= was.bytes && io.requests <= was.requests {
			continue
		}
		name := strings.TrimPrefix(strings.TrimPrefix(key.dir, h.unified), h.blkio)
		if name == "" {
			name = "/"
		}
		out = append(out, Writer{
			Kind: "cgroup", Name: name, CGroup: name, Device: names[key.device], WrittenBytes: io.bytes - was.bytes,
			Requests: float64(io.requests-was.requests) / seconds, Here: here[key.dir],
		})
	}

	slices.SortFunc(out, func(a, b Writer) int {
		return cmp.Or(cmp.Compare(b.WrittenBytes, a.WrittenBytes), strings.Compare(a.Name, b.Name),
			strings.Compare(a.Device, b.Device))
	})
	return out[:min(len(out), mostListed)]
}

func (w *watch) hostFigures() {
	h := &w.report.Host
	h.Steal = -1
	if n := w.stop.ticks - w.start.ticks; n > 0 {
		h.Steal = float64(w.stop.steal-w.start.steal) / float64(n)
	}
	for i, p := range []*float64{&h.IOPressure, &h.CPUPressure, &h.MemoryPressure} {
		*p = -1
		if w.start.psi[i] >= 0 && w.stop.psi[i] >= 0 && w.elapsed > 0 {
			*p = min(1, float64(w.stop.psi[i]-w.start.psi[i])/float64(w.elapsed.Microseconds()))
		}
	}
}

// commitTimes are the durations of commits of an ext4 journal.
type commitTimes struct {
	began     map[int64]uint64 // by transaction
	n         int64
	sum, most uint64 // nanoseconds
}

func (c *commitTimes) start(id int64, at uint64) {
	if c.began == nil || len(c.began) > 64 {
		c.began = map[int64]uint64{}
	}
	c.began[id] = at
}

func (c *commitTimes) end(id int64, at uint64) {
	from, ok := c.began[id]
	delete(c.began, id)
	if !ok || at < from {
		return
	}
	c.n++
	c.sum += at - from
	c.most = max(c.most, at-from)
}

// handleEvent handles an event of the journal; it returns false for other events.
func (c *commitTimes) handleEvent(r *tracepoint.Record) bool {
	switch r.Event.Name {
	case "jbd2:jbd2_start_commit":
		c.start(r.Event.Int(r.Raw, "transaction"), r.Time)
	case "jbd2:jbd2_end_commit":
		c.end(r.Event.Int(r.Raw, "transaction"), r.Time)
	default:
		return false
	}
	return true
}
