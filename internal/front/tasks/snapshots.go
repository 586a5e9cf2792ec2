package tasks

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/front/schedule"
)

// snapshot takes a snapshot of each volume, and removes older ones of the task.
func (h *Host) snapshot(ctx context.Context, t Task) (schedule.Outcome, error) {
	ctx = act(ctx, t.Name, t.why())
	names, err := h.matching(ctx, t.Snapshot)
	if err != nil {
		return schedule.Outcome{}, err
	}
	if len(names) == 0 {
		return schedule.Outcome{Words: "no volume matches"}, nil
	}
	labels, err := driver.NewLabels("snapshot", map[string]string{Label: t.Name})
	if err != nil {
		return schedule.Outcome{}, err
	}

	return h.operation(ctx, "snapshot", t.What(), t.Name, func(
		ctx context.Context, tr *progress.Tracker,
	) (any, string, error) {
		tr.Start("taking snapshots", int64(len(names)), 0)
		take := h.takeEach
		if t.Group {
			take = h.takeGroup
		}
		taken, removed, failed := take(ctx, t, names, labels, tr)
		words := "took " + errs.Plural(len(taken), "snapshot")
		if removed > 0 {
			words += fmt.Sprintf(", destroyed %d", removed)
		}
		return taken, words, failed
	})
}

// takeEach takes a snapshot of one volume after the other, and removes older ones.
func (h *Host) takeEach(
	ctx context.Context, t Task, names []ref.Name, labels driver.Labels, tr *progress.Tracker,
) (taken []engine.Info, removed int, failed error) {
	for _, n := range names {
		if ctx.Err() != nil {
			break
		}
		v, err := h.Engine.Snapshot(ctx, engine.SnapshotRequest{Volume: n, Labels: labels, Hooks: h.hooks(t)})
		if v.Name != "" { // even if the command after it has failed
			taken = append(taken, v)
			gone, rerr := h.retain(ctx, n, t)
			removed, err = removed+gone, cmp.Or(err, rerr)
		}
		if err != nil && !errs.Is(err, errs.NotFound) && failed == nil { // else it was destroyed in the meantime
			failed = err
		}
		tr.Add(1, 0)
	}
	return taken, removed, failed
}

// takeGroup takes snapshots of all volumes at one point in time, and removes older ones.
func (h *Host) takeGroup(
	ctx context.Context, t Task, names []ref.Name, labels driver.Labels, tr *progress.Tracker,
) (taken []engine.Info, removed int, failed error) {
	g, failed := h.Engine.SnapshotGroup(ctx, engine.SnapshotGroupRequest{Volumes: names, Labels: labels, Hooks: h.hooks(t),
		Tracker: tr})
	for i := range g.Snapshots {
		gone, err := h.retain(ctx, names[i], t)
		removed, failed = removed+gone, cmp.Or(failed, err)
	}
	return g.Snapshots, removed, failed
}

// hooks returns the commands around the snapshots of a task. What they print goes to the log.
func (h *Host) hooks(t Task) engine.SnapshotHooks {
	return engine.SnapshotHooks{Before: t.Before, After: t.After, Env: h.Env, Output: printed{h, t.Name}}
}

// printed logs what the commands of a task print.
type printed struct {
	h    *Host
	task string
}

// Write logs a part of the output.
func (p printed) Write(b []byte) (int, error) {
	for l := range strings.Lines(string(b)) {
		p.h.Log("task %q printed: %s", p.task, strings.TrimRight(l, "\n"))
	}
	return len(b), nil
}

// retain destroys the snapshots of a volume that a task has taken and does not keep, and returns their number. Those
// that are pinned or in use stay until a later run.
func (h *Host) retain(ctx context.Context, volume ref.Name, t Task) (int, error) {
	if t.Keep.IsZero() {
		return 0, nil
	}
	mine, err := driver.ParseLabelSelector("snapshot", Label+"="+escape(t.Name))
	if err != nil {
		return 0, err
	}
	all, err := h.Engine.SnapshotsWith(ctx, volume, mine)
	if err != nil {
		return 0, err
	}

	times := make([]time.Time, len(all))
	for i, s := range all {
		times[i] = s.CreatedAt
	}
	var q engine.DestroyRequest
	for i, keep := range t.Keep.Kept(times) {
		if !keep {
			r, err := ref.Parse("snapshot", all[i].Name)
			if err != nil {
				return 0, err
			}
			q.What = append(q.What, ref.Pattern{Ref: r})
		}
	}
	if len(q.What) == 0 {
		return 0, nil
	}

	report, err := h.Engine.Destroy(act(ctx, t.Name, "retention"), q)
	if err != nil {
		return 0, err
	}
	for _, err := range report.Failed {
		if !errs.Is(err, errs.InUse) {
			return len(report.Destroyed), err
		}
	}
	return len(report.Destroyed), nil
}

// escape returns a pattern that only a text itself matches.
func escape(text string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(text)
}
