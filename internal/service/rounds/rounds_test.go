package rounds

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// script runs rounds that end as scripted, and then interrupts. It returns when each began, and what was reported.
func script(t *testing.T, period time.Duration, ends ...error) (starts []time.Duration, got []string, err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		begun := time.Now()
		err = Repeat(ctx, period, func(context.Context) (bool, error) {
			if len(starts) == len(ends) {
				stop()
				return false, context.Canceled
			}
			starts = append(starts, time.Since(begun))
			time.Sleep(time.Second) // on the clock of the bubble: nobody waits
			return false, ends[len(starts)-1]
		}, func(c Change) {
			got = append(got, fmt.Sprint(c.Err, c.Failed, c.Since.Sub(begun), c.Pause))
		})
	})
	return starts, got, err
}

// TestRepeat: each problem is reported once, however long it lasts, and its end is reported.
func TestRepeat(t *testing.T) {
	outage := func(words string) error {
		return objstore.TransientAnswer(errs.New(errs.IO, "push", "", "%s", words), objstore.Answer{})
	}
	full := errs.New(errs.NoSpace, "push", "", "full")
	starts, got, err := script(t, 10*time.Second, nil, outage("cut"), outage("silent"), full, nil, nil, full)
	if err != nil {
		t.Error(err)
	}
	s := time.Second
	if want := []time.Duration{0, 10 * s, 21 * s, 42 * s, 83 * s, 93 * s, 103 * s}; !slices.Equal(starts, want) {
		t.Errorf("rounds began after %v, wanted %v", starts, want)
	}
	want := []string{
		"push: cut 1 11s 15m0s", "push: full 3 11s 15m0s", "<nil> 3 11s 0s", "push: full 1 1m44s 15m0s",
	}
	if !slices.Equal(got, want) {
		t.Errorf("reported %q, wanted %q", got, want)
	}
}

// TestRepeatForever: what waiting cannot fix ends the first round, but no later one, nor one that did some of its work.
func TestRepeatForever(t *testing.T) {
	missing := errs.New(errs.NotFound, "push", "v", "no such volume")
	if starts, got, err := script(t, time.Second, missing, nil); !errors.Is(err, missing) || len(starts)+len(got) != 1 {
		t.Errorf("%v, %v, %v", starts, got, err)
	}
	if starts, got, err := script(t, time.Second, nil, missing, nil); err != nil || len(starts) != 3 || len(got) != 2 {
		t.Errorf("%v, %v, %v", starts, got, err)
	}

	ctx, stop := context.WithCancel(t.Context())
	n := 0
	err := Repeat(ctx, 0, func(context.Context) (bool, error) {
		if n++; n == 3 {
			stop()
		}
		return true, missing
	}, func(Change) {})
	if err != nil || n != 3 {
		t.Errorf("after some work: %d rounds, %v", n, err)
	}
}

// TestRepeatInterrupted: an interruption ends a round and a pause without an error.
func TestRepeatInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), 90*time.Minute)
		defer stop()
		start := time.Now()
		err := Repeat(ctx, time.Hour, func(ctx context.Context) (bool, error) { return true, nil }, func(Change) {})
		if err != nil || time.Since(start) != 90*time.Minute {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

func TestPause(t *testing.T) {
	for _, c := range []struct {
		period time.Duration
		failed int
		want   time.Duration
	}{
		{time.Second, 1, time.Second},
		{time.Second, 2, 2 * time.Second},
		{time.Second, 5, 16 * time.Second},
		{time.Minute, 4, 8 * time.Minute},
		{time.Minute, 5, MaxPause},
		{time.Minute, 1 << 40, MaxPause},
		{time.Hour, 1, time.Hour}, // the pause is never shorter than the period
		{time.Hour, 9, time.Hour},
	} {
		if got := pause(c.period, c.failed); got != c.want {
			t.Errorf("after %d failures, each %v: %v, wanted %v", c.failed, c.period, got, c.want)
		}
	}
}
