// Package rounds repeats work until it is interrupted, and reports problems and their end: pushes, refreshes, reads of
// events.
package rounds

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/replicate"
)

// MaxPause is the longest pause after a failed round, unless the period is longer.
const MaxPause = 15 * time.Minute

// Change reports that a round had another problem than the one before, or none after a problem.
type Change struct {
	Err    error         // problem; nil: the work succeeds again
	Failed int           // number of failed rounds in a row
	Since  time.Time     // time of the first of these
	Pause  time.Duration // longest pause between rounds from now on; 0 without a problem
}

// Repeat calls round every period until ctx ends, which counts as success. An error of the first round that waiting
// cannot fix is returned, unless some of the work was done. After other errors it pauses, twice as long after each.
// report is called when a problem begins, changes or ends, and not while it lasts; a remote that does not answer is one
// problem, whatever the errors say.
func Repeat(
	ctx context.Context, period time.Duration, round func(context.Context) (some bool, err error), report func(Change),
) error {
	var s series
	for first := true; ; first = false {
		start := time.Now()
		some, err := round(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if first && !some && lastsForever(err) {
			return err
		}

		if c, changed := s.add(err, period); changed {
			report(c)
		}

		wait := period - time.Since(start)
		if err != nil {
			wait = pause(period, s.failed)
		}
		t := time.NewTimer(max(wait, 0))
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-t.C:
		}
	}
}

// series is a series of failed rounds.
type series struct {
	failed  int
	since   time.Time // time of the first failed round
	problem string    // problem of the last failed round
}

// add counts a round, and returns what it changes.
func (s *series) add(err error, period time.Duration) (c Change, changed bool) {
	if err == nil {
		c = Change{Failed: s.failed, Since: s.since}
		*s = series{}
		return c, c.Failed > 0
	}

	if s.failed++; s.failed == 1 {
		s.since = time.Now()
	}
	problem := err.Error()
	if replicate.Outage(err) {
		problem = "outage" // the words depend on how the remote fails to answer
	}
	changed = problem != s.problem
	s.problem = problem
	return Change{Err: err, Failed: s.failed, Since: s.since, Pause: max(period, MaxPause)}, changed
}

// pause returns how long to wait after n consecutive failed rounds.
func pause(period time.Duration, n int) time.Duration {
	wait := period
	for range n - 1 {
		if wait *= 2; wait >= MaxPause {
			break
		}
	}
	return max(min(wait, MaxPause), period)
}

// lastsForever reports whether waiting cannot help against an error.
func lastsForever(err error) bool {
	return errs.Is(err, errs.Invalid, errs.NotFound, errs.Exists, errs.Permission, errs.Unsupported, errs.TooNew,
		errs.Conflict)
}
