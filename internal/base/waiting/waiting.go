// Package waiting waits for resources that other processes hold, visibly and with a limit.
//
// A wait that takes longer than a moment is reported, with what is known about the process that
// holds the resource. A front end decides by WithNotes where to show that.
package waiting

import (
	"context"
	"log/slog"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/logs"
)

const (
	// stoppedLimit is how long to wait for a resource if a process that holds it is stopped.
	stoppedLimit = 15 * time.Second

	// noteInterval is the time between two notes.
	noteInterval = 30 * time.Second

	// maxPause is the longest pause between two attempts.
	maxPause = 50 * time.Millisecond
)

// quietTime is how long a wait lasts before it is reported.
var quietTime = 2 * time.Second

type notesKey struct{}

// WithNotes returns a context in which each wait that takes longer than a moment calls note with a
// sentence about it, from any goroutine.
func WithNotes(ctx context.Context, note func(text string)) context.Context {
	return context.WithValue(ctx, notesKey{}, note)
}

// Note reports text through the note function of ctx, if it has one, and logs it.
func Note(ctx context.Context, text string) {
	logs.From(ctx).InfoContext(ctx, errs.MaskURLs(text))
	if note, ok := ctx.Value(notesKey{}).(func(string)); ok {
		note(text)
	}
}

// Wait describes a resource to wait for.
type Wait struct {
	Op, Ref string           // of errors
	What    string           // the resource: "the pool's lock"
	Limit   time.Duration    // 0: no limit, unless a holder is stopped
	Holders func() []Process // called if the wait takes long; nil: unknown
	GiveUp  func() error     // returns the error of Until after the limit; nil: Error
}

// Until calls try until it returns done or an error. InUse, with the processes that hold the
// resource and a hint: the limit has passed or, if one of the processes is stopped, stoppedLimit.
// It returns the error of ctx when that ends.
func (w Wait) Until(ctx context.Context, try func() (done bool, err error)) error {
	begun := time.Now()
	noteAt := begun.Add(quietTime)
	for d := time.Millisecond; ; d = min(2*d, maxPause) {
		if done, err := try(); done || err != nil {
			return err
		}

		waited := time.Since(begun)
		if w.Limit > 0 && waited >= w.Limit {
			return w.giveUp(waited)
		}

		if time.Now().After(noteAt) {
			who := w.holders()
			if waited >= stoppedLimit && anyStopped(who) {
				return w.giveUp(waited)
			}
			Note(ctx, "waiting for "+w.describeHeld(who))
			noteAt = time.Now().Add(min(noteInterval, max(stoppedLimit-waited, quietTime)))
		}

		timer := time.NewTimer(d)
		select {
		case <-ctx.Done():
			timer.Stop()
			return errs.Wrap(w.Op, w.Ref, ctx.Err())
		case <-timer.C:
		}
	}
}

// Watch reports through ctx, until stop is called, that something takes longer than a moment. It is for callers that
// wait by other means.
func (w Wait) Watch(ctx context.Context) (stop func()) {
	if ctx.Value(notesKey{}) == nil && !logs.From(ctx).Enabled(ctx, slog.LevelInfo) {
		return func() {}
	}
	t := time.AfterFunc(quietTime, func() { Note(ctx, "waiting for "+w.describeHeld(w.holders())) })
	return func() { t.Stop() }
}

func (w Wait) giveUp(waited time.Duration) error {
	if w.GiveUp != nil {
		return w.GiveUp()
	}
	return w.Error(waited)
}

// Error returns the error for a wait that was given up.
func (w Wait) Error(waited time.Duration) error {
	who := w.holders()
	hint := "wait until it is done, or stop it"
	for _, p := range who {
		if p.Stopped {
			hint = "continue the stopped process with `kill -CONT " + p.pid() + "`, or kill it"
		}
	}
	return errs.New(errs.InUse, w.Op, w.Ref, "waited %v for %s", waited.Round(time.Second), w.describeHeld(who)).
		WithHint("%s", hint)
}

func (w Wait) holders() []Process {
	if w.Holders == nil {
		return nil
	}
	return w.Holders()
}

// describeHeld names the resource and its holders, for users.
func (w Wait) describeHeld(who []Process) string {
	if len(who) == 0 {
		return w.What + ", held by another process"
	}
	return w.What + ", held by " + Format(who)
}

func anyStopped(who []Process) bool {
	for _, p := range who {
		if p.Stopped {
			return true
		}
	}
	return false
}
