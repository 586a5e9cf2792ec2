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

// Operation is what targets wrote while something was done, and afterwards.
type Operation struct {
	Before *Sample     `json:"before"` // the second before it: what others write all the time
	During *Sample     `json:"during"` // from its beginning to its end
	After  *Sample     `json:"after"`  // the tail
	Total  *Sample     `json:"total"`  // of both
	Tail   TailOutcome `json:"tail"`
}

// TailOutcome says how writing ended.
type TailOutcome struct {
	Seconds float64 `json:"seconds"` // from the end of the operation to the last write
	Quiet   bool    `json:"quiet"`   // false: it had not died down when the limit came
	// UnwrittenBytes is what was still in memory at the end, to be written: of the
	// targets' devices, or of the whole host (Scope).
	UnwrittenBytes int64  `json:"unwritten_bytes"`
	Scope          string `json:"scope"` // "targets", "host"
}

// Around measures an operation. Before it begins, the filesystems of the targets are synced,
// so that what was written earlier is not counted as its; afterwards nothing is, because
// how the kernel writes by itself is what is measured. It waits until next to nothing is
// written any more and what is in memory has been written, but not longer than limit. An error of fn is
// returned, with what was measured nevertheless.
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

// Outcome is how a command ended.
type Outcome struct {
	Command []string `json:"command"`
	Exit    int      `json:"exit"` // 128 + signal if one ended it
	Seconds float64  `json:"seconds"`
	// DirtiedBytes is what the command and the processes that it has waited for have
	// written on filesystems, wherever, as the kernel counts it: whole pages, when they
	// become different from what is on disk.
	DirtiedBytes int64 `json:"dirtied_bytes"`
	Operation
}

// AroundCommand is Around a command, which has the standard streams that are given, and gets the signals. That it
// exits with another status than 0 is no error. NotFound if there is no such program.
func (w *Watcher) AroundCommand(
	ctx context.Context, limit time.Duration, argv []string, signals run.Signals, stdin, stdout, stderr *os.File,
) (*Outcome, error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return nil, errs.New(errs.NotFound, op, argv[0], "no such program")
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

// written is what has been written to each device of the targets, in bytes.
func (w *Watcher) written() ([]int64, error) {
	var out []int64
	for _, t := range w.layout.targets {
		for _, g := range t.groups {
			if g.last && len(t.groups) > 1 {
				continue // the host's disk: others write there, in bursts too
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

// Where to look for what is in memory.
const (
	ofTargets = "targets"
	ofHost    = "host"
)

// unwritten returns what tells how much is in memory, to be written: for the devices
// of the targets if the kernel shows that, else for the host.
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

// slack is by how much the kernel's counts of unwritten bytes may be off: each
// processor keeps some pages to itself. The host's are others', too.
func slack(scope string) int64 {
	if scope == ofHost {
		return quietDirty
	}
	n := runtime.NumCPU()
	return int64(8*(1+bits.Len(uint(n)))*n) * int64(os.Getpagesize())
}

// disk is the disk of a partition: pages are counted for that.
func disk(d blockdev.Device) blockdev.Device {
	if d.Kind == blockdev.Partition {
		if below, err := d.Below(); err == nil && len(below) == 1 {
			return below[0]
		}
	}
	return d
}

// debugfs tells where debugfs can be read from: where it is mounted, or mounted for this
// process alone, at no path, for as long as it lives.
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
