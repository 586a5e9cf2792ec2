package tasks

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/warnings"
	"pando/internal/front/schedule"
	"pando/internal/remote/replicate"
)

// verify checks a remote. Problems are its error.
func (h *Host) verify(ctx context.Context, t Task) (schedule.Outcome, error) {
	ctx = act(ctx, t.Name, t.why())
	return h.operation(ctx, "verify", t.Verify, t.Name, func(
		ctx context.Context, tr *progress.Tracker,
	) (any, string, error) {
		r, err := h.Remote("verify", t.Verify, tr)
		if err != nil {
			return nil, "", err
		}
		v, err := replicate.Verify(ctx, r, replicate.VerifyRequest{ReadPercent: t.ReadPercent, Pool: h.Engine, Tracker: tr})
		if err != nil {
			return nil, "", err
		}
		for _, w := range v.Warnings {
			warnings.Add(ctx, "%s", w)
		}

		words := fmt.Sprintf("checked %s with %s", errs.Plural(v.Volumes, "volume"), errs.Plural(v.Points, "point"))
		if t.ReadPercent > 0 {
			words += ", read " + errs.FormatBytes(v.ReadBytes)
		}
		return v, words, v.Err()
	})
}

// pruneRemote removes the points of a remote that the task does not keep, and what no point needs.
func (h *Host) pruneRemote(ctx context.Context, t Task) (schedule.Outcome, error) {
	const verb = "remote prune"
	ctx = act(ctx, t.Name, t.why())
	return h.operation(ctx, verb, t.PruneRemote, t.Name, func(
		ctx context.Context, tr *progress.Tracker,
	) (any, string, error) {
		r, err := h.Remote(verb, t.PruneRemote, tr)
		if err != nil {
			return nil, "", err
		}
		p, err := replicate.Prune(ctx, r, replicate.PruneRequest{Policy: t.Keep, MaxRepack: -1, Pool: h.Engine, Tracker: tr})
		if err != nil {
			return nil, "", err
		}
		for _, d := range p.Damaged {
			warnings.Add(ctx, "the list of points of %s is damaged or lost: all its points were kept; rebuild it with %s",
				d, errs.Run("remote repair", t.PruneRemote))
		}
		if p.KeptAll != "" {
			warnings.Add(ctx, "nothing was deleted: %s", p.KeptAll)
		}
		return p, fmt.Sprintf("removed %s, returned %s", errs.Plural(len(p.Points), "point"),
			errs.FormatBytes(p.FreedBytes)), nil
	})
}
