package cli

import (
	"context"
	"encoding/json"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/replicate"
)

// pushEvery pushes until it is interrupted: see repeat.
func (a *App) pushEvery(
	ctx context.Context, to string, words []string, q replicate.PushRequest, period time.Duration,
) error {
	return a.repeat(ctx, period, "pushing", func(ctx context.Context) (bool, error) {
		done, err := a.pushRound(ctx, to, words, q)
		if perr := a.printRound(done); perr != nil {
			return len(done) > 0, perr
		}
		return len(done) > 0, err
	})
}

// printRound prints a line for a round of --every, or one line of JSON for each
// thing pushed.
func (a *App) printRound(out []replicate.Pushed) error {
	if a.json {
		enc := json.NewEncoder(a.Stdout)
		enc.SetEscapeHTML(false)
		for _, p := range out {
			if err := enc.Encode(p); err != nil {
				return a.written(err)
			}
		}
		return nil
	}

	if a.quiet || len(out) == 0 {
		return nil
	}

	now := time.Now().Format(time.DateTime)
	if len(out) == 1 {
		return a.printf("%s  %s\n", now, a.pushedWords(out[0]))
	}

	var sent int64
	secs, unchanged := 0.0, 0
	for _, p := range out {
		sent += p.UploadedBytes
		secs += p.Seconds
		if p.Unchanged {
			unchanged++
		}
	}

	return a.printf("%s  %s pushed, %d unchanged, %s sent, in %s\n",
		now, errs.Plural(len(out)-unchanged, "volume"), unchanged, formatBytes(sent), formatSeconds(secs))
}
