// Package iostat measures what paths and volumes write at each layer, and what of it
// reaches the disks. It takes the kernel's own counts (statistics of block devices, of
// XFS, of ZFS datasets, and tracepoints of syncs), and says "not known" where the kernel
// does not count by volume: filesystems that several share are never divided by guess.
//
// It knows paths, and nothing of pools. It keeps nothing open in what it watches.
package iostat

import (
	"context"
	"time"

	"pando/internal/base/errs"
)

const op = "watch"

// Target is something to watch: the filesystem that a path is on.
type Target struct {
	Name string // as it is called in samples; unique
	Path string // a directory, file or block device
	// Only: what is at the path is meant, not the whole filesystem that it is on. The path
	// must be where something is mounted, or a symbolic link to a directory or device.
	Only bool
}

// Sample is what happened in an interval. Its figures are sums over the interval, so
// that those of samples on end add up.
type Sample struct {
	Time    time.Time      `json:"time"` // the end of the interval
	Seconds float64        `json:"seconds"`
	Targets []TargetSample `json:"targets"`
	// Layers are the devices below that others may write to as well, each once however
	// many targets are on it.
	Layers []LayerSample `json:"layers"`
	// Missing says in words what is not measured here, and why.
	Missing []string `json:"missing,omitempty"`
}

// TargetSample is what one target did.
type TargetSample struct {
	Name   string   `json:"name"`
	Path   string   `json:"path"`
	FSType string   `json:"fstype"` // "" of a block device
	Layers []string `json:"layers"` // what it is on, from the top down

	// ApplicationBytes is what programs wrote by write(2) and the like; null where the
	// filesystem does not count it. Writes into mapped memory are not in it on XFS.
	ApplicationBytes  *int64 `json:"application_bytes"`
	ApplicationSource string `json:"application_source,omitempty"` // "xfs", "zfs"

	// Device is the device of its own, which nobody else writes to: what arrives there is
	// what its filesystem wrote. "" if it shares one; Shared says why.
	Device string  `json:"device"`
	Shared string  `json:"shared,omitempty"`
	Own    *Counts `json:"own"`

	Syncs *Syncs `json:"syncs"` // null: not known

	// Steps are the layers of devices from the target down to the disks.
	Steps []Step `json:"steps"`
	// Amplification is the bytes at the disks, without those that others are known to have
	// written, over the bytes of the target: at its own device, else those of its
	// programs. What nobody is known to have written is counted as the target's, so it is
	// at most so much. Null if the target wrote nothing or either is not known; NoAmplification
	// says which.
	Amplification   *float64 `json:"amplification"`
	NoAmplification string   `json:"no_amplification,omitempty"`
}

// Step is the same at one layer.
type Step struct {
	Layer        string `json:"layer"` // a device; several joined by "+"
	WrittenBytes int64  `json:"written_bytes"`
	// OthersBytes is what other devices on the same layers (and those above) have passed
	// down: the neighbours' writes. It is more than has arrived if that is still in memory.
	OthersBytes int64 `json:"others_bytes"`
	// Amplification is null also if so much has come from others that less is left than
	// the target had written one step above.
	Amplification *float64 `json:"amplification"`
}

// Counts are what a device did.
type Counts struct {
	WrittenBytes   int64   `json:"written_bytes"`
	Writes         int64   `json:"writes"` // requests completed
	WriteSeconds   float64 `json:"write_seconds"`
	Flushes        *int64  `json:"flushes"` // of the write cache, completed; null: not counted (partitions, old kernels)
	FlushSeconds   float64 `json:"flush_seconds"`
	DiscardedBytes int64   `json:"discarded_bytes"`
	ReadBytes      int64   `json:"read_bytes"`
}

// LayerSample is what a shared layer did, and where it came from.
type LayerSample struct {
	Name string `json:"name"` // as in Step
	Kind string `json:"kind"` // "loop", "disk", ...
	On   string `json:"on"`   // what is on it: "xfs on /pool/data", "zpool tank"; "" if devices are
	Counts
	// From are the devices (or datasets) that wrote to it and are counted themselves.
	From []From `json:"from"`
	// RestBytes is what came from none of them: the filesystem's own metadata and log, and
	// files that programs write there. It is negative if devices have passed down what is
	// still in memory.
	RestBytes int64 `json:"rest_bytes"`
}

// From is what passed one more of the things that are on a layer.
type From struct {
	Name         string `json:"name"`             // "loop5", "tank/home"
	Target       string `json:"target,omitempty"` // whose own device it is
	Watched      bool   `json:"watched"`          // targets are above it
	File         string `json:"file,omitempty"`   // behind it, of a loop device
	WrittenBytes int64  `json:"written_bytes"`
}

// Syncs are what programs waited for.
type Syncs struct {
	// Source says what was counted: "calls" (fsync, fdatasync, msync and writes that sync, of the
	// filesystem or subvolume), "flushes" (of its own device; several calls may share one),
	// "zil" (commits of the dataset's intent log).
	Source string `json:"source"`
	Count  int64  `json:"count"`
	Timed  int64  `json:"timed"` // of them, those that Latency is of
	// Latency is null if none was timed. Of flushes, only the mean is known.
	Latency *Latency `json:"latency_seconds"`
}

// Latency is how long they took, in seconds. Percentiles are at most 3 % above the truth.
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

// New begins to watch. NotFound, Permission; Unsupported if what a target is on keeps
// nothing on a block device of this host (tmpfs, network filesystems, FUSE); NotFound also if
// nothing is mounted at a target's path (Target.Only). Without root,
// what needs it is left out, and said in Sample.Missing.
func New(ctx context.Context, targets []Target) (*Watcher, error) {
	w := &Watcher{syncs: newSyncTracer()}
	if all := w.Set(ctx, targets); len(all) > 0 {
		w.Close()
		return nil, all[0]
	}
	return w, nil
}

// Set watches other targets from now on: an interval ends here. It looks again at what is
// below them; call it when mounts have changed. Those that cannot be watched are left out,
// and why is returned, of kinds as of New.
func (w *Watcher) Set(ctx context.Context, targets []Target) []error {
	l, failures := newLayout(ctx, targets, w.layout)
	w.layout = l
	w.syncs.set(l)
	w.last = w.state()
	return failures
}

// Sample is what happened since the last Sample or Set. A target that was unmounted
// meanwhile is not in it.
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

// unsupported is an error about a path that nothing can be measured of.
func unsupported(path, why string) error {
	return errs.New(errs.Unsupported, op, path, "%s",
		why).WithHint("only what is on block devices of this host can be watched")
}
