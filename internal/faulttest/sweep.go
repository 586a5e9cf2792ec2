//go:build linux && (amd64 || arm64)

package faulttest

import (
	"os"
	"strconv"
	"testing"
)

// AtVariable is the environment variable that narrows every [Sweep] to one
// step, to repeat a failure: its value is the step's index.
const AtVariable = "PANDO_FAULT_AT"

// Sweep strikes a program at every step of an operation, one run for each.
type Sweep struct {
	// Plan is the mode, the errno and the filters. Its At is ignored.
	Plan Plan

	// Start and Stride select every Stride-th step from Start on. Slow
	// operations can be sampled, or split into shards that run in parallel: shard i
	// of n has Start i and Stride n. A Stride of 0 means 1.
	Start, Stride int

	// MaxRuns bounds the sweep: the test fails if the program still has steps
	// left after that many runs. 0 means 10,000.
	MaxRuns int
}

// Each calls run with Plan.At at each of the sweep's steps, and check with
// what came of it, until a run in which the step was not reached because the
// program had come to its end. That run's Result is returned; check does not see
// it. Two runs of a program need not have the same number of steps, which is
// why none is computed beforehand.
//
// run prepares the state that the operation starts from, hands the plan to
// [Run], and fails the test if Run returns an error; check recovers and examines
// what is there. Both report by t. If they fail the test, Each says at which
// step and stops.
//
// The test fails if the program has no steps at all: then nothing was tested.
func (s Sweep) Each(t testing.TB, run func(Plan) Result, check func(Result)) Result {
	t.Helper()
	if t.Failed() {
		t.FailNow() // or a failure of the sweep could not be told from an earlier one
	}
	start, stride, limit := s.Start, max(s.Stride, 1), s.MaxRuns
	if limit == 0 {
		limit = 10_000
	}
	only, err := strconv.Atoi(os.Getenv(AtVariable))
	single := err == nil
	if single {
		if only < start || (only-start)%stride != 0 {
			t.Skipf("%s=%d is not a step of this sweep", AtVariable, only)
		}
		start = only
	}
	if s.Plan.Mode == Observe {
		t.Fatal("faulttest: a sweep needs a plan that strikes")
	}
	for n := range limit {
		plan := s.Plan
		plan.At = start + n*stride
		res := s.one(t, plan, run, check)
		switch {
		case !res.Fired && n == 0 && len(res.Steps) == 0:
			t.Fatal("faulttest: the program made no step that matches: nothing was tested")
		case !res.Fired || single:
			return res
		}
	}
	t.Fatalf("faulttest: the sweep is not at its end after %d runs; raise MaxRuns, or sample with Stride", limit)
	return Result{}
}

// one makes one run. Its deferred report also works when run or check end the
// test's goroutine.
func (s Sweep) one(t testing.TB, plan Plan, run func(Plan) Result, check func(Result)) (res Result) {
	t.Helper()
	defer func() {
		t.Helper()
		if t.Failed() {
			t.Logf("faulttest: failed with plan %v, which struck %v; the steps were:", plan, res.FiredAt)
			for _, step := range res.Steps {
				t.Logf("    %v", step)
			}
			t.Logf("faulttest: to repeat it: %s=%d go test -run '^%s$'", AtVariable, plan.At, t.Name())
		}
	}()
	res = run(plan)
	if res.Fired {
		check(res)
	}
	if t.Failed() {
		t.FailNow()
	}
	return res
}
