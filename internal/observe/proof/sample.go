package proof

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/observe/stack"
	"pando/internal/observe/tracepoint"

	"golang.org/x/sys/unix"
)

const (
	// sampleEvery is the interval between reads of the kernel's buffers, 4 MiB for each CPU: enough for 500,000 events per
	// second.
	sampleEvery = 20 * time.Millisecond
	// settled is the time after which an event is certainly in its buffer.
	settled = time.Millisecond
	// keptFlushes limits the memory for each device.
	keptFlushes = 1 << 16
)

// Sample records single syncs of the load for a while. For each it checks whether, between its start and its end, a
// flush or forced write was sent to every device that needs one, at the topmost device after the sync's own data. It
// waits for the load's first sync, no longer than d. It slows the load by a few percent, so keep it short; it may be
// called several times. Without tracepoints it does nothing. Canceled: the syncs seen so far are kept.
func (w *Watch) Sample(ctx context.Context, d time.Duration) error {
	if w.method != Tracepoints || w.started == nil || w.cmd.Process == nil {
		return nil
	}

	if err := w.atWork(ctx, d); err != nil {
		return err
	}

	s, specs, err := w.sampler()
	if err != nil {
		return err
	}

	r, err := tracepoint.NewRecorder(specs...)
	if err != nil {
		return err
	}

	defer r.Close()

	// The recorders are now active on all CPUs.
	s.begin = tracepoint.Now()
	begin := time.Now()
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()

	for done := false; !done; {
		select {
		case <-tick.C:
		case <-ctx.Done():
		}

		done = ctx.Err() != nil || time.Since(begin) >= d
		before := tracepoint.Now()
		records, lost, err := r.Read()
		if err != nil {
			return err
		}
		if done {
			before = ^uint64(0)
		}

		s.processRecords(records, lost, before)
	}

	end := time.Now()
	if w.sample == nil {
		w.sample = &Sample{Uncovered: map[string]int64{}}
	}

	w.sample.Seconds += end.Sub(begin).Seconds()
	w.sample.Syncs += s.syncs
	w.sample.Lost += int64(s.lost)
	for name, n := range s.uncovered {
		w.sample.Uncovered[name] += n
	}

	return errs.Wrap("count syncs", w.stack.Path, ctx.Err())
}

// atWork waits, at most for d, until the load has synced, or has opened a file to sync.
func (w *Watch) atWork(ctx context.Context, d time.Duration) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); ; {
		n, err := w.calls.read()
		if err != nil {
			return err
		}
		if n["fsync"]+n["fdatasync"]+n["msync"]+n["open with O_DSYNC"] > 0 || time.Since(begin) >= d {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errs.Wrap("count syncs", w.stack.Path, ctx.Err())
		}
	}
}

// sampler matches syncs with flushes.
type sampler struct {
	needs []need
	top   map[uint64]bool // devices that receive the load's own data
	begin uint64
	early bool // ZFS may write data to disk before its sync is called

	ours   func(pid int) bool
	dsync  func(pid int, fd int64) bool
	held   []tracepoint.Record // not settled yet
	open   map[int]*single     // by thread
	wrote  map[int]uint64      // the end of each thread's last write
	sent   map[uint64][]uint64 // times of flushes by device, ascending
	writes map[int]bool        // threads in a write that does not sync

	syncs     int64
	lost      uint64
	uncovered map[string]int64
}

// need is a layer that needs a flush, at one of some devices.
type need struct {
	name    string
	devices []uint64 // in the kernel's form
	top     bool
}

// single is a sync in progress.
type single struct{ from, data uint64 }

func (w *Watch) sampler() (*sampler, []tracepoint.Spec, error) {
	s := &sampler{
		top: map[uint64]bool{}, open: map[int]*single{}, wrote: map[int]uint64{}, writes: map[int]bool{},
		sent: map[uint64][]uint64{}, uncovered: map[string]int64{},
	}
	pid := w.cmd.Process.Pid
	s.ours, s.dsync = descendants(pid), openedDSync()
	j := &judge{Evidence: &Evidence{stack: w.stack, devices: map[string]evidence{}}}
	for _, d := range w.devices {
		j.devices[d.name] = evidence{dev: d}
	}

	s.needs = needs(j)
	var flushes, plain []string
	for _, n := range s.needs {
		for _, k := range n.devices {
			flushes = append(flushes, fmt.Sprintf("dev == %d", k))
			if n.top {
				s.top[k] = true
				plain = append(plain, fmt.Sprintf("dev == %d", k))
			}
		}
	}

	specs := []tracepoint.Spec{
		{Event: "syscalls:sys_enter_fsync"}, {Event: "syscalls:sys_exit_fsync"},
		{Event: "syscalls:sys_enter_fdatasync"}, {Event: "syscalls:sys_exit_fdatasync"},
		{Event: "syscalls:sys_enter_msync", Filter: msyncSync}, {Event: "syscalls:sys_exit_msync"},
	}

	if len(flushes) > 0 {
		specs = append(specs, tracepoint.Spec{Event: queued,
			Filter: "(" + strings.Join(flushes, " || ") + ") && " + isEither})
	}

	if len(plain) > 0 {
		specs = append(specs, tracepoint.Spec{Event: queued,
			Filter: "(" + strings.Join(plain, " || ") + ") && " + `rwbs ~ "W*" && !(` + isEither + ")"})
	}

	for _, l := range w.stack.Layers {
		s.early = s.early || l.Kind == stack.Zpool
	}

	n, err := w.calls.read()
	if err != nil {
		return nil, nil, err
	}

	if n["open with O_DSYNC"] > 0 || s.early {
		filter := byName(names(s.ours))
		for _, call := range writeCalls {
			for _, event := range []string{"syscalls:sys_enter_", "syscalls:sys_exit_"} {
				if _, err := tracepoint.Lookup(event + call); err == nil {
					specs = append(specs, tracepoint.Spec{Event: event + call, Filter: filter})
				}
			}
		}
	}

	return s, specs, nil
}

// needs lists the layers that need a flush for each sync: devices with volatile caches, and zpools of several disks as
// one.
func needs(j *judge) (out []need) {
	pooled := map[int]bool{}
	for i, l := range j.stack.Layers {
		if l.Kind != stack.Zpool {
			continue
		}

		disks := leaves(j.stack.Layers, i)
		if len(disks) < 2 {
			continue
		}

		n := need{name: l.Name}
		for _, k := range children(j.stack.Layers, i) {
			for _, c := range j.countable(k) {
				pooled[c] = true
			}
		}

		for _, leaf := range disks {
			for _, c := range j.countable(leaf) {
				if d := j.stack.Layers[c].Device; d.VolatileCache {
					n.devices = append(n.devices, tracepoint.KernelDev(d.Number))
				}
			}
		}

		if len(n.devices) > 0 {
			out = append(out, n)
		}
	}

	first := true
	for i := range j.stack.Layers {
		x, ok := j.evidenceAt(i)
		if !ok {
			continue
		}
		if x.dev.dev.VolatileCache && !pooled[i] {
			out = append(out, need{name: x.dev.name, devices: []uint64{tracepoint.KernelDev(x.dev.dev.Number)}, top: first})
		}
		first = false
	}

	return out
}

// processRecords processes the records that are settled before a time.
func (s *sampler) processRecords(records []tracepoint.Record, lost, before uint64) {
	if lost > s.lost {
		// The lost events are unknown, so all syncs in progress near them are skipped.
		s.lost = lost
		s.held = nil
		clear(s.open)
		clear(s.wrote)
		clear(s.writes)
		clear(s.sent)
		return
	}

	s.held = append(s.held, records...)
	slices.SortStableFunc(s.held, func(a, b tracepoint.Record) int {
		switch {
		case a.Time < b.Time:
			return -1
		case a.Time > b.Time:
			return 1
		}
		return 0
	})

	n := 0
	for n < len(s.held) && (before == ^uint64(0) || s.held[n].Time+uint64(settled) < before) {
		s.event(s.held[n])
		n++
	}

	s.held = append([]tracepoint.Record(nil), s.held[n:]...) // frees the old records
}

func (s *sampler) event(r tracepoint.Record) {
	if r.Event.Name == queued {
		s.queue(r)
		return
	}

	call, isEnter := strings.CutPrefix(r.Event.Name, "syscalls:sys_enter_")
	if !isEnter {
		call, _ = strings.CutPrefix(r.Event.Name, "syscalls:sys_exit_")
	}
	if !s.ours(r.PID) {
		return
	}

	isWrite := slices.Contains(writeCalls, call)
	switch {
	case isEnter && isWrite && !s.dsync(r.PID, r.Event.Int(r.Raw, "fd")):
		s.writes[r.TID] = true
	case isEnter && r.Time < s.begin:
	case isEnter:
		from := r.Time
		if t := s.wrote[r.TID]; s.early && !isWrite && t != 0 {
			from = t
		}
		s.open[r.TID] = &single{from: from}
	case s.writes[r.TID]:
		delete(s.writes, r.TID)
		s.wrote[r.TID] = r.Time
	default:
		if o := s.open[r.TID]; o != nil {
			delete(s.open, r.TID)
			if r.Event.Int(r.Raw, "ret") >= 0 {
				s.ended(o, r.Time)
			}
		}
	}
}

// queue records a request at a device.
func (s *sampler) queue(r tracepoint.Record) {
	dev := uint64(r.Event.Int(r.Raw, "dev"))
	if strings.Contains(strings.TrimPrefix(r.Event.String(r.Raw, "rwbs"), "R"), "F") {
		list := append(s.sent[dev], r.Time)
		if len(list) > keptFlushes {
			list = slices.Clone(list[len(list)/2:])
		}
		s.sent[dev] = list
		return
	}

	if o := s.open[r.TID]; o != nil && s.top[dev] {
		o.data = r.Time
	}
}

// ended checks whether a sync was covered.
func (s *sampler) ended(o *single, at uint64) {
	s.syncs++
	for _, n := range s.needs {
		from := o.from
		if n.top {
			from = max(from, o.data)
		}
		if !slices.ContainsFunc(n.devices, func(dev uint64) bool {
			list := s.sent[dev]
			i, _ := slices.BinarySearch(list, from)
			return i < len(list) && list[i] <= at
		}) {
			s.uncovered[n.name]++
		}
	}
}

// descendants returns a function that reports whether a process descends from root. It caches its answers.
func descendants(root int) func(int) bool {
	known := map[int]bool{root: true}
	var is func(pid, depth int) bool
	is = func(pid, depth int) bool {
		if pid <= 1 || depth > 64 {
			return false
		}

		if yes, ok := known[pid]; ok {
			return yes
		}

		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return false // it has ended; not cached
		}

		known[pid] = is(parseParent(string(b)), depth+1)
		return known[pid]
	}

	return func(pid int) bool { return is(pid, 0) }
}

// parseParent reads a process's parent from /proc/PID/stat, whose second field may contain anything; 0 if it cannot.
func parseParent(stat string) int {
	i := strings.LastIndexByte(stat, ')')
	if i < 0 {
		return 0
	}

	f := strings.Fields(stat[i+1:])
	if len(f) < 2 {
		return 0
	}

	n, err := strconv.Atoi(f[1])
	if err != nil || n < 0 {
		return 0
	}

	return n
}

// openedDSync returns a function that reports whether a process's descriptor was opened with O_DSYNC. It caches its
// answers.
func openedDSync() func(int, int64) bool {
	type key struct {
		pid int
		fd  int64
	}
	known := map[key]bool{}
	return func(pid int, fd int64) bool {
		k := key{pid, fd}
		if yes, ok := known[k]; ok {
			return yes
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
		if err != nil {
			return false
		}
		known[k] = parseFlags(string(b))&unix.O_DSYNC != 0
		return known[k]
	}
}

// parseFlags reads a descriptor's flags from its fdinfo; 0 if it has none.
func parseFlags(fdinfo string) int64 {
	for line := range strings.Lines(fdinfo) {
		if v, ok := strings.CutPrefix(line, "flags:"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(v), 8, 64)
			if err != nil {
				return 0
			}
			return n
		}
	}
	return 0
}

// names lists the names of the threads of some processes, each once.
func names(ours func(int) bool) (out []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is valid
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil || !ours(pid) {
			continue
		}
		tasks, _ := filepath.Glob(filepath.Join(d, "task/*/comm"))
		for _, t := range tasks {
			if n := text(t); n != "" && !slices.Contains(out, n) {
				out = append(out, n)
			}
		}
	}

	return out
}

// byName returns a filter for threads of some names; "" if they are too many, or contain characters that a filter
// cannot have. It does not use numbers, because new threads must match, and the kernel's numbers differ from those in a
// container.
func byName(names []string) string {
	const most = 20
	if len(names) > most {
		return ""
	}

	var or []string
	for _, n := range names {
		if strings.ContainsAny(n, "\"'\\*?[") {
			return ""
		}
		or = append(or, fmt.Sprintf("comm == %q", n))
	}

	return strings.Join(or, " || ")
}
