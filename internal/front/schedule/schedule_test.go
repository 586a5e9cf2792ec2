package schedule

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pando/internal/base/errs"
)

// clock is a clock on the wall that can be set.
type clock struct{ off atomic.Int64 }

func (c *clock) now() time.Time { return time.Now().Round(0).Add(time.Duration(c.off.Load())) }

// step sets the clock forward; in the case of a suspended host, timers stood still in that time.
func (c *clock) step(d time.Duration) { c.off.Add(int64(d)) }

// run runs a schedule in a bubble until the test function returns.
func run(t *testing.T, jobs []Job, test func(s *Schedule, c *clock)) {
	synctest.Test(t, func(t *testing.T) {
		c := &clock{}
		s := New()
		s.now = c.now
		s.Replace(jobs)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); s.Run(ctx) }()
		synctest.Wait()
		test(s, c)
		cancel()
		<-ended
	})
}

// counted is a job that counts its runs.
func counted(n *atomic.Int64, every time.Duration, then func() (Outcome, error)) Job {
	return Job{Name: "job", Every: every, Run: func(context.Context) (Outcome, error) {
		n.Add(1)
		return then()
	}}
}

func good() (Outcome, error) { return Outcome{Words: "did it"}, nil }

func wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestInterval: runs begin at equal intervals, after a jitter of a tenth of the interval at most.
func TestInterval(t *testing.T) {
	var n atomic.Int64
	run(t, []Job{counted(&n, 10*time.Minute, good)}, func(s *Schedule, _ *clock) {
		if st := s.States()[0]; st.Next.Sub(wallClock()) > time.Minute || !st.LastStart.IsZero() {
			t.Errorf("at the start: %+v", st)
		}
		wait(time.Minute + time.Second)
		if n.Load() != 1 {
			t.Fatalf("%d runs after the jitter", n.Load())
		}
		first := s.States()[0]
		if first.Result != "did it" || first.Runs != 1 || first.Next.Sub(first.LastStart) != 10*time.Minute {
			t.Errorf("after a run: %+v", first)
		}
		wait(100 * time.Minute)
		if n.Load() != 11 {
			t.Errorf("%d runs, want 11", n.Load())
		}
	})
}

// TestBackoff: after failures, a job is tried after a minute, and then less and less often, until it works.
func TestBackoff(t *testing.T) {
	var n atomic.Int64
	var broken atomic.Bool
	broken.Store(true)
	job := counted(&n, time.Hour, func() (Outcome, error) {
		if broken.Load() {
			return Outcome{}, errs.New(errs.IO, "push", "backup", "no answer")
		}
		return good()
	})
	run(t, []Job{job}, func(s *Schedule, _ *clock) {
		wait(time.Minute)
		for i, want := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
			st := s.States()[0]
			in := st.Next.Sub(st.LastEnd)
			if st.Failed != i+1 || in < want*time.Minute || in > want*time.Minute*11/10+time.Second || st.Err == nil {
				t.Fatalf("after %d failures: next in %v: %+v", i+1, in, st)
			}
			wait(in)
		}
		broken.Store(false)
		wait(2 * time.Hour)
		if st := s.States()[0]; st.Failed != 0 || st.Err != nil || st.Result != "did it" {
			t.Errorf("when it works again: %+v", st)
		}
	})

	if got := Backoff(time.Second, 15*time.Minute, 1000); got != 15*time.Minute {
		t.Errorf("after 1000 failures: %v", got)
	}
	if got := Backoff(time.Hour, 15*time.Minute, 3); got != time.Hour {
		t.Errorf("an interval longer than the limit: %v", got)
	}
}

// TestCanceled: a run that somebody has canceled is not repeated before its time.
func TestCanceled(t *testing.T) {
	var n atomic.Int64
	job := counted(&n, time.Hour, func() (Outcome, error) {
		return Outcome{}, &errs.Error{Kind: errs.Canceled, Op: "push", Err: errors.New("canceled")}
	})
	run(t, []Job{job}, func(s *Schedule, _ *clock) {
		wait(30 * time.Minute)
		if st := s.States()[0]; n.Load() != 1 || st.Failed != 0 || st.Err == nil {
			t.Errorf("%d runs: %+v", n.Load(), st)
		}
	})
}

// TestNeverTwice: a run that takes longer than the interval is not joined by another one, nor made up for, even if its
// job is replaced.
func TestNeverTwice(t *testing.T) {
	var running, most, n atomic.Int64
	job := func(same string) Job {
		return Job{Name: "job", Every: time.Second, Same: same, Run: func(ctx context.Context) (Outcome, error) {
			most.Store(max(most.Load(), running.Add(1)))
			n.Add(1)
			select {
			case <-time.After(time.Minute):
			case <-ctx.Done():
			}
			running.Add(-1)
			return good()
		}}
	}
	run(t, []Job{job("a")}, func(s *Schedule, _ *clock) {
		wait(5*time.Minute + 30*time.Second)
		if n.Load() != 6 {
			t.Errorf("%d runs in 5.5 min of 1 min each", n.Load())
		}
		s.Replace([]Job{job("b")})
		s.Replace([]Job{job("c")})
		wait(5 * time.Minute)
		if most.Load() != 1 || n.Load() < 10 {
			t.Errorf("%d at once, %d runs", most.Load(), n.Load())
		}
	})
}

// TestReplace: a job that is the same keeps its time and state, one that is gone does not run again.
func TestReplace(t *testing.T) {
	var a, b atomic.Int64
	job := func(name, same string, n *atomic.Int64) Job {
		j := counted(n, time.Hour, good)
		j.Name, j.Same = name, same
		return j
	}
	run(t, []Job{job("a", "1", &a), job("b", "1", &b)}, func(s *Schedule, _ *clock) {
		wait(2 * time.Minute)
		before := s.States()[0]
		s.Replace([]Job{job("a", "1", &a)})
		if after := s.States(); len(after) != 1 || after[0] != before {
			t.Errorf("the same job: %+v, before %+v", after, before)
		}
		s.Replace([]Job{job("a", "2", &a)})
		if st := s.States()[0]; st.Result != "did it" || st.Runs != 1 {
			t.Errorf("a changed job: %+v", st)
		}
		wait(90 * time.Minute)
		if a.Load() != 3 || b.Load() != 1 {
			t.Errorf("%d and %d runs, want 3 and 1", a.Load(), b.Load())
		}
	})
}

// TestSuspend: after the host was suspended past a run, the run begins within pollMost, and only once.
func TestSuspend(t *testing.T) {
	var n atomic.Int64
	run(t, []Job{counted(&n, time.Hour, good)}, func(s *Schedule, c *clock) {
		wait(2 * time.Minute)
		c.step(8 * time.Hour)
		wait(pollMost)
		if n.Load() != 2 {
			t.Errorf("%d runs after 8 h of sleep, want 2", n.Load())
		}
		wait(30 * time.Minute)
		if n.Load() != 2 {
			t.Errorf("%d runs: runs that were missed are made up for", n.Load())
		}
	})
}

// TestClockSetBack: a clock that is set back by days delays a run by little more than its interval.
func TestClockSetBack(t *testing.T) {
	var n atomic.Int64
	run(t, []Job{counted(&n, time.Hour, good)}, func(s *Schedule, c *clock) {
		wait(2 * time.Minute)
		c.step(-240 * time.Hour)
		wait(time.Hour + 4*jitterMost)
		if n.Load() != 2 {
			t.Errorf("%d runs, want 2", n.Load())
		}
	})
}

// TestWatch: a job that looks for work runs when it says, is not reported while it has none, and does not wait for
// other jobs.
func TestWatch(t *testing.T) {
	var n atomic.Int64
	busy := func(i int) Job {
		return Job{Name: fmt.Sprint(i), Every: time.Second, Run: func(ctx context.Context) (Outcome, error) {
			<-ctx.Done()
			return Outcome{}, ctx.Err()
		}}
	}
	jobs := []Job{{Name: "watch", Every: 10 * time.Second, Watch: true, Run: func(context.Context) (Outcome, error) {
		if n.Add(1) == 1 {
			return Outcome{Idle: true, Next: wallClock().Add(2500 * time.Millisecond)}, nil
		}
		return Outcome{Words: "work"}, nil
	}}}
	for i := range 2 * atOnce {
		jobs = append(jobs, busy(i))
	}
	run(t, jobs, func(s *Schedule, _ *clock) {
		wait(2 * time.Second)
		if st := s.States()[0]; n.Load() != 1 || st.Runs != 0 || !st.LastStart.IsZero() || st.Next.IsZero() {
			t.Errorf("idle: %d rounds, %+v", n.Load(), st)
		}
		wait(time.Second)
		if st := s.States()[0]; n.Load() != 2 || st.Runs != 1 || st.Result != "work" {
			t.Errorf("due: %d rounds, %+v", n.Load(), st)
		}
		running := 0
		for _, st := range s.States() {
			if st.Running {
				running++
			}
		}
		if running != atOnce {
			t.Errorf("%d jobs run, want %d", running, atOnce)
		}
	})
}

// TestEnd: Run returns when all jobs have, and jobs see the end.
func TestEnd(t *testing.T) {
	var ended []string
	synctest.Test(t, func(t *testing.T) {
		s := New()
		s.Replace([]Job{{Name: "job", Every: time.Minute, Run: func(ctx context.Context) (Outcome, error) {
			<-ctx.Done()
			time.Sleep(time.Second) // it undoes what it did
			ended = append(ended, "job")
			return Outcome{}, ctx.Err()
		}}})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, cancel)
		s.Run(ctx)
		if got := strings.Join(ended, " "); got != "job" {
			t.Errorf("ended: %q", got)
		}
	})
}

func TestFormatInterval(t *testing.T) {
	for d, want := range map[time.Duration]string{time.Second: "1s", 90 * time.Second: "1m30s", 15 * time.Minute: "15m",
		12 * time.Hour: "12h", 90 * time.Minute: "1h30m", 24 * time.Hour: "1d", 36 * time.Hour: "36h"} {
		if got := FormatInterval(d); got != want {
			t.Errorf("%v: got %s, want %s", time.Duration(d), got, want)
		}
	}
}
