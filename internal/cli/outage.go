package cli

import (
	"fmt"
	"sync"
	"time"

	"pando/internal/base/progress"
	"pando/internal/remote/replicate"
)

// outage is that a remote does not answer as it should, and what was said of it. The zero value is ready, and
// nil says nothing. Its methods may be called by several goroutines at once.
type outage struct {
	mu      sync.Mutex
	tracker *progress.Tracker // that is shown, which then says it; nil: none
	said    time.Time         // the last line about it, if no tracker does
}

// outagePause is from which pause on people are told of it: shorter ones are over before a line is read.
const outagePause = time.Second

// showIn makes a tracker say what is waited for; nil: lines of their own do.
func (o *outage) showIn(t *progress.Tracker) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tracker = t
}

// showRetry shows a pause before a request is repeated.
func (o *outage) showRetry(a *App, w replicate.Waiting) {
	if o == nil || w.Pause < outagePause {
		return
	}

	s := &progress.Stall{Answer: w.Answer.Words, Attempt: w.Attempt, Of: w.Of, Next: time.Now().Add(w.Pause)}

	o.mu.Lock()
	defer o.mu.Unlock()
	o.tracker.Stall(s)
	if o.tracker != nil || a.quiet || a.noProgress || a.lasting || time.Since(o.said) < lineInterval {
		return
	}

	o.said = time.Now()
	if a.json {
		fmt.Fprintln(a.Stderr, progressJSON(progress.State{Stalled: s}, 0))
	} else {
		fmt.Fprintln(a.Stderr, "pando: "+stallWords(s))
	}
}

// endRetry ends what waiting shows: the repeated request was answered.
func (o *outage) endRetry() {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tracker.Stall(nil)
}

// stallWords says what is waited for: "server answers 503, attempt 4 of 10, next in 6 s".
func stallWords(s *progress.Stall) string {
	if s.Of == 0 {
		return s.Answer
	}
	out := fmt.Sprintf("%s, attempt %d of %d", s.Answer, s.Attempt, s.Of)
	if next := time.Until(s.Next); next > 0 {
		return out + fmt.Sprintf(", next in %d s", (next+time.Second-1)/time.Second)
	}
	return out + ", next one now"
}

// idleAfter is after which time without progress an estimate of the time left is worth nothing.
const idleAfter = 15 * time.Second

// idle finds out that nothing goes on, also where nobody has said why: a request may hang for a minute before it is
// cut.
type idle struct {
	last  progress.State
	since time.Time // of the last progress
}

// markStalled is a state with what stalls it, if something does.
func (i *idle) markStalled(s progress.State, now time.Time) progress.State {
	was := i.last
	i.last = s
	if i.since.IsZero() || s.Stage != was.Stage || s.Files != was.Files || s.Bytes != was.Bytes {
		i.since = now
	}
	if d := now.Sub(i.since); s.Stalled == nil && d >= idleAfter && s.TotalBytes > s.Bytes {
		s.Stalled = &progress.Stall{Answer: "no progress for " + formatSpan(d.Round(time.Second))}
	}
	return s
}
