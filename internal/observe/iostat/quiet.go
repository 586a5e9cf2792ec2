package iostat

import (
	"context"
	"strconv"
	"strings"
	"time"

	"pando/internal/linux/kernel"
)

// Quiet defines when writing has ended.
type Quiet struct {
	// Written reads the bytes written so far, in as many places as Idle has.
	Written func() ([]int64, error)
	Idle    []float64     // bytes/s of the background load there
	Limit   time.Duration // wait no longer
	// Dirty reads the amount of dirty data in memory; nil: ignored. DirtyBefore is the amount before the operation; up to
	// DirtySlack more is tolerated (0: 4 MiB, for the whole host).
	Dirty       func() int64
	DirtyBefore int64
	DirtySlack  int64
}

// Tail describes how writing ended.
type Tail struct {
	Seconds float64 // from the start of the wait to the last write
	Quiet   bool    // false: the limit was reached first
}

const (
	pollEvery  = 250 * time.Millisecond
	quietPolls = 4
	// A poll with at most quietBytes written counts as quiet, if at most quietDirty more bytes are dirty than before.
	quietBytes = 64 << 10
	quietDirty = 4 << 20
)

// UntilQuiet waits until hardly anything beyond q.Idle has been written for a second, and no more data is dirty than
// before, or until q.Limit has passed. It syncs nothing.
func UntilQuiet(ctx context.Context, q Quiet) (Tail, error) {
	start := time.Now()
	last := start
	t := Tail{}
	if q.DirtySlack == 0 {
		q.DirtySlack = quietDirty
	}

	prev, err := q.Written()
	if err != nil {
		return t, err
	}

	for polls := 0; time.Since(start) < q.Limit; {
		if err := sleep(ctx, min(pollEvery, q.Limit)); err != nil {
			return t, err
		}

		now, err := q.Written()
		if err != nil {
			return t, err
		}

		polls++
		for i := range now {
			if float64(now[i]-prev[i]) > max(quietBytes, 2*q.Idle[i]*pollEvery.Seconds()) {
				polls, last = 0, time.Now()
			}
		}

		prev = now
		if polls >= quietPolls && (q.Dirty == nil || q.Dirty() <= q.DirtyBefore+q.DirtySlack) {
			t.Quiet = true
			break
		}
	}

	t.Seconds = last.Sub(start).Seconds()
	return t, nil
}

// Rate measures the write rate of each place over a time, in bytes/s.
func Rate(ctx context.Context, d time.Duration, written func() ([]int64, error)) ([]float64, error) {
	a, err := written()
	if err != nil {
		return nil, err
	}

	start := time.Now()
	if err := sleep(ctx, d); err != nil {
		return nil, err
	}

	b, err := written()
	if err != nil {
		return nil, err
	}

	out := make([]float64, len(a))
	for i := range a {
		out[i] = float64(b[i]-a[i]) / max(time.Since(start).Seconds(), 0.001)
	}

	return out, nil
}

// DirtyBytes returns the amount of dirty data in memory, for all disks; 0 if it cannot be read.
func DirtyBytes() int64 {
	mem, err := kernel.ReadMemory()
	if err != nil {
		return 0
	}
	return mem.Dirty + mem.Writeback
}

// parseDirty adds up lines of a disk's statistics such as "BdiWriteback:     128 kB", in bytes.
func parseDirty(text string, names ...string) int64 {
	var total int64
	for line := range strings.Lines(text) {
		k, v, _ := strings.Cut(line, ":")
		for _, name := range names {
			if k == name {
				n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
				total += n << 10
			}
		}
	}
	return total
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
