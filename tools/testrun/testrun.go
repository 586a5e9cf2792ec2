//go:build linux

// Package testrun builds test binaries once and runs them as often as a tool wants, in tools/isolate.
package testrun

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Package is a package of this module, as `go list` describes it.
type Package struct {
	ImportPath, Dir           string
	Module                    struct{ Path, Dir string }
	GoFiles                   []string
	TestGoFiles, XTestGoFiles []string
	TestImports, XTestImports []string
}

// Name is the package's directory below the module's.
func (p Package) Name() string {
	return strings.TrimPrefix(strings.TrimPrefix(p.Dir, p.Module.Dir), "/")
}

// List returns the packages that the patterns name.
func List(ctx context.Context, patterns ...string) (all []Package, err error) {
	cmd := command(ctx, "", nil, append([]string{"go", "list", "-json=ImportPath,Dir,Module,GoFiles,TestGoFiles," +
		"XTestGoFiles,TestImports,XTestImports", "--"}, patterns...)...)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w\n%s", err, &complaint)
	}
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		var p Package
		if err := decoder.Decode(&p); err == io.EOF {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
}

// Build writes the package's test binary to path. What Go leaves behind when it is killed is beside it.
func (p Package) Build(ctx context.Context, path string, flags ...string) error {
	args := append([]string{"go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-o", path}, flags...)
	env := []string{"GOTMPDIR=" + filepath.Dir(path)}
	if out, err := command(ctx, "", env, append(args, p.ImportPath)...).CombinedOutput(); err != nil {
		return fmt.Errorf("building the tests of %s: %w\n%s", p.Name(), err, out)
	}
	return nil
}

// Test is what became of a test or subtest, or of a fuzz target.
type Test struct {
	Name                    string
	Passed, Failed, Skipped int
	Seconds                 float64 // that it and its longest subtest took at most
	Output                  string
}

// Result is what became of a run.
type Result struct {
	Tests   []*Test // in the order in which they began
	Output  string  // outside of tests
	Status  int     // exit status; not 0 if something failed
	Stopped bool    // the context ended the run
}

// Test returns a test, or nil if it has not begun.
func (r *Result) Test(name string) *Test {
	if i := slices.IndexFunc(r.Tests, func(t *Test) bool { return t.Name == name }); i >= 0 {
		return r.Tests[i]
	}
	return nil
}

// Ended returns the tests below one that ended, without those below another that did.
func (r *Result) Ended(top string) (names []string) {
	for _, t := range r.Tests {
		if strings.HasPrefix(t.Name, top+"/") && t.Passed+t.Failed+t.Skipped > 0 {
			names = append(names, t.Name)
		}
	}
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(name, n+"/") })
	})
}

// Failures returns the tests that failed, without those of which a subtest did.
func (r *Result) Failures() (failed []*Test) {
	for _, t := range r.Tests {
		below := func(o *Test) bool { return o.Failed > 0 && strings.HasPrefix(o.Name, t.Name+"/") }
		if t.Failed > 0 && !slices.ContainsFunc(r.Tests, below) {
			failed = append(failed, t)
		}
	}
	return failed
}

// Run runs a command, a test binary with what stands before it, in the package's directory, and reads what it prints
// with -test.v=test2json. When the context ends, SIGTERM ends the command, which cleans up first.
func (p Package) Run(ctx context.Context, env []string, argv ...string) (*Result, error) {
	convert := command(context.Background(), "", nil, "go", "tool", "test2json", "-t", "-p", p.ImportPath)
	in, ierr := convert.StdinPipe()
	out, oerr := convert.StdoutPipe()
	if err := errors.Join(ierr, oerr, convert.Start()); err != nil {
		return nil, err
	}

	test := command(ctx, p.Dir, env, argv...)
	test.Cancel = func() error {
		go keepEnding(test.Process)
		return nil
	}
	test.Stdout, test.Stderr = in, in
	ended := make(chan error, 1)
	go func() { ended <- errors.Join(test.Run(), in.Close()) }()

	r := &Result{}
	rerr := r.read(out)
	err, cerr := <-ended, convert.Wait()
	if test.ProcessState == nil || rerr != nil || cerr != nil {
		return nil, errors.Join(err, rerr, cerr)
	}
	r.Status, r.Stopped = test.ProcessState.ExitCode(), ctx.Err() != nil
	return r, nil
}

// keepEnding sends SIGTERM until the process has ended: the first process of a PID namespace does not get those that
// come before it expects them.
func keepEnding(p *os.Process) {
	for p.Signal(syscall.SIGTERM) == nil {
		time.Sleep(time.Second / 2)
	}
}

// command has its own process group, so that Ctrl-C does not reach it: the context ends it.
func command(ctx context.Context, dir string, env []string, argv ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Minute
	cmd.Env = append(os.Environ(), env...)
	if cmd.Dir = dir; dir != "" {
		cmd.Env = append(cmd.Env, "PWD="+dir)
	}
	return cmd
}

// event is a line of test2json.
type event struct {
	Action, Test, Output string
	Elapsed              float64
}

// read takes in events until their end.
func (r *Result) read(events io.Reader) error {
	for decoder := json.NewDecoder(events); ; {
		var e event
		if err := decoder.Decode(&e); err == io.EOF {
			return nil
		} else if err != nil {
			return fmt.Errorf("reading the events of a test: %w", err)
		}
		r.add(e)
	}
}

func (r *Result) add(e event) {
	if e.Test == "" {
		r.Output += e.Output
		return
	}
	t := r.Test(e.Test)
	if t == nil {
		t = &Test{Name: e.Test}
		r.Tests = append(r.Tests, t)
	}

	switch e.Action {
	case "output":
		t.Output += e.Output
	case "pass":
		t.Passed++
	case "fail":
		t.Failed++
	case "skip":
		t.Skipped++
	}
	// Go does not count in the time of a test what its parallel subtests take.
	t.Seconds = max(t.Seconds, e.Elapsed)
	if top, _, isSub := strings.Cut(e.Test, "/"); isSub {
		if t := r.Test(top); t != nil {
			t.Seconds = max(t.Seconds, e.Elapsed)
		}
	}
}
