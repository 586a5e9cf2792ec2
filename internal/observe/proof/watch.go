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

// Watch counts, below one path, what the syncs of a load become. It is used once, in
// the order New, Baseline, Start, Sample (any number of times), Stop, Close. Its methods
// are for one goroutine; only Close may be called at any time, and again.
type Watch struct {
	stack    *stack.Stack
	facts    []fact
	method   Method
	noTraces string

	devices []*device
	all     *family // sync calls of the whole host

	before   *reading // the baseline's start, its end, and the run's start
	quiet    *reading
	started  *reading
	cmd      *exec.Cmd
	preload  string
	calls    *family       // of the load
	sample   *Sample       // nil: none was taken
	finished chan struct{} // closed: the thread that started the load may end
	closing  sync.Once
}

// New looks at what is known without a run (mount options, properties, settings of
// devices), and opens counters at the devices of a stack. It does not fail for want of
// root or of tracepoints, but then counts less: see Proof.Method. Canceled; other
// errors are of the statistics of block devices. Close releases what it opened.
func New(ctx context.Context, s *stack.Stack) (*Watch, error) {
	w := &Watch{stack: s, facts: lookAt(ctx, s), method: Tracepoints, finished: make(chan struct{})}
	if err := ctx.Err(); err != nil {
		return nil, errs.Wrap("count syncs", s.Path, err)
	}

	for i, l := range s.Layers {
		if l.Device != nil && counted(*l.Device) {
			w.devices = append(w.devices, newDevice(s, i))
		}
	}

	if err := w.open(); err != nil {
		w.release()
		w.method, w.noTraces = Statistics, err.Error()
	}

	if _, err := w.read(); err != nil {
		w.release()
		return nil, err
	}

	return w, nil
}

// open opens the counters of devices and of the host.
func (w *Watch) open() (err error) {
	for _, d := range w.devices {
		if err := d.open(); err != nil {
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

// Baseline counts for a while what others write and flush at each layer: it is to be
// called before the load is started. Canceled.
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

// Start starts the load, such that the system calls of it and of its children are
// counted from its exec on. It is called instead of cmd.Start and gives its error; the
// caller waits for the load. Of Linux's "parent died" signal: the parent is a thread
// that lives until Close.
func (w *Watch) Start(cmd *exec.Cmd) error { return w.start(cmd, itsChildren) }

// StartOne is Start for one program that starts no other and leaves its threads their name, under which there is
// no other program on this host: a link to it of a name made up for the purpose. Its
// calls are counted by that name, which costs the load next to nothing; Start's costs some 30 µs for each
// sync.
func (w *Watch) StartOne(cmd *exec.Cmd) error {
	name := filepath.Base(cmd.Path)
	return w.start(cmd, named(name[:min(len(name), maxName)]))
}

// maxName is what the kernel keeps of the name of a thread.
const maxName = 15

func (w *Watch) start(cmd *exec.Cmd, load whose) error {
	if w.started != nil {
		return errs.New(errs.Internal, "count syncs", w.stack.Path, "started twice")
	}

	w.cmd, w.preload = cmd, preloaded(cmd)
	ready := make(chan error)
	go func() {
		// Not unlocked: the counters are of what this thread starts, so it must start
		// nothing else, and ends with this function.
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

// preloaded tells what the load has put into it by the dynamic linker.
func preloaded(cmd *exec.Cmd) string {
	found := ""
	for _, e := range cmd.Environ() { // what the load gets, whether it is told or inherits it
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

// Evidence is what was counted during a run.
type Evidence struct {
	stack    *stack.Stack
	facts    []fact
	method   Method
	noTraces string
	preload  string

	seconds float64
	devices map[string]evidence // by the layer's name
	calls   map[string]int64    // of the load; nil: not counted
	// othersSyncs are calls of other programs: what kernel threads have flushed for
	// others on the path's own filesystem is no more than that.
	othersSyncs int64
	sample      *Sample
}

// evidence is what was counted at a device.
type evidence struct {
	counts
	rate perSecond // of others, before the run
	dev  *device
}

// Stop ends the counting: call it when the load has ended. Once.
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

// Close closes the counters. The load must have ended, or is not counted further.
func (w *Watch) Close() error {
	w.closing.Do(func() {
		close(w.finished)
		w.release()
	})
	return nil
}
