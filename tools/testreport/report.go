package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// report is what is known of a run.
type report struct {
	requireAll              bool
	packages                map[string]*testPackage // that have begun and not ended
	begun                   int                     // packages
	passed, failed, skipped int                     // tests without subtests
	skips                   []*skip
	failures                []failure // each top-level test once
	refused                 []string  // tests that were skipped and must not be
	races                   []string  // what the race detector printed
	timeouts                []string  // what Go printed of packages that timed out
	times                   []duration
}

// testPackage is a package whose tests are running.
type testPackage struct {
	name   string // its directory
	tests  map[string]*test
	failed int
	output strings.Builder // outside of tests
}

// test is a test or subtest that has begun.
type test struct {
	output strings.Builder
	parent bool // it has subtests, which count in its place
	ended  bool
	failed bool // it, or one of its subtests
	count  int  // of failures that it adds to the sum
	grave  string
}

// skip is a reason why tests were skipped, and which.
type skip struct {
	reason string
	names  []string
}

type duration struct {
	name    string
	seconds float64
}

func newReport(requireAll bool) *report {
	return &report{requireAll: requireAll, packages: map[string]*testPackage{}}
}

func (r *report) add(e event) {
	p := r.packages[e.Package]
	if p == nil {
		p = &testPackage{name: strings.TrimPrefix(e.Package, "pando/"), tests: map[string]*test{}}
		r.packages[e.Package] = p
		r.begun++
	}

	switch {
	case e.Test != "":
		r.addTest(p, e)
	case e.Action == "output":
		p.output.WriteString(e.Output)
	case e.Action == "pass" || e.Action == "fail" || e.Action == "skip":
		r.endPackage(p, e.Action == "fail")
		delete(r.packages, e.Package)
	}
}

func (r *report) addTest(p *testPackage, e event) {
	t := p.tests[e.Test]
	if t == nil {
		t = &test{}
		p.tests[e.Test] = t
		for up := parentOf(e.Test); up != ""; up = parentOf(up) {
			if p.tests[up] != nil {
				p.tests[up].parent = true
			}
		}
	}

	switch e.Action {
	case "output":
		t.output.WriteString(e.Output)
		return
	case "fail":
		r.noteRace(t.output.String())
		t.ended = true
	case "pass", "skip":
		t.ended = true
	default:
		return
	}

	name := p.name + " " + e.Test
	if !t.parent {
		r.times = append(r.times, duration{name, e.Elapsed})
	}

	switch {
	case e.Action == "fail":
		p.fail(e.Test, "")
	case t.parent && e.Action == "pass": // its subtests count
	case e.Action == "pass":
		r.passed++
	default:
		r.skip(p, e.Test, name, reason(t.output.String()))
	}
}

// noteRace keeps the report of a data race, if there is one. CI shows only the end of a long log, and the report begins
// with what matters.
func (r *report) noteRace(output string) {
	if _, race, ok := strings.Cut(output, "WARNING: DATA RACE\n"); ok {
		race, _, _ = strings.Cut(race, "\n==================")
		r.races = append(r.races, race)
	}
}

// noteTimeout keeps what Go prints when the time of a package is up, if it is there: gotestsum does not show it.
func (r *report) noteTimeout(output string) {
	if _, stacks, ok := strings.Cut(output, "panic: test timed out"); ok {
		r.timeouts = append(r.timeouts, stacks)
	}
}

func parentOf(name string) string {
	at := strings.LastIndexByte(name, '/')
	return name[:max(at, 0)]
}

// fail counts a test that failed, which if grave is set is never forgiven. A test that fails because a subtest did adds
// nothing.
func (p *testPackage) fail(name, grave string) {
	t := p.tests[name]
	if !t.failed {
		p.failed++
		t.failed, t.count = true, 1
	}
	t.grave = cmp.Or(t.grave, grave)
	for up := parentOf(name); up != ""; up = parentOf(up) {
		if p.tests[up] != nil { // the name of a subtest may contain a slash itself
			p.tests[up].failed = true
		}
	}
}

func (r *report) skip(p *testPackage, test, name, why string) {
	if r.requireAll && strings.HasPrefix(why, "SKIPPED") && !mayBeMissing.MatchString(why) {
		p.fail(test, "it was skipped: "+why)
		r.refused = append(r.refused, name+": "+why)
		return
	}

	r.skipped++
	i := slices.IndexFunc(r.skips, func(k *skip) bool { return k.reason == why })
	if i < 0 {
		i = len(r.skips)
		r.skips = append(r.skips, &skip{reason: why})
	}

	r.skips[i].names = append(r.skips[i].names, name)
}

var place = regexp.MustCompile(`^\s*[\w.-]+\.go:\d+: (.*)`)

// reason finds what a test said when it skipped itself.
func reason(output string) string {
	why := "no reason given"
	for line := range strings.Lines(output) {
		if m := place.FindStringSubmatch(strings.TrimRight(line, "\n")); m != nil && !strings.HasPrefix(why, "SKIPPED") {
			why = m[1]
		}
	}
	return why
}

func (r *report) endPackage(p *testPackage, failed bool) {
	if failed {
		// Running when the program died or ran out of time. Subtests first: they count for their parents.
		for _, name := range slices.Backward(slices.Sorted(maps.Keys(p.tests))) {
			if t := p.tests[name]; !t.ended {
				p.fail(name, "it did not come to its end")
				r.noteTimeout(t.output.String())
			}
		}
		outside := p.failed == 0 // the build, or something outside of tests
		if outside {
			p.failed = 1
		}
		if outside || graveAnywhere.MatchString(p.output.String()) {
			r.failures = append(r.failures, failure{pkg: p.name, output: p.output.String(),
				grave: "it failed outside of its tests"})
		}
	}

	r.failures = append(r.failures, p.failures()...)
	r.failed += p.failed
}

// failures are the top-level tests that failed, each with what its failed subtests said.
func (p *testPackage) failures() (out []failure) {
	for _, name := range slices.Sorted(maps.Keys(p.tests)) {
		t := p.tests[name]
		if !t.failed {
			continue
		}
		top, _, isSubtest := strings.Cut(name, "/")
		if !isSubtest {
			out = append(out, failure{pkg: p.name, test: top})
		}
		f := &out[len(out)-1] // a test comes before its subtests
		f.output += t.output.String()
		f.count += t.count
		f.grave = cmp.Or(f.grave, t.grave)
	}

	for i := range out {
		out[i].grave = cmp.Or(out[i].grave, graveOf(p.name, out[i].output))
	}
	return out
}

// end counts as failed what has not come to its end: the machine that ran it may have died.
func (r *report) end() {
	for _, name := range slices.Sorted(maps.Keys(r.packages)) {
		r.refused = append(r.refused, strings.TrimPrefix(name,
			"pando/")+": the tests of this package did not come to their end")
		r.endPackage(r.packages[name], true)
	}
	clear(r.packages)
}

func (r *report) printSkips(w io.Writer) {
	const shown = 4 // names for each reason
	if len(r.skips) > 0 {
		fmt.Fprintf(w, "\n%d tests were SKIPPED:\n", r.skipped)
	}

	for _, k := range r.skips {
		fmt.Fprintf(w, "  %s\n", k.reason)
		names := k.names
		if len(names) > shown+1 {
			names = names[:shown]
		}
		for _, n := range names {
			fmt.Fprintf(w, "      %s\n", n)
		}
		if more := len(k.names) - len(names); more > 0 {
			fmt.Fprintf(w, "      and %d more\n", more)
		}
	}

	for _, line := range r.refused {
		fmt.Fprintf(w, "FAIL  %s\n", line)
	}

	if r.requireAll && len(r.refused) > 0 {
		fmt.Fprintln(w, "      PANDO_TEST_REQUIRE_ALL=1: this run must not skip what this host can run")
	}
}

// printRaces prints the reports of data races.
func (r *report) printRaces(w io.Writer) {
	for _, race := range r.races {
		fmt.Fprintf(w, "\nDATA RACE\n%s\n", strings.TrimRight(race, "\n"))
	}
}

// printTimeouts prints which tests were running when the time of a package was up, and their stacks.
func (r *report) printTimeouts(w io.Writer) {
	const shown = 300 // lines: CI shows only the end of a long log
	for _, stacks := range r.timeouts {
		lines := strings.Split(strings.TrimRight(stacks, "\n"), "\n")
		fmt.Fprintf(w, "\nTEST TIMED OUT%s\n", strings.Join(lines[:min(shown, len(lines))], "\n"))
		if len(lines) > shown {
			fmt.Fprintf(w, "... and %d more lines in the events\n", len(lines)-shown)
		}
	}
}

func (r *report) printSlowest(w io.Writer) {
	const shown = 10
	slices.SortStableFunc(r.times, func(a, b duration) int { return cmp.Compare(b.seconds, a.seconds) })
	if len(r.times) > 0 {
		fmt.Fprintf(w, "\nSlowest tests:\n")
	}
	for _, d := range r.times[:min(shown, len(r.times))] {
		fmt.Fprintf(w, "  %6.1f s  %s\n", d.seconds, d.name)
	}
}

func (r *report) counts() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
}
