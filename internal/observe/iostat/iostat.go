// Package iostat measures what paths and volumes write at each layer, and how much of it reaches the disks. It uses the
// kernel's own counts (statistics of block devices, XFS and ZFS datasets, and tracepoints of syncs), and reports
// figures as unknown where the kernel does not count by volume: it never divides the writes of a shared filesystem by
// guessing.
// It knows paths, but not pools. It keeps no file open on the filesystems it watches.
package iostat

import (
	"context"
	"time"

	"pando/internal/base/errs"
)

const op = "watch"

// Target is something to watch: the filesystem of a path.
type Target struct {
	Name string // its name in samples; unique
	Path string // a directory, file or block device
	// Only restricts the target to the path itself, instead of its whole filesystem. The path must be a mount point, or a
	// symbolic link to a directory or device.
	Only bool
}

// Sample is the activity in an interval. Its figures are sums over the interval, so those of consecutive samples add
// up.
type Sample struct {
	Time    time.Time      `json:"time"` // the end of the interval
	Seconds float64        `json:"seconds"`
	Targets []TargetSample `json:"targets"`
	// Layers are the devices below that may have other writers, each listed once, even if several targets are on it.
	Layers []LayerSample `json:"layers"`
	// Missing lists in words what was not measured, and why.
	Missing []string `json:"missing,omitempty"`
}

// TargetSample is the activity of one target.
type TargetSample struct {
	Name   string   `json:"name"`
	Path   string   `json:"path"`
	FSType string   `json:"fstype"` // "" of a block device
	Layers []string `json:"layers"` // the layers below it, from the top down

	// ApplicationBytes is the amount that programs wrote with write(2) and similar calls; null if the filesystem does not
	// count it. On XFS it excludes writes to mapped memory.
	ApplicationBytes  *int64 `json:"application_bytes"`
	ApplicationSource string `json:"application_source,omitempty"` // "xfs", "zfs"

	// Device is the target's own device, which has no other writers: the data that arrives there is what its filesystem
	// wrote. "" if it shares a device; Shared is the reason.
	Device string  `json:"device"`
	Shared string  `json:"shared,omitempty"`
	Own    *Counts `json:"own"`

	Syncs *Syncs `json:"syncs"` // null: unknown

	// Steps are the layers of devices from the target down to the disks.
	Steps []Step `json:"steps"`
	// Amplification is the ratio of the bytes at the disks, without those known to be written by others, to the bytes of
	// the target: at its own device, otherwise those of its programs. Bytes of unknown origin count as the target's, so it
	// is an upper bound. Null if the target wrote nothing or either figure is unknown; NoAmplification is the reason.
	Amplification   *float64 `json:"amplification"`
	NoAmplification string   `json:"no_amplification,omitempty"`
}

// Step is the activity of a target at one layer.
type Step struct {
	Layer        string `json:"layer"` // a device; several joined by "+"
	WrittenBytes int64  `json:"written_bytes"`
	// OthersBytes is the amount that other devices on the same layers (and those above) have passed down: the writes of
	// neighbours. It exceeds the amount that has arrived if some is still in memory.
	OthersBytes int64 `json:"others_bytes"`
	// Amplification is also null if the bytes of others leave less than the target had written one step above.
	Amplification *float64 `json:"amplification"`
}

// Counts are the requests of a device.
type Counts struct {
	WrittenBytes   int64   `json:"written_bytes"`
	Writes         int64   `json:"writes"` // requests completed
	WriteSeconds   float64 `json:"write_seconds"`
	Flushes        *int64  `json:"flushes"` // of the write cache, completed; null: not counted (partitions, old kernels)
	FlushSeconds   float64 `json:"flush_seconds"`
	DiscardedBytes int64   `json:"discarded_bytes"`
	ReadBytes      int64   `json:"read_bytes"`
}

// LayerSample is the activity of a shared layer, and its origin.
type LayerSample struct {
	Name string `json:"name"` // as in Step
	Kind string `json:"kind"` // "loop", "disk", ...
	On   string `json:"on"`   // the filesystem or pool on it: "xfs on /pool/data", "zpool tank"; "" if devices are on it
	Counts
	// From are the devices (or datasets) that wrote to it and have counts of their own.
	From []From `json:"from"`
	// RestBytes is the amount that came from none of them: the filesystem's own metadata and log, and files that programs
	// write there. It is negative if some of what devices passed down is still in memory.
	RestBytes int64 `json:"rest_bytes"`
}

// From is the amount written by one of the devices or datasets on a layer.
type From struct {
	Name         string `json:"name"`             // "loop5", "tank/home"
	Target       string `json:"target,omitempty"` // the target whose own device it is
	Watched      bool   `json:"watched"`          // targets are above it
	File         string `json:"file,omitempty"`   // the file behind a loop device
	WrittenBytes int64  `json:"written_bytes"`
}

// Syncs are the syncs that programs waited for.
type Syncs struct {
	// Source is what was counted: "calls" (fsync, fdatasync, msync and writes that sync, of the
	// filesystem or subvolume), "flushes" (of its own device; several calls may share one),
	// "zil" (commits of the dataset's intent log).
	Source string `json:"source"`
	Count  int64  `json:"count"`
	Timed  int64  `json:"timed"` // of them, those included in Latency
	// Latency is null if none was timed. For flushes, only the mean is known.
	Latency *Latency `json:"latency_seconds"`
}

// Latency is the duration of syncs, in seconds. Percentiles are at most 3 % too high.
type Latency struct {
	Mean float64  `json:"mean"`
	P50  *float64 `json:"p50"`
	P95  *float64 `json:"p95"`
	P99  *float64 `json:"p99"`
	Max  *float64 `json:"max"`
}

// Watcher watches targets. Its methods are for one goroutine.
type Watcher struct {
	layout *layout
	syncs  *syncTracer
	last   *state
}

// New starts a watch. NotFound, Permission; Unsupported if a target is not on a block device of this host (tmpfs,
// network filesystems, FUSE); NotFound as well when nothing is mounted at a target's path (Target.Only). Figures that
// need root are left out without it, and listed in Sample.Missing.
func New(ctx context.Context, targets []Target) (*Watcher, error) {
	w := &Watcher{syncs: newSyncTracer()}
	if all := w.Set(ctx, targets); len(all) > 0 {
		w.Close()
		return nil, all[0]
	}
	return w, nil
}

// Set replaces the targets, and ends the interval. It finds the layers below them anew; call it when mounts have
// changed. It leaves out targets that cannot be watched, and returns the reasons, with the error kinds of New.
func (w *Watcher) Set(ctx context.Context, targets []Target) []error {
	l, failures := newLayout(ctx, targets, w.layout)
	w.layout = l
	w.syncs.set(l)
	w.last = w.state()
	return failures
}

// Sample returns the activity since the last Sample or Set, without targets that have been unmounted.
func (w *Watcher) Sample() *Sample {
	now := w.state()
	s := w.between(w.last, now)
	w.last = now
	return s
}

// Close stops watching.
func (w *Watcher) Close() { w.syncs.close() }

func (w *Watcher) between(from, to *state) *Sample {
	s := w.layout.diff(from, to)
	s.Missing = append(s.Missing, w.syncs.missing(w.layout)...)
	return s
}

// unsupported is the error for a path that cannot be measured.
func unsupported(path, why string) error {
	return errs.New(errs.Unsupported, op, path, "%s",
		why).WithHint("watch a path on a block device of this host")
}
