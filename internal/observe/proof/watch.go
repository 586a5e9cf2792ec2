package proof

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/observe/stack"
)

// Watch counts the requests that the syncs of a load cause below a path. Use it once, in the order New, Baseline,
// Start, Sample (any number of times), Stop, Close. Its methods are for one goroutine; only Close may be called at any
// time, and repeatedly.
type Watch struct {
	stack    *stack.Stack
	facts    []fact
	method   Method
	noTraces string

	devices []*device
	all     *family // sync calls of the whole host

	before   *reading // the start of the baseline, its end, and the start of the run
	quiet    *reading
	started  *reading
	cmd      *exec.Cmd
	preload  string
	calls    *family       // of the load
	sample   *Sample       // nil: none was taken
	finished chan struct{} // closed: the thread that started the load may end
	closing  sync.Once
}

// New collects the facts known without a run (mount options, properties, settings of devices), and opens counters at
// the devices of a stack. Without root or tracepoints it does not fail, but counts less: Proof.Method says how.
// Canceled; other errors are from the statistics of block devices. Close releases the counters.
func New(ctx context.Context, s *stack.Stack) (*Watch, error) {
	w := &Watch{stack: s, facts: stackFacts(ctx, s), method: Tracepoints, finished: make(chan struct{})}
	if err := ctx.Err(); err != nil {
		return nil, errs.Wrap("count syncs", s.Path, err)
	}

	for i, l := range s.Layers {
		if l.Device != nil && counted(*l.Device) {
			w.devices = append(w.devices, newDevice(s, i))
		}
	}

	if err := w.openCounters(); err != nil {
		w.release()
		w.method, w.noTraces = Statistics, err.Error()
	}

	if _, err := w.read(); err != nil {
		w.release()
		return nil, err
	}

	return w, nil
}

// openCounters opens the counters of devices and of the host.
func (w *Watch) openCounters() (err error) {
	for _, d := range w.devices {
		if err := d.openCounters(); err != nil {
			return err
		}
	}
	w.all, err = syncsOfAll()
	return err
}

func (w *Watch) release() {
	for _, d := range w.devices {
		d.close()
	}
	w.all.close()
	w.calls.close()
	w.all, w.calls = nil, nil
}

// Baseline counts for a while the writes and flushes of others at each layer: call it before the load starts. Canceled.
func (w *Watch) Baseline(ctx context.Context, d time.Duration) error {
	first, err := w.read()
	if err != nil {
		return err
	}

	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return errs.Wrap("count syncs", w.stack.Path, ctx.Err())
	}

	last, err := w.read()
	if err != nil {
		return err
	}

	w.before, w.quiet = first, last
	return nil
}

// Start starts the load, and counts the system calls of it and its children from its exec on. It replaces cmd.Start and
// returns its error; the caller waits for the load. For Linux's "parent died" signal, the parent is a thread that lives
// until Close.
func (w *Watch) Start(cmd *exec.Cmd) error { return w.start(cmd, itsChildren) }

// StartOne is Start for a program that starts no other, and whose threads keep its name, which no other program on this
// host has: use a link with a name made up for the purpose. Its calls are counted by that name, which costs the load
// almost nothing; Start costs some 30 µs for each sync.
func (w *Watch) StartOne(cmd *exec.Cmd) error {
	name := filepath.Base(cmd.Path)
	return w.start(cmd, named(name[:min(len(name), maxName)]))
}

// maxName is the length of thread names in the kernel.
const maxName = 15

func (w *Watch) start(cmd *exec.Cmd, load whose) error {
	if w.started != nil {
		return errs.New(errs.Internal, "count syncs", w.stack.Path, "started twice")
	}

	w.cmd, w.preload = cmd, preloaded(cmd)
	ready := make(chan error)
	go func() {
		// Not unlocked: the counters cover the children of this thread, so it must start nothing else, and ends with this
		// function.
		runtime.LockOSThread()
		ready <- w.startHere(cmd, load)
		<-w.finished
	}()

	return <-ready
}

func (w *Watch) startHere(cmd *exec.Cmd, load whose) (err error) {
	if w.method == Tracepoints {
		if w.calls, err = callsOf(load); err == nil {
			for _, d := range w.devices {
				if err = d.openOwn(load); err != nil {
					break
				}
			}
		}
		if err != nil {
			w.release()
			w.method, w.noTraces = Statistics, err.Error()
		}
	}

	if w.started, err = w.read(); err != nil {
		return err
	}

	return cmd.Start()
}

// preloaded returns the libraries that the dynamic linker loads into the load.
func preloaded(cmd *exec.Cmd) string {
	found := ""
	for _, e := range cmd.Environ() { // the load's environment, given or inherited
		if v, ok := strings.CutPrefix(e, "LD_PRELOAD="); ok {
			found = v
		}
	}

	if found != "" {
		return "LD_PRELOAD=" + found
	}

	if b, err := os.ReadFile("/etc/ld.so.preload"); err == nil && len(strings.Fields(string(b))) > 0 {
		return "/etc/ld.so.preload: " + strings.Join(strings.Fields(string(b)), " ")
	}

	return ""
}

// Evidence is the counts of a run.
type Evidence struct {
	stack    *stack.Stack
	facts    []fact
	method   Method
	noTraces string
	preload  string

	seconds float64
	devices map[string]evidence // by the layer's name
	calls   map[string]int64    // of the load; nil: not counted
	// othersSyncs are the calls of other programs: kernel threads flushed at most that often for others on the path's own
	// filesystem.
	othersSyncs int64
	sample      *Sample
}

// evidence is the counts of a device.
type evidence struct {
	counts
	rate perSecond // of others, before the run
	dev  *device
}

// Stop ends the counting. Call it once, when the load has ended.
func (w *Watch) Stop() (*Evidence, error) {
	if w.started == nil {
		return nil, errs.New(errs.Internal, "count syncs", w.stack.Path, "not started")
	}

	end, err := w.read()
	if err != nil {
		return nil, err
	}

	run := end.minus(w.started)
	e := &Evidence{
		stack: w.stack, facts: w.facts, method: w.method, noTraces: w.noTraces, preload: w.preload,
		seconds: run.seconds(), devices: map[string]evidence{}, sample: w.sample,
	}
	if w.method == Tracepoints {
		e.calls = run.calls
		e.othersSyncs = max(0,
			run.all-run.calls["fsync"]-run.calls["fdatasync"]-run.calls["msync"]-run.calls["syncfs"]-run.calls["sync"])
	}

	var quiet *reading
	if w.quiet != nil {
		quiet = w.quiet.minus(w.before)
	}

	for _, d := range w.devices {
		x := evidence{counts: run.devices[d.name], dev: d}
		if quiet != nil {
			x.rate = quiet.devices[d.name].per(quiet.seconds())
		}
		e.devices[d.name] = x
	}

	return e, nil
}

// Close closes the counters. A load that is still running is no longer counted.
func (w *Watch) Close() error {
	w.closing.Do(func() {
		close(w.finished)
		w.release()
	})
	return nil
}
