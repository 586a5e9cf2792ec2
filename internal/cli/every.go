package cli

import (
	"context"
	"fmt"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/remote/replicate"
)

// maxBackoff is the longest wait of `--every` after a failed round.
const maxBackoff = 15 * time.Minute

// repeat calls round every period until it is interrupted, which counts as success. In the first round, an error that
// waiting cannot fix ends it, unless some of the work was done. Later problems, for example a remote that does not
// answer, are reported once, and once more when they are over, however long that takes. doing is the work: "pushing".
func (a *App) repeat(
	ctx context.Context, period time.Duration, doing string, round func(ctx context.Context) (some bool, err error),
) error {
	a.lasting = true
	failed := 0
	row := failedRounds{doing: doing}
	for first := true; ; first = false {
		start := time.Now()
		some, err := round(ctx)
		if ctx.Err() != nil {
			return nil
		}

		wait := period
		if err != nil {
			if first && !some && failsForever(err) {
				return a.allButLast(err)
			}
			failed++
			wait = backoff(period, failed)
		} else {
			failed = 0
			wait -= time.Since(start)
		}

		a.reportRound(&row, err, wait)
		t := time.NewTimer(max(wait, 0))
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-t.C:
		}
	}
}

// parseEvery reads a period. Invalid.
func parseEvery(op, text string) (time.Duration, error) {
	period, err := units.ParseDuration(op, text)
	if err == nil && period < time.Second {
		err = errs.New(errs.Invalid, op, text, "--every must be at least 1s (got %s)", text).
			WithHint("use for example --every 10s")
	}
	return period, err
}

// failedRounds describes consecutive failed rounds of repeat.
type failedRounds struct {
	doing  string // "pushing"
	rounds int
	since  time.Time
	said   string // the problem that was reported last
}

// reportRound prints the error of a round, once as long as it stays the same, and the end of a series of failed rounds.
func (a *App) reportRound(f *failedRounds, err error, wait time.Duration) {
	if err == nil {
		if f.rounds > 0 {
			a.noteWait(fmt.Sprintf("%s works again after %s and %s",
				f.doing, formatSpan(time.Since(f.since)), errs.Plural(f.rounds, "failed round")))
		}
		*f = failedRounds{doing: f.doing}
		return
	}

	what := err.Error()
	if replicate.Outage(err) {
		what = "outage" // however the remote fails to answer
	}

	if f.rounds++; f.rounds == 1 {
		f.since = time.Now()
	}

	if what != f.said {
		f.said = what
		every := formatSpan(max(wait, maxBackoff))
		a.warnRound(a.allButLast(err), "retrying at least every "+every+", and reporting when "+f.doing+" works again")
	}
}

// backoff returns how long to wait after n consecutive failed rounds.
func backoff(period time.Duration, n int) time.Duration {
	wait := period
	for range n - 1 {
		if wait *= 2; wait >= maxBackoff {
			break
		}
	}
	return max(min(wait, maxBackoff), period)
}

// failsForever reports whether repeating the command cannot help.
func failsForever(err error) bool {
	switch errs.KindOf(err) {
	case errs.Invalid, errs.NotFound, errs.Exists, errs.Permission, errs.Unsupported, errs.TooNew, errs.Conflict:
		return true
	}
	return false
}

// warnRound prints the error of a round.
func (a *App) warnRound(err error, then string) {
	if a.json {
		a.printError(err)
		return
	}
	hint := hintOf(err)
	if hint != "" {
		hint = "; hint: " + hint
	}
	a.printWarning("%v%s; %s", err, hint, then)
}
