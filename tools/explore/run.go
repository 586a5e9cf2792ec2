//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"pando/tools/testrun"
)

const (
	fuzzTime  = 20 * time.Second // of a target, in a turn
	timeLimit = 15 * time.Minute // of a test binary
	maxFinds  = 3                // of a test: what always fails says nothing new
)

// runUnit runs one unit, and takes in what came of it.
func (s *search) runUnit(ctx context.Context, u unit) error {
	if len(u.items) == 0 {
		return s.open(ctx, u.pkg)
	}
	args := []string{s.binary(u.pkg, "test"), "-test.run=" + u.pattern(), "-test.skip=" + u.skip()}
	if u.items[0].kind == fuzzed {
		var err error
		if args, err = s.fuzz(ctx, u); err != nil {
			return err
		}
	}
	args = append([]string{s.isolate}, append(args, "-test.v=test2json", "-test.timeout="+timeLimit.String())...)

	drawn := filepath.Join(s.dir, fmt.Sprintf("drawn-%p", u.items[0]))
	defer os.Remove(drawn)
	start := time.Now()
	r, err := u.pkg.Run(ctx, []string{"PANDO_TEST_DRAWN=" + drawn, "PANDO_SEED=" + strconv.FormatUint(u.draw.seed, 10),
		"PANDO_SHARD=" + strconv.Itoa(u.draw.shard)}, args...)
	if err != nil {
		return err
	}
	drew, err := readDrawn(drawn)
	if err != nil {
		return err
	}
	return s.takeIn(u, r, drew, time.Since(start))
}

// fuzz builds a package for fuzzing, once, and returns what runs a target. What it learns goes where `go test -fuzz`
// keeps it.
func (s *search) fuzz(ctx context.Context, u unit) ([]string, error) {
	binary := s.binary(u.pkg, "fuzz")
	u.pkg.building.Lock()
	defer u.pkg.building.Unlock()
	if _, err := os.Stat(binary); err != nil {
		if err := u.pkg.Build(ctx, binary, "-fuzz=."); err != nil {
			return nil, err
		}
	}
	return []string{binary, "-test.run=^$", "-test.fuzz=" + u.pattern(), "-test.fuzztime=" + fuzzTime.String(),
		"-test.fuzzminimizetime=10s", "-test.parallel=1",
		"-test.fuzzcachedir=" + filepath.Join(s.fuzzCache, u.pkg.ImportPath)}, nil
}

// pattern selects the tests of a unit.
func (u unit) pattern() string {
	var names []string
	for _, i := range u.items {
		names = append(names, i.name)
	}
	if len(names) == 1 {
		return exactly(names[0])
	}
	return "^(" + strings.Join(names, "|") + ")$"
}

// skip selects the subtests that earlier runs have finished.
func (u unit) skip() string {
	var done []string
	for _, i := range u.items {
		for _, name := range i.done[u.draw] {
			done = append(done, exactly(name))
		}
	}
	return strings.Join(done, "|")
}

// exactly is a pattern for one test or subtest.
func exactly(name string) string {
	parts := strings.Split(name, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

// drew is how many shards a test that has run draws from: those that cover what it samples most densely (every kill on
// the first kind of pool, say), and those that cover everything.
type drew struct{ round, of int }

// readDrawn returns what each test that drew something draws from.
func readDrawn(path string) (map[string]drew, error) {
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	tests := map[string]drew{}
	for line := range strings.Lines(string(text)) {
		name, number, _ := strings.Cut(strings.TrimSpace(line), "\t")
		n, err := strconv.Atoi(number)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		d := tests[name]
		if d.of = max(d.of, n); n > 1 && (d.round <= 1 || n < d.round) || d.round == 0 {
			d.round = n
		}
		tests[name] = d
	}
	return tests, nil
}

// takeIn notes what became of a unit, and prints it.
func (s *search) takeIn(u unit, r *testrun.Result, tests map[string]drew, took time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, "%s  %s  %.1f s\n", time.Now().Format(time.TimeOnly), u, took.Seconds())
	finds, err := s.reportAll(u, r)
	if err != nil {
		return err
	}

	recorded := 0
	for _, i := range u.items {
		rec, ok := i.recordOf(r, tests[i.name])
		rec.Found = finds[i.name]
		i.finds += rec.Found
		i.left = i.finds >= maxFinds || i.kind == fuzzed && i.finds > 0 || !ok && r.Status == 0
		if !ok {
			continue
		}
		recorded++
		rec.Package, rec.Seed, rec.Shard, rec.Commit = u.pkg.Name(), u.draw.seed, u.draw.shard, s.commit
		if len(u.items) == 1 {
			rec.Seconds = took.Seconds()
		}
		i.add(rec)
		if err := s.log.add(rec); err != nil {
			return err
		}
	}

	// If the binary died, others may run without the test of which it did.
	for _, i := range u.items {
		i.left = i.left || recorded == 0 && !r.Stopped
	}
	return nil
}

// recordOf returns what to note of a test that has run. It returns false if the test did not come to its end, or did
// not come to what it draws, because it failed or this host cannot run it.
func (i *item) recordOf(r *testrun.Result, d drew) (rec record, ok bool) {
	t := r.Test(i.name)
	if t == nil {
		return rec, false
	}
	rec = record{Test: i.name, Round: d.round, Of: max(i.of, d.of), Seconds: t.Seconds}
	switch ended := t.Passed+t.Failed+t.Skipped > 0; {
	case i.kind == fuzzed:
		return rec, ended || r.Stopped
	case ended:
		return rec, t.Passed > 0 || rec.Of > 0
	case r.Stopped:
		rec.Done = r.Ended(i.name)
	}
	return rec, len(rec.Done) > 0
}
