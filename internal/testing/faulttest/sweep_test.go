//go:build linux && (amd64 || arm64)

package faulttest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
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
			var res Result
			for i := 0; i < steps && !res.Fired; i++ {
				step := Step{Index: i, Name: "mkdirat", Detail: fmt.Sprint("/dir", i)}
				if p.Match != nil && !p.Match(step) {
					continue
				}
				res.Steps = append(res.Steps, step)
				res.Fired = len(res.Steps) == p.At+1
				res.FiredAt = step
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

// setShard is what PANDO_SEED and PANDO_SHARD do.
func setShard(t *testing.T, seed, shard uint64) {
	t.Helper()
	oldSeed, oldShard := Seed, Shard
	Seed, Shard = func() uint64 { return seed }, func() uint64 { return shard }
	t.Cleanup(func() { Seed, Shard = oldSeed, oldShard })
}

// TestShardsCoverEverything: with each seed, as many shards as steps are left out strike each step once, and the same
// shard strikes the same steps. With PANDO_TEST_FULL nothing is left out.
func TestShardsCoverEverything(t *testing.T) {
	t.Setenv(AtVariable, "")
	t.Setenv("PANDO_TEST_FULL", "")
	for seed := range uint64(20) {
		var struck []int
		for shard := range uint64(3) {
			setShard(t, seed, shard)
			_, got := pretended(Sweep{Plan: Plan{Mode: KillBefore}, Every: 3}, 9, nil)
			if _, again := pretended(Sweep{Plan: Plan{Mode: KillBefore}, Every: 3}, 9, nil); !slices.Equal(again, got) {
				t.Errorf("with the same seed and shard: struck %v, and then %v", got, again)
			}
			struck = append(struck, got...)
		}
		if slices.Sort(struck); !slices.Equal(struck, []int{0, 1, 2, 3, 4, 5, 6, 7, 8}) {
			t.Errorf("seed %d: three shards of one in three struck %v", seed, struck)
		}
	}

	t.Setenv("PANDO_TEST_FULL", "1")
	if _, got := pretended(Sweep{Plan: Plan{Mode: KillBefore}, Every: 3}, 9, nil); len(got) != 9 {
		t.Errorf("in full: struck %v of 9", got)
	}
}

// TestSweepsTakeTurns: what is struck in different ways, or on different kinds of pools, is struck at different steps.
func TestSweepsTakeTurns(t *testing.T) {
	t.Setenv(AtVariable, "")
	t.Setenv("PANDO_TEST_FULL", "")
	var first []int
	for turn := range 3 {
		for _, plan := range []Plan{{Mode: KillBefore}, {Mode: Fail, Errno: syscall.ENOSPC}, {Mode: Fail, Errno: syscall.EIO},
			{Mode: KillAfter}} {
			_, got := pretended(Sweep{Plan: plan, Every: 16, Of: "clone", Turn: turn}, 16, nil)
			if len(got) != 1 {
				t.Fatalf("one of 16: struck %v", got)
			}
			first = append(first, got[0])
		}
	}
	if slices.Sort(first); len(slices.Compact(first)) != 12 {
		t.Errorf("12 sweeps strike steps %v", first)
	}
}

// TestStepsThatAreAlwaysStruck: they are struck in every sample, and a failure at one says how to repeat it.
func TestStepsThatAreAlwaysStruck(t *testing.T) {
	t.Setenv("PANDO_TEST_FULL", "")
	s := Sweep{Plan: Plan{Mode: KillBefore}, Every: 100, Always: func(s Step) bool { return s.Index%4 == 1 }}
	_, got := pretended(s, 12, nil)
	if want := []int{1, 5, 9}; len(got) < 3 || !slices.Equal(got[:3], want) {
		t.Errorf("struck %v, want %v and a sample", got, want)
	}

	r, _ := pretended(s, 12, func(r *recorder, res Result) {
		if res.FiredAt.Index == 9 {
			r.Errorf("wrong")
		}
	})
	if said := strings.Join(r.logs, "\n"); !strings.Contains(said, AtVariable+"=always-2 ") {
		t.Errorf("it says %q", said)
	}

	t.Setenv(AtVariable, "always-2")
	if r, got := pretended(s, 12, nil); r.failed || !slices.Equal(got, []int{9}) {
		t.Errorf("repeated: struck %v; %q", got, r.logs)
	}
	s.Always = nil
	if r, got := pretended(s, 12, nil); !r.skipped || got != nil {
		t.Errorf("of a sweep without such steps: skipped %v, struck %v", r.skipped, got)
	}
}

// TestSampleEndsWithKnownSteps: no run is undisturbed then, unless everything is struck.
func TestSampleEndsWithKnownSteps(t *testing.T) {
	var known []Step
	for i := range 12 {
		known = append(known, Step{Index: i, Name: "mkdirat", Paths: []string{fmt.Sprint("/dir", i%2)}})
	}
	for _, full := range []string{"", "1"} {
		t.Setenv("PANDO_TEST_FULL", full)
		s := Sweep{Plan: Plan{Mode: KillBefore, PathPrefix: []string{"/dir0"}}, Every: 2, Known: known}
		var at []int
		last := s.Each(t, func(p Plan) Result {
			at = append(at, p.At)
			return Result{Fired: p.At < 6, Steps: known}
		}, func(Result) {})
		if beyond := slices.ContainsFunc(at, func(n int) bool { return n >= 6 }); beyond != (full != "") ||
			(last.Steps != nil) != (full != "") || len(at) < 3 {
			t.Errorf("full %q: struck %v, and in the end %+v", full, at, last)
		}
	}
}

// TestDrawsAreIndependent: all shards of two draws, one below the other, come to all combinations.
func TestDrawsAreIndependent(t *testing.T) {
	t.Setenv("PANDO_TEST_FULL", "")
	seen := map[[2]int]bool{}
	for shard := range uint64(80) {
		setShard(t, DefaultSeed, shard)
		seen[[2]int{Draw(t, 2, "fault"), DrawInside(t, 40, 2, Plan{Mode: Fail})}] = true
	}
	if len(seen) != 80 {
		t.Errorf("80 shards draw %d of 80 combinations", len(seen))
	}
}

// TestDrawsAreNoted: the file that the environment names has a line for each test and number of shards.
func TestDrawsAreNoted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "drawn")
	t.Setenv(DrawnVariable, path)
	t.Setenv(AtVariable, "")
	t.Setenv("PANDO_TEST_FULL", "")
	t.Run("sub", func(t *testing.T) {
		for range 2 {
			pretended(Sweep{Plan: Plan{Mode: KillBefore}, Every: 3}, 9, nil)
			pretended(Sweep{Plan: Plan{Mode: KillBefore}}, 9, nil) // not sampled
			Draw(t, 5)
			DrawInside(t, 4, 10)
			Rand(t)
		}
	})
	const want = "TestRecorded\t3\nTestDrawsAreNoted\t5\nTestDrawsAreNoted\t40\nTestDrawsAreNoted\t1\n"
	if got, err := os.ReadFile(path); string(got) != want {
		t.Errorf("noted %q, %v; want %q", got, err, want)
	}
}

func TestSweepThatTestsNothingFails(t *testing.T) {
	t.Setenv(AtVariable, "")
	kill := Plan{Mode: KillBefore}
	for want, f := range map[string]func() (*recorder, []int){
		"nothing was tested": func() (*recorder, []int) { return pretended(Sweep{Plan: kill}, 0, nil) },
		"after 3 runs":       func() (*recorder, []int) { return pretended(Sweep{Plan: kill, MaxRuns: 3}, 7, nil) },
		"a plan that":        func() (*recorder, []int) { return pretended(Sweep{}, 7, nil) },
		"the program made no step": func() (*recorder, []int) {
			return pretended(Sweep{Plan: kill, Every: 2, Known: []Step{}}, 0, nil)
		},
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
