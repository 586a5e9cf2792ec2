// Package diagnose watches a live system for a while and finds out why syncs of a path are slow: which processes sync,
// where the time of a sync goes, layer by layer, and which of the usual causes make it longer, ranked, with the
// evidence for each.
//
// It causes no load, writes nothing, and changes no setting. It records kernel events in windows, limited by a budget
// of events, so that it does not slow the system down.
package diagnose

import (
	"context"
	"fmt"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/mount"
	"pando/internal/observe/stack"
	"pando/internal/observe/tracepoint"

	"golang.org/x/sys/unix"
)

// Format is the version of Report's JSON form. It grows when a field changes its meaning or is removed.
const Format = 1

// Request is what Watch examines.
type Request struct {
	// Path is a file, a directory or a block device. The report explains the syncs of files below it.
	Path   string
	Volume string        // the name the user gave, if any: for the report
	For    time.Duration // how long to watch; 0: 30 s
}

// Report is the result. Times are in seconds, sizes in bytes, shares from 0 to 1. Its JSON
// form is stable.
type Report struct {
	Kind    string    `json:"kind"` // "pando diagnose"
	Format  int       `json:"format"`
	Path    string    `json:"path"`
	Volume  string    `json:"volume,omitempty"`
	Started time.Time `json:"started_at"`
	Layers  []Layer   `json:"layers"`
	// Hidden is the reason why nothing is known below the last layer.
	Hidden  string  `json:"hidden,omitempty"`
	Seconds float64 `json:"seconds"`        // watched
	Traced  float64 `json:"traced_seconds"` // of them, with events recorded
	// Interrupted is set if Watch ended early; the report then covers Seconds.
	Interrupted bool `json:"interrupted"`

	Syncs   Syncs    `json:"syncs"`
	Devices []Device `json:"devices"`
	Writers []Writer `json:"writers"`
	Host    Host     `json:"host"`
	Causes  []Cause  `json:"causes"`
	// Databases are those at the path or directly below it.
	Databases []Database `json:"databases,omitempty"`
	Verdict   string     `json:"verdict"` // a sentence or two
	Next      []string   `json:"next"`    // suggested command lines, if there is no cause
	NotLooked []Missing  `json:"not_looked_at"`
}

// Layer is a filesystem, device or pool below the path.
type Layer struct {
	Name   string `json:"name"`
	Kind   string `json:"kind"`
	Depth  int    `json:"depth"`
	Role   string `json:"role,omitempty"`
	FSType string `json:"fstype,omitempty"`
}

// Missing is something that could not be examined.
type Missing struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// Syncs are those of files below the path.
type Syncs struct {
	// Count is the number of syncs that ended during the watch: counted if all of it was traced, otherwise extrapolated
	// from the windows. -1: unknown.
	Count     int64   `json:"count"`
	PerSecond float64 `json:"per_second"`
	Exact     bool    `json:"exact"`

	// The latencies are those of the Sampled syncs that were recorded.
	Sampled int64   `json:"sampled"`
	Mean    float64 `json:"mean"`
	P50     float64 `json:"p50"`
	P99     float64 `json:"p99"`
	Max     float64 `json:"max"`
	// Pending is the duration so far of the oldest sync that had not ended.
	Pending float64 `json:"pending"`

	// Where splits the time of the syncs by the layer where they waited, from the top.
	Where []Part `json:"where"`

	Processes []Process `json:"processes"` // that sync here, or on the same devices
	// Lost is the number of events dropped because the buffers were full.
	Lost uint64 `json:"lost_events"`
}

// Part is a part of the time of the syncs.
type Part struct {
	Name  string  `json:"name"` // "above loop3", "loop3", "vda"
	Share float64 `json:"share"`
}

// Relation is how a process is related to the path.
type Relation string

// The relations.
const (
	Here       Relation = "here"       // its files are below the path
	Filesystem Relation = "filesystem" // they are on the same filesystem
	Devices    Relation = "device"     // they are on another filesystem, on a device below the path
)

// Process is a process that syncs.
type Process struct {
	PID       int      `json:"pid"`
	Command   string   `json:"command"`
	CGroup    string   `json:"cgroup"`
	Relation  Relation `json:"relation"`
	File      string   `json:"file"` // that it synced most
	Call      string   `json:"call"` // that it used most
	Sampled   int64    `json:"sampled"`
	PerSecond float64  `json:"per_second"`
	Mean      float64  `json:"mean"`
	P50       float64  `json:"p50"`
	P99       float64  `json:"p99"`
	Max       float64  `json:"max"`
	// IOPressure and MemoryPressure are the shares of the time in which some task of its control group waited for storage,
	// and for memory; -1: not counted for this group.
	IOPressure     float64 `json:"io_pressure"`
	MemoryPressure float64 `json:"memory_pressure"`
}

// Device is the work that a device below the path did.
type Device struct {
	Name  string `json:"name"`
	Kind  string `json:"kind"`
	Depth int    `json:"depth"`
	Role  string `json:"role,omitempty"`

	ReadsPerSecond    float64 `json:"reads_per_second"`
	WritesPerSecond   float64 `json:"writes_per_second"`
	FlushesPerSecond  float64 `json:"flushes_per_second"` // -1: not counted
	DiscardsPerSecond float64 `json:"discards_per_second"`
	WrittenBytes      int64   `json:"written_bytes"`
	DiscardedBytes    int64   `json:"discarded_bytes"`

	WriteAwait  float64 `json:"write_await"` // mean, from queueing to completion
	FlushAwait  float64 `json:"flush_await"`
	Busy        float64 `json:"busy"`        // share of the time with a request in flight
	Queue       float64 `json:"queue"`       // mean number in flight
	MostQueued  int64   `json:"most_queued"` // of all readings
	NrRequests  int     `json:"nr_requests"`
	Errors      int64   `json:"errors"`       // requests that failed; -1: not counted
	SyncShare   float64 `json:"sync_share"`   // of the time of the syncs, with a request at this device
	FlushShare  float64 `json:"flush_share"`  // ... with a flush at it
	OthersShare float64 `json:"others_share"` // ... in which it worked for others
}

// Writer is a process, control group or loop device that wrote to the devices below the path, or synced on them.
type Writer struct {
	Kind         string  `json:"kind"` // "process", "cgroup" or "device" (of a loop device beside)
	Name         string  `json:"name"` // of the command, the group, or the device
	PID          int     `json:"pid,omitempty"`
	CGroup       string  `json:"cgroup,omitempty"`
	Device       string  `json:"device,omitempty"`
	WrittenBytes int64   `json:"written_bytes"` // during the watch
	Requests     float64 `json:"requests_per_second"`
	Flushes      float64 `json:"flushes_per_second"`
	Syncs        float64 `json:"syncs_per_second"`
	Here         bool    `json:"here"` // its syncs are among those the report explains
}

// Host is the state of the rest of the host. Shares are of the time watched; -1: unknown.
type Host struct {
	Steal          float64 `json:"steal"`
	IOPressure     float64 `json:"io_pressure"`
	CPUPressure    float64 `json:"cpu_pressure"`
	MemoryPressure float64 `json:"memory_pressure"`
	DirtyBytes     int64   `json:"dirty_bytes"` // the most of all readings
	WritebackBytes int64   `json:"writeback_bytes"`
}

// Confidence is how sure a cause is.
type Confidence string

// The confidences.
const (
	Certain  Confidence = "certain"  // read from a setting, or counted
	Likely   Confidence = "likely"   // the share was measured
	Possible Confidence = "possible" // it exists, and often is a cause; its cost here was not measured
)

// Cause is one reason for slow syncs.
type Cause struct {
	Code string `json:"code"` // stable: see docs/diagnose.md
	Rank int    `json:"rank"` // from 1
	// Share is the part of the time of the syncs that the cause explains; -1: it cannot be computed. Shares of several
	// causes overlap.
	Share      float64    `json:"share"`
	Confidence Confidence `json:"confidence"`
	Title      string     `json:"title"`
	Evidence   []string   `json:"evidence"`
	Next       []string   `json:"next"` // next steps; command lines are in `backquotes`

	score float64
}

// step is the interval between two samples of state that has no events.
const step = 100 * time.Millisecond

// Watch watches until the time is over or ctx ends; the report then is about the time
// really watched, and Interrupted. Errors are those of finding the layers below the
// path: NotFound, Permission, Unsupported (the path is not a file, directory or block
// device). All else that cannot be looked at is in the report.
func Watch(ctx context.Context, q Request) (*Report, error) {
	if q.For <= 0 {
		q.For = 30 * time.Second
	}

	progress.From(ctx).StartOf(progress.FindingLayers, q.Path, 0, 0)
	s, err := stack.Of(ctx, q.Path)
	if err != nil {
		return nil, err
	}

	w := newWatch(q, s)
	if err := w.identify(); err != nil {
		return nil, err
	}

	if err := w.settings(ctx); err != nil {
		return nil, err
	}

	defer w.close()
	w.observe(ctx)
	return w.report, nil
}

// observe watches, and fills in the report.
func (w *watch) observe(ctx context.Context) {
	w.trace()
	w.begin()
	w.run(ctx)
	w.end()
	// The rest is quick, and worth a short delay after an interruption.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	w.finish(last)
}

// watch is one run.
type watch struct {
	q      Request
	stack  *stack.Stack
	report *Report

	fsDev  uint64      // st_dev of files on the filesystem
	rawDev uint64      // of a path that is a block device
	file   uint64      // inode number, if the path is a regular file
	entry  mount.Entry // of the filesystem at the top; zero for a device
	fsType string

	tracer *tracer
	dirty  *dirtyWatch
	errors map[string]*tracepoint.Counter // by device
	uring  *tracepoint.Counter

	start, stop sample
	elapsed     time.Duration
	ops         map[string]*operation // seen running, by name
	zfs         *zfsFacts
	most        map[string]int64 // in flight, by device
	scans       []scanner
	shared      map[uint64]sharing        // by number of the filesystem
	cpu         map[int]*runDelay         // of threads that sync the path
	pressures   map[string]*groupPressure // by directory of the control group
	looks       int
}

func newWatch(q Request, s *stack.Stack) *watch {
	r := &Report{
		Kind: "pando diagnose", Format: Format, Path: s.Path, Volume: q.Volume, Started: time.Now().UTC(), Hidden: s.Hidden,
		Layers: []Layer{}, Devices: []Device{}, Writers: []Writer{}, Causes: []Cause{}, Next: []string{},
		NotLooked: []Missing{},
		Syncs:     Syncs{Count: -1, Where: []Part{}, Processes: []Process{}},
	}
	for _, l := range s.Layers {
		r.Layers = append(r.Layers, Layer{Name: l.Name, Kind: string(l.Kind), Depth: l.Depth, Role: l.Role, FSType: l.FSType})
	}
	return &watch{q: q, stack: s, report: r, errors: map[string]*tracepoint.Counter{}, ops: map[string]*operation{},
		most: map[string]int64{}}
}

// missing records once that something could not be examined.
func (w *watch) missing(what string, format string, args ...any) {
	m := Missing{What: what, Why: fmt.Sprintf(format, args...)}
	for _, x := range w.report.NotLooked {
		if x == m {
			return
		}
	}
	w.report.NotLooked = append(w.report.NotLooked, m)
}

// identify finds out how to tell files below the path from others.
func (w *watch) identify() error {
	var st unix.Stat_t
	if err := unix.Stat(w.stack.Path, &st); err != nil {
		return errs.Wrap("diagnose", w.stack.Path, &os.PathError{Op: "stat", Path: w.stack.Path, Err: err})
	}

	w.fsDev = st.Dev
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		w.rawDev, w.fsDev = st.Rdev, st.Rdev
		return nil
	case unix.S_IFREG:
		w.file = st.Ino
	}

	top := w.stack.Layers
	if len(top) == 0 || top[0].FSType == "" {
		return errs.New(errs.Unsupported, "diagnose", w.q.Path, "%s", w.stack.Hidden)
	}

	w.entry, w.fsType = top[0].Mount, top[0].FSType
	return nil
}

// run watches.
func (w *watch) run(ctx context.Context) {
	tick := time.NewTicker(step)
	defer tick.Stop()
	begin := time.Now()
	end := begin.Add(w.q.For)
	progress.From(ctx).StartOf(progress.Watching, w.stack.Path, int64(w.q.For/time.Second), 0)
	for {
		progress.From(ctx).Set(int64(time.Since(begin)/time.Second), 0, 0)
		select {
		case <-ctx.Done():
			w.report.Interrupted = true
			w.elapsed = time.Since(begin)
			return
		case now := <-tick.C:
			w.sampleOften()
			if w.tracer != nil {
				w.tracer.step(now)
			}
			if !now.Before(end) {
				w.elapsed = time.Since(begin)
				return
			}
		}
	}
}

// close closes files, counters and recorders.
func (w *watch) close() {
	if w.tracer != nil {
		w.tracer.close()
	}
	if w.dirty != nil {
		_ = w.dirty.recorder.Close()
	}

	for _, c := range w.errors {
		_ = c.Close()
	}

	if w.uring != nil {
		_ = w.uring.Close()
	}

	for _, s := range w.scans {
		_ = s.dir.Close()
	}
}
