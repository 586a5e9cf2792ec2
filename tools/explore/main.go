//go:build linux

// Explore looks for faults that no change has just made, where the gate does not look: it walks the shards of all
// sweeps, draws with other seeds, and runs fuzz targets, until the time is up.
//
//	explore -for 20m -isolate PROGRAM -dir DIR [-log FILE] [PACKAGE...]
//
// Packages take turns, and in a package shards, seeds and fuzz targets. What a test draws from, it says itself
// (faulttest.DrawnVariable), so each test runs once before it is known. A round of a package is as many shards of each
// test as cover what the test samples most densely: every kill on the first kind of pool, say. The next round goes on
// with the next shards, and when a test has run with all of them, with the next seed.
//
// For each find two lines are printed: the test and where its output is, and a command that repeats it. The log has a
// line of JSON for each test, seed and shard that ran, with the commit: see [record]. The next search continues there,
// also with subtests, if the time was up before a test was at its end. Without the log everything begins anew.
//
// A signal ends it as the end of the time does. The exit status is 1 if something was found, and 2 if the search could
// not go on.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"pando/tools/testrun"
)

func main() {
	s := &search{out: os.Stdout, found: map[string]bool{}}
	length := flag.Duration("for", 20*time.Minute, "how long to search")
	path := flag.String("log", "out/explored", "file that says what has been searched")
	flag.StringVar(&s.isolate, "isolate", "", "program that runs test binaries: tools/isolate")
	flag.StringVar(&s.dir, "dir", "", "directory for test binaries")
	flag.IntVar(&s.atOnce, "at-once", runtime.NumCPU(), "how many tests run at once")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, *length)
	defer cancel()
	err := s.prepare(ctx, *path, flag.Args())
	if err == nil {
		err = s.run(ctx)
	}

	switch {
	case err != nil && ctx.Err() == nil:
		fmt.Fprintln(os.Stderr, "explore:", err)
		os.Exit(2)
	case len(s.found) > 0:
		os.Exit(1)
	}
}

// prepare opens the log and finds the packages that there is something to search in.
func (s *search) prepare(ctx context.Context, path string, patterns []string) (err error) {
	if s.isolate == "" || s.dir == "" {
		return errors.New("-isolate and -dir must be set")
	}
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	s.keep = filepath.Join(filepath.Dir(path), "found")
	s.commit = commit()
	cache, err := exec.Command("go", "env", "GOCACHE").Output()
	if err != nil {
		return err
	}
	s.fuzzCache = filepath.Join(strings.TrimSpace(string(cache)), "fuzz")

	if s.log, s.records, err = openLog(path); err != nil {
		return err
	}
	all, err := testrun.List(ctx, patterns...)
	if err != nil {
		return err
	}
	if all, err = worthSearching(ctx, all); err != nil {
		return err
	}
	for _, p := range all {
		s.packages = append(s.packages, &searched{Package: p})
	}
	if len(s.packages) == 0 {
		return fmt.Errorf("no test of %s draws anything, and there is no fuzz target", strings.Join(patterns, " "))
	}
	fmt.Fprintf(s.out, "searching %d packages at %s\n", len(s.packages), s.commit)
	return nil
}

// commit is what is searched.
func commit() string {
	hash, err := exec.Command("git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		return "unknown"
	}
	changes, _ := exec.Command("git", "status", "--porcelain").Output()
	if len(changes) > 0 {
		return strings.TrimSpace(string(hash)) + "+"
	}
	return strings.TrimSpace(string(hash))
}

var (
	draws  = regexp.MustCompile(`\bfaulttest\.(Draw|DrawInside|Rand|Sweep)\b`)
	fuzzes = regexp.MustCompile(`(?m)^func Fuzz[A-Z]`)
)

// worthSearching returns the packages of which a test draws, itself or in a package of helpers that it imports, or
// which have fuzz targets.
func worthSearching(ctx context.Context, all []testrun.Package) (worth []testrun.Package, err error) {
	everything, err := testrun.List(ctx, "./...")
	if err != nil {
		return nil, err
	}
	helpers := map[string]bool{}
	for _, p := range everything {
		if helpers[p.ImportPath], err = contains(p.Dir, p.GoFiles, draws); err != nil {
			return nil, err
		}
	}

	for _, p := range all {
		tests := slices.Concat(p.TestGoFiles, p.XTestGoFiles)
		drawn, derr := contains(p.Dir, tests, draws)
		fuzzed, ferr := contains(p.Dir, tests, fuzzes)
		if err := errors.Join(derr, ferr); err != nil {
			return nil, err
		}
		imports := slices.Concat(p.TestImports, p.XTestImports)
		if drawn || fuzzed || slices.ContainsFunc(imports, func(i string) bool { return helpers[i] }) {
			worth = append(worth, p)
		}
	}
	return worth, nil
}

// contains reports whether one of the files has something that matches.
func contains(dir string, names []string, what *regexp.Regexp) (bool, error) {
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || what.Match(text) {
			return err == nil, err
		}
	}
	return false, nil
}
