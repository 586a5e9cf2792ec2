package iostat

import (
	"encoding/hex"
	"fmt"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/observe/tracepoint"

	"golang.org/x/sys/unix"
)

// syncKey identifies syncs that are counted together: those of a filesystem on a device (ext4, XFS), of a btrfs (subvol
// 0), or of one subvolume of it. The zero key is unused.
type syncKey struct {
	fs     string   // "ext4", "xfs", "btrfs"
	dev    uint64   // in the kernel's form
	btrfs  [16]byte // its UUID
	subvol uint64
}

// syncKey returns the target's key; zero if its syncs cannot be told from others.
func (w *watched) syncKey() syncKey {
	switch {
	case w.fs == nil:
		return syncKey{}
	case w.fs.FSType == "btrfs":
		id, ok := btrfsUUID(w.groups[0].devs[0].Name)
		if !ok {
			return syncKey{}
		}

		k := syncKey{fs: "btrfs", btrfs: id}
		if w.own != nil {
			return k
		}

		d, err := os.Open(w.fs.Mount.Point) // closed at once, to keep the mount free
		if err != nil {
			return syncKey{}
		}

		defer d.Close()
		var st unix.Stat_t
		if unix.Fstat(int(d.Fd()), &st) != nil || !kernel.IsSubvolRoot(st.Ino) {
			return syncKey{} // a directory: others sync in the same subvolume
		}

		info, err := kernel.SubvolInfoOf(d)
		if err != nil {
			return syncKey{}
		}

		k.subvol = info.ID
		return k
	case w.own != nil && (w.fs.FSType == "ext4" || w.fs.FSType == "xfs"):
		return syncKey{fs: w.fs.FSType, dev: tracepoint.KernelDev(w.fs.Mount.Dev)}
	}

	return syncKey{}
}

// btrfsUUID finds the UUID of the btrfs on a device.
func btrfsUUID(device string) (id [16]byte, ok bool) {
	found, _ := filepath.Glob("/sys/fs/btrfs/*/devices/" + device) // device names contain no pattern
	if len(found) != 1 {
		return id, false
	}
	b, err := hex.DecodeString(strings.ReplaceAll(filepath.Base(filepath.Dir(filepath.Dir(found[0]))), "-", ""))
	return id, err == nil && copy(id[:], b) == len(id)
}

// tally counts syncs and their durations.
type tally struct {
	count, timed int64
	sum          time.Duration
	hist         histogram
}

func (t *tally) minus(o *tally) *Syncs {
	if o == nil {
		o = &tally{}
	}
	s := &Syncs{Source: "calls", Count: t.count - o.count, Timed: t.timed - o.timed}
	if s.Timed > 0 {
		h := t.hist.minus(o.hist)
		s.Latency = &Latency{Mean: (t.sum - o.sum).Seconds() / float64(s.Timed), P50: h.at(0.5), P95: h.at(0.95),
			P99: h.at(0.99), Max: h.at(1)}
	}
	return s
}

// histogram counts durations in classes 1/32 wide: class 32*e+m holds durations from (32+m)<<e ns, for 32 ns and more.
type histogram []int64

const classBits = 5

func class(d time.Duration) int {
	n := uint64(max(d, 1<<classBits))
	e := bits.Len64(n) - 1 - classBits
	return e<<classBits + int(n>>e) - 1<<classBits
}

// upper returns the end of a class, in seconds.
func upper(class int) float64 {
	e, m := class>>classBits, class&(1<<classBits-1)
	return float64(uint64(m+1+1<<classBits)<<e) / 1e9
}

func (h *histogram) add(d time.Duration) {
	c := class(d)
	if c >= len(*h) {
		*h = append(*h, make([]int64, c+1-len(*h))...)
	}
	(*h)[c]++
}

func (h histogram) minus(o histogram) histogram {
	out := slices.Clone(h)
	for i := range o {
		out[i] -= o[i]
	}
	return out
}

// at returns the percentile p, in seconds; nil if the histogram is empty.
func (h histogram) at(p float64) *float64 {
	var total, seen int64
	for _, n := range h {
		total += n
	}

	if total == 0 {
		return nil
	}

	want := max(int64(math.Ceil(p*float64(total))), 1)
	for c, n := range h {
		if seen += n; seen >= want {
			v := upper(c)
			return &v
		}
	}

	return nil
}

// drainEvery is the interval between reads of the kernel's buffers, which hold several seconds of syncs on the fastest
// disks.
const drainEvery = 200 * time.Millisecond

// syncTracer counts and times syncs by kernel events.
type syncTracer struct {
	mu      sync.Mutex
	rec     *tracepoint.Recorder
	cut     uint64 // records up to this time have been counted, by the previous recorder
	keys    map[syncKey]*tally
	began   map[int]begun // by thread: in a system call
	inExt4  map[int]begun // and in ext4's part of one
	lost    uint64
	err     error // the reason if own is nilhing is recorded
	specs   []tracepoint.Spec
	drainer chan struct{} // closed to stop it
	stopped chan struct{}
}

// begun is a call in progress.
type begun struct {
	at   uint64
	keys []*tally // the tallies to add it to, once known
}

func newSyncTracer() *syncTracer {
	return &syncTracer{keys: map[syncKey]*tally{}, began: map[int]begun{}, inExt4: map[int]begun{}}
}

// maxFiltered is the number of devices in the kernel's filter, which has a limited size; with more devices, this
// program filters.
const maxFiltered = 100

// set starts counting the syncs of the layout's targets.
func (s *syncTracer) set(l *layout) {
	keys := map[syncKey]*tally{}
	devs := map[string][]string{}
	for _, t := range l.targets {
		if t.sync.fs != "" && keys[t.sync] == nil {
			keys[t.sync] = &tally{}
			devs[t.sync.fs] = append(devs[t.sync.fs], fmt.Sprintf("dev == %d", t.sync.dev))
		}
	}

	var specs []tracepoint.Spec
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		of := devs[fs]
		if len(of) == 0 {
			continue
		}
		slices.Sort(of)
		filter := ""
		if fs != "btrfs" && len(of) <= maxFiltered {
			filter = strings.Join(of, " || ")
		}
		for _, e := range fileSystemEvents[fs] {
			specs = append(specs, tracepoint.Spec{Event: e, Filter: filter})
		}
	}

	if len(devs["xfs"])+len(devs["btrfs"]) > 0 {
		// These filesystems have no event at the end of a sync, so the end of the system call is used. The call begins before
		// the event of the filesystem identifies it.
		for _, c := range []string{"fsync", "fdatasync", "msync"} {
			specs = append(specs, tracepoint.Spec{Event: "syscalls:sys_enter_" + c},
				tracepoint.Spec{Event: "syscalls:sys_exit_" + c})
		}
	}

	s.mu.Lock()
	defer s.mu.Unlock()

	for k := range keys {
		if t := s.keys[k]; t != nil {
			keys[k] = t
		}
	}

	if slices.Equal(specs, s.specs) {
		s.drain()
		s.keys = keys
		return
	}

	var next *tracepoint.Recorder
	s.err = nil
	if len(specs) > 0 {
		next, s.err = tracepoint.NewRecorder(specs...)
	}

	cut := tracepoint.Now()
	s.drainUpTo(cut)
	if s.rec != nil {
		_ = s.rec.Close()
	}

	s.rec, s.specs, s.keys, s.cut = next, specs, keys, cut
	if s.err != nil {
		s.specs = nil
	}

	if s.rec != nil && s.drainer == nil {
		s.drainer, s.stopped = make(chan struct{}), make(chan struct{})
		go s.keepDraining(s.drainer, s.stopped)
	}
}

// fileSystemEvents are the events of a sync in a filesystem: its start and, for ext4, its end.
var fileSystemEvents = map[string][]string{
	"ext4":  {"ext4:ext4_sync_file_enter", "ext4:ext4_sync_file_exit"},
	"xfs":   {"xfs:xfs_file_fsync", "xfs:xfs_dir_fsync"},
	"btrfs": {"btrfs:btrfs_sync_file"},
}

func (s *syncTracer) keepDraining(stop, stopped chan struct{}) {
	defer close(stopped)
	tick := time.NewTicker(drainEvery)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
			s.mu.Lock()
			s.drain()
			s.mu.Unlock()
		}
	}
}

func (s *syncTracer) drain() { s.drainUpTo(math.MaxUint64) }

// drainUpTo counts the records up to a time.
func (s *syncTracer) drainUpTo(end uint64) {
	if s.rec == nil {
		return
	}

	records, lost, err := s.rec.Read()
	if err != nil {
		s.err = err
		_ = s.rec.Close()
		s.rec = nil
		return
	}

	s.lost = lost
	for _, r := range records {
		if r.Time > s.cut && r.Time <= end {
			s.handleRecord(r)
		}
	}

	if len(s.began)+len(s.inExt4) > maxBegun { // left by threads that ended during their calls
		s.began, s.inExt4 = map[int]begun{}, map[int]begun{}
	}
}

const maxBegun = 1 << 16

func (s *syncTracer) handleRecord(r tracepoint.Record) {
	e := r.Event
	system, name, _ := strings.Cut(e.Name, ":")
	switch {
	case system == "syscalls" && strings.HasPrefix(name, "sys_enter_"):
		s.began[r.TID] = begun{at: r.Time}
	case system == "syscalls":
		s.ended(s.began, r)
	case name == "ext4_sync_file_exit":
		s.ended(s.inExt4, r)
	case system == "ext4":
		k := syncKey{fs: system, dev: uint64(e.Int(r.Raw, "dev"))}
		if t := s.keys[k]; t != nil {
			t.count++
			s.inExt4[r.TID] = begun{r.Time, []*tally{t}}
		}
	case system == "xfs":
		s.entered(r, syncKey{fs: system, dev: uint64(e.Int(r.Raw, "dev"))})
	case system == "btrfs":
		k := syncKey{fs: system}
		id := e.Fields["fsid"]
		if id.Size != len(k.btrfs) || id.Offset+id.Size > len(r.Raw) {
			return
		}
		copy(k.btrfs[:], r.Raw[id.Offset:])

		// Count it for the whole filesystem, then for its subvolume.
		s.entered(r, k)
		k.subvol = uint64(e.Int(r.Raw, "root_objectid"))
		s.entered(r, k)
	}
}

// entered counts a sync in a filesystem without an event for its end.
func (s *syncTracer) entered(r tracepoint.Record, k syncKey) {
	t := s.keys[k]
	if t == nil {
		return
	}
	t.count++
	if b, ok := s.began[r.TID]; ok {
		b.keys = append(b.keys, t)
		s.began[r.TID] = b
	}
}

// ended times a call that has returned.
func (s *syncTracer) ended(calls map[int]begun, r tracepoint.Record) {
	b, ok := calls[r.TID]
	if !ok {
		return
	}

	delete(calls, r.TID)
	if r.Time < b.at {
		return
	}

	for _, t := range b.keys {
		d := time.Duration(r.Time - b.at)
		t.timed++
		t.sum += d
		t.hist.add(d)
	}
}

// read returns the counts so far, empty if nothing is counted.
func (s *syncTracer) read() map[syncKey]*tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drain()
	out := map[syncKey]*tally{}
	if s.rec == nil {
		return out
	}

	for k, t := range s.keys {
		c := *t
		c.hist = slices.Clone(t.hist)
		out[k] = &c
	}

	return out
}

// missing lists the syncs that are not counted, with the reason.
func (s *syncTracer) missing(l *layout) []string {
	s.mu.Lock()
	defer s.mu.Unlock()

	var out []string
	switch {
	case errs.Is(s.err, errs.Permission):
		out = append(out, "only root can see the syncs of programs: showing flushes of the device instead")
	case s.err != nil:
		out = append(out, "syncs of programs are not visible ("+s.err.Error()+"): showing flushes of the device instead")
	}

	if s.lost > 0 {
		out = append(out, fmt.Sprintf("%d sync events came too fast to be recorded", s.lost))
	}

	var mixed []string
	for _, t := range l.targets {
		if t.sync.fs == "" && t.own == nil && (t.fs == nil || t.fs.FSType != "zfs") {
			mixed = append(mixed, t.Name)
		}
	}

	if n := len(mixed); n > 0 {
		names := strings.Join(mixed[:min(n, 3)], ", ")
		if n > 3 {
			names += fmt.Sprintf(" and %d more", n-3)
		}
		out = append(out, names+": its syncs cannot be told from others on the same filesystem")
	}

	return out
}

func (s *syncTracer) close() {
	if s.drainer != nil {
		close(s.drainer)
		<-s.stopped
		s.drainer = nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec != nil {
		_ = s.rec.Close()
		s.rec = nil
	}
}
