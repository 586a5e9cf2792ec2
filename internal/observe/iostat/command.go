package iostat

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/durable"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/observe/blockdev"
)

// Operation is what targets wrote during an operation and afterwards.
type Operation struct {
	Before *Sample     `json:"before"` // the second before it: the background load
	During *Sample     `json:"during"` // from its start to its end
	After  *Sample     `json:"after"`  // the tail
	Total  *Sample     `json:"total"`  // of both
	Tail   TailOutcome `json:"tail"`
}

// TailOutcome describes how writing ended.
type TailOutcome struct {
	Seconds float64 `json:"seconds"` // from the end of the operation to the last write
	Quiet   bool    `json:"quiet"`   // false: the limit was reached before writing ended
	// UnwrittenBytes is the dirty data left in memory at the end: for the targets' devices, or for the whole host (Scope).
	UnwrittenBytes int64  `json:"unwritten_bytes"`
	Scope          string `json:"scope"` // "targets", "host"
}

// Around measures an operation. It syncs the filesystems of the targets first, so that earlier writes do not count; it
// does not sync afterwards, because it measures how the kernel itself writes back. It waits until hardly anything is
// written any more and dirty data has been written, but no longer than limit. It returns an error of fn together with
// the measurement.
func (w *Watcher) Around(ctx context.Context, limit time.Duration, fn func() error) (*Operation, error) {
	for _, t := range w.layout.targets {
		if t.fs == nil {
			continue // a block device
		}
		if err := durable.SyncFS(t.Path); err != nil {
			return nil, err
		}
	}

	unwritten, scope := w.unwritten()
	dirty := unwritten()
	start := w.state()
	idle, err := Rate(ctx, time.Second, w.written)
	if err != nil {
		return nil, err
	}

	o := &Operation{}
	begin := w.state()
	o.Before = w.between(start, begin)
	failure := fn()
	end := w.state()
	o.During = w.between(begin, end)
	tail, err := UntilQuiet(ctx, Quiet{Written: w.written, Idle: idle, Limit: limit, Dirty: unwritten, DirtyBefore: dirty,
		DirtySlack: slack(scope)})
	if err != nil && ctx.Err() == nil {
		return nil, err
	}

	last := w.state()
	o.After, o.Total = w.between(end, last), w.between(begin, last)
	o.Tail = TailOutcome{Seconds: tail.Seconds, Quiet: tail.Quiet, UnwrittenBytes: unwritten(), Scope: scope}
	w.last = last
	return o, failure
}

// Outcome describes how a command ended.
type Outcome struct {
	Command []string `json:"command"`
	Exit    int      `json:"exit"` // 128 + signal if it was killed by one
	Seconds float64  `json:"seconds"`
	// DirtiedBytes is the amount that the command and the processes it waited for have written to any filesystem, as the
	// kernel counts it: whole pages, when they become dirty.
	DirtiedBytes int64 `json:"dirtied_bytes"`
	Operation
}

// AroundCommand is Around for a command, which uses the given standard streams and receives the signals. An exit status
// other than 0 is not an error. NotFound: the program does not exist.
func (w *Watcher) AroundCommand(
	ctx context.Context, limit time.Duration, argv []string, signals run.Signals, stdin, stdout, stderr *os.File,
) (*Outcome, error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return nil, errs.New(errs.NotFound, op, argv[0], "program not found")
	}

	out := &Outcome{Command: argv}
	o, err := w.Around(ctx, limit, func() (err error) {
		cmd := &exec.Cmd{Path: path, Args: argv, Stdin: stdin, Stdout: stdout, Stderr: stderr}
		out.Exit, err = run.Foreground(cmd, signals)
		if err != nil {
			return errs.Wrap(op, argv[0], err)
		}
		if u, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
			out.DirtiedBytes = u.Oublock * 512
		}
		return nil
	})
	if err != nil {
		return nil, err
	}

	out.Operation = *o
	out.Seconds = o.During.Seconds
	return out, nil
}

// written returns the bytes written to each device of the targets.
func (w *Watcher) written() ([]int64, error) {
	var out []int64
	for _, t := range w.layout.targets {
		for _, g := range t.groups {
			if g.last && len(t.groups) > 1 {
				continue // the host's disk: other programs write there, too, in bursts
			}
			for _, d := range g.devs {
				s, err := d.Stat()
				if err != nil {
					return nil, err
				}
				out = append(out, s.WrittenBytes)
			}
		}
	}

	return out, nil
}

// The scope of the count of dirty data.
const (
	ofTargets = "targets"
	ofHost    = "host"
)

// unwritten returns a function that reads the amount of dirty data: of the targets' devices if the kernel shows that,
// otherwise of the host.
func (w *Watcher) unwritten() (read func() int64, scope string) {
	var files []string
	dir, err := debugfs()
	for _, t := range w.layout.targets {
		if err != nil {
			break
		}

		for i, g := range t.groups {
			if i > 0 && g.last || g.on == "" && i > 0 {
				continue // the host's own disk
			}
			for _, d := range g.devs {
				f := filepath.Join(dir(), "bdi", disk(d).ID(), "stats")
				if _, err = os.Stat(f); err != nil {
					break
				}
				if !slices.Contains(files, f) {
					files = append(files, f)
				}
			}
		}

		if t.fs != nil && (t.fs.FSType == "btrfs" || t.fs.FSType == "zfs") {
			err = errors.New("no bdi of a device")
		}
	}
	if err != nil || len(files) == 0 {
		return DirtyBytes, ofHost
	}

	return func() (total int64) {
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil {
				total += parseDirty(string(b), "BdiWriteback", "BdiReclaimable")
			}
		}
		return total
	}, ofTargets
}

// slack returns the possible error of the kernel's counts of unwritten bytes: each CPU keeps some pages to itself. The
// host's count includes other programs.
func slack(scope string) int64 {
	if scope == ofHost {
		return quietDirty
	}
	n := runtime.NumCPU()
	return int64(8*(1+bits.Len(uint(n)))*n) * int64(os.Getpagesize())
}

// disk returns the disk of a partition, because pages are counted by disk.
func disk(d blockdev.Device) blockdev.Device {
	if d.Kind == blockdev.Partition {
		if below, err := d.Below(); err == nil && len(below) == 1 {
			return below[0]
		}
	}
	return d
}

// debugfs returns a path to read debugfs from: its mount point, or a mount private to this process, without a path, for
// as long as the process lives.
var debugfs = sync.OnceValues(func() (func() string, error) {
	const usual = "/sys/kernel/debug"
	if _, err := os.Stat(usual + "/bdi"); err == nil {
		return func() string { return usual }, nil
	}

	d, err := mount.Device("debugfs", "debugfs", nil, true)
	if err != nil {
		return nil, err
	}

	dir, err := d.Open()
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}

	return func() string {
		runtime.KeepAlive(d)
		return fmt.Sprintf("/proc/self/fd/%d", dir.Fd())
	}, nil
})
