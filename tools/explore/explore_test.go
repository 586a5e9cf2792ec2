//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// project is a copy of testdata/project with what it imports, in which explore runs.
type project struct {
	t              *testing.T
	dir, bin, temp string
}

func newProject(t *testing.T) *project {
	t.Helper()
	top := t.TempDir()
	p := &project{t, filepath.Join(top, "project"), filepath.Join(top, "bin"), filepath.Join(top, "tmp")}
	for _, dir := range []string{p.bin, p.temp} {
		if err := os.Mkdir(dir, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(p.dir, os.DirFS("testdata/project")); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"internal/testing/faulttest", "internal/linux/kernel"} {
		if err := os.CopyFS(filepath.Join(p.dir, dir), os.DirFS("../../"+dir)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"go.mod", "go.sum"} {
		text, err := os.ReadFile("../../" + name)
		if err != nil {
			t.Fatal(err)
		}
		p.write(name, string(text))
	}
	build := exec.Command("go", "build", "-o", p.bin, "pando/tools/explore", "pando/tools/isolate")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return p
}

func (p *project) write(name, text string) {
	p.t.Helper()
	if err := os.WriteFile(filepath.Join(p.dir, name), []byte(text), 0o666); err != nil {
		p.t.Fatal(err)
	}
}

func (p *project) read(name string) string {
	text, _ := os.ReadFile(filepath.Join(p.dir, name)) // not there: empty
	return string(text)
}

// said is what a program has printed so far.
type said struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// explore searches a package until it has done enough, and ends the search by a signal. It returns what the search
// said, and checks that it left nothing behind.
func (p *project) explore(pkg string, wantStatus int, enough func(out string) bool) string {
	p.t.Helper()
	cmd := exec.Command(filepath.Join(p.bin, "explore"), "-for", "5m", "-isolate", filepath.Join(p.bin, "isolate"), "-dir",
		p.bin, pkg)
	var out said
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, &out, &out
	cmd.Env = append(os.Environ(), "TMPDIR="+p.temp, "PANDO_TEST_DRAWN=", "PANDO_TEST_USAGE=", "PWD="+p.dir)
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	// Some of what is waited for shows in files only: polling sees both.
	for end := time.Now().Add(4 * time.Minute); !enough(out.String()); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Error("it has not done enough")
			break
		}
	}

	signalled := time.Now()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Errorf("it had ended: %v", err)
	}
	_ = cmd.Wait() // its status says how it went
	if took := time.Since(signalled); took > 15*time.Second || cmd.ProcessState.ExitCode() != wantStatus {
		p.t.Errorf("%v after the signal: %v, want status %d\n%s", took, cmd.ProcessState, wantStatus, &out)
	}
	if left, _ := filepath.Glob(p.temp + "/*"); len(left) > 0 {
		p.t.Errorf("LEAK: %q", left)
	}
	if left, _ := exec.Command("pgrep", "-f", p.bin).Output(); len(left) > 0 {
		p.t.Errorf("LEAK: processes %q", left)
	}
	return out.String()
}

// repeat runs a command that explore has printed.
func (p *project) repeat(command string) (out string, err error) {
	cmd := exec.Command("bash", "-c", command)
	cmd.Dir = p.dir
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// TestFinds: a search finds what one shard shows, and what a fuzzer finds, and the lines that it prints repeat that.
// The next search continues behind it.
func TestFinds(t *testing.T) {
	p := newProject(t)
	const round = "sample: round 1 is complete: 7 shards, unknown\n"
	wants := []*regexp.Regexp{
		regexp.MustCompile(`(?m)^PANDO_SHARD=1 RUN='\^TestDraws\$' make test PKG=./sample$`),
		regexp.MustCompile(`(?m)^PANDO_SHARD=2 PANDO_FAULT_AT=6 RUN='\^TestSweep\$/\^of_8'\\''s\$' make test PKG=./sample$`),
		regexp.MustCompile(`(?m)^RUN='\^FuzzFails\$/\^\w+\$' make test PKG=./sample$`),
	}
	out := p.explore("./sample", 1, func(out string) bool {
		missing := func(want *regexp.Regexp) bool { return !want.MatchString(out) }
		return !slices.ContainsFunc(wants, missing) && strings.Contains(out, round) &&
			strings.Contains(out, "TestSeeds: seed 3")
	})
	if !regexp.MustCompile(`sample: [0-6] of 7 shards in round \d+, \d+ seeds, .*\n\d found\n`).MatchString(out) {
		t.Errorf("it ended with:\n%s", out)
	}

	for _, want := range wants {
		line := want.FindString(out)
		if said, err := p.repeat(line); err == nil || !strings.Contains(said, "'s fault") {
			t.Errorf("%s: %v\n%s", line, err, said)
		}
		other := strings.NewReplacer("_AT=6", "_AT=5", "SHARD=1", "SHARD=3", "FuzzFails", "TestSeeds").Replace(line)
		if said, err := p.repeat(other); err != nil {
			t.Errorf("%s: %v\n%s", other, err, said)
		}
	}

	// One more round of the sweep finds its fault again.
	before := p.read("out/explored")
	const swept = `"test":"TestSweep"`
	p.explore("./sample", 1, func(string) bool {
		return strings.Count(p.read("out/explored"), swept) >= strings.Count(before, swept)+4
	})
	after := p.read("out/explored")
	if !strings.HasPrefix(after, before) {
		t.Errorf("%s\nbecame\n%s", before, after)
	}
	_, all, err := openLog(filepath.Join(p.dir, "out/explored"))
	seen := map[string]bool{}
	for _, r := range all {
		key := fmt.Sprint(r.Test, r.Seed, r.Shard)
		if seen[key] && r.Test != "FuzzFails" {
			t.Errorf("%s has run twice", key)
		}
		seen[key] = true
		of := map[string]int{"TestSweep": 4, "TestDraws": 6, "TestSeeds": 1}[r.Test]
		if r.Of != of || r.Package != "sample" {
			t.Errorf("%+v, want %d shards of sample", r, of)
		}
	}
	if err != nil || len(seen) < 10 {
		t.Errorf("%d tests, seeds and shards have run: %v", len(seen), err)
	}
}

// TestGoesOn: a search that ends in the middle of a test goes on there.
func TestGoesOn(t *testing.T) {
	p := newProject(t)
	p.write("slow/slow", "")
	p.explore("./slow", 0, func(string) bool { return strings.Contains(p.read("slow/ran"), "second") })
	got := p.read("out/explored")
	if !strings.Contains(got, `"done":["TestSlow/first"]`) || strings.Count(got, "\n") != 1 {
		t.Fatalf("it noted %s", got)
	}

	if err := os.Remove(filepath.Join(p.dir, "slow/slow")); err != nil {
		t.Fatal(err)
	}
	p.explore("./slow", 0, func(out string) bool { return strings.Contains(out, "TestSlow: seed 1, shard 2 of 3") })
	p.explore("./slow", 0, func(string) bool { // while Go builds the tests
		building, _ := filepath.Glob(p.bin + "/go-build*")
		return len(building) > 0
	})
	if got := p.read("slow/ran"); !strings.HasPrefix(got, "first\nsecond\nsecond\nfirst\nsecond\nfirst\nsecond\n") {
		t.Errorf("subtests ran in this order: %q", got)
	}
}

// TestNothingToSearch: what cannot be searched is refused, and so is a log that is damaged.
func TestNothingToSearch(t *testing.T) {
	p := newProject(t)
	for _, c := range []struct{ pkg, log, want string }{
		{"./internal/linux/kernel", "", "no test of ./internal/linux/kernel draws anything"},
		{"./sample", "{}\n{\n", "log:2: "},
		{"./missing", "", "go list"},
	} {
		p.write("log", c.log)
		cmd := exec.Command(filepath.Join(p.bin, "explore"), "-isolate", "x", "-dir", p.bin, "-log", "log", c.pkg)
		cmd.Dir = p.dir
		out, _ := cmd.CombinedOutput() // its status says how it went
		if !strings.Contains(string(out), c.want) || cmd.ProcessState.ExitCode() != 2 {
			t.Errorf("%s: %v, %q; want %q", c.pkg, cmd.ProcessState, out, c.want)
		}
	}
}
