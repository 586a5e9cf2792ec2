//go:build linux

package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/tools/testrun"
)

// stress runs tests often.
type stress struct {
	out     io.Writer
	isolate string
	times   int
	tests   []*test
	dir     string // for test binaries
	failed  int
}

// run runs all tests within the budget. It returns an error if one failed.
func (s *stress) run(ctx context.Context, events string, budget time.Duration) (err error) {
	limited, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	end := time.Now().Add(budget)
	if s.dir, err = os.MkdirTemp("", "pando-newtests-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.dir)) }()

	// Those of which nobody knows how long they take run once, in half of the time.
	if err := s.readTimes(events); err != nil {
		return err
	}
	for _, t := range s.tests {
		if t.seconds < 0 {
			t.often = 1
		}
	}
	if err := s.runAll(limited, budget/2); err != nil {
		return err
	}

	// In an earlier run other packages were in the way: there may be time left for more.
	for limited.Err() == nil && share(s.tests, time.Until(end), s.times) {
		if err := s.runAll(limited, time.Hour); err != nil {
			return err
		}
	}

	s.report()
	if s.failed > 0 {
		return fmt.Errorf("%d failed", s.failed)
	}
	return ctx.Err()
}

// length is how long a run takes.
func (t *test) length() time.Duration {
	return max(time.Duration(t.seconds*float64(time.Second)), time.Millisecond)
}

// share divides the time between the tests, and returns false if none is to run. Each gets a run, the shortest first,
// as long as there is time, and then its part of the rest. What short ones leave goes to longer ones.
func share(tests []*test, left time.Duration, times int) (some bool) {
	slices.SortStableFunc(tests, func(a, b *test) int { return cmp.Compare(a.seconds, b.seconds) })
	give := func(t *test, part time.Duration) {
		took := t.length()
		n := min(int(part/took), times-t.passed-t.often)
		if n > 0 && !t.failed && !t.skipped {
			t.often += n
			left -= time.Duration(n) * took
			some = true
		}
	}

	for _, t := range tests {
		t.often = 0
		if t.passed == 0 && t.length() < left {
			give(t, t.length())
		}
	}
	for i, t := range tests {
		give(t, left/time.Duration(len(tests)-i))
	}
	return some
}

// runAll runs each test as often as it says. Those of a package that say the same share a process, and each process has
// its part of the time.
func (s *stress) runAll(ctx context.Context, budget time.Duration) error {
	type group struct {
		pkg   string
		often int
	}
	groups := map[group][]*test{}
	var order []group
	for _, t := range s.tests {
		g := group{t.pkg, t.often}
		if t.often == 0 {
			continue
		}
		if groups[g] == nil {
			order = append(order, g)
		}
		groups[g] = append(groups[g], t)
	}

	end := time.Now().Add(budget)
	for i, g := range order {
		part, cancel := context.WithTimeout(ctx, time.Until(end)/time.Duration(len(order)-i))
		err := s.runTogether(part, g.pkg, g.often, groups[g])
		ended := part.Err() != nil
		cancel()
		if err != nil && !ended { // while it was built
			return err
		}
	}
	return nil
}

// runTogether runs tests of a package in one process, and counts how often each passes.
func (s *stress) runTogether(ctx context.Context, dir string, often int, tests []*test) error {
	all, err := testrun.List(ctx, "./"+dir)
	if err != nil {
		return err
	}
	binary := filepath.Join(s.dir, strings.ReplaceAll(dir, "/", "_")+".test")
	if _, err := os.Stat(binary); err != nil {
		if err := all[0].Build(ctx, binary); err != nil {
			return err
		}
	}

	var names []string
	for _, t := range tests {
		names = append(names, t.name)
	}
	start := time.Now()
	r, err := all[0].Run(ctx, nil, s.isolate, binary, "-test.v=test2json", fmt.Sprintf("-test.count=%d", often),
		"-test.timeout=15m", "-test.run=^("+strings.Join(names, "|")+")$")
	if err != nil {
		return err
	}

	for _, t := range tests {
		result := r.Test(t.name)
		if result == nil {
			result = &testrun.Test{}
		}
		ended := result.Passed+result.Failed+result.Skipped > 0
		t.passed += result.Passed
		t.failed = t.failed || result.Failed > 0 || !ended && !r.Stopped && r.Status != 0
		t.skipped = result.Skipped > 0 || !ended && !r.Stopped // this host has no such test
		t.seconds = result.Seconds
		if r.Stopped && t.passed == 0 { // it takes longer
			t.seconds = time.Since(start).Seconds()
		}
	}
	s.complain(dir, r)
	return nil
}

// complain prints what failed.
func (s *stress) complain(dir string, r *testrun.Result) {
	failures := r.Failures()
	for _, t := range failures {
		fmt.Fprintf(s.out, "FAIL  %s %s\n%s", dir, t.Name, t.Output)
	}
	if len(failures) == 0 && r.Status != 0 && !r.Stopped {
		failures = append(failures, nil)
		fmt.Fprintf(s.out, "FAIL  %s: exit status %d\n%s", dir, r.Status, r.Output)
	}
	s.failed += len(failures)
}

// report says how often each test has run, and loudly which have not.
func (s *stress) report() {
	left := 0
	for _, t := range s.tests {
		name := t.pkg + " " + t.name
		switch {
		case t.failed:
			fmt.Fprintf(s.out, "FAILED    %s\n", name)
		case t.skipped:
			fmt.Fprintf(s.out, "skipped   %s\n", name)
		case t.passed == 0:
			left++
			fmt.Fprintf(s.out, "LEFT OUT  %s, which takes %.1f s or more\n", name, max(t.seconds, 0))
		case t.passed < s.times:
			fmt.Fprintf(s.out, "%2d of %d  %s: the time was used up\n", t.passed, s.times, name)
		default:
			fmt.Fprintf(s.out, "%2d of %d  %s\n", t.passed, s.times, name)
		}
	}
	if left > 0 {
		fmt.Fprintf(s.out, "THE TIME IS USED UP: %d of %d new tests were left out\n", left, len(s.tests))
	}
}

// readTimes reads how long tests took in an earlier run. No file: nothing is known.
func (s *stress) readTimes(events string) error {
	if events == "" {
		return nil
	}
	f, err := os.Open(events)
	if err != nil {
		return err
	}
	defer f.Close()

	took := map[string]float64{}
	lines := bufio.NewReader(f)
	for err == nil {
		var line []byte
		line, err = lines.ReadBytes('\n')
		var e struct {
			Package, Test string
			Elapsed       float64
		}
		if json.Unmarshal(line, &e) == nil && e.Test != "" && e.Elapsed >= 0 {
			top, _, _ := strings.Cut(e.Test, "/") // a test's own time is without that of parallel subtests
			_, pkg, _ := strings.Cut(e.Package, "/")
			took[pkg+" "+top] = max(took[pkg+" "+top], e.Elapsed)
		}
	}
	for _, t := range s.tests {
		if seconds, ok := took[t.pkg+" "+t.name]; ok {
			t.seconds = seconds
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}
