package cli

import (
	"context"
	"fmt"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/service/rounds"
)

// parseEvery reads a period. It returns Invalid.
func parseEvery(op, text string) (time.Duration, error) {
	period, err := units.ParseDuration(op, text)
	if err == nil && period < time.Second {
		err = errs.New(errs.Invalid, op, text, "--every must be at least 1s (got %s)", text).
			WithHint("use for example --every 10s")
	}
	return period, err
}

// repeat calls round every period until it is interrupted: see rounds.Repeat. doing is the work: "pushing".
func (a *App) repeat(
	ctx context.Context, period time.Duration, doing string, round func(ctx context.Context) (some bool, err error),
) error {
	a.lasting = true
	err := rounds.Repeat(ctx, period, round, func(c rounds.Change) { a.printChange(doing, c) })
	return a.allButLast(err)
}

// printChange prints a problem of rounds, or that it is over.
func (a *App) printChange(doing string, c rounds.Change) {
	if c.Err == nil {
		a.noteWait(fmt.Sprintf("%s works again after %s and %s", doing, formatSpan(time.Since(c.Since)),
			errs.Plural(c.Failed, "failed round")))
		return
	}

	err := a.allButLast(c.Err)
	if a.json {
		a.printError(err)
		return
	}
	hint := hintOf(err)
	if hint != "" {
		hint = "; hint: " + hint
	}
	a.printWarning("%v%s; retrying at least every %s, and reporting when %s works again", err, hint, formatSpan(c.Pause),
		doing)
}
