package cli

import (
	"fmt"
	"sync"
	"time"

	"pando/internal/base/progress"
	"pando/internal/remote/replicate"
)

// outage reports to the user that a remote does not answer properly. The zero value is ready, and a nil outage
// reports nothing. Its methods may be called by several goroutines at once.
type outage struct {
	mu      sync.Mutex
	tracker *progress.Tracker // the tracker on display, which then shows the outage; nil: none
	said    time.Time         // when the last line was printed, if no tracker shows the outage
}

// outagePause is the shortest pause that is reported: shorter ones end before anyone can read the line.
const outagePause = time.Second

// showIn makes t show outages from now on; with nil, they are printed as lines.
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

// endRetry ends what showRetry shows: the repeated request was answered.
func (o *outage) endRetry() {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tracker.Stall(nil)
}

// stallWords describes what pando waits for: "server answers 503, attempt 4 of 10, next in 6 s".
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

// idleAfter is the time without progress after which an estimate of the time left is meaningless.
const idleAfter = 15 * time.Second

// idle detects that there is no progress, even if no request has failed yet: a request may hang for a minute before
// it is cut.
type idle struct {
	last  progress.State
	since time.Time // of the last progress
}

// markStalled returns s with a stall added if there was no progress for idleAfter.
func (i *idle) markStalled(s progress.State, now time.Time) progress.State {
	was := i.last
	i.last = s
	if i.since.IsZero() || s.Words() != was.Words() || s.Files != was.Files || s.Bytes != was.Bytes {
		i.since = now
	}
	if d := now.Sub(i.since); s.Stalled == nil && d >= idleAfter && s.TotalBytes > s.Bytes {
		s.Stalled = &progress.Stall{Answer: "no progress for " + formatSpan(d.Round(time.Second))}
	}
	return s
}
