package proof

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
	"pando/internal/observe/tracepoint"
)

// Filters on the kind of a request (the field rwbs, from blk_fill_rwbs in the kernel): an F in front is a flush before
// the request, or a flush without data; an F behind the W is a write through the cache (FUA). Requests with both count
// as flushes only.
const (
	queued    = "block:block_bio_queue"
	isFlush   = `rwbs ~ "F*"`
	isFUA     = `rwbs ~ "WF*"`
	isEither  = `rwbs ~ "*F*"`
	isWrite   = `rwbs ~ "*W*"`
	msyncSync = "flags & 4"    // MS_SYNC
	openDSync = "flags & 4096" // O_DSYNC, which is part of O_SYNC
)

// kernelThreads are the names of kernel threads that send flushes for others on any stack, and those of particular
// layers: journals, pools, RAID. Each flush is compared with each name, so the list is as short as possible.
var (
	kernelThreads = []string{"kworker/*", "ksoftirqd/*", "kswapd*", "loop[0-9]*"}
	threadsOf     = map[string][]string{
		"ext3": {"jbd2/*"}, "ext4": {"jbd2/*"}, "ocfs2": {"jbd2/*", "ocfs2*"}, "xfs": {"xfsaild/*",
			"xfs-*"}, "btrfs": {"btrfs-*"},
		"f2fs": {"f2fs_*"}, "jfs": {"jfsCommit"}, "nilfs2": {"segctord"}, "gfs2": {"gfs2_*"}, "bcachefs": {"bch-*"},
		string(stack.Zpool): {"z_*", "zvol*", "txg_*", "dp_*"}, string(blockdev.RAID): {"md[0-9]*", "raid*_*"},
		string(blockdev.Mapper): {"dmcrypt*", "kcopyd", "dm-*"}, string(blockdev.Other): {"bcache*", "drbd*"},
	}
)

// byKernel returns a filter on the sender, for a stack. Kernel threads of devices beside the stack may not be in it:
// they count as other programs.
func byKernel(s *stack.Stack) string {
	names := slices.Clone(kernelThreads)
	for _, l := range s.Layers {
		for _, n := range append(slices.Clone(threadsOf[l.FSType]), threadsOf[string(l.Kind)]...) {
			if !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
	}

	var or []string
	for _, n := range names {
		or = append(or, fmt.Sprintf("comm ~ %q", n))
	}

	return "(" + strings.Join(or, " || ") + ")"
}

// family is a set of counters, by name.
type family struct {
	counters map[string][]*tracepoint.Counter
}

func (f *family) count(name, event, filter string, scope tracepoint.Scope) error {
	c, err := tracepoint.Count(event, filter, scope)
	if err != nil {
		return err
	}
	if f.counters == nil {
		f.counters = map[string][]*tracepoint.Counter{}
	}
	f.counters[name] = append(f.counters[name], c)
	return nil
}

// countIf is count for an event that some kernels lack.
func (f *family) countIf(name, event, filter string, scope tracepoint.Scope) error {
	err := f.count(name, event, filter, scope)
	if errs.Is(err, errs.Unsupported) {
		if _, e := tracepoint.Lookup(event); errs.Is(e, errs.Unsupported) {
			return nil
		}
	}
	return err
}

// read returns the sums; 0 for names without a counter.
func (f *family) read() (map[string]int64, error) {
	if f == nil {
		return nil, nil
	}

	out := map[string]int64{}
	for name, list := range f.counters {
		for _, c := range list {
			n, err := c.Read()
			if err != nil {
				return nil, errs.Wrap("count syncs", name, err)
			}
			out[name] += int64(n)
		}
	}

	return out, nil
}

func (f *family) close() {
	if f == nil {
		return
	}
	for _, list := range f.counters {
		for _, c := range list {
			_ = c.Close() // only read, and no longer needed
		}
	}
	f.counters = nil
}

// syncsOfAll counts the calls of all programs that cause flushes.
func syncsOfAll() (*family, error) {
	f := &family{}
	var all []error
	for _, call := range []string{"fsync", "fdatasync", "syncfs", "sync"} {
		all = append(all, f.count("all", "syscalls:sys_enter_"+call, "", tracepoint.Everything))
	}
	all = append(all, f.count("all", "syscalls:sys_enter_msync", msyncSync, tracepoint.Everything))
	if err := errors.Join(all...); err != nil {
		f.close()
		return nil, first(all)
	}
	return f, nil
}

func first(all []error) error {
	for _, err := range all {
		if err != nil {
			return err
		}
	}
	return nil
}

// writeCalls are the calls that write, openCalls those that open files with visible flags.
var (
	writeCalls = []string{"write", "pwrite64", "writev", "pwritev", "pwritev2"}
	openCalls  = []string{"open", "openat"}
)

// whose selects the events of the load.
type whose struct {
	scope  tracepoint.Scope
	filter string
}

// itsChildren are the descendants of this thread. The kernel switches each of these counters at every change of
// threads, twice for each sync: with all counters that takes some 30 µs, which is nothing for a rotating disk, but a
// tenth of a sync or more for a fast one.
var itsChildren = whose{scope: tracepoint.Children}

// named are the threads of a name, on the whole host: the counters are never switched, and add less than a microsecond
// to a sync.
func named(name string) whose {
	return whose{scope: tracepoint.Everything, filter: fmt.Sprintf("comm == %q", name)}
}

// and returns a filter for the events of w that also match another filter.
func (w whose) and(filter string) string {
	if w.filter == "" || filter == "" {
		return w.filter + filter
	}
	return w.filter + " && " + filter
}

// callsOf counts the calls of the load.
func callsOf(w whose) (*family, error) {
	f := &family{}
	var all []error
	for _, call := range []string{"fsync", "fdatasync", "syncfs", "sync"} {
		all = append(all, f.count(call, "syscalls:sys_enter_"+call, w.and(""), w.scope))
	}

	all = append(all, f.count("msync", "syscalls:sys_enter_msync", w.and(msyncSync), w.scope))
	for _, call := range writeCalls {
		all = append(all, f.countIf("write", "syscalls:sys_enter_"+call, w.and(""), w.scope))
	}

	for _, call := range openCalls {
		all = append(all, f.countIf("open with O_DSYNC", "syscalls:sys_enter_"+call, w.and(openDSync), w.scope))
	}

	all = append(all,
		f.countIf("sync_file_range", "syscalls:sys_enter_sync_file_range", w.and(""), w.scope),
		f.countIf("io_uring", "syscalls:sys_enter_io_uring_enter", w.and(""), w.scope),
		f.countIf("aio", "syscalls:sys_enter_io_submit", w.and(""), w.scope))
	if err := first(all); err != nil {
		f.close()
		return nil, err
	}

	return f, nil
}

// device is a block device that is counted.
type device struct {
	name string // of its layer
	dev  blockdev.Device
	// top is set if no other device is between it and the path's filesystem.
	top bool
	// direct is set if the programs that sync that filesystem write its data, and not kernel threads.
	direct bool
	// beside are devices on the same disk that are not below the path: partitions, logical volumes. Their flushes arrive
	// at the disk, too.
	beside []blockdev.Device
	kernel string // the filter for kernel threads
	family
}

func newDevice(s *stack.Stack, i int) *device {
	d := &device{name: s.Layers[i].Name, dev: *s.Layers[i].Device, top: true, kernel: byKernel(s)}
	mine := map[uint64]bool{}
	for _, l := range s.Devices() {
		mine[l.Device.Number] = true
	}

	depth := s.Layers[i].Depth
	for k := i - 1; k >= 0; k-- {
		l := s.Layers[k]
		if l.Depth >= depth {
			continue
		}
		depth = l.Depth
		switch {
		case l.Device != nil && counted(*l.Device):
			d.top = false
		case l.Kind == stack.Filesystem:
			d.direct = strings.HasPrefix(l.FSType, "ext") || l.FSType == "xfs"
		}
	}

	d.direct = d.direct && d.top
	above, err := d.dev.Above()
	for n := 0; err == nil && n < len(above); n++ { // it grows
		if !mine[above[n].Number] {
			d.beside = append(d.beside, above[n])
		}
		if above[n].Kind == blockdev.Partition {
			more, err := above[n].Above()
			if err == nil {
				above = append(above, more...)
			}
		}
	}

	return d
}

// besideWrites returns the number of writes of the devices beside it; a removed device counts as none.
func (d *device) besideWrites() (n int64) {
	for _, b := range d.beside {
		if s, err := b.Stat(); err == nil {
			n += s.Writes
		}
	}
	return n
}

// counted reports whether a device has events and statistics of its own, which partitions have not.
func counted(d blockdev.Device) bool { return d.Kind != blockdev.Partition }

// statisticsHaveFlushes reports whether a device's statistics count flushes: only the kernel's request queues do, which
// these drivers do not use.
func statisticsHaveFlushes(d blockdev.Device) bool {
	return d.Kind == blockdev.Disk || d.Kind == blockdev.Loop || d.Kind == blockdev.Other
}

func (d *device) filter(what string) string {
	return fmt.Sprintf("dev == %d && %s", tracepoint.KernelDev(d.dev.Number), what)
}

func (d *device) openCounters() error {
	all := []error{
		d.count("flush", queued, d.filter(isFlush), tracepoint.Everything),
		d.count("fua", queued, d.filter(isFUA), tracepoint.Everything),
		d.count("kernel", queued, d.filter(isEither+" && "+d.kernel), tracepoint.Everything),
	}
	if d.direct {
		all = append(all, d.count("user writes", queued, d.filter(isWrite+" && !"+d.kernel), tracepoint.Everything))
	}
	return first(all)
}

// openOwn counts the requests of the load's own threads.
func (d *device) openOwn(w whose) error {
	return first([]error{
		d.count("own", queued, w.and(d.filter(isEither)), w.scope),
		d.count("own writes", queued, w.and(d.filter(isWrite)), w.scope),
	})
}

// counts are the requests of a device.
type counts struct {
	stat blockdev.Stat
	// By tracepoints: all flushes and FUA writes; those of both sent by kernel threads, and by the load; writes sent by
	// programs, and by the load.
	flush, fua, kernel, own, userWrites, ownWrites int64
	beside                                         int64 // writes
}

// reading holds all counts at one moment.
type reading struct {
	at      time.Time
	took    time.Duration // set in differences
	devices map[string]counts
	calls   map[string]int64
	all     int64
}

func (w *Watch) read() (*reading, error) {
	r := &reading{at: time.Now(), devices: map[string]counts{}}
	for _, d := range w.devices {
		s, err := d.dev.Stat()
		if err != nil {
			return nil, errs.Wrap("count syncs", d.name, err)
		}
		n, err := d.read()
		if err != nil {
			return nil, err
		}
		r.devices[d.name] = counts{stat: s, flush: n["flush"], fua: n["fua"], kernel: n["kernel"], own: n["own"],
			userWrites: n["user writes"], ownWrites: n["own writes"], beside: d.besideWrites()}
	}

	var err error
	if r.calls, err = w.calls.read(); err != nil {
		return nil, err
	}

	all, err := w.all.read()
	if err != nil {
		return nil, err
	}

	r.all = all["all"]
	return r, nil
}

func (r *reading) seconds() float64 { return r.took.Seconds() }

func (r *reading) minus(o *reading) *reading {
	d := &reading{took: r.at.Sub(o.at), devices: map[string]counts{}, calls: map[string]int64{}, all: r.all - o.all}
	for name, a := range r.devices {
		b := o.devices[name]
		d.devices[name] = counts{stat: a.stat.Minus(b.stat), flush: a.flush - b.flush, fua: a.fua - b.fua,
			kernel: a.kernel - b.kernel, own: a.own - b.own,
			userWrites: a.userWrites - b.userWrites, ownWrites: a.ownWrites - b.ownWrites, beside: max(0, a.beside-b.beside)}
	}
	for name, n := range r.calls {
		d.calls[name] = n - o.calls[name]
	}
	return d
}

// perSecond are the rates of a device.
type perSecond struct{ flushes, writes, bytes float64 }

func (c counts) per(seconds float64) perSecond {
	if seconds <= 0 {
		return perSecond{}
	}
	return perSecond{float64(max(0, c.stat.Flushes)) / seconds, float64(c.stat.Writes) / seconds,
		float64(c.stat.WrittenBytes) / seconds}
}
