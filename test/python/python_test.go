// Package python runs what is written in Python: the tests of clients/python, and schemathesis, which reads the OpenAPI
// document and sends the service whatever the document allows and forbids. Each of their tests is a subtest here.
package python

import (
	"context"
	"encoding/xml"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

// pando is the program under test.
var pando string

func TestMain(m *testing.M) { os.Exit(testfs.WithProgram(&pando, m.Run)) }

// environment is the script that runs commands with the packages of clients/python/requirements.txt.
const environment = "../../scripts/python.sh"

// python returns a command in that environment. It ends with the test.
func python(t *testing.T, arguments ...string) *exec.Cmd {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	if out, err := exec.Command(environment, "true").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: there is no environment for Python: run make deps: %v: %s", err, out)
	}

	script, err := filepath.Abs(environment)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), script, arguments...)
	runtime.LockOSThread() // for the rest of the test: the command dies with its thread
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	return cmd
}

// junit is a report of pytest and of schemathesis.
type junit struct {
	Suites []struct {
		Cases []junitCase `xml:"testcase"`
	} `xml:"testsuite"`
}

type junitCase struct {
	Class    string      `xml:"classname,attr"`
	Name     string      `xml:"name,attr"`
	Failures []junitText `xml:"failure"`
	Errors   []junitText `xml:"error"`
	Skipped  []junitText `xml:"skipped"`
}

type junitText struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// subtests runs a command that writes a report, and makes each of its tests a subtest. It returns how many there were.
func subtests(t *testing.T, cmd *exec.Cmd, report string) int {
	t.Helper()
	out, err := cmd.CombinedOutput()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		t.Fatalf("%v: %s", err, out)
	}

	text, rerr := os.ReadFile(report)
	if rerr != nil {
		t.Fatalf("%v, %v: %s", err, rerr, out)
	}
	var r junit
	if err := xml.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}

	n := 0
	for _, s := range r.Suites {
		for _, c := range s.Cases {
			n++
			t.Run(strings.TrimPrefix(c.Class+"/"+c.Name, "/"), func(t *testing.T) { c.report(t) })
		}
	}
	if err != nil && !t.Failed() {
		t.Errorf("%v, though no test has failed: %s", err, out)
	}
	return n
}

// report has the outcome of a test in Python.
func (c junitCase) report(t *testing.T) {
	for _, f := range append(c.Failures, c.Errors...) {
		t.Errorf("%s\n%s", f.Message, f.Text)
	}
	for _, s := range c.Skipped {
		t.Errorf("skipped: %s", s.Message)
	}
}

// TestClient runs the tests of clients/python: its code, its types and style, its wheel, and the examples of its page.
func TestClient(t *testing.T) {
	dir := t.TempDir()
	report := filepath.Join(dir, "report.xml")
	cmd := python(t, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest",
		"-p", "no:schemathesis", "--basetemp", filepath.Join(dir, "tmp"), "--junitxml", report)
	cmd.Dir = "../../clients/python"
	source, err := filepath.Abs("../../clients/python/src")
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), "PANDO_TEST_BINARY="+pando, "PYTHONPATH="+source, "PANDO_POOL=", "RUFF_NO_CACHE=true")
	if n := subtests(t, cmd, report); n < 60 {
		t.Errorf("only %d tests of clients/python ran", n)
	}
}

// wait waits for a condition.
func wait(ctx context.Context, limit time.Duration, is func() bool) bool {
	for end := time.Now().Add(limit); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		if is() {
			return true
		}
	}
	return false
}
