package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"pando/internal/linux/durable"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/iostat"
	"pando/internal/observe/stack"
)

// Device is a block device below the pool.
type Device struct {
	Name string `json:"name"` // "loop0", "vda1"
	Role string `json:"role"` // "pool": the pool's filesystem is on it; "host": it is below the file behind that
	// VolatileCache: the device has a write cache that loses power, so the kernel
	// must flush it. Without one there is nothing to flush.
	VolatileCache bool `json:"volatile_cache"`

	dev blockdev.Device
}

// devicesBelow finds the block devices that hold dir: those that its filesystem is
// made on, and if they are loop devices, those of the filesystems of the files
// behind, and so on. What such a device is itself made of (the disk of a partition) would
// count the same bytes again. It returns an error that says why if there is none or
// it cannot be told.
func devicesBelow(ctx context.Context, dir string) ([]Device, error) {
	s, err := stack.Of(ctx, dir)
	if err != nil {
		return nil, err
	}

	var out []Device
	for i, l := range s.Layers {
		above := s.Above(i)
		if l.Device == nil || above < 0 || s.Layers[above].Device != nil {
			continue
		}
		d := Device{Name: l.Name, Role: "pool", VolatileCache: l.Device.VolatileCache, dev: *l.Device}
		for a := above; a >= 0; a = s.Above(a) {
			if s.Layers[a].Device != nil {
				d.Role = "host" // a file on it is behind a device
			}
		}
		out = append(out, d)
	}

	if len(out) == 0 {
		return nil, fmt.Errorf("%s is not on a block device: %s", dir, s.Hidden)
	}

	return out, nil
}

// meter measures what is written to the devices below a pool.
type meter struct {
	devs  []Device
	err   error    // why there is nothing to measure
	dirs  []string // whose filesystems are synced
	limit time.Duration
	idle  []float64 // bytes/s that others write, by device
}

func newMeter(ctx context.Context, limit time.Duration, dirs ...string) *meter {
	m := &meter{dirs: dirs, limit: limit}
	m.devs, m.err = devicesBelow(ctx, dirs[0])
	m.idle = make([]float64, len(m.devs))
	return m
}

func (m *meter) read() ([]blockdev.Stat, error) {
	if m.err != nil {
		return nil, m.err
	}

	out := make([]blockdev.Stat, len(m.devs))
	for i, d := range m.devs {
		c, err := d.dev.Stat()
		if err != nil {
			return nil, err
		}
		out[i] = c
	}

	return out, nil
}

// written is what the devices have written so far, in bytes.
func (m *meter) written() ([]int64, error) {
	all, err := m.read()
	out := make([]int64, len(all))
	for i, s := range all {
		out[i] = s.WrittenBytes
	}
	return out, err
}

// DeviceBytes is what an operation made a device do, divided by the number of
// operations that were measured together.
type DeviceBytes struct {
	Device  string  `json:"device"`
	Role    string  `json:"role"`
	During  float64 `json:"written_during_bytes"`
	After   float64 `json:"written_after_bytes"`     // the tail: until it was quiet, with a final sync
	Flushes float64 `json:"flushes"`                 // completed during the operation; -1: not counted by this kernel
	Others  float64 `json:"others_bytes_per_second"` // written in the second before, by other programs
}

// Tail says how writing ended after an operation.
type Tail struct {
	Seconds float64 `json:"seconds"` // from the end of the operation to the last write
	Quiet   bool    `json:"quiet"`   // false: the limit came first
}

// around runs fn, which does n operations of one kind, and measures what they
// write, during and after, each divided by n. reason says why nothing could be
// measured; fn has run nevertheless.
func (m *meter) around(
	ctx context.Context, fn func() (n int, err error),
) (devs []DeviceBytes, tail *Tail, reason string, err error) {
	if err := m.settle(ctx); err != nil {
		return nil, nil, "", err
	}

	dirty := iostat.DirtyBytes()
	before, rerr := m.read()
	n, err := fn()
	if err != nil {
		return nil, nil, "", err
	}
	if rerr != nil {
		return nil, nil, rerr.Error(), nil
	}

	after, err := m.read()
	if err != nil {
		return nil, nil, err.Error(), nil
	}

	t, err := m.untilQuiet(ctx, dirty)
	if err != nil {
		return nil, nil, "", err
	}

	end, err := m.read()
	if err != nil {
		return nil, nil, err.Error(), nil
	}

	per := float64(max(n, 1))
	for i, d := range m.devs {
		b := DeviceBytes{
			Device: d.Name, Role: d.Role, Others: m.idle[i], Flushes: -1,
			During: float64(after[i].WrittenBytes-before[i].WrittenBytes) / per,
			After:  float64(end[i].WrittenBytes-after[i].WrittenBytes) / per,
		}
		if before[i].Flushes >= 0 {
			b.Flushes = float64(after[i].Flushes-before[i].Flushes) / per
		}
		devs = append(devs, b)
	}

	return devs, &t, "", nil
}

// settle syncs, and measures for a second (less if there is less patience for
// tails) what others write.
func (m *meter) settle(ctx context.Context) error {
	if err := m.sync(); err != nil {
		return err
	}
	if m.err != nil {
		return nil // nothing to measure: said elsewhere
	}
	idle, err := iostat.Rate(ctx, min(time.Second, m.limit), m.written)
	if err == nil {
		m.idle = idle
	}
	return ctx.Err()
}

// untilQuiet waits until next to nothing is written for a second and the
// system has no more unwritten data than before, then syncs.
func (m *meter) untilQuiet(ctx context.Context, dirty int64) (Tail, error) {
	q, err := iostat.UntilQuiet(ctx, iostat.Quiet{
		Written: m.written, Idle: m.idle, Limit: m.limit, Dirty: iostat.DirtyBytes, DirtyBefore: dirty,
	})
	t := Tail{Seconds: q.Seconds, Quiet: q.Quiet}
	if err != nil {
		return t, err
	}
	return t, m.sync()
}

// sync writes out the filesystems of the pool.
func (m *meter) sync() error {
	var all []error
	for _, d := range m.dirs {
		all = append(all, durable.SyncFS(d))
	}
	return errors.Join(all...)
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
