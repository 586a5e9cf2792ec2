package diagnose

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/linux/mount"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
	"pando/internal/observe/tracepoint"

	"golang.org/x/sys/unix"
)

// target is the file behind a descriptor.
type target struct {
	rel     Relation // "" if it is unrelated to the path
	file    string
	durable bool // opened with O_DSYNC or O_SYNC
	asked   time.Time
}

// targetAge is how long an answer is cached: descriptors are reused.
const targetAge = time.Second

// target returns the file behind a descriptor of a process, nil if it is closed.
func (t *tracer) target(pid, fd int) *target {
	key := [2]int{pid, fd}
	now := time.Now()
	if x := t.targets[key]; x != nil && now.Sub(x.asked) < targetAge {
		return x
	}

	x := t.w.target(pid, fd)
	if x != nil {
		x.asked = now
		t.targets[key] = x
	} else {
		delete(t.targets, key)
	}

	return x
}

func (w *watch) target(pid, fd int) *target {
	link := fmt.Sprintf("/proc/%d/fd/%d", pid, fd)
	var st unix.Stat_t
	if err := unix.Stat(link, &st); err != nil {
		return nil
	}
	name, err := os.Readlink(link)
	if err != nil {
		return nil
	}
	return &target{rel: w.relation(pid, fd, name, &st), file: name, durable: openFlags(pid, fd)&unix.O_DSYNC != 0}
}

// relation returns how a file is related to the path.
func (w *watch) relation(pid, fd int, name string, st *unix.Stat_t) Relation {
	kind := st.Mode & unix.S_IFMT
	if w.rawDev != 0 {
		if kind == unix.S_IFBLK && st.Rdev == w.rawDev || st.Dev == w.rawDev {
			return Here
		}
	} else if kind == unix.S_IFREG || kind == unix.S_IFDIR {
		same := st.Dev == w.fsDev
		if !same && (w.fsType == "btrfs" || w.fsType == "overlay") {
			same = mountDev(pid, fd) == w.entry.Dev
		}
		switch {
		case same && w.below(name, st):
			return Here
		case same:
			return Filesystem
		}
	}

	if kind != unix.S_IFREG && kind != unix.S_IFDIR && kind != unix.S_IFBLK {
		return ""
	}

	dev := st.Dev
	if kind == unix.S_IFBLK {
		dev = st.Rdev
	}
	if w.shares(dev, name) {
		return Devices
	}

	return ""
}

// below reports whether a file of the filesystem is below the path.
func (w *watch) below(name string, st *unix.Stat_t) bool {
	if w.file != 0 {
		return st.Ino == w.file && st.Dev == w.fsDev
	}
	if w.stack.Path == w.entry.Point && (w.entry.Root == "/" || st.Dev == w.fsDev && w.fsType == "btrfs") {
		return true // the whole filesystem, or subvolume, wherever else it is mounted
	}
	return name == w.stack.Path || strings.HasPrefix(name, strings.TrimSuffix(w.stack.Path, "/")+"/")
}

// sharing caches which filesystems are on devices of the stack.
var sharingAge = 10 * time.Second

type sharing struct {
	yes   bool
	asked time.Time
}

// shares reports whether the filesystem (or block device) with a number has a
// device in common with the path.
func (w *watch) shares(dev uint64, name string) bool {
	if w.shared == nil {
		w.shared = map[uint64]sharing{}
	}

	if s, known := w.shared[dev]; known && time.Since(s.asked) < sharingAge {
		return s.yes
	}

	if len(w.shared) > 4096 {
		clear(w.shared)
	}

	path := name
	if d, err := blockdev.Lookup(dev); err == nil {
		path = d.Path()
	}

	yes := false
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()

	if s, err := stack.Of(ctx, path); err == nil {
		for _, l := range s.Devices() {
			yes = yes || slices.ContainsFunc(w.stack.Devices(), func(m stack.Layer) bool {
				return m.Device.Number == l.Device.Number
			})
		}
	}

	w.shared[dev] = sharing{yes, time.Now()}
	return yes
}

// mountDev returns the device number of a descriptor's filesystem, as in mount tables; 0 if unknown. On btrfs it is the
// same for all subvolumes, unlike st_dev.
func mountDev(pid, fd int) uint64 {
	id, err := strconv.ParseUint(fdinfo(pid, fd, "mnt_id:"), 10, 64)
	if err != nil {
		return 0
	}

	table, err := mount.Table(strconv.Itoa(pid))
	if err != nil {
		return 0
	}

	for _, m := range table {
		if m.ID == id {
			return m.Dev
		}
	}

	return 0
}

// openFlags returns the flags that a descriptor was opened with.
func openFlags(pid, fd int) int {
	n, err := strconv.ParseInt(fdinfo(pid, fd, "flags:"), 8, 64)
	if err != nil {
		return 0
	}
	return int(n)
}

func fdinfo(pid, fd int, key string) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// dsyncTracer records writes to descriptors opened with O_DSYNC or O_SYNC. It searches for such descriptors from time
// to time, and records only these.
type dsyncTracer struct {
	w        *watch
	recorder *tracepoint.Recorder
	filter   string
	next     time.Time
	off      bool
}

// scanEvery is the interval between searches of descriptors. A search costs a few microseconds for each descriptor open
// on the host, so it is rarer on hosts with many.
const scanEvery = 5 * time.Second

var writeCalls = []string{"write", "pwrite64", "writev", "pwritev"}

func newDsyncTracer(w *watch) *dsyncTracer {
	d := &dsyncTracer{w: w}
	d.scan(time.Now())
	return d
}

func (d *dsyncTracer) scan(now time.Time) {
	if now.Before(d.next) {
		return
	}

	begin := time.Now()
	filter := d.find()
	took := time.Since(begin)
	d.next = now.Add(max(scanEvery, 200*took)) // half a percent of a CPU
	if filter == d.filter {
		return
	}

	d.filter = filter
	d.close()
	if filter == "" {
		return
	}

	var specs []tracepoint.Spec
	for _, c := range writeCalls {
		specs = append(specs, tracepoint.Spec{Event: "syscalls:sys_enter_" + c, Filter: filter},
			tracepoint.Spec{Event: "syscalls:sys_exit_" + c, Filter: d.exits()})
	}

	r, err := tracepoint.NewRecorder(specs...)
	if err != nil {
		d.w.missing("writes to files opened with O_DSYNC or O_SYNC", "%v", err)
		return
	}

	d.recorder = r
	if d.off {
		_ = r.Pause()
	}
}

// exits returns the part of the filter that also applies to events at the end of a call.
func (d *dsyncTracer) exits() string {
	if _, threads, both := strings.Cut(d.filter, " && "); both {
		return threads
	}
	return ""
}

// find builds a filter for the descriptors open with O_DSYNC on files below the path, or near it; "" if there are none.
func (d *dsyncTracer) find() string {
	// Collect such descriptors, and the threads of their processes.
	fds, tids := map[int]bool{}, map[int]bool{}
	for _, pid := range processes() {
		if pid == os.Getpid() {
			continue
		}

		dir := fmt.Sprintf("/proc/%d/fd", pid)
		names, err := os.ReadDir(dir)
		if err != nil {
			continue
		}

		mine := false
		for _, n := range names {
			fd, err := strconv.Atoi(n.Name())
			if err != nil {
				continue
			}

			var st unix.Stat_t
			if unix.Stat(dir+"/"+n.Name(), &st) != nil {
				continue
			}

			kind := st.Mode & unix.S_IFMT
			if kind != unix.S_IFREG && kind != unix.S_IFBLK || openFlags(pid, fd)&unix.O_DSYNC == 0 {
				continue
			}

			if x := d.w.target(pid, fd); x != nil && x.rel != "" {
				fds[fd], mine = true, true
			}
		}

		if mine {
			tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
			if err != nil {
				continue
			}
			for _, n := range tasks {
				if tid, err := strconv.Atoi(n.Name()); err == nil {
					tids[tid] = true
				}
			}
		}
	}

	if len(fds) == 0 {
		return ""
	}

	// Instead of a filter with too many terms, use a wider one.
	const mostTerms = 64
	filter := anyOf("fd", fds)
	if len(fds) > mostTerms {
		filter = "fd >= 0"
	}
	if len(tids) <= mostTerms {
		return filter + " && " + anyOf("common_pid", tids)
	}

	return filter
}

func anyOf(field string, values map[int]bool) string {
	var list []int
	for v := range values {
		list = append(list, v)
	}
	slices.Sort(list)
	var terms []string
	for _, v := range list {
		terms = append(terms, fmt.Sprintf("%s == %d", field, v))
	}
	return "(" + strings.Join(terms, " || ") + ")"
}

func (d *dsyncTracer) read() []tracepoint.Record {
	if d.recorder == nil {
		return nil
	}
	records, _, err := d.recorder.Read()
	if err != nil {
		return nil
	}
	return records
}

func (d *dsyncTracer) pause() {
	d.off = true
	if d.recorder != nil {
		_ = d.recorder.Pause()
	}
}

func (d *dsyncTracer) resume() {
	d.off = false
	if d.recorder != nil {
		_ = d.recorder.Resume()
	}
}

func (d *dsyncTracer) close() {
	if d.recorder != nil {
		_ = d.recorder.Close()
		d.recorder = nil
	}
}

// processes lists the PIDs of all processes.
func processes() []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}

	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}

	var out []int
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil {
			out = append(out, pid)
		}
	}

	return out
}
