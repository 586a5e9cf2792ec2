//go:build linux

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// inRepository writes files into a new repository, each "name\n" and text, commits them, and goes there.
func inRepository(t *testing.T, files ...string) {
	t.Helper()
	t.Chdir(t.TempDir())
	t.Setenv("GIT_CONFIG_GLOBAL", os.DevNull)
	write(t, files...)
	for _, args := range [][]string{{"init", "-q"}, {"add", "-A"},
		{"-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-q", "--allow-empty", "-m", "x"}} {
		if _, err := git(args...); err != nil {
			t.Fatal(err)
		}
	}
}

func write(t *testing.T, files ...string) {
	t.Helper()
	for _, f := range files {
		name, text, _ := strings.Cut(f, "\n")
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
}

const sample = `a/a_test.go
package a
import "testing"
func helper() int { return 1 }
func TestOne(t *testing.T) { t.Log("one") }
func TestTwo(t *testing.T) {
	for _, i := range []int{1, 2} {
		t.Log(i, helper())
	}
}
`

func TestChangedTests(t *testing.T) {
	edit := strings.NewReplacer
	for name, c := range map[string]struct {
		after []string // files that are written over the sample
		want  string
	}{
		"nothing":  {nil, ""},
		"code":     {[]string{edit(`"one"`, `"1"`).Replace(sample)}, "a TestOne"},
		"operator": {[]string{edit("t.Log(i,", "t.Log(-i,").Replace(sample)}, "a TestTwo"},
		"comment": {[]string{edit("\t\tt.Log", "\t\t// why\n\t\tt.Log", "func TestO", "// TestOne:\nfunc TestO").
			Replace(sample)}, ""},
		"format":  {[]string{edit("int{1, 2}", "int{\n1,\n2,\n}", "\t", " ").Replace(sample)}, ""},
		"helper":  {[]string{edit("return 1", "return 2").Replace(sample)}, ""},
		"renamed": {[]string{edit("TestOne", "TestNew").Replace(sample)}, "a TestNew"},
		"moved":   {[]string{edit("a/a_", "a/b_").Replace(sample), "a/a_test.go\npackage a\n"}, ""},
		"untracked": {[]string{"b/c/x_test.go\npackage c_test\nimport \"testing\"\nfunc TestX(t *testing.T) {}\n" +
			"func TestMain(m *testing.M) {}\nfunc Testify(t *testing.T) {}\nfunc (s) TestM(t *testing.T) {}\n"}, "b/c TestX"},
		"testdata":     {[]string{edit("a/a", "a/testdata/a").Replace(sample)}, ""},
		"other module": {[]string{edit("a/a", "m/a").Replace(sample), "m/go.mod\nmodule m\n"}, ""},
		"no test":      {[]string{edit("a/a_test.go", "a/a.go", `"one"`, `"1"`).Replace(sample)}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inRepository(t, sample)
			write(t, c.after...)
			all, err := changedTests("HEAD")
			var got []string
			for _, found := range all {
				got = append(got, found.pkg+" "+found.name)
			}
			if err != nil || strings.Join(got, ", ") != c.want {
				t.Errorf("found %q, %v; want %q", got, err, c.want)
			}
		})
	}

	inRepository(t, sample)
	if err := os.Remove("a/a_test.go"); err != nil {
		t.Fatal(err)
	}
	if all, err := changedTests("HEAD"); err != nil || len(all) > 0 {
		t.Errorf("removed: %v, %v", all, err)
	}
	if _, err := changedTests("missing"); err == nil {
		t.Error("a commit that is not there")
	}
}

// TestShare: each test gets ten runs or its part of the time, and what short ones leave.
func TestShare(t *testing.T) {
	for _, c := range []struct {
		seconds []float64
		want    []int
	}{
		{[]float64{0, 1, 2}, []int{10, 10, 10}},
		{[]float64{5, 6}, []int{10, 10}},
		{[]float64{1, 30}, []int{10, 3}},
		{[]float64{20, 20, 19}, []int{2, 2, 2}},
		{[]float64{1, 50, 50}, []int{7, 1, 1}},
		{[]float64{130, 1}, []int{10, 0}},
	} {
		var tests []*test
		for _, s := range c.seconds {
			tests = append(tests, &test{seconds: s})
		}
		share(tests, 2*time.Minute, 10)
		for i, want := range c.want {
			if tests[i].often != want {
				t.Errorf("%v: %.0f s run %d times, want %d", c.seconds, tests[i].seconds, tests[i].often, want)
			}
		}
	}
}

const flaky = `a/a_test.go
package a
import ("os"; "testing"; "time")
func TestFast(t *testing.T) {}
func TestFifth(t *testing.T) {
	b, _ := os.ReadFile("count")
	if len(b) == FIFTH { t.Error("the fifth time") }
	os.WriteFile("count", append(b, 'x'), 0o600)
}
func TestSlow(t *testing.T) { t.Run("sub", func(t *testing.T) { t.Parallel(); time.Sleep(time.Millisecond) }) }
func TestHangs(t *testing.T) { time.Sleep(time.Hour) }
func TestSkipped(t *testing.T) { t.Skip() }
`

const elsewhere = `a/b_test.go
//go:build windows

package a
import "testing"
func TestElsewhere(t *testing.T) {}
`

// TestStress: tests run ten times or as long as there is time, it says which, and one failure in ten fails all.
func TestStress(t *testing.T) {
	isolate := filepath.Join(t.TempDir(), "isolate")
	if out, err := exec.Command("go", "build", "-o", isolate, "pando/tools/isolate").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, c := range map[string]struct {
		fifth, hangs string // how often it has run when it fails, how long it takes
		budget       time.Duration
		want         []string
		fails        bool
	}{
		"good": {"-1", "3600", time.Minute, []string{"10 of 10  a TestFast\n", "10 of 10  a TestFifth\n",
			"10 of 10  a TestSlow\n", "LEFT OUT  a TestHangs, which takes 3600.0 s or more\n",
			"1 of 6 new tests", "skipped   a TestElsewhere\n", "skipped   a TestSkipped\n"}, false},
		"fails": {"4", "3600", time.Minute, []string{"the fifth time", "FAILED    a TestFifth\n",
			"10 of 10  a TestFast"}, true},
		"stops": {"-1", "0.1", 2 * time.Second, []string{"LEFT OUT  a TestHangs, which"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TMPDIR", t.TempDir())
			t.Setenv("PANDO_TEST_USAGE", "")
			inRepository(t, "go.mod\nmodule m\n")
			write(t, elsewhere, strings.Replace(flaky, "FIFTH", c.fifth, 1),
				"events\n"+`{"Package":"m/a","Test":"TestSlow/sub","Action":"pass","Elapsed":20}
{"Package":"m/a","Test":"TestHangs","Action":"pass","Elapsed":`+c.hangs+"}\n")
			tests, err := changedTests("HEAD")
			if err != nil {
				t.Fatal(err)
			}

			var out strings.Builder
			s := &stress{out: &out, isolate: isolate, times: 10, tests: tests}
			start := time.Now()
			err = s.run(context.Background(), "events", c.budget)
			if (err != nil) != c.fails || time.Since(start) > c.budget+20*time.Second {
				t.Errorf("after %v: %v", time.Since(start), err)
			}
			for _, want := range c.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is not in:\n%s", want, &out)
				}
			}
			if left, _ := filepath.Glob(os.Getenv("TMPDIR") + "/*"); len(left) > 0 {
				t.Errorf("LEAK: %q", left)
			}
		})
	}
}
