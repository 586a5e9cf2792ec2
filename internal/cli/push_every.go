package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/replicate"
)

// maxPushBackoff is the longest wait of `push --every` after a failed round.
const maxPushBackoff = 15 * time.Minute

// pushEvery pushes until it is interrupted, which counts as success. In the first round, an error that waiting
// cannot fix ends it. Later problems, for example a remote that does not answer, are reported once, and once more
// when they are over, however long that takes.
func (a *App) pushEvery(ctx context.Context, to string, q replicate.PushRequest, period time.Duration) error {
	a.lasting = true
	failed := 0
	var row failedRounds
	for first := true; ; first = false {
		start := time.Now()
		done, err := a.pushRound(ctx, to, q)
		if err := a.printRound(done); err != nil {
			return err
		}

		if ctx.Err() != nil {
			return nil
		}

		wait := period
		if err != nil {
			if first && len(done) == 0 && failsForever(err) {
				return a.allButLast(err)
			}
			failed++
			wait = pushBackoff(period, failed)
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

// failedRounds describes consecutive failed rounds of pushEvery.
type failedRounds struct {
	rounds int
	since  time.Time
	said   string // the problem that was reported last
}

// reportRound prints the error of a round, once as long as it stays the same, and the end of a series of failed rounds.
func (a *App) reportRound(f *failedRounds, err error, wait time.Duration) {
	if err == nil {
		if f.rounds > 0 {
			a.noteWait(fmt.Sprintf("pushing works again after %s and %s",
				formatSpan(time.Since(f.since)), errs.Plural(f.rounds, "failed round")))
		}
		*f = failedRounds{}
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
		every := formatSpan(max(wait, maxPushBackoff))
		a.warnRound(a.allButLast(err), "retrying at least every "+every+", and reporting when pushing works again")
	}
}

// pushBackoff returns how long to wait after n consecutive failed rounds.
func pushBackoff(period time.Duration, n int) time.Duration {
	wait := period
	for range n - 1 {
		if wait *= 2; wait >= maxPushBackoff {
			break
		}
	}
	return max(min(wait, maxPushBackoff), period)
}

// failsForever reports whether repeating the command cannot help.
func failsForever(err error) bool {
	switch errs.KindOf(err) {
	case errs.Invalid, errs.NotFound, errs.Exists, errs.Permission, errs.Unsupported, errs.TooNew, errs.Conflict:
		return true
	}
	return false
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
