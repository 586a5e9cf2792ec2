package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// failing returns the events of a package in which tests fail with what they say.
func failing(pkg string, says map[string]string) string {
	var b strings.Builder
	for test, output := range says {
		fmt.Fprintf(&b, `{"Action":"run","Package":"pando/%s","Test":"%s"}`+"\n", pkg, test)
		fmt.Fprintf(&b, `{"Action":"output","Package":"pando/%s","Test":"%s","Output":%q}`+"\n", pkg, test, output)
		fmt.Fprintf(&b, `{"Action":"fail","Package":"pando/%s","Test":"%s"}`+"\n", pkg, test)
	}
	fmt.Fprintf(&b, `{"Action":"fail","Package":"pando/%s","Elapsed":2}`+"\n", pkg)
	return b.String()
}

// repeats writes a command that says how each repetition of a test goes: "pass", "fail" or "none". It notes its
// arguments in the file "args" beside it.
func repeats(t *testing.T, outcomes ...string) string {
	t.Helper()
	dir := t.TempDir()
	for i, outcome := range outcomes {
		events := `{"Action":"run","Package":"pando/a","Test":"TestA"}
{"Action":"` + outcome + `","Package":"pando/a","Test":"TestA"}
{"Action":"` + outcome + `","Package":"pando/a"}
`
		if outcome == "none" {
			events = `{"Action":"start","Package":"pando/a"}
{"Action":"pass","Package":"pando/a"}
`
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte(events), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	script := `echo "$@" >>` + dir + `/args; n=$(wc -l <` + dir + `/args); cat ` + dir + `/$((n-1))`
	path := filepath.Join(dir, "again")
	if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const ordinary = "    a_test.go:7: want 1, got 2\n"

func TestForgive(t *testing.T) {
	for name, c := range map[string]struct {
		events   string
		changed  []string
		known    string
		outcomes []string
		want     string // the sum
		says     string
	}{
		"flaky": {failing("a", map[string]string{"TestA": ordinary}), nil, "", []string{"pass", "pass"},
			"1 passed, 0 failed, 0 skipped\n", "FLAKY  a TestA failed, and then passed twice"},
		"fails again": {failing("a", map[string]string{"TestA": ordinary}), nil, "", []string{"fail"},
			"0 passed, 1 failed, 0 skipped\n", "it failed in run 1 of 2"},
		"fails in the end": {failing("a", map[string]string{"TestA": ordinary}), nil, "", []string{"pass", "fail"},
			"0 passed, 1 failed, 0 skipped\n", "it failed in run 2 of 2"},
		"cannot be repeated": {failing("a", map[string]string{"TestA": ordinary}), nil, "", []string{"none"},
			"0 passed, 1 failed, 0 skipped\n", "it could not be repeated"},
		"touched": {failing("a", map[string]string{"TestA": ordinary}), []string{"a/a.go"}, "", nil,
			"0 passed, 1 failed, 0 skipped\n", "touches its package"},
		"testdata": {failing("a", map[string]string{"TestA": ordinary}), []string{"a/testdata/x/y"}, "", nil,
			"0 passed, 1 failed, 0 skipped\n", "touches its package"},
		"another package": {failing("a", map[string]string{"TestA": ordinary}),
			[]string{"a/b/c.go", "ab/c.go", "README.md"}, "", []string{"pass", "pass"},
			"1 passed, 0 failed, 0 skipped\n", "FLAKY"},
		"everything changed": {failing("a", map[string]string{"TestA": ordinary}), []string{"everything"}, "", nil,
			"0 passed, 1 failed, 0 skipped\n", "touches its package"},
		"one that is not forgiven": {failing("a", map[string]string{"TestA": ordinary, "TestB": "LEAK: x\n"}), nil, "", nil,
			"0 passed, 2 failed, 0 skipped\n", `"LEAK"`},
		"four": {failing("a", map[string]string{"TestA": "", "TestB": "", "TestC": "", "TestD": ""}), nil, "", nil,
			"0 passed, 4 failed, 0 skipped\n", "at most 3"},
		"listed": {failing("a", map[string]string{"TestA": "LEAK: loop7\n"}), []string{"a/a.go"},
			"a\tTestA\tLEAK: loop\t2026-11-26\tudev\n", []string{"pass", "pass"}, "1 passed, 0 failed, 0 skipped\n", "FLAKY"},
		"listed otherwise": {failing("a", map[string]string{"TestA": "LEAK: mount\n"}), nil,
			"a\tTestA\tLEAK: loop\t2026-11-26\tudev\n", nil,
			"0 passed, 1 failed, 0 skipped\n", `"LEAK"`},
		"dead": {`{"Action":"run","Package":"pando/a","Test":"TestA"}` + "\n" +
			`{"Action":"fail","Package":"pando/a"}` + "\n", nil, "", nil,
			"0 passed, 1 failed, 0 skipped\n", "did not come to its end"},
		"build": {`{"Action":"fail","Package":"pando/a","FailedBuild":"pando/a"}` + "\n", nil, "", nil,
			"0 passed, 1 failed, 0 skipped\n", "outside of its tests"},
		"leak of a package": {`{"Action":"output","Package":"pando/a","Output":"LEAK: file x\n"}` + "\n" +
			failing("a", map[string]string{"TestA": ordinary}), nil, "", nil,
			"0 passed, 1 failed, 0 skipped\n", "outside of its tests\n    LEAK: file x\n"},
		"a suite about data": {failing("test/crash", map[string]string{"TestA": ordinary}), nil, "", nil,
			"0 passed, 1 failed, 0 skipped\n", "lost or leaked data"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReport(false)
			if err := r.read(strings.NewReader(c.events)); err != nil {
				t.Fatal(err)
			}
			r.end()
			list := filepath.Join(t.TempDir(), "flaky.txt")
			if err := os.WriteFile(list, []byte(c.known), 0o600); err != nil {
				t.Fatal(err)
			}
			known, err := readFlaky(list)
			if err != nil {
				t.Fatal(err)
			}

			command := repeats(t, c.outcomes...)
			all := changes{c.changed != nil && c.changed[0] == "everything", c.changed}
			j := &judge{all, known, []string{"sh", command}, t.TempDir()}
			verdicts, err := j.forgive(r)
			if err != nil {
				t.Fatal(err)
			}
			var said strings.Builder
			j.print(&said, verdicts)
			if r.counts() != c.want || !strings.Contains(said.String(), c.says) {
				t.Errorf("counted %q, want %q; said %q, want %q", r.counts(), c.want, &said, c.says)
			}
			args, _ := os.ReadFile(filepath.Join(filepath.Dir(command), "args")) // not there: none
			if want := strings.Repeat("-run ^TestA$ ./a\n", len(c.outcomes)); string(args) != want {
				t.Errorf("repeated with %q, want %q", args, want)
			}
			kept, err := os.ReadFile(filepath.Join(j.keep, "a.TestA"))
			if len(c.outcomes) > 0 && (err != nil || len(kept) == 0) {
				t.Errorf("kept %q, %v", kept, err)
			}
		})
	}
}

// TestGraveOutput: what speaks of lost or leaked data is never forgiven.
func TestGraveOutput(t *testing.T) {
	for output, want := range map[string]bool{
		"    a_test.go:7: want 1, got 2\n":                               false,
		"    a_test.go:7: it took 1.2 s\n":                               false,
		"    a_test.go:7: file \"f\" has other content than was written": true,
		"    a_test.go:7: e2fsck: exit status 4":                         true,
		"    testfs.go:313: LEAK: /dev/loop3":                            true,
		"WARNING: DATA RACE\n":                                           true,
		"panic: runtime error\n":                                         true,
		"    a_test.go:7: exit 3: pando: damaged: checksum mismatch\n":   true,
	} {
		if got := graveOf("internal/a", output); (got != "") != want {
			t.Errorf("%q: %q", output, got)
		}
	}
}

func TestListOfFlakyTests(t *testing.T) {
	const good = "internal/a\tTestA\tsignature\t2026-11-01\tsuspicion\n"
	for text, want := range map[string]string{
		"# comment\n\n" + good:                         "",
		strings.Repeat(good, 11):                       "more than 10",
		"internal/a\tTestA\tx\t2026-11-01\n":           "4 fields",
		"internal/a\tTestA/b\tx\t2026-11-01\ty\n":      "top-level",
		"internal/a\tTestA\t\t2026-11-01\ty\n":         "each field",
		"internal/a\tTestA\t(\t2026-11-01\ty\n":        "missing closing",
		"internal/a\tTestA\tx\tyesterday\tsuspicion\n": "yesterday",
	} {
		path := filepath.Join(t.TempDir(), "flaky.txt")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := readFlaky(path)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}

	f, err := parseFlaky(strings.TrimSuffix(good, "\n"))
	if err != nil {
		t.Fatal(err)
	}
	if at := f.since.Add(oldEntry); f.old(at) != "" || !strings.Contains(f.old(at.Add(time.Hour)), "30 days") {
		t.Errorf("after 30 days: %q, and an hour: %q", f.old(at), f.old(at.Add(time.Hour)))
	}
}

// TestProjectsList: the list of this project can be read.
func TestProjectsList(t *testing.T) {
	if _, err := readFlaky("../../test/flaky.txt"); err != nil {
		t.Error(err)
	}
}
