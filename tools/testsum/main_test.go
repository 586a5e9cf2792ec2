package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A run of three packages: one passes and skips, one fails in a subtest, in a
// test and by dying in a third, one does not build.
const run = `{"Action":"run","Package":"pando/a","Test":"TestOne"}
{"Action":"output","Package":"pando/a","Test":"TestOne","Output":"=== RUN TestOne\n"}
{"Action":"pass","Package":"pando/a","Test":"TestOne"}
{"Action":"run","Package":"pando/a","Test":"TestSub"}
{"Action":"run","Package":"pando/a","Test":"TestSub/x"}
{"Action":"pass","Package":"pando/a","Test":"TestSub/x"}
{"Action":"run","Package":"pando/a","Test":"TestSub/y"}
{"Action":"output","Package":"pando/a","Test":"TestSub/y","Output":"    a_test.go:7: SKIPPED: mounting needs root\n"}
{"Action":"output","Package":"pando/a","Test":"TestSub/y","Output":"--- SKIP: TestSub/y (0.00s)\n"}
{"Action":"skip","Package":"pando/a","Test":"TestSub/y"}
{"Action":"pass","Package":"pando/a","Test":"TestSub"}
{"Action":"run","Package":"pando/a","Test":"TestDoesNotApply"}
{"Action":"output","Package":"pando/a","Test":"TestDoesNotApply","Output":"    a_test.go:9: the driver keeps no images\n"}
{"Action":"skip","Package":"pando/a","Test":"TestDoesNotApply"}
{"Action":"pass","Package":"pando/a","Elapsed":1.5}
{"Action":"run","Package":"pando/b","Test":"TestTop"}
{"Action":"run","Package":"pando/b","Test":"TestTop/bad"}
{"Action":"output","Package":"pando/b","Test":"TestTop/bad","Output":"    b_test.go:3: want 1, got 2\n"}
{"Action":"fail","Package":"pando/b","Test":"TestTop/bad"}
{"Action":"fail","Package":"pando/b","Test":"TestTop"}
{"Action":"run","Package":"pando/b","Test":"TestAlone"}
{"Action":"fail","Package":"pando/b","Test":"TestAlone"}
{"Action":"run","Package":"pando/b","Test":"TestDies"}
{"Action":"run","Package":"pando/b","Test":"TestDies/slow"}
{"Action":"run","Package":"pando/b","Test":"TestGood"}
{"Action":"output","Package":"pando/b","Test":"TestGood","Output":"panic: test timed out\n"}
{"Action":"pass","Package":"pando/b","Test":"TestGood"}
{"Action":"fail","Package":"pando/b","Elapsed":2}
{"Action":"build-output","ImportPath":"pando/c [pando/c.test]","Output":"c/c_test.go:1: undefined: x\n"}
{"Action":"build-fail","ImportPath":"pando/c [pando/c.test]"}
{"Action":"fail","Package":"pando/c","Elapsed":0,"FailedBuild":"pando/c [pando/c.test]"}
`

func TestSummary(t *testing.T) {
	for _, c := range []struct {
		requireAll bool
		want       string
		contains   []string
	}{
		{false, "3 passed, 4 failed, 2 skipped", []string{"want 1, got 2", "panic: test timed out", "it did not end", "undefined: x", "pando/a", "2 tests were SKIPPED", "mounting needs root", "keeps no images"}},
		{true, "3 passed, 5 failed, 1 skipped", []string{"this run must not skip it", "keeps no images"}},
	} {
		var out strings.Builder
		s := newSummary(&out, c.requireAll)
		if err := s.read(strings.NewReader(run)); err != nil {
			t.Fatal(err)
		}
		s.finish()
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if last := lines[len(lines)-1]; last != c.want {
			t.Errorf("require all %v: the last line is %q, want %q", c.requireAll, last, c.want)
		}
		for _, w := range c.contains {
			if w = strings.TrimPrefix(w, "pando/"); !strings.Contains(out.String(), w) {
				t.Errorf("require all %v: %q is not in\n%s", c.requireAll, w, out.String())
			}
		}
	}
}

// TestDied: a run that stops in the middle of a package, as when a guest dies,
// has failed there, with the test that was running.
func TestDied(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events")
	lines := strings.Split(run, "\n")
	for _, c := range []struct {
		lines int
		want  string
	}{
		{0, ""},
		{1, "0 passed, 1 failed, 0 skipped"},  // in a test
		{3, "1 passed, 1 failed, 0 skipped"},  // between two
		{14, "2 passed, 1 failed, 2 skipped"}, // after the last
		{15, "2 passed, 0 failed, 2 skipped"}, // after the package
	} {
		if err := os.WriteFile(file, []byte(strings.Join(lines[:c.lines], "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		s := newSummary(&out, false)
		if err := s.readFiles([]string{file}); errors.Is(err, errNoEvents) != (c.want == "") {
			t.Fatalf("%d lines: %v", c.lines, err)
		}
		s.endAll()
		s.finish()
		if c.want != "" && !strings.HasSuffix(out.String(), c.want+"\n") {
			t.Errorf("%d lines: want %q, got\n%s", c.lines, c.want, out.String())
		}
		if told := strings.Contains(out.String(), "did not come to their end"); told != strings.Contains(c.want, "1 failed") {
			t.Errorf("%d lines: that it did not end is told: %v, in\n%s", c.lines, told, out.String())
		}
	}
}

func TestSkipsThatAreAllowed(t *testing.T) {
	for why, allowed := range map[string]bool{
		"SKIPPED: no C compiler":                                 true,
		"SKIPPED: this test needs root":                          false,
		"SKIPPED: run mkfs.xfs: program not found":               false,
		"SKIPPED: mounting a btrfs needs root: run it as root":   false,
		"SKIPPED, NOTHING WAS TESTED: operation not permitted":   false,
		"SKIPPED: before Linux 6.8 the kernel uses IDs of mount": true,
	} {
		if got := mayBeMissing.MatchString(why); got != allowed {
			t.Errorf("%q: allowed = %v, want %v", why, got, allowed)
		}
	}
}
