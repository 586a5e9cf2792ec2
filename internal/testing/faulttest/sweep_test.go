//go:build linux && (amd64 || arm64)

package faulttest

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// recorder is a testing.TB that takes note.
type recorder struct {
	testing.TB // nil: a method that is not here must not be called
	logs       []string
	failed     bool
	skipped    bool
}

func (r *recorder) Helper()      {}
func (r *recorder) Name() string { return "TestRecorded" }
func (r *recorder) Failed() bool { return r.failed }
func (r *recorder) FailNow()     { r.failed = true; runtime.Goexit() }
func (r *recorder) Logf(f string, a ...any) {
	r.logs = append(r.logs, fmt.Sprintf(f, a...))
}
func (r *recorder) Errorf(f string, a ...any) { r.Logf(f, a...); r.failed = true }
func (r *recorder) Fatal(a ...any)            { r.Logf("%s", fmt.Sprint(a...)); r.FailNow() }
func (r *recorder) Fatalf(f string, a ...any) { r.Logf(f, a...); r.FailNow() }
func (r *recorder) Skipf(f string, a ...any)  { r.Logf(f, a...); r.skipped = true; runtime.Goexit() }

// pretended runs a sweep over a program of so many steps, that is not run.
func pretended(s Sweep, steps int, check func(*recorder, Result)) (*recorder, []int) {
	r := &recorder{}
	var struck []int
	done := make(chan bool)
	go func() {
		defer close(done)
		s.Each(r, func(p Plan) Result {
			res := Result{Fired: p.At < steps}
			for i := range min(p.At+1, steps) {
				res.Steps = append(res.Steps, Step{Index: i, Name: "mkdirat", Detail: fmt.Sprint("/dir", i)})
			}
			if res.Fired {
				res.FiredAt = res.Steps[p.At]
			}
			return res
		}, func(res Result) {
			struck = append(struck, res.FiredAt.Index)
			if check != nil {
				check(r, res)
			}
		})
	}()
	<-done
	return r, struck
}

func TestSweepSelects(t *testing.T) {
	kill := Plan{Mode: KillBefore}
	for _, c := range []struct {
		sweep Sweep
		only  string
		want  []int
	}{
		{Sweep{Plan: kill}, "", []int{0, 1, 2, 3, 4, 5, 6}},
		{Sweep{Plan: kill, Start: 1, Stride: 3}, "", []int{1, 4}},
		{Sweep{Plan: kill, Start: 9}, "", nil},
		{Sweep{Plan: kill, MaxRuns: 8}, "", []int{0, 1, 2, 3, 4, 5, 6}},
		{Sweep{Plan: kill}, "5", []int{5}},
		{Sweep{Plan: kill, Start: 1, Stride: 3}, "4", []int{4}},
	} {
		t.Setenv(AtVariable, c.only)
		r, got := pretended(c.sweep, 7, nil)
		if r.failed || r.skipped || !slices.Equal(got, c.want) {
			t.Errorf("%+v, only %q: struck %v, want %v; %q", c.sweep, c.only, got, c.want, r.logs)
		}
	}
	t.Setenv(AtVariable, "5")
	if r, got := pretended(Sweep{Plan: kill, Start: 1, Stride: 3}, 7, nil); !r.skipped || got != nil {
		t.Errorf("a step of another shard: skipped %v, struck %v", r.skipped, got)
	}
}

// TestSweepSamples: what one seed leaves out another one strikes, and with
// PANDO_TEST_FULL nothing is left out.
func TestSweepSamples(t *testing.T) {
	t.Setenv(AtVariable, "")
	t.Setenv("PANDO_TEST_FULL", "")
	struck := map[int]bool{}
	for range 200 {
		seed := rand.Uint64()
		Seed = func() uint64 { return seed }
		_, got := pretended(Sweep{Plan: Plan{Mode: KillBefore}, Every: 3}, 9, nil)
		if len(got) != 3 || got[1] != got[0]+3 || got[2] != got[1]+3 {
			t.Fatalf("one of 3 steps: struck %v of 9", got)
		}
		if _, again := pretended(Sweep{Plan: Plan{Mode: KillBefore}, Every: 3}, 9, nil); !slices.Equal(again, got) {
			t.Errorf("with the same seed: struck %v, and then %v", got, again)
		}
		struck[got[0]] = true
	}
	if len(struck) != 3 {
		t.Errorf("200 runs began with steps %v only", struck)
	}

	t.Setenv("PANDO_TEST_FULL", "1")
	if _, got := pretended(Sweep{Plan: Plan{Mode: KillBefore}, Every: 3}, 9, nil); len(got) != 9 {
		t.Errorf("in full: struck %v of 9", got)
	}
}

// TestDrawsAreIndependent: what two draws of one seed come to has nothing to do with
// each other, or some combinations would never be tested.
func TestDrawsAreIndependent(t *testing.T) {
	t.Setenv("PANDO_TEST_FULL", "")
	seen := map[[2]int]bool{}
	for range 5000 {
		seed := rand.Uint64()
		Seed = func() uint64 { return seed }
		seen[[2]int{Draw(t, 2, "fault"), Draw(t, 40, Plan{Mode: Fail})}] = true
	}
	if len(seen) != 80 {
		t.Errorf("5,000 seeds draw %d of 80 combinations", len(seen))
	}
}

func TestSweepThatTestsNothingFails(t *testing.T) {
	t.Setenv(AtVariable, "")
	kill := Plan{Mode: KillBefore}
	for want, f := range map[string]func() (*recorder, []int){
		"nothing was tested": func() (*recorder, []int) { return pretended(Sweep{Plan: kill}, 0, nil) },
		"after 3 runs":       func() (*recorder, []int) { return pretended(Sweep{Plan: kill, MaxRuns: 3}, 7, nil) },
		"a plan that":        func() (*recorder, []int) { return pretended(Sweep{}, 7, nil) },
	} {
		r, _ := f()
		if !r.failed || !strings.Contains(strings.Join(r.logs, "\n"), want) {
			t.Errorf("failed %v, %q; want %q", r.failed, r.logs, want)
		}
	}
}

func TestSweepSaysWhereItFailed(t *testing.T) {
	t.Setenv(AtVariable, "")
	for name, fail := range map[string]func(*recorder){
		"Errorf": func(r *recorder) { r.Errorf("wrong") },
		"Fatalf": func(r *recorder) { r.Fatalf("wrong") },
	} {
		r, struck := pretended(Sweep{Plan: Plan{Mode: KillAfter}}, 7, func(r *recorder, res Result) {
			if res.FiredAt.Index == 3 {
				fail(r)
			}
		})
		logs := strings.Join(r.logs, "\n")
		for _, want := range []string{"kill-after@3", "#3 mkdirat /dir3", "#0 mkdirat",
			AtVariable + "=3 go test -run '^TestRecorded$'"} {
			if !strings.Contains(logs, want) {
				t.Errorf("%s: %q is not in %q", name, want, logs)
			}
		}
		if !slices.Equal(struck, []int{0, 1, 2, 3}) {
			t.Errorf("%s: struck %v", name, struck)
		}
	}
}
