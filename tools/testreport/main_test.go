package main

import (
	"errors"
	"fmt"
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
{"Action":"run","Package":"pando/a","Test":"TestSub/y/z"}
{"Action":"output","Package":"pando/a","Test":"TestSub/y/z","Output":"    a_test.go:7: SKIPPED: mounting needs root\n"}
{"Action":"output","Package":"pando/a","Test":"TestSub/y/z","Output":"--- SKIP: TestSub/y (0.00s)\n"}
{"Action":"skip","Package":"pando/a","Test":"TestSub/y/z"}
{"Action":"pass","Package":"pando/a","Test":"TestSub"}
{"Action":"run","Package":"pando/a","Test":"TestDoesNotApply"}
{"Action":"output","Package":"pando/a","Test":"TestDoesNotApply","Output":"  a_test.go:9: the driver keeps no images\n"}
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

func TestReport(t *testing.T) {
	for _, c := range []struct {
		requireAll bool
		want       string
		contains   []string
	}{
		{false, "3 passed, 4 failed, 2 skipped\n", []string{"2 tests were SKIPPED", "mounting needs root",
			"keeps no images"}},
		{true, "3 passed, 5 failed, 1 skipped\n", []string{"FAIL  a TestSub/y/z: SKIPPED: mounting needs root",
			"keeps no images"}},
	} {
		r := newReport(c.requireAll)
		if err := r.read(strings.NewReader(run)); err != nil {
			t.Fatal(err)
		}
		r.end()
		if r.counts() != c.want {
			t.Errorf("require all %v: counted %q, want %q", c.requireAll, r.counts(), c.want)
		}

		var out strings.Builder
		r.printSkips(&out)
		for _, want := range c.contains {
			if !strings.Contains(out.String(), want) {
				t.Errorf("require all %v: %q is not in\n%s", c.requireAll, want, out.String())
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
		{1, "0 passed, 1 failed, 0 skipped\n"},  // in a test
		{3, "1 passed, 1 failed, 0 skipped\n"},  // between two
		{14, "2 passed, 1 failed, 2 skipped\n"}, // after the last
		{15, "2 passed, 0 failed, 2 skipped\n"}, // after the package
	} {
		if err := os.WriteFile(file, []byte(strings.Join(lines[:c.lines], "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		r := newReport(false)
		if err := r.readFiles([]string{file}); errors.Is(err, errNoEvents) != (c.want == "") {
			t.Fatalf("%d lines: %v", c.lines, err)
		}
		r.end()
		if c.want != "" && r.counts() != c.want {
			t.Errorf("%d lines: want %q, got %q", c.lines, c.want, r.counts())
		}
		if told := len(r.refused) > 0; told != strings.Contains(c.want, "1 failed") {
			t.Errorf("%d lines: reported as not ended: %v, in %q", c.lines, told, r.refused)
		}
	}
}

// TestSlowest: the table has tests without subtests only, the slowest first.
func TestSlowest(t *testing.T) {
	r := newReport(false)
	events := `{"Action":"run","Package":"pando/a","Test":"TestTop"}
{"Action":"run","Package":"pando/a","Test":"TestTop/quick"}
{"Action":"pass","Package":"pando/a","Test":"TestTop/quick","Elapsed":0.5}
{"Action":"run","Package":"pando/a","Test":"TestTop/slow"}
{"Action":"pass","Package":"pando/a","Test":"TestTop/slow","Elapsed":12}
{"Action":"pass","Package":"pando/a","Test":"TestTop","Elapsed":12.5}
`
	if err := r.read(strings.NewReader(events)); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	r.printSlowest(&out)
	if want := "\nSlowest tests:\n    12.0 s  a TestTop/slow\n     0.5 s  a TestTop/quick\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestUsage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "usage")
	lines := `{"Package":"internal/a","WallSeconds":1,"UserSeconds":0.25,"SystemSeconds":0.5,"WrittenBytes":1048576}
{"Package":"internal/b","WallSeconds":2,"UserSeconds":3,"SystemSeconds":0,"WrittenBytes":0}
`
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := printUsage(&out, file); err != nil {
		t.Fatal(err)
	}
	want := `
Packages, in seconds:
    wall     user   kernel  waiting    written
     2.0      3.0      0.0      0.0      0 MiB  internal/b
     1.0      0.2      0.5      0.2      1 MiB  internal/a
     3.0      3.2      0.5      0.0      1 MiB  all 2
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
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

// TestRaces: the report of a data race is printed once more, at the end.
func TestRaces(t *testing.T) {
	const run = `{"Action":"run","Package":"pando/a","Test":"TestRace"}
{"Action":"output","Package":"pando/a","Test":"TestRace","Output":"==================\n"}
{"Action":"output","Package":"pando/a","Test":"TestRace","Output":"WARNING: DATA RACE\n"}
{"Action":"output","Package":"pando/a","Test":"TestRace","Output":"Write at 0x00c by goroutine 7:\n"}
{"Action":"output","Package":"pando/a","Test":"TestRace","Output":"  pando/a.write()\n"}
{"Action":"output","Package":"pando/a","Test":"TestRace","Output":"==================\n"}
{"Action":"output","Package":"pando/a","Test":"TestRace","Output":"    testing.go:1: race detected\n"}
{"Action":"fail","Package":"pando/a","Test":"TestRace"}
{"Action":"fail","Package":"pando/a","Elapsed":2}
`
	r := newReport(false)
	if err := r.read(strings.NewReader(run)); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	r.printRaces(&b)
	if want := "\nDATA RACE\nWrite at 0x00c by goroutine 7:\n  pando/a.write()\n"; b.String() != want {
		t.Errorf("printed %q, want %q", b.String(), want)
	}
}

// TestTimeouts: what was running when the time of a package was up is printed, with stacks.
func TestTimeouts(t *testing.T) {
	var events strings.Builder
	events.WriteString(`{"Action":"run","Package":"pando/a","Test":"TestHangs"}` + "\n")
	say := func(line string) {
		fmt.Fprintf(&events, `{"Action":"output","Package":"pando/a","Test":"TestHangs","Output":%q}`+"\n", line+"\n")
	}
	say("panic: test timed out after 5m0s")
	say("\trunning tests:")
	say("\t\tTestHangs (5m0s)")
	for range 500 {
		say("goroutine 8 [sleep]:")
	}
	events.WriteString(`{"Action":"fail","Package":"pando/a","Elapsed":300}` + "\n")

	r := newReport(false)
	if err := r.read(strings.NewReader(events.String())); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	r.printTimeouts(&b)
	const begin = "\nTEST TIMED OUT after 5m0s\n\trunning tests:\n\t\tTestHangs (5m0s)\ngoroutine 8"
	if !strings.HasPrefix(b.String(), begin) ||
		!strings.HasSuffix(b.String(), "... and 203 more lines in the events\n") {
		t.Errorf("printed %q", b.String())
	}
}
