package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// maxForgiven is how many flaky tests a run may have and pass.
const maxForgiven = 3

// maxOutside is how many lines are repeated of what a package said outside of its tests.
const maxOutside = 20

// failure is a top-level test that failed, or what failed of a package outside of its tests.
type failure struct {
	pkg    string // directory of the package
	test   string // "" outside of tests
	output string // of the test and of those of its subtests that failed
	count  int    // of tests, as the sum counts them
	grave  string // why it is never forgiven; "" if it is an ordinary assertion
}

func (f failure) String() string { return strings.TrimSpace(f.pkg + " " + f.test) }

var (
	// Wherever it stands in the output of a failed test.
	graveAnywhere = regexp.MustCompile(`WARNING: DATA RACE|race detected|(?m:^|: )(LEAK|LOST|WRONG|CHANGED)\b|` +
		`(?m:^)(panic: |fatal error: )|test timed out`)
	// In the first line of something that the test said.
	graveSaid = regexp.MustCompile(`(?mi)^\s+[\w.-]+\.go:\d+: .*(\bdiffer|content|other bytes|bytes are|another file|` +
		`not the same|fsck|xfs_repair|btrfs check|damage|corrupt|checksum|frozen|left behind|` +
		`is still (attached|mounted|in use))`)

	// Suites of which every assertion is about lost or leaked data.
	graveSuites = []string{"test/crash", "test/model", "test/remotechaos", "internal/driver"}
)

// graveOf returns why a failed assertion is never forgiven, or "".
func graveOf(pkg, output string) string {
	if slices.ContainsFunc(graveSuites, func(s string) bool { return pkg == s || strings.HasPrefix(pkg, s+"/") }) {
		return "all tests of this package are about lost or leaked data"
	}
	if found := graveAnywhere.FindString(output); found != "" {
		return fmt.Sprintf("it says %q", strings.TrimSpace(found))
	}
	if found := graveSaid.FindStringSubmatch(output); found != nil {
		return fmt.Sprintf("it speaks of data: %q", found[1])
	}
	return ""
}

// judge decides which failures say something about the change under test.
type judge struct {
	changed changes
	known   []flaky
	again   []string // command that runs tests; "-run PATTERN PACKAGE" is added, and it prints events
	keep    string   // directory for the first output of flaky tests
}

// verdict is what became of a failure.
type verdict struct {
	failure
	forgiven bool
	why      string
}

// forgive repeats failed tests where that says something, and takes those that then pass out of the sum of failures.
func (j *judge) forgive(r *report) (all []verdict, err error) {
	for _, f := range r.failures {
		v := verdict{failure: f, why: f.grave}
		if v.why == "" && j.changed.touch(f.pkg) {
			v.why = "this change touches its package"
		}
		if i := slices.IndexFunc(j.known, f.isListed); i >= 0 {
			v.why = ""
		}
		all = append(all, v)
	}

	// A failure that is not forgiven fails the run, whatever the others are.
	if slices.ContainsFunc(all, func(v verdict) bool { return v.why != "" }) {
		return all, nil
	}
	if len(all) > maxForgiven {
		for i := range all {
			all[i].why = fmt.Sprintf("%d tests failed: at most %d are repeated", len(all), maxForgiven)
		}
		return all, nil
	}

	for i := range all {
		v := &all[i]
		if err := j.keepOutput(v.failure); err != nil {
			return all, err
		}
		if v.why, err = j.failsAgain(v.failure); err != nil {
			return all, err
		}
		if v.forgiven = v.why == ""; v.forgiven {
			r.failed -= v.count
			r.passed += v.count
		}
	}
	return all, nil
}

// failsAgain repeats a test twice, and returns what was wrong with that, or "".
func (j *judge) failsAgain(f failure) (why string, err error) {
	for n := range 2 {
		args := append(slices.Clone(j.again), "-run", "^"+regexp.QuoteMeta(f.test)+"$", "./"+f.pkg)
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			return "", err
		}
		if err := cmd.Start(); err != nil {
			return "", err
		}

		again := newReport(true)
		err = again.read(out)
		again.end()
		status := cmd.Wait()
		switch {
		case err != nil:
			return "", err
		case again.failed > 0:
			return fmt.Sprintf("repeated alone, it failed in run %d of 2", n+1), nil
		case status != nil || again.passed == 0:
			return fmt.Sprintf("it could not be repeated: %d passed, %v", again.passed, status), nil
		}
	}
	return "", nil
}

func (j *judge) keepOutput(f failure) error {
	if err := os.MkdirAll(j.keep, 0o777); err != nil {
		return err
	}
	return os.WriteFile(j.outputFile(f), []byte(f.output), 0o666)
}

func (j *judge) outputFile(f failure) string {
	return filepath.Join(j.keep, strings.ReplaceAll(f.pkg, "/", "_")+"."+f.test)
}

// print says which tests are flaky, and why the other failures were not forgiven.
func (j *judge) print(w io.Writer, all []verdict) {
	for _, v := range all {
		if v.forgiven {
			fmt.Fprintf(w, "\n%s\n", j.line(v))
		} else {
			fmt.Fprintf(w, "\nFAIL   %s: %s\n", v, v.why)
			v.printOutside(w)
		}
	}
}

// printOutside repeats the end of what a package said outside of its tests, such as what it has left behind: no test
// names it, and of a long log CI shows only the end.
func (f failure) printOutside(w io.Writer) {
	if f.test != "" || f.output == "" {
		return
	}
	lines := strings.Split(strings.TrimSpace(f.output), "\n")
	for _, line := range lines[max(0, len(lines)-maxOutside):] {
		fmt.Fprintf(w, "    %s\n", line)
	}
}

func (j *judge) line(v verdict) string {
	return fmt.Sprintf("FLAKY  %s failed, and then passed twice alone; its first output is in %s", v,
		j.outputFile(v.failure))
}

// note adds the lines about flaky tests to a file. No path: nothing.
func (j *judge) note(all []verdict, path string) error {
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	for _, v := range all {
		if v.forgiven {
			_, werr := fmt.Fprintln(f, j.line(v))
			err = errors.Join(err, werr)
		}
	}
	return errors.Join(err, f.Close())
}

// changes are the files that differ from what has landed.
type changes struct {
	everything bool
	files      []string
}

// readChanges reads the names of changed files, one a line; "everything" stands for all. No file: everything.
func readChanges(path string) (changes, error) {
	if path == "" {
		return changes{everything: true}, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return changes{}, err
	}
	files := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
	return changes{slices.Contains(files, "everything"), files}, nil
}

// touch reports whether a file of the package has changed, or one of its testdata.
func (c changes) touch(pkg string) bool {
	return c.everything || slices.ContainsFunc(c.files, func(f string) bool {
		rest, below := strings.CutPrefix(f, pkg+"/")
		return below && (!strings.Contains(rest, "/") || strings.HasPrefix(rest, "testdata/"))
	})
}
