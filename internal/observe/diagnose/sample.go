package diagnose

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/linux/kernel"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
	"pando/internal/observe/tracepoint"
)

// sample holds the values of counters at one moment.
type sample struct {
	devices map[string]blockdev.Stat // of the stack, by name
	beside  map[string]besideStat    // loop devices whose files are on the same disks
	procs   map[int]int64            // bytes written, by thread; 0 is not there
	leaders map[int]int              // the process of a thread
	groups  map[ioKey]groupIO
	fails   map[string]int64 // of control groups of version 1: how often memory was at its limit
	steal   int64            // ticks
	ticks   int64
	psi     [3]int64 // io, cpu, memory: microseconds, -1 unknown
}

type besideStat struct {
	stat blockdev.Stat
	file string
}

// sample reads all counters once.
func (w *watch) sample() sample {
	// Devices of the stack, and loop devices beside it.
	s := sample{devices: map[string]blockdev.Stat{}, beside: map[string]besideStat{}, procs: map[int]int64{},
		leaders: map[int]int{}}
	numbers := map[string]bool{}
	for _, l := range w.stack.Devices() {
		numbers[l.Device.ID()] = true
		if st, err := l.Device.Stat(); err == nil {
			s.devices[l.Name] = st
		} else {
			w.missing("the statistics of "+l.Name, "%v", err)
		}
	}

	for _, d := range w.besides() {
		if st, err := d.Stat(); err == nil {
			s.beside[d.Name] = besideStat{st, d.Backing}
		}
	}

	w.sampleProcesses(&s)
	s.groups = readGroupIO(numbers)

	// Time that the hypervisor took, of all CPU time.
	for line := range strings.Lines(slurp("/proc/stat")) {
		if f := strings.Fields(line); len(f) > 8 && f[0] == "cpu" {
			for i, x := range f[1:9] {
				n, _ := strconv.ParseInt(x, 10, 64)
				s.ticks += n
				if i == 7 {
					s.steal = n
				}
			}
		}
	}

	for i, what := range []string{"io", "cpu", "memory"} {
		s.psi[i] = pressure("/proc/pressure/" + what)
	}

	return s
}

// sampleProcesses reads how much each thread has written.
func (w *watch) sampleProcesses(s *sample) {
	denied := 0
	for _, pid := range processes() {
		// Read by thread: the figures of a process suddenly include all children that it has waited for.
		dir := "/proc/" + strconv.Itoa(pid) + "/task"
		tasks, err := os.ReadDir(dir)
		if err != nil {
			continue
		}

		for _, n := range tasks {
			b, err := os.ReadFile(dir + "/" + n.Name() + "/io")
			if os.IsPermission(err) {
				denied++
				break
			}
			tid, bad := strconv.Atoi(n.Name())
			if _, rest, ok := strings.Cut(string(b), "\nwrite_bytes: "); ok && bad == nil {
				text, _, _ := strings.Cut(rest, "\n")
				s.procs[tid], _ = strconv.ParseInt(text, 10, 64)
				s.leaders[tid] = pid
			}
		}
	}

	if denied > 0 {
		w.missing("writes of other users' processes", "/proc/PID/io of %d processes is only readable as root",
			denied)
	}
}

// besides lists the loop devices outside the stack whose files are on the device of one of its filesystems.
func (w *watch) besides() (out []blockdev.Device) {
	all, err := blockdev.List()
	if err != nil {
		return nil
	}

	below := w.stack.Devices()
	for _, d := range all {
		if d.Kind != blockdev.Loop || slices.ContainsFunc(below, func(l stack.Layer) bool {
			return l.Device.Number == d.Number
		}) {
			continue
		}
		const most = 1000
		if len(out) < most && w.shares(d.Number, d.Path()) {
			out = append(out, d)
		}
	}

	return out
}

// begin takes the first sample.
func (w *watch) begin() {
	w.start = w.sample()
	w.start.fails = map[string]int64{}
	w.most = map[string]int64{}
	w.cpu = map[int]*runDelay{}
	w.pressures = map[string]*groupPressure{}
	w.prepareOperations()
}

// end takes the last sample.
func (w *watch) end() {
	if t := w.tracer; t != nil && t.on {
		if t.recorder.Pause() == nil {
			t.dsync.pause()
		}
		t.traced += time.Since(t.last)
		t.read(true)
	}
	w.stop = w.sample()
	w.sampleSeldom()
	w.readDirty()
	w.report.Seconds = w.elapsed.Seconds()
}

// sampleOften takes the samples of every step.
func (w *watch) sampleOften() {
	w.looks++
	for _, l := range w.stack.Devices() {
		before := tracepoint.Now()
		s, err := l.Device.Stat()
		if err != nil {
			continue
		}
		w.most[l.Name] = max(w.most[l.Name], s.InFlight)
		if t := w.tracer; t != nil && s.InFlight == 0 && l.Device.Kind != blockdev.Partition {
			if i, d := t.deviceOf(l.Device.Number); i >= 0 && d.idle == 0 {
				d.idle = before - settle
			}
		}
	}

	w.lookOperations()
	w.readDirty()
	if w.looks%10 == 1 {
		w.sampleSeldom()
	}
}

// sampleSeldom takes the samples of every second.
func (w *watch) sampleSeldom() {
	h := &w.report.Host
	if mem, err := kernel.ReadMemory(); err == nil {
		h.DirtyBytes = max(h.DirtyBytes, mem.Dirty)
		h.WritebackBytes = max(h.WritebackBytes, mem.Writeback)
	}

	if w.tracer == nil {
		return
	}

	for key, p := range w.tracer.procs {
		if key.rel != Here {
			continue
		}

		const most = 256
		for tid := range p.tids {
			if len(w.cpu) < most || w.cpu[tid] != nil {
				w.readDelay(p.pid, tid)
			}
		}

		w.readPressure(pressureDir(p.groups))
		for _, path := range memoryFails(p.groups) {
			n, err := strconv.ParseInt(strings.TrimSpace(slurp(path)), 10, 64)
			if _, known := w.start.fails[path]; err == nil && !known {
				w.start.fails[path] = n
			}
		}
	}
}

func (w *watch) readPressure(dir string) {
	const most = 64
	p := w.pressures[dir]
	if dir == "" || p == nil && len(w.pressures) >= most {
		return
	}
	io, memory := pressure(dir+"/io.pressure"), pressure(dir+"/memory.pressure")
	if p == nil {
		p = &groupPressure{since: time.Now(), io0: io, mem0: memory}
		w.pressures[dir] = p
	}
	p.io1, p.mem1 = io, memory
}

// memoryFails returns the files that count how often a control group of version 1 reached its memory limit.
func memoryFails(g cgroups) []string {
	h := groupRoots()
	if h.memory == "" || g.memory == "" || g.memory == "/" {
		return nil
	}
	return []string{filepath.Join(h.memory, g.memory, "memory.failcnt")}
}

// runDelay is the time in which a thread was ready but not running.
type runDelay struct {
	first, last time.Duration
	since, till time.Time
}

func (w *watch) readDelay(pid, tid int) {
	f := strings.Fields(slurp("/proc/" + strconv.Itoa(pid) + "/task/" + strconv.Itoa(tid) + "/schedstat"))
	if len(f) < 2 {
		return
	}

	n, err := strconv.ParseInt(f[1], 10, 64)
	if err != nil {
		return
	}

	d := w.cpu[tid]
	if d == nil {
		d = &runDelay{first: time.Duration(n), since: time.Now()}
		w.cpu[tid] = d
	}

	d.last, d.till = time.Duration(n), time.Now()
}

// dirtyWatch adds up the pauses of processes that dirty memory faster than it is written back. Pauses are few, so all
// are recorded.
type dirtyWatch struct {
	recorder *tracepoint.Recorder
	layers   map[string]string // of bdi names: the filesystem
	paused   map[dirtyKey]*pauses
}

type dirtyKey struct {
	pid int
	bdi string
}

type pauses struct {
	*identity
	n     int64
	total time.Duration
	most  time.Duration
	// At the last pause, in pages: the dirty data of this device, and its target.
	dirty, aim int64
}

// bdiName returns the kernel's name for the writeback of a filesystem; "" if it cannot be found.
func bdiName(l stack.Layer) string {
	if l.FSType == "btrfs" {
		if dir := btrfsDir(l); dir != "" {
			if link, err := filepath.EvalSymlinks(dir + "/bdi"); err == nil {
				return filepath.Base(link)
			}
		}
		return ""
	}

	d, err := blockdev.Lookup(l.Mount.Dev)
	if err != nil {
		return ""
	}

	if d.Kind == blockdev.Partition { // writeback is the disk's
		if below, err := d.Below(); err == nil && len(below) == 1 {
			d = below[0]
		}
	}

	return d.ID()
}

func (w *watch) watchDirty() {
	d := &dirtyWatch{layers: map[string]string{}, paused: map[dirtyKey]*pauses{}}
	var terms []string
	for _, l := range w.stack.Layers {
		if l.FSType == "" {
			continue
		}
		if name := bdiName(l); name != "" && d.layers[name] == "" {
			d.layers[name] = l.Name
			terms = append(terms, `bdi == "`+name+`"`)
		}
	}

	if len(terms) == 0 {
		return
	}

	r, err := tracepoint.NewRecorder(tracepoint.Spec{Event: "writeback:balance_dirty_pages",
		Filter: "pause > 0 && (" + strings.Join(terms, " || ") + ")"})
	if err != nil {
		w.missing("writers throttled for too much dirty data", "%v", err)
		return
	}

	d.recorder = r
	w.dirty = d
}

func (w *watch) readDirty() {
	if w.dirty == nil {
		return
	}

	records, _, err := w.dirty.recorder.Read()
	if err != nil {
		return
	}

	for _, r := range records {
		key := dirtyKey{r.PID, r.Event.String(r.Raw, "bdi")}
		p := w.dirty.paused[key]
		if p == nil {
			if len(w.dirty.paused) >= mostProcesses {
				continue
			}
			p = &pauses{identity: identify(r.PID)}
			w.dirty.paused[key] = p
		}

		d := time.Duration(r.Event.Int(r.Raw, "pause")) * time.Millisecond
		p.n++
		p.total += d
		p.most = max(p.most, d)
		p.dirty, p.aim = r.Event.Int(r.Raw, "wb_dirty"), r.Event.Int(r.Raw, "wb_setpoint")
	}
}

// countErrors counts failed requests of the devices of the stack.
func (w *watch) countErrors() {
	for _, l := range w.stack.Devices() {
		if l.Device.Kind == blockdev.Partition {
			continue
		}
		c, err := tracepoint.Count("block:block_rq_error",
			"dev == "+strconv.FormatUint(tracepoint.KernelDev(l.Device.Number), 10), tracepoint.Everything)
		if err != nil {
			w.missing("failed requests", "%v", err)
			return
		}
		w.errors[l.Name] = c
	}
}
