package objstore_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/logs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/file"
	"pando/internal/testing/storetest"
)

// newStore is a real store in a temporary directory.
func newStore(t *testing.T) objstore.Store {
	t.Helper()
	s, err := file.Open(t.Context(), &url.URL{Scheme: "file", Path: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// inBubble runs a test in which time passes at once, and only while all wait.
func inBubble(t *testing.T, test func(t *testing.T, s objstore.Store)) {
	t.Helper()
	s := newStore(t)
	synctest.Test(t, func(t *testing.T) { test(t, s) })
}

func mustPut(t *testing.T, s objstore.Store, key, data string, c objstore.Condition) objstore.Version {
	t.Helper()
	v, err := s.Put(t.Context(), key, []byte(data), c)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func mustHold(t *testing.T, s objstore.Store, key, want string, v objstore.Version) {
	t.Helper()
	data, info, err := s.Get(t.Context(), key, 0, -1)
	if err != nil || string(data) != want || info.Version != v {
		t.Errorf("%s is %q with version %q, %v; want %q, %q", key, data, info.Version, err, want, v)
	}
}

// TestRetrySettlesLostAnswers: whatever the condition, and however often the answer
// is lost, the Put is done once and its own version comes back.
func TestRetrySettlesLostAnswers(t *testing.T) {
	for lost := 1; lost <= 3; lost++ {
		inBubble(t, func(t *testing.T, s objstore.Store) {
			f := storetest.Faulty(s)
			r := objstore.Retry(f, objstore.RetryOptions{})
			fault := storetest.Fault{Match: storetest.Ops(storetest.Put), When: storetest.After, Times: lost}

			f.Add(fault)
			v := mustPut(t, r, "a", "first", objstore.IfAbsent)
			mustHold(t, s, "a", "first", v)
			f.Heal()
			f.Add(fault)
			w := mustPut(t, r, "a", "second", objstore.IfVersion(v))
			mustHold(t, s, "a", "second", w)
			if v == w {
				t.Error("the version of the first write came back for the second")
			}
			f.Heal()
			f.Add(fault)
			w = mustPut(t, r, "a", "third", objstore.Always)
			mustHold(t, s, "a", "third", w)
			if n := f.Count(storetest.Put); n != 3*(lost+1) {
				t.Errorf("%d Puts, want %d", n, 3*(lost+1))
			}
		})
	}
}

// TestRetryLostBeforeEffect: a failure before the effect is tried again as if nothing
// had been.
func TestRetryLostBeforeEffect(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		f := storetest.Faulty(s, storetest.Fault{Times: 3})
		r := objstore.Retry(f, objstore.RetryOptions{})
		mustHold(t, s, "a", "x", mustPut(t, r, "a", "x", objstore.IfAbsent))
		if f.Count(storetest.Put) != 4 || f.Count(storetest.Get) != 0 {
			t.Errorf("calls: %v", f.Calls())
		}
	})
}

// TestRetryConflictsOfOthers: what somebody else wrote is never taken for one's own,
// and what was not tried before is not settled.
func TestRetryConflictsOfOthers(t *testing.T) {
	// Our write is done, its answer lost, and somebody replaces it.
	inBubble(t, func(t *testing.T, s objstore.Store) {
		v := mustPut(t, s, "a", "old", objstore.Always)
		var theirs objstore.Version
		f := storetest.Faulty(s, storetest.Fault{When: storetest.After,
			Err: objstore.Transient(errs.New(errs.IO, "put", "a", "lost")),
			Do:  func(storetest.Call) { theirs = mustPut(t, s, "a", "theirs", objstore.Always) }})
		_, err := objstore.Retry(f, objstore.RetryOptions{}).Put(t.Context(), "a", []byte("ours"), objstore.IfVersion(v))
		if !errs.Is(err, errs.Conflict) || objstore.Temporary(err) {
			t.Errorf("%v, want a conflict", err)
		}
		mustHold(t, s, "a", "theirs", theirs)
	})
	// The first try fails before its effect, then somebody else is first.
	inBubble(t, func(t *testing.T, s objstore.Store) {
		f := storetest.Faulty(s, storetest.Fault{Err: objstore.Transient(errs.New(errs.IO, "put", "a", "lost")),
			Do: func(storetest.Call) { mustPut(t, s, "a", "theirs", objstore.IfAbsent) }})
		_, err := objstore.Retry(f, objstore.RetryOptions{}).Put(t.Context(), "a", []byte("ours"), objstore.IfAbsent)
		if !errs.Is(err, errs.Conflict) {
			t.Errorf("%v, want a conflict", err)
		}
	})
	// Our write is done, its answer lost, and somebody deletes it.
	inBubble(t, func(t *testing.T, s objstore.Store) {
		v := mustPut(t, s, "a", "old", objstore.Always)
		f := storetest.Faulty(s, storetest.Fault{When: storetest.After,
			Err: objstore.Transient(errs.New(errs.IO, "put", "a", "lost")),
			Do: func(storetest.Call) {
				if err := s.Delete(t.Context(), "a"); err != nil {
					t.Error(err)
				}
			}})
		_, err := objstore.Retry(f, objstore.RetryOptions{}).Put(t.Context(), "a", []byte("ours"), objstore.IfVersion(v))
		if !errs.Is(err, errs.Conflict) {
			t.Errorf("%v, want a conflict", err)
		}
	})
	// No answer was lost: the same bytes prove nothing.
	inBubble(t, func(t *testing.T, s objstore.Store) {
		mustPut(t, s, "a", "same", objstore.Always)
		f := storetest.Faulty(s)
		_, err := objstore.Retry(f, objstore.RetryOptions{}).Put(t.Context(), "a", []byte("same"), objstore.IfAbsent)
		if !errs.Is(err, errs.Conflict) || f.Count() != 1 {
			t.Errorf("%v after %v, want a conflict at once", err, f.Calls())
		}
	})
}

// TestRetrySettlesBehindFailures: reading back is tried again, too; if that cannot be
// done the result says that nobody knows.
func TestRetrySettlesBehindFailures(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		f := storetest.Faulty(s,
			storetest.Fault{Match: storetest.Ops(storetest.Put), When: storetest.After},
			storetest.Fault{Match: storetest.Ops(storetest.Get), Times: 4})
		mustHold(t, s, "a", "x", mustPut(t, objstore.Retry(f, objstore.RetryOptions{}), "a", "x", objstore.IfAbsent))

		f = storetest.Faulty(s,
			storetest.Fault{Match: storetest.Ops(storetest.Put), When: storetest.After},
			storetest.Fault{Match: storetest.Ops(storetest.Get), Times: -1})
		_, err := objstore.Retry(f, objstore.RetryOptions{}).Put(t.Context(), "b", []byte("x"), objstore.IfAbsent)
		if !objstore.Temporary(err) || errs.Is(err, errs.Conflict) {
			t.Errorf("%v, want a temporary error that is no conflict", err)
		}
	})
}

// TestRetryBusy: a 409 that says "an operation is under way" is no Conflict.
func TestRetryBusy(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		busy := objstore.Transient(errs.New(errs.Conflict, "write object", "a", "409 conflicting operation in progress"))
		f := storetest.Faulty(s, storetest.Fault{Err: busy, Times: 2})
		mustHold(t, s, "a", "x", mustPut(t, objstore.Retry(f, objstore.RetryOptions{}), "a", "x", objstore.IfAbsent))
		// Also after an answer that was lost.
		f = storetest.Faulty(s, storetest.Fault{When: storetest.After}, storetest.Fault{At: 1, Err: busy})
		mustHold(t, s, "b", "x", mustPut(t, objstore.Retry(f, objstore.RetryOptions{}), "b", "x", objstore.IfAbsent))
	})
}

// operations are all that a store does, each as one call.
func operations(ctx context.Context, s objstore.Store) map[storetest.Op]func() error {
	return map[storetest.Op]func() error{
		storetest.Put:    func() error { _, err := s.Put(ctx, "a", []byte("x"), objstore.Always); return err },
		storetest.Get:    func() error { _, _, err := s.Get(ctx, "a", 0, -1); return err },
		storetest.Stat:   func() error { _, err := s.Stat(ctx, "a"); return err },
		storetest.Delete: func() error { return s.Delete(ctx, "b") },
		storetest.List: func() error {
			for _, err := range s.List(ctx, "") {
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// TestRetryAll: each operation rides out some failures, tries a permanent error
// once, and gives up in the end.
func TestRetryAll(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		mustPut(t, s, "a", "x", objstore.Always)
		f := storetest.Faulty(s)
		for op, do := range operations(t.Context(), objstore.Retry(f, objstore.RetryOptions{Attempts: 5})) {
			run := func(fault storetest.Fault) (calls int, err error) {
				f.Heal()
				f.Add(fault)
				n := f.Count()
				err = do()
				return f.Count() - n, err
			}
			for _, when := range []storetest.When{storetest.Before, storetest.After} {
				if n, err := run(storetest.Fault{Times: 4, When: when}); err != nil || n != 5 {
					t.Errorf("%s with four failures: %v after %d calls", op, err, n)
				}
			}
			n, err := run(storetest.Fault{Times: -1})
			if !objstore.Temporary(err) || !errs.Is(err, errs.IO) || n != 5 || !strings.Contains(err.Error(), "tried 5 times") {
				t.Errorf("%s that always fails: %v after %d calls", op, err, n)
			}
			for _, kind := range errs.Kinds() {
				permanent := storetest.Permanent(kind)
				if n, err := run(storetest.Fault{Err: permanent, Times: -1}); !errors.Is(err, permanent) || n != 1 {
					t.Errorf("%s with a permanent error of kind %s: %v after %d calls", op, kind, err, n)
				}
			}
		}
	})
}

// TestRetryPauses: they double, are shortened by chance, and are bounded.
func TestRetryPauses(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		var pauses []time.Duration
		r := objstore.Retry(storetest.Faulty(s, storetest.Fault{Times: -1}), objstore.RetryOptions{
			OnRetry: func(w objstore.Waiting) {
				if !objstore.Temporary(w.Err) || w.Attempt != len(pauses)+1 || w.Of != objstore.DefaultAttempts {
					t.Errorf("told of attempt %d of %d, %v", w.Attempt, w.Of, w.Err)
				}
				pauses = append(pauses, w.Pause)
			},
		})
		var sum time.Duration
		start := time.Now()
		if _, err := r.Stat(t.Context(), "a"); !objstore.Temporary(err) {
			t.Error(err)
		}
		longest := 200 * time.Millisecond
		for i, p := range pauses {
			if p > longest || p < longest/2 {
				t.Errorf("pause %d is %s, want one from %s to %s", i, p, longest/2, longest)
			}
			longest = min(2*longest, 15*time.Second)
			sum += p
		}
		if len(pauses) != 9 || time.Since(start) != sum {
			t.Errorf("%d pauses of %s in %s", len(pauses), sum, time.Since(start))
		}
	})
}

// TestRetryHonoursContext: the end of the context ends a pause at once, whatever the
// operation, and nothing is tried after it.
func TestRetryHonoursContext(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		f := storetest.Faulty(s, storetest.Fault{Times: -1})
		r := objstore.Retry(f, objstore.RetryOptions{First: time.Hour, Longest: time.Hour, Total: 2 * time.Hour})
		for op := range operations(t.Context(), r) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			start, before := time.Now(), f.Count()
			err := operations(ctx, r)[op]()
			cancel()
			if !errs.Is(err, errs.Canceled) || !errors.Is(err, context.DeadlineExceeded) ||
				!strings.Contains(err.Error(), "made to fail") {
				t.Errorf("%s: %v, want the end of the context and why it was waiting", op, err)
			}
			if time.Since(start) != time.Minute || f.Count() != before+1 {
				t.Errorf("%s: returned after %s and %d calls", op, time.Since(start), f.Count()-before)
			}
		}
	})
}

// TestRetryList: a listing that breaks off again and again yields every key once, in
// order.
func TestRetryList(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		var want []string
		for i := range 40 {
			key := fmt.Sprintf("k/%02d", i)
			mustPut(t, s, key, key, objstore.Always)
			want = append(want, key)
		}
		for _, when := range []storetest.When{storetest.Before, storetest.After} {
			f := storetest.Faulty(s, storetest.Fault{When: when, Times: 3})
			var got []string
			for info, err := range objstore.Retry(f, objstore.RetryOptions{Attempts: 4}).List(t.Context(), "k/") {
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, info.Key)
			}
			if !slices.Equal(got, want) {
				t.Errorf("yielded are %q", got)
			}
			if f.Count(storetest.List) != 4 {
				t.Errorf("%d listings", f.Count())
			}
		}
		// Who stops is not called again.
		n := 0
		for range objstore.Retry(s, objstore.RetryOptions{}).List(t.Context(), "k/") {
			n++
			break
		}
		if n != 1 {
			t.Errorf("%d keys after the end", n)
		}
	})
}

func TestTemporary(t *testing.T) {
	e := errs.New(errs.IO, "read object", "a", "time-out").WithHint("wait")
	err := objstore.Transient(e)
	if !objstore.Temporary(err) || !objstore.Temporary(fmt.Errorf("behind: %w", err)) ||
		!objstore.Temporary(errs.Wrap("pull", "web", err)) {
		t.Error("what was marked is not temporary")
	}
	if objstore.Temporary(e) || objstore.Temporary(nil) || objstore.Temporary(context.Canceled) {
		t.Error("what was not marked is temporary")
	}
	if !errs.Is(err, errs.IO) || errs.HintOf(err) != "wait" || err.Error() != e.Error() {
		t.Errorf("%v, hint %q", err, errs.HintOf(err))
	}
}

// TestRetryTotal: operations end in bounded time however long each attempt takes, and sooner if the address seems to be
// wrong; a listing that goes on is not bounded.
func TestRetryTotal(t *testing.T) {
	hang := func(a objstore.Answer) storetest.Fault {
		return storetest.Fault{Times: -1, Err: objstore.TransientAnswer(errs.New(errs.IO, "read object", "a", "time-out"), a),
			Do: func(storetest.Call) { time.Sleep(time.Minute) }}
	}
	inBubble(t, func(t *testing.T, s objstore.Store) {
		r := objstore.Retry(
			storetest.Faulty(s, hang(objstore.Answer{Words: "server does not answer"})),
			objstore.RetryOptions{Reach: 8 * time.Second},
		)
		for op, do := range operations(t.Context(), r) {
			start := time.Now()
			if err := do(); !objstore.Temporary(err) || !strings.Contains(err.Error(), "tried 3 times") {
				t.Errorf("%s: %v", op, err)
			}
			if d := time.Since(start); d > objstore.DefaultTotal+time.Minute || d < objstore.DefaultTotal {
				t.Errorf("%s took %s", op, d)
			}
		}
	})
	inBubble(t, func(t *testing.T, s objstore.Store) {
		refused := objstore.TransientAnswer(
			errs.New(errs.IO, "read object", "a", "refused"),
			objstore.Answer{Unreached: true},
		)
		f := storetest.Faulty(s, storetest.Fault{Times: -1, Err: refused})
		r := objstore.Retry(f, objstore.RetryOptions{Reach: 8 * time.Second})
		start := time.Now()
		if _, err := r.Stat(t.Context(), "a"); !objstore.Temporary(err) || time.Since(start) > 8*time.Second {
			t.Errorf("%v after %s", err, time.Since(start))
		}
		// Once it has answered, it gets the time that any outage gets.
		f.Heal()
		mustPut(t, r, "a", "x", objstore.Always)
		f.Add(storetest.Fault{Times: -1, Err: refused})
		start = time.Now()
		if _, err := r.Stat(t.Context(), "a"); !objstore.Temporary(err) || time.Since(start) < 20*time.Second {
			t.Errorf("%v after %s", err, time.Since(start))
		}
	})
}

// TestRetryTells what is waited for, and when it is over.
func TestRetryTells(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		mustPut(t, s, "a", "x", objstore.Always)
		busy := objstore.TransientAnswer(errs.New(errs.IO, "", "", "busy"), objstore.Status(503))
		var said []string
		over := 0
		f := storetest.Faulty(s)
		var log strings.Builder
		ctx := logs.With(t.Context(), slog.New(slog.NewTextHandler(&log, nil)))
		r := objstore.Retry(f, objstore.RetryOptions{
			OnRetry:  func(w objstore.Waiting) { said = append(said, w.String()) },
			OnAnswer: func() { over++ },
		})
		for op, do := range operations(ctx, r) {
			said, over = nil, 0
			log.Reset()
			if err := do(); err != nil || over != 0 || said != nil {
				t.Fatalf("%s: %v, said %q, over %d times", op, err, said, over)
			}
			f.Heal()
			f.Add(storetest.Fault{Times: 3, Err: busy})
			if err := do(); err != nil || over != 1 || len(said) != 3 ||
				said[0] != "server answers 503, attempt 1 of 10, next in 1 s" {
				t.Errorf("%s: %v, said %q, over %d times", op, err, said, over)
			}
			if strings.Count(log.String(), `level=WARN msg="server answers 503, attempt`) != 3 {
				t.Errorf("%s logged %s", op, log.String())
			}
			f.Heal()
			f.Add(storetest.Fault{Times: -1, Err: busy})
			if err := do(); !objstore.Temporary(err) || over != 1 || objstore.AnswerOf(err).Words != "server answers 503" {
				t.Errorf("%s: %v, over %d times", op, err, over)
			}
			f.Heal()
		}
	})
}

// TestClosePassesOn: closing what is around a store closes the store.
func TestClosePassesOn(t *testing.T) {
	s := newStore(t)
	if err := objstore.Close(objstore.Retry(objstore.Limit(s, 1000), objstore.RetryOptions{})); err != nil {
		t.Error(err)
	}
	if _, err := s.Stat(t.Context(), "a"); err == nil || errs.Is(err, errs.NotFound) {
		t.Errorf("the store is still open: %v", err)
	}
	if err := objstore.Close(storeFunc(nil)); err != nil {
		t.Error(err)
	}
}
