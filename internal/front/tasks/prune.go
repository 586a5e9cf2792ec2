package tasks

import (
	"context"
	"fmt"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/engine"
	"pando/internal/front/schedule"
)

// moreFree is how much more than keep_free a prune frees, so that it does not have to run again soon.
const moreFree = 1.2

// keepFree returns the work that prunes when less space is free than q says, and then until a fifth more is.
func (h *Host) keepFree(q engine.PruneRequest) run {
	least := q.KeepFreePercent
	q.KeepFreePercent = min(least*moreFree, (100+least)/2)
	return func(ctx context.Context) (schedule.Outcome, error) {
		free, total, err := h.Engine.FreeSpace(ctx)
		if err != nil || share(free, total) >= least {
			return schedule.Outcome{Idle: true}, err
		}
		why := fmt.Sprintf("%s of the pool was free, less than %s", percent(share(free, total)), percent(least))
		return h.prune(ctx, nameKeepFree, q, least, why)
	}
}

// prune prunes until as much is free as q says, and fails if less than least is in the end.
func (h *Host) prune(
	ctx context.Context, task string, q engine.PruneRequest, least float64, why string,
) (schedule.Outcome, error) {
	return h.operation(act(ctx, task, why), "prune", selection(q), task, func(
		ctx context.Context, t *progress.Tracker,
	) (any, string, error) {
		q.Tracker = t
		r, err := h.Engine.Prune(ctx, q)
		if err != nil {
			return nil, "", err
		}

		removed := 0
		for _, c := range r.Candidates {
			if c.Destroyed {
				removed++
			}
		}
		words := fmt.Sprintf("removed %s, returned %s: %s of the pool is free", errs.Plural(removed, "object"),
			errs.FormatBytes(r.FreedBytes), percent(share(r.FreeAfter, r.TotalBytes)))
		if share(r.FreeAfter, r.TotalBytes) < least {
			return r, words, errs.New(errs.NoSpace, "prune", "", "%s, less than %s", words, percent(least)).
				WithHint("unmount or unpin volumes that are not needed; %s shows what stays and why",
					errs.Run("gc", errs.Param("explain")))
		}
		return r, words, nil
	})
}

// share returns a part in percent.
func share(part, of int64) float64 { return 100 * float64(part) / float64(max(of, 1)) }

// percent formats a percentage with at most one digit after the point.
func percent(p float64) string {
	return strconv.FormatFloat(float64(int64(p*10))/10, 'f', -1, 64) + " %"
}
