//go:build linux && (amd64 || arm64)

package faulttest

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// AtVariable is the environment variable that narrows every [Sweep] to one
// step, to repeat a failure: its value is the step's index, or "always-" and the
// index among the steps that are always struck.
const AtVariable = "PANDO_FAULT_AT"

const alwaysPrefix = "always-"

// Sweep strikes a program at every step of an operation, one run for each.
type Sweep struct {
	// Plan is the mode, the errno and the filters. Its At is ignored.
	Plan Plan

	// Every is of how many steps one is struck by default, for time's sake: those
	// whose index is, modulo Every, a hash of [Seed] and of what is struck plus
	// [Shard] plus Turn. So the shards 0 to Every-1 strike all. With PANDO_TEST_FULL
	// all are struck, with -short even fewer. 0 means 1.
	Every int

	// Of names what is struck; sweeps with the same Of take different steps if they
	// differ in Turn, or in the mode or errno of the plan. "": the test's name.
	Of   string
	Turn int

	// Always, if set, selects steps that are struck in every sample, because they
	// decide between the old and the new state.
	Always func(Step) bool

	// Start and Stride select every Stride-th step from Start on, always. An
	// operation can be split into shards that run in parallel: shard i of n has
	// Start i and Stride n. A Stride of 0 means 1.
	Start, Stride int

	// Known, if set, are the steps of an undisturbed run, which the caller has seen. A sample ends with the last of
	// them, and not with one more undisturbed run: Each then returns the zero Result.
	Known []Step

	// MaxRuns bounds the sweep: the test fails if the program still has steps
	// left after that many runs. 0 means 10,000.
	MaxRuns int

	prefix string // of what AtVariable is set to, to repeat a step
}

// Sampled reports whether the sweep leaves out steps that it would otherwise
// strike: then a test cannot count on what only some steps show.
func (s Sweep) Sampled() bool { return s.every() > 1 && !Full() && os.Getenv(AtVariable) == "" }

func (s Sweep) every() int {
	if testing.Short() {
		return max(s.Every, 1) * 8
	}
	return s.Every
}

// sample draws the steps that are struck: the same ones for the same seed and shard.
func (s Sweep) sample(t testing.TB) Sweep {
	if !s.Sampled() {
		return s
	}

	what := s.Of
	if what == "" {
		what = t.Name()
	}
	every, stride := s.every(), max(s.Stride, 1)
	noteDraw(t, every)
	turn := uint64(s.Turn + s.Plan.turn()*every/4)
	s.Start, s.Stride = s.Start+stride*residue(every, Shard()+turn, what), stride*every
	return s
}

// turn is which of four: sweeps of one operation that differ in how they strike take different steps.
func (p Plan) turn() int {
	switch {
	case p.Mode == KillAfter:
		return 1
	case p.Mode == Fail && p.Errno == syscall.ENOSPC:
		return 2
	case p.Mode == Fail:
		return 3
	}
	return 0
}

// Each calls run with Plan.At at each of the sweep's steps, and check with
// what came of it, until a run in which the step was not reached because the
// program had come to its end. That run's Result is returned; check does not see
// it. Two runs of a program need not have the same number of steps, which is
// why none is computed beforehand, unless a sample gets Known.
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
	if s.Plan.Mode == Observe {
		t.Fatal("faulttest: a sweep needs a plan that strikes")
	}

	// One step only, to repeat a failure.
	if text := os.Getenv(AtVariable); text != "" {
		index, always := strings.CutPrefix(text, alwaysPrefix)
		only, err := strconv.Atoi(index)
		if err != nil {
			t.Fatalf("%s is not the index of a step: %q", AtVariable, text)
		}
		return s.repeat(t, only, always, run, check)
	}

	// The steps that are always struck, then the sample of all.
	if s.Always != nil && s.Sampled() {
		s.always().walk(t, run, check)
	}
	last := s.sample(t).walk(t, run, check)
	if !last.Fired && len(last.Steps) == 0 && s.known() == 0 {
		t.Fatal("faulttest: the program made no step that matches: nothing was tested")
	}
	return last
}

// repeat makes one run of the sweep.
func (s Sweep) repeat(t testing.TB, only int, always bool, run func(Plan) Result, check func(Result)) Result {
	t.Helper()
	if always {
		if s.Always == nil {
			t.Skipf("%s=%s%d is not a step of this sweep", AtVariable, alwaysPrefix, only)
		}
		s = s.always()
	}
	if only < s.Start || (only-s.Start)%max(s.Stride, 1) != 0 {
		t.Skipf("%s=%d is not a step of this sweep", AtVariable, only)
	}

	plan := s.Plan
	plan.At = only
	return s.one(t, plan, run, check)
}

// always is the sweep of the steps that are struck in every sample.
func (s Sweep) always() Sweep {
	matches := s.Plan.Match
	s.Plan.Match = func(step Step) bool { return (matches == nil || matches(step)) && s.Always(step) }
	s.Start, s.Stride, s.prefix = 0, 1, alwaysPrefix
	return s
}

// walk strikes one step after the other, until there is none.
func (s Sweep) walk(t testing.TB, run func(Plan) Result, check func(Result)) Result {
	t.Helper()
	limit := s.MaxRuns
	if limit == 0 {
		limit = 10_000
	}

	for n := range limit {
		plan := s.Plan
		plan.At = s.Start + n*max(s.Stride, 1)
		if s.Known != nil && s.Sampled() && plan.At >= s.known() {
			return Result{}
		}
		if res := s.one(t, plan, run, check); !res.Fired {
			return res
		}
	}

	t.Fatalf("faulttest: the sweep is not at its end after %d runs; raise MaxRuns, or sample with Stride", limit)
	return Result{}
}

// known is how many of the known steps the plan matches.
func (s Sweep) known() (n int) {
	for _, step := range s.Known {
		if s.Plan.wants(step) {
			n++
		}
	}
	return n
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
				t.Logf("faulttest: drawn with PANDO_SEED=%d PANDO_SHARD=%d", Seed(), Shard())
			}
			t.Logf("faulttest: to repeat it: %s=%s%d go test -run '^%s$'", AtVariable, s.prefix, plan.At, t.Name())
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
