package diagnose

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/tracepoint"

	"golang.org/x/sys/unix"
)

// The budget of events. An event costs the recorded process about 0.6 microseconds (BenchmarkRecorded in package
// tracepoint), and this process about as much again: this budget costs the load 0.3 %, and some time of another CPU.
const (
	eventsPerSecond = 5000
	mostCredit      = 2 * eventsPerSecond
	// mostHold is how many steps more a window stays open for a sync that has not
	// ended.
	mostHold = 10
	// mostProcesses bounds those that are told apart; mostSenders those that send
	// requests.
	mostProcesses = 512
	mostSenders   = 4096
)

// syncCalls are the calls that make data durable and name a descriptor.
var syncCalls = []string{"fdatasync", "fsync", "sync_file_range", "syncfs"}

// tracer records events in windows and adds them up.
type tracer struct {
	w        *watch
	recorder *tracepoint.Recorder
	dsync    *dsyncTracer

	// The calls of the threads that sync the path, counted all the time since counting.
	counters     map[string]*tracepoint.Counter
	countFilter  string
	counting     time.Time
	since        time.Duration // with counters that were given up for others
	countedSoFar map[string]int64
	flight       *flight
	byNumber     map[uint64]*device // kernel's numbers, of partitions too

	on      bool
	always  bool // never paused so far
	credit  float64
	held    int
	last    time.Time
	traced  time.Duration
	from    uint64 // all events were being recorded from then on
	lost    uint64
	young   []tracepoint.Record // recorded, and not yet played back
	pending map[int]*syncing    // by thread

	targets  map[[2]int]*target
	pids     map[int]*identity
	procs    map[procKey]*process
	senders  map[senderKey]*sender
	here     histogram           // syncs of files below the path
	whereSum []float64           // as flight.sums, over these syncs only
	related  [3]int64            // syncs by relation: here, filesystem, device
	callSeen map[string][3]int64 // by call: all, of the path, other ones of who syncs the path
	unknown  int64               // syncs whose file was gone before it could be looked at
	traffic  map[*device]*traffic
	commits  commitTimes
}

// syncing is a sync call in progress.
type syncing struct {
	call  string
	start uint64
	t     *target
	pid   int
	sums  []float64
}

type procKey struct {
	pid int
	rel Relation
}

// process adds up the syncs of one process.
type process struct {
	*identity
	pid   int
	rel   Relation
	hist  histogram
	files map[string]int
	calls map[string]int
	tids  map[int]bool
}

type senderKey struct {
	pid int
	dev *device
}

// sender adds up the requests that a process sent to a device.
type sender struct {
	*identity
	requests, flushes, discards, bytes int64
}

// traffic is the requests of a device: all of them, and those of kernel threads.
type traffic struct {
	requests, flushes, bytes, kernelFlushes, kernelBytes int64
}

// trace starts recording, or records why it cannot.
func (w *watch) trace() {
	if err := tracepoint.Available(); err != nil {
		hint := ""
		if errs.Is(err, errs.Permission) {
			hint = "; run it as root"
		}
		w.missing("the processes that sync here, and where the time of their syncs goes", "%v%s", err, hint)
		w.missing("writers throttled for too much dirty data; failed requests", "%v", err)
		return
	}

	t := &tracer{
		w: w, counters: map[string]*tracepoint.Counter{}, byNumber: map[uint64]*device{}, always: true, credit: mostCredit,
		pending: map[int]*syncing{}, targets: map[[2]int]*target{}, pids: map[int]*identity{}, procs: map[procKey]*process{},
		senders: map[senderKey]*sender{}, callSeen: map[string][3]int64{}, traffic: map[*device]*traffic{},
	}

	// Start the recorder.
	r, err := tracepoint.NewRecorder(t.specs()...)
	if err != nil {
		w.missing("the processes that sync here, and where the time of their syncs goes", "%v", err)
		return
	}

	t.recorder = r
	t.on, t.last = true, time.Now()
	t.from = tracepoint.Now()
	t.flight.reset(t.from)
	t.whereSum = make([]float64, len(t.flight.sums))
	t.dsync = newDsyncTracer(w)
	w.tracer = t

	// Count what needs no recording.
	w.watchDirty()
	w.countErrors()

	if _, err := tracepoint.Lookup("io_uring:io_uring_submit_req"); err == nil {
		const opFsync = 3
		if c, err := tracepoint.Count("io_uring:io_uring_submit_req", fmt.Sprintf("opcode == %d", opFsync),
			tracepoint.Everything); err == nil {
			w.uring = c
		}
	}
}

// specs returns the events to record: sync calls, requests to the devices, and commits of ext4's journal.
func (t *tracer) specs() []tracepoint.Spec {
	w := t.w
	filter := t.devices()
	var specs []tracepoint.Spec
	add := func(name, filter string) {
		if _, err := tracepoint.Lookup(name); err != nil {
			w.missing("events "+name, "%v", err)
			return
		}
		specs = append(specs, tracepoint.Spec{Event: name, Filter: filter})
	}

	for _, c := range syncCalls {
		add("syscalls:sys_enter_"+c, "")
		add("syscalls:sys_exit_"+c, "")
	}

	add("syscalls:sys_enter_pwritev2", fmt.Sprintf("flags & %d", unix.RWF_DSYNC|unix.RWF_SYNC))
	add("syscalls:sys_exit_pwritev2", "")
	if filter != "" {
		add("block:block_bio_queue", filter)
		add("block:block_rq_complete", filter)
		add("block:block_bio_complete", filter)
	}

	if n := w.entry.Dev; w.fsType == "ext4" && n != 0 {
		for _, name := range []string{"jbd2:jbd2_start_commit", "jbd2:jbd2_end_commit"} {
			add(name, fmt.Sprintf("dev == %d", tracepoint.KernelDev(n)))
		}
	}

	return specs
}

// devices lists the traced devices, and builds their filter. Requests of partitions count for their disk.
func (t *tracer) devices() string {
	var list []*device
	var terms []string
	number := func(n uint64, d *device) {
		k := tracepoint.KernelDev(n)
		if t.byNumber[k] == nil {
			t.byNumber[k] = d
			terms = append(terms, fmt.Sprintf("dev == %d", k))
		}
	}

	all, err := blockdev.List()
	if err != nil {
		t.w.missing("partitions beside those below the path", "%v", err)
	}

	for _, l := range t.w.stack.Devices() {
		if l.Device.Kind == blockdev.Partition {
			continue
		}

		d := &device{name: l.Name, depth: l.Depth}
		list = append(list, d)
		t.traffic[d] = &traffic{}
		number(l.Device.Number, d)
		for _, p := range all {
			if p.Kind != blockdev.Partition {
				continue
			}
			if of, err := p.Below(); err == nil && len(of) == 1 && of[0].Number == l.Device.Number {
				number(p.Number, d)
			}
		}
	}

	t.flight = newFlight(list)
	return strings.Join(terms, " || ")
}

// deviceOf returns the state of a device of the stack; for a partition, that of its disk.
func (t *tracer) deviceOf(n uint64) (int, *device) {
	d := t.byNumber[tracepoint.KernelDev(n)]
	return slices.Index(t.flight.devices, d), d
}

// step reads the recorded events, and decides whether to continue recording.
func (t *tracer) step(now time.Time) {
	t.dsync.scan(now)
	t.countHere()
	t.credit = min(mostCredit, t.credit+eventsPerSecond*now.Sub(t.last).Seconds())
	if t.on {
		t.traced += now.Sub(t.last)
		t.read(false)
	}

	t.last = now
	switch {
	case t.on && t.credit < 0 && (!t.waiting() || t.held >= mostHold):
		t.held = 0
		t.always = false
		if t.recorder.Pause() == nil {
			t.dsync.pause()
			t.read(true) // what came in between
			t.on = false
			clear(t.pending)
		}
	case t.on && t.credit < 0:
		t.held++
	case !t.on && t.credit >= mostCredit/4:
		if t.recorder.Resume() == nil {
			t.dsync.resume()
			t.on, t.held = true, 0
			t.from = tracepoint.Now()
			t.flight.reset(t.from)
		}
	}
}

// waiting reports whether a sync of the path is in progress.
func (t *tracer) waiting() bool {
	for _, s := range t.pending {
		if s.t.rel == Here {
			return true
		}
	}
	return false
}

// settle is the minimum age of an event that is replayed: the buffers of the CPUs are read one after the other, so the
// newest events are incomplete, especially where a hypervisor stops a CPU in the middle of an event.
const settle = uint64(20 * time.Millisecond)

// read returns the events recorded since the last call; all of them if no more can come.
func (t *tracer) read(all bool) {
	until := tracepoint.Now() - settle
	records, lost, err := t.recorder.Read()
	if err != nil {
		t.w.missing("part of the events", "%v", err)
		return
	}

	if lost > t.lost { // what is open may have ended unseen
		t.lost = lost
		clear(t.pending)
		t.flight.reset(t.flight.now)
	}

	t.credit -= float64(len(records))
	if more := t.dsync.read(); len(more)+len(t.young) > 0 {
		t.credit -= float64(len(more))
		records = slices.Concat(t.young, records, more)
		slices.SortStableFunc(records, func(a, b tracepoint.Record) int { return cmp.Compare(a.Time, b.Time) })
	}

	t.young = nil
	for i := range records {
		if records[i].Time < t.from {
			continue
		}
		if !all && records[i].Time > until {
			t.young = slices.Clone(records[i:])
			break
		}
		t.handleRecord(&records[i])
	}

	t.forget()
}

// forget drops state that may be stale: a descriptor may refer to another file now.
func (t *tracer) forget() {
	const most = 1 << 14
	if len(t.targets) > most {
		clear(t.targets)
	}
	if len(t.pids) > most {
		clear(t.pids)
	}
	if len(t.pending) > most {
		clear(t.pending)
	}
}

func (t *tracer) handleRecord(r *tracepoint.Record) {
	e := r.Event
	system, name, _ := strings.Cut(e.Name, ":")
	if system == "syscalls" {
		if call, ok := strings.CutPrefix(name, "sys_enter_"); ok {
			t.enter(r, call)
		} else if s := t.pending[r.TID]; s != nil {
			t.exit(r, s)
		}
		return
	}

	if t.commits.handleEvent(r) {
		return
	}

	d := t.byNumber[uint64(e.Int(r.Raw, "dev"))]
	if d == nil {
		return
	}

	sector, count := uint64(e.Int(r.Raw, "sector")), uint64(uint32(e.Int(r.Raw, "nr_sector")))
	t.flight.advance(r.Time)

	switch name {
	case "block_bio_queue":
		t.queued(r, d, sector, count)
	case "block_rq_complete":
		// The request that carries the flush itself ends before that of who asked for it.
		if sector != ^uint64(0) {
			d.complete(sector, count)
		}
	case "block_bio_complete":
		d.completeAt(sector + count)
	}
}

func (t *tracer) queued(r *tracepoint.Record, d *device, sector, count uint64) {
	rwbs := r.Event.String(r.Raw, "rwbs")
	who := t.identity(r.PID)
	if who.command == "" {
		who.command = r.Event.String(r.Raw, "comm")
	}

	f := t.traffic[d]
	flush, write := strings.Contains(rwbs, "F"), strings.Contains(rwbs, "W")
	f.requests++
	bytes := int64(0)
	if write {
		bytes = int64(count) * 512
	}

	f.bytes += bytes
	if flush {
		f.flushes++
	}

	if who.kernel {
		f.kernelBytes += bytes
		if flush {
			f.kernelFlushes++
		}
	}

	key := senderKey{r.PID, d}
	if who.kernel {
		key.pid = 0
	}

	s := t.senders[key]
	if s == nil && len(t.senders) < mostSenders {
		s = &sender{identity: who}
		if who.kernel {
			s.identity = kernelThreads
		}
		t.senders[key] = s
	}

	if s != nil {
		s.requests++
		s.bytes += bytes
		if flush {
			s.flushes++
		}
		if strings.HasPrefix(rwbs, "D") {
			s.discards++
		}
	}

	d.queue(request{at: r.Time, kernel: who.kernel, sector: sector, count: count, others: t.others(who, r.PID, d, flush)},
		rwbs)
}

// others returns the part of a request that is for processes other than those whose syncs the report explains. Requests
// of kernel threads are divided: at a device below another one of the stack, in proportion to the requests of that
// device. At the uppermost device, each sync of another filesystem, for example on a loop device, accounts for one
// flush of a kernel thread; the rest is divided by how often each process syncs on the filesystem.
func (t *tracer) others(who *identity, pid int, d *device, flush bool) float64 {
	if !who.kernel {
		if t.procs[procKey{pid, Here}] != nil {
			return 0
		}
		return 1
	}

	var above *traffic
	for _, x := range t.flight.devices {
		if x.depth < d.depth && (above == nil || t.traffic[x].bytes > above.bytes) {
			above = t.traffic[x]
		}
	}

	f := t.traffic[d]
	switch {
	case above == nil:
		here, beside, elsewhere := float64(t.related[0]), float64(t.related[1]), float64(t.related[2])
		if here+beside+elsewhere == 0 {
			return 0
		}
		far := min(1, elsewhere/float64(max(f.kernelFlushes, 1)))
		return far + (1-far)*beside/max(here+beside, 1)
	case flush && f.kernelFlushes > 0:
		return max(0, 1-float64(above.flushes)/float64(f.kernelFlushes))
	case f.kernelBytes > 0:
		return max(0, 1-float64(above.bytes)/float64(f.kernelBytes))
	}

	return 0
}

func (t *tracer) enter(r *tracepoint.Record, call string) {
	fd := int(int32(r.Event.Int(r.Raw, "fd")))
	target := t.target(r.PID, fd)
	seen := t.callSeen[call]
	seen[0]++
	if target == nil {
		t.unknown++
		t.callSeen[call] = seen
		return
	}

	if target.rel == Here {
		seen[1]++
	} else if t.procs[procKey{r.PID, Here}] != nil {
		seen[2]++
	}

	t.callSeen[call] = seen
	if target.rel == "" || (call == "write" || strings.HasPrefix(call, "pwrite")) && !target.durable &&
		call != "pwritev2" {
		return
	}

	t.flight.advance(r.Time)
	s := &syncing{call: call, start: r.Time, t: target, pid: r.PID}
	if target.rel == Here {
		s.sums = slices.Clone(t.flight.sums)
	}

	t.pending[r.TID] = s
}

func (t *tracer) exit(r *tracepoint.Record, s *syncing) {
	if strings.TrimPrefix(r.Event.Name, "syscalls:sys_exit_") != s.call {
		return
	}

	delete(t.pending, r.TID)
	if r.Time < s.start {
		return
	}

	took := r.Time - s.start
	key := procKey{s.pid, s.t.rel}
	p := t.procs[key]
	if p == nil {
		if len(t.procs) >= mostProcesses {
			return
		}
		p = &process{identity: t.identity(s.pid), pid: s.pid, rel: s.t.rel, files: map[string]int{}, calls: map[string]int{},
			tids: map[int]bool{}}
		t.procs[key] = p
	}

	p.hist.add(took)
	if len(p.tids) < 1024 {
		p.tids[r.TID] = true
	}

	if n, known := p.files[s.t.file]; known || len(p.files) < 64 {
		p.files[s.t.file] = n + 1
	}

	p.calls[callName(s.call)]++

	switch s.t.rel {
	case Here:
		t.related[0]++
		t.here.add(took)
		t.flight.advance(r.Time)
		for i, v := range t.flight.sums {
			t.whereSum[i] += v - s.sums[i]
		}
	case Filesystem:
		t.related[1]++
	case Devices:
		t.related[2]++
	}
}

// callName returns the name of a call for people.
func callName(call string) string {
	if strings.Contains(call, "write") {
		return call + " (O_DSYNC)"
	}
	return call
}

// oldest returns the duration so far of the oldest sync of the path in progress.
func (t *tracer) oldest() uint64 {
	now, most := tracepoint.Now(), uint64(0)
	for _, s := range t.pending {
		if s.t.rel == Here && now > s.start {
			most = max(most, now-s.start)
		}
	}
	return most
}

func (t *tracer) closeCounters() {
	for call, c := range t.counters {
		_ = c.Close()
		delete(t.counters, call)
	}
}

func (t *tracer) close() {
	t.closeCounters()
	t.dsync.close()
	_ = t.recorder.Close()
}

// identity describes a process.
type identity struct {
	command string
	cgroup  string // for people
	groups  cgroups
	kernel  bool // a thread of the kernel
}

// kernelThreads stands for all kernel threads, which need no distinction.
var kernelThreads = &identity{command: "threads of the kernel", kernel: true}

func (t *tracer) identity(pid int) *identity {
	if i := t.pids[pid]; i != nil {
		return i
	}
	i := identify(pid)
	t.pids[pid] = i
	return i
}

func identify(pid int) *identity {
	if pid <= 0 {
		return &identity{command: "the kernel", kernel: true}
	}

	i := &identity{}
	dir := "/proc/" + strconv.Itoa(pid)
	b, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return i
	}

	text := string(b)
	from, to := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if from < 0 || to < from {
		return i
	}

	i.command = text[from+1 : to]
	f := strings.Fields(text[to+1:])
	const pfKthread = 0x00200000
	if len(f) > 6 {
		flags, _ := strconv.ParseUint(f[6], 10, 64)
		i.kernel = flags&pfKthread != 0
	}

	i.groups = groupsOf(pid)
	i.cgroup = i.groups.name()
	return i
}
