// Package schedule runs jobs at intervals. It knows when, and nothing of what they do.
package schedule

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
)

// Job is work that is repeated.
type Job struct {
	Name  string        // unique in a schedule
	Verb  string        // what it does, for people: "push"
	Ref   string        // and with what: "db-*"; may be ""
	Every time.Duration // from the begin of one run to that of the next
	Same  string        // Replace keeps a job that has the same text here; what the job does must depend on it alone

	// Watch is a job that only looks whether there is something to do: its rounds without work are not reported, it has no
	// jitter, and it does not wait for other jobs. It says in its Outcome when the next one is due.
	Watch bool

	// Run does the work. An error makes the schedule wait longer before it tries again. A run that was canceled is not
	// repeated early. It must return soon after ctx ends.
	Run func(ctx context.Context) (Outcome, error)
}

// Outcome is what a run did.
type Outcome struct {
	Words string    // for people: "took 2 snapshots"
	Idle  bool      // there was nothing to do: the state of the job stays as it is
	Next  time.Time // when there is something to do again, if that is known; the next run is not later
}

// State is what is known of a job.
type State struct {
	Name      string
	Verb, Ref string
	Every     time.Duration // 0: the job watches
	Running   bool
	Runs      int       // that have ended, without idle ones
	LastStart time.Time // zero: it has not run yet
	LastEnd   time.Time
	Result    string // of the last run that did not fail
	Err       error  // of the last run; nil: it did not fail
	Failed    int    // runs that have failed in a row
	Next      time.Time
}

const (
	// pollMost limits how long a job sleeps before it looks at the clock again: timers stand still while the host is
	// suspended, and the clock may be set.
	pollMost = 30 * time.Second
	// atOnce limits the jobs that run at the same time.
	atOnce = 4

	jitterMost = time.Minute // of the first run
	retryFirst = time.Minute // after one failure, unless the interval is shorter
	retryMost  = 15 * time.Minute
)

// Backoff returns how long to wait after n failures in a row: first, then twice as long each time, but at most most.
func Backoff(first, most time.Duration, n int) time.Duration {
	wait := first
	for range n - 1 {
		if wait >= most {
			break
		}
		wait *= 2
	}
	return max(min(wait, most), first)
}

// Schedule runs jobs. Its methods may be called concurrently.
type Schedule struct {
	now  func() time.Time // of the clock on the wall; tests set it
	room chan struct{}    // has one element for each job that runs

	mu     sync.Mutex
	ctx    context.Context // of Run; nil: it has not been called
	ended  bool            // Run is waiting for the last jobs: no more begin
	jobs   []*entry
	ending sync.WaitGroup
}

// entry is a job with its state.
type entry struct {
	Job
	quit chan struct{} // closed: the job has been replaced
	done chan struct{} // closed: no run of it will begin or is going on
	due  time.Time     // of the next run

	state State // the schedule's mutex guards it
}

// New returns a schedule without jobs.
func New() *Schedule {
	return &Schedule{now: wallClock, room: make(chan struct{}, atOnce)}
}

// wallClock returns the time without the reading of the monotonic clock, which stands still while the host is
// suspended.
func wallClock() time.Time { return time.Now().Round(0) }

// Run runs jobs until ctx ends, and returns when all have returned. It is called once.
func (s *Schedule) Run(ctx context.Context) {
	s.mu.Lock()
	s.ctx = ctx
	for _, e := range s.jobs {
		s.begin(e, nil)
	}
	s.mu.Unlock()

	<-ctx.Done()
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.ending.Wait()
}

// Replace replaces all jobs. A job that is the same goes on. One that is gone finishes the run that it is in, and a new
// job of its name does not begin before that; it takes over the last result.
func (s *Schedule) Replace(jobs []Job) {
	s.mu.Lock()
	defer s.mu.Unlock()

	var next []*entry
	for _, j := range jobs {
		i := slices.IndexFunc(s.jobs, func(e *entry) bool { return e.Name == j.Name })
		if i >= 0 && s.jobs[i].Same == j.Same {
			next = append(next, s.jobs[i])
			continue
		}

		e := &entry{Job: j, quit: make(chan struct{}), done: make(chan struct{})}
		e.due = s.firstDue(j)
		e.state = State{Name: j.Name, Verb: j.Verb, Ref: j.Ref, Every: j.Every, Next: e.due}
		var before *entry
		if i >= 0 {
			before = s.jobs[i]
			was := before.state
			e.state.Runs, e.state.LastStart, e.state.LastEnd, e.state.Result = was.Runs, was.LastStart, was.LastEnd, was.Result
		}
		if j.Watch {
			e.state.Every, e.state.Next = 0, time.Time{}
		}
		next = append(next, e)
		if s.ctx != nil {
			s.begin(e, before)
		}
	}

	for _, e := range s.jobs {
		if !slices.Contains(next, e) {
			close(e.quit)
		}
	}
	s.jobs = next
}

// firstDue returns when the first run of a job is due: soon, but hosts that start together, or read the same file, do
// not all ask the same server at once.
func (s *Schedule) firstDue(j Job) time.Time {
	if j.Watch {
		return s.now()
	}
	return s.now().Add(rand.N(min(j.Every/10, jitterMost) + 1))
}

// begin starts the goroutine of a job, after that of the job it replaces. The caller holds the mutex.
func (s *Schedule) begin(e, before *entry) {
	if s.ended {
		return
	}
	s.ending.Go(func() {
		defer close(e.done)
		if before != nil {
			<-before.done
		}
		for s.sleep(e) {
			s.runOnce(e)
		}
	})
}

// sleep waits until a job is due. It reports false if there will be no more runs.
func (s *Schedule) sleep(e *entry) bool {
	for {
		now := s.now()
		wait := e.due.Sub(now)
		if most := e.longest(); wait > most {
			// The clock was set back: nothing is due later than this.
			s.setDue(e, now.Add(most))
			wait = most
		}

		t := time.NewTimer(min(max(wait, 0), pollMost))
		select {
		case <-s.ctx.Done():
			t.Stop()
			return false
		case <-e.quit:
			t.Stop()
			return false
		case <-t.C:
		}
		select {
		case <-s.ctx.Done(): // at the same time
			return false
		case <-e.quit:
			return false
		default:
		}
		if !s.now().Before(e.due) {
			return true
		}
	}
}

// longest is how far in the future a run may be due.
func (e *entry) longest() time.Duration { return max(e.Every, retryMost) + 2*jitterMost }

func (s *Schedule) setDue(e *entry, due time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.due = due
	if !e.Watch {
		e.state.Next = due
	}
}

// runOnce runs a job, and records what came of it.
func (s *Schedule) runOnce(e *entry) {
	if !e.Watch {
		select {
		case s.room <- struct{}{}:
			defer func() { <-s.room }()
		case <-s.ctx.Done():
			return
		}
	}

	start := s.now()
	s.mu.Lock()
	e.state.Running = !e.Watch
	s.mu.Unlock()

	out, err := e.Run(s.ctx)
	end := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	e.record(start, end, out, err)
}

// record records a run, and decides when the next one is due. The caller holds the mutex.
func (e *entry) record(start, end time.Time, out Outcome, err error) {
	st := &e.state
	st.Running = false
	if !out.Idle || err != nil {
		st.Runs++
		st.LastStart, st.LastEnd, st.Err = start, end, err
	}

	// The next run, for which one that took longer than the interval does not make up.
	next := start.Add(e.Every)
	switch {
	case err == nil:
		st.Failed = 0
		if !out.Idle {
			st.Result = out.Words
		}
		if e.Watch && st.Err != nil && out.Idle {
			st.Err = nil // what failed is over
		}
	case errs.Is(err, errs.Canceled):
	default:
		st.Failed++
		most := retryMost
		if e.Watch {
			most = retryFirst
		}
		wait := Backoff(min(e.Every, retryFirst), max(e.Every, most), st.Failed)
		next = end.Add(wait)
		if !e.Watch {
			next = next.Add(rand.N(wait/10 + 1))
		}
	}
	if err == nil && !out.Next.IsZero() && out.Next.Before(next) {
		next = out.Next
	}
	if next.Before(end) {
		next = end
	}

	e.due, st.Next = next, next
	if e.Watch {
		st.Next = out.Next
	}
}

// States describes all jobs, in their order.
func (s *Schedule) States() []State {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]State, 0, len(s.jobs))
	for _, e := range s.jobs {
		out = append(out, e.state)
	}
	return out
}

// FormatInterval formats an interval as people write it: 15m, 12h, 7d.
func FormatInterval(d time.Duration) string {
	if days := d / (24 * time.Hour); days > 0 && d%(24*time.Hour) == 0 {
		return fmt.Sprintf("%dd", days)
	}
	text := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if cut, ok := strings.CutSuffix(text, zero); ok {
			text = cut + zero[:1]
		}
	}
	return text
}
