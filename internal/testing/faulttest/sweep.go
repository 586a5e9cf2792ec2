//go:build linux && (amd64 || arm64)

package faulttest

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
)

// AtVariable is the environment variable that narrows every [Sweep] to one
// step, to repeat a failure: its value is the step's index.
const AtVariable = "PANDO_FAULT_AT"

// Sweep strikes a program at every step of an operation, one run for each.
type Sweep struct {
	// Plan is the mode, the errno and the filters. Its At is ignored.
	Plan Plan

	// Every is of how many steps one is struck by default, for time's sake. Which
	// is drawn from [Seed], so that in the long run all get their turn: n runs
	// leave out a given step with a probability of (1-1/Every)^n. With
	// PANDO_TEST_FULL all are struck, with -short even fewer. 0 means 1.
	Every int

	// Start and Stride select every Stride-th step from Start on, always. An
	// operation can be split into shards that run in parallel: shard i of n has
	// Start i and Stride n. A Stride of 0 means 1.
	Start, Stride int

	// MaxRuns bounds the sweep: the test fails if the program still has steps
	// left after that many runs. 0 means 10,000.
	MaxRuns int
}

// Seed is what samples are drawn from in this process: PANDO_SEED, or a random
// number. What fails says it.
var Seed = sync.OnceValue(func() uint64 {
	text := os.Getenv("PANDO_SEED")
	if text == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		panic("PANDO_SEED is not a number: " + text)
	}
	return seed
})

// Sampled reports whether the sweep leaves out steps that it would otherwise
// strike: then a test cannot count on what only some steps show.
func (s Sweep) Sampled() bool {
	return s.every() > 1 && os.Getenv("PANDO_TEST_FULL") == "" && os.Getenv(AtVariable) == ""
}

func (s Sweep) every() int {
	if testing.Short() {
		return max(s.Every, 1) * 8
	}
	return s.Every
}

// sample draws the steps of a test: the same ones for the same seed.
func (s Sweep) sample(t testing.TB) Sweep {
	if !s.Sampled() {
		return s
	}
	every, stride := s.every(), max(s.Stride, 1)
	s.Start, s.Stride = s.Start+stride*Draw(t, every, s.Plan), stride*every
	return s
}

// Draw returns a number below n that depends on [Seed], the test and what is drawn
// for. It is 0 with PANDO_TEST_FULL, so that `for i := Draw(t, n); ...; i += DrawStep(n)`
// takes a sample by default, and else everything.
func Draw(t testing.TB, n int, what ...any) int {
	if os.Getenv("PANDO_TEST_FULL") != "" {
		return 0
	}
	h := fnv.New64a()
	fmt.Fprintln(h, Seed(), t.Name(), what)
	// Not the sum itself: its low bits are tied between all draws of a seed.
	return rand.New(rand.NewPCG(h.Sum64(), Seed())).IntN(n)
}

// DrawStep is the step of a loop that begins with [Draw].
func DrawStep(n int) int {
	if os.Getenv("PANDO_TEST_FULL") != "" {
		return 1
	}
	return n
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

	s = s.sample(t)
	start, stride, limit := s.Start, max(s.Stride, 1), s.MaxRuns
	if limit == 0 {
		limit = 10_000
	}

	only, err := strconv.Atoi(os.Getenv(AtVariable))
	single := err == nil
	if text := os.Getenv(AtVariable); text != "" && !single {
		t.Fatalf("%s is not a number: %q", AtVariable, text)
	}

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
			if s.Sampled() {
				t.Logf("faulttest: drawn with PANDO_SEED=%d", Seed())
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
