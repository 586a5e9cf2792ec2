package engine

import (
	"context"
	"strconv"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// TaskRun is a run of a task that several services of a pool may have. Other processes do not run it until End.
type TaskRun struct {
	Last time.Time // when the last run that was Done began, in any process; zero: none was

	e      *Engine
	key    string
	began  time.Time
	unlock func()
}

// BeginTask begins a run of a task, unless another process is running it, which returns nil. The caller calls End. The
// lock ends with the process.
func (e *Engine) BeginTask(ctx context.Context, task string) (*TaskRun, error) {
	unlock, ok, err := e.tryLock("task " + task)
	if err != nil || !ok {
		return nil, err
	}

	r := &TaskRun{e: e, key: "task-" + task, began: time.Now().Round(0), unlock: unlock}
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		text, err := tx.Meta(r.key)
		if n, perr := strconv.ParseInt(text, 10, 64); err == nil && perr == nil {
			r.Last = time.Unix(0, n)
		}
		return err
	})
	if err != nil {
		unlock()
		return nil, err
	}
	return r, nil
}

// Done records that the run has done its work. The record is a hint: it may be lost with the power.
func (r *TaskRun) Done(ctx context.Context) error {
	return r.e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		return tx.SetMeta(r.key, strconv.FormatInt(r.began.UnixNano(), 10))
	})
}

// End ends the run.
func (r *TaskRun) End() { r.unlock() }

// FreeSpace returns how many bytes of the pool are free now, and its size, without waiting for space that the
// filesystem is about to free.
func (e *Engine) FreeSpace(ctx context.Context) (free, total int64, err error) {
	s, err := e.pool.Space(ctx)
	return s.FreeBytes, s.TotalBytes, err
}

// SnapshotsWith lists the snapshots of a volume that have labels, the oldest first. It measures nothing. NotFound.
func (e *Engine) SnapshotsWith(ctx context.Context, volume ref.Name, labels driver.LabelSelector) ([]Info, error) {
	var out []Info
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		out = nil
		vol, err := tx.ResolveVolume("show", volume.String())
		if err != nil {
			return err
		}
		snaps, err := tx.Snapshots(vol.Lineage())
		for _, s := range snaps {
			if labels.Matches(s.Labels) {
				out = append(out, snapshotInfo(s, vol.Name, e.caps.Name))
			}
		}
		return errs.Wrap("show", volume.String(), err)
	})
	return out, err
}
