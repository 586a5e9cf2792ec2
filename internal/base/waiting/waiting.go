// Package waiting waits for what other processes hold: visibly, and with a limit.
//
// Whoever waits for longer than a moment says so, with what is known of the process that is in
// the way. A front end decides by WithNotes where that is shown.
package waiting

import (
	"context"
	"time"

	"pando/internal/base/errs"
)

const (
	// Limit is how long a process is waited for that should be done in a moment.
	Limit = 15 * time.Second

	// noteInterval is the pause between two notes.
	noteInterval = 30 * time.Second

	// maxPause is the longest between two attempts.
	maxPause = 50 * time.Millisecond
)

// quietTime is how long a wait is silent.
var quietTime = 2 * time.Second

type notesKey struct{}

// WithNotes returns a context in which note is called with a sentence about each wait that takes
// longer than a moment, from any goroutine.
func WithNotes(ctx context.Context, note func(text string)) context.Context {
	return context.WithValue(ctx, notesKey{}, note)
}

// Note says text where the notes of ctx go.
func Note(ctx context.Context, text string) {
	if note, ok := ctx.Value(notesKey{}).(func(string)); ok {
		note(text)
	}
}

// Wait describes what is waited for.
type Wait struct {
	Op, Ref string           // of errors
	What    string           // that others hold: "the pool's lock"
	Limit   time.Duration    // 0: for as long as those who hold it are not stopped
	Holders func() []Process // called when it takes long; nil: unknown
	GiveUp  func() error     // what Until returns after the limit; nil: Error
}

// Until calls try until it reports that there is nothing to wait for, or fails. InUse, with the
// processes in the way and what to do about them, after the limit, or if one of them
// is stopped, after Limit; and the error of ctx when that ends.
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
			if waited >= Limit && anyStopped(who) {
				return w.giveUp(waited)
			}
			Note(ctx, "waiting for "+w.describeHeld(who))
			noteAt = time.Now().Add(min(noteInterval, max(Limit-waited, quietTime)))
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

// Watch notes in ctx, until stop, that something takes longer than a moment: for what waits by itself.
func (w Wait) Watch(ctx context.Context) (stop func()) {
	if ctx.Value(notesKey{}) == nil {
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

// Error is that of a wait that was given up.
func (w Wait) Error(waited time.Duration) error {
	who := w.holders()
	hint := "wait until it is done, or end it"
	for _, p := range who {
		if p.Stopped {
			hint = "continue the stopped process with `kill -CONT " + p.pid() + "`, or end it"
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

// describeHeld is what is waited for and who has it, for people.
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
