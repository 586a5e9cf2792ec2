package build

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

const example = `golden = "app"
from = "base"

[env]
CI = "1"

[[step]]
name = "deps"
copy = ["in"]
to = "src"
exclude = ["*.o"]
run = "make"
dir = "src"
env = { MODE = "prod" }
secrets = ["TOKEN"]

[[step]]
run = "true"
`

// world is a directory with input files.
func world(t *testing.T) (*File, string) {
	t.Helper()
	unix.Umask(0o022)
	dir := t.TempDir()
	f, err := parse("pando.toml", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	f.dir = dir
	write(t, filepath.Join(dir, "in/a"), "content")
	write(t, filepath.Join(dir, "in/sub/b"), "")
	write(t, filepath.Join(dir, "in/sub/b.o"), "object")
	if err := os.Symlink("../a", filepath.Join(dir, "in/sub/link")); err != nil {
		t.Fatal(err)
	}
	return f, dir
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// sums returns what identifies each step.
func sums(t *testing.T, f *File) []string {
	t.Helper()
	before, out := "", []string{}
	for i := range f.Steps {
		s := step{Step: &f.Steps[i], env: f.environment(&f.Steps[i])}
		var err error
		if s.inputs, err = f.inputs(t.Context(), s.Step); err != nil {
			t.Fatal(err)
		}
		before = s.chainSum(before)
		out = append(out, before)
	}
	return out
}

// TestKeysStay: other versions of Pando must find the results of this one, so these never change.
func TestKeysStay(t *testing.T) {
	f, _ := world(t)
	want := []string{
		"2b6bd7480a6a597bafa217e9b3d5c05c2c065f08d3b4ca103946d9c61328cbfb",
		"4f05b14653316e72e0ab6e1686b49f1e3bd7eb2b4555130525d3c4f3746afc6c",
	}
	if got := sums(t, f); !slices.Equal(got, want) {
		t.Errorf("chains are %q", got)
	}
	c := chain{base: "3noos3smp0u4edlng46sp5533c"}
	if got := c.keyOf("ab"); got != "sha256:d6ff95978b4ffc18536fbb6230fb3496661c381a9e58478500fbeccfe66b16f6" {
		t.Errorf("the key of a step is %q", got)
	}
	const command = "sha256:da4580340eed27e794925257850675ffdae20abe684f5edb383570be98b1e95c"
	if got := CommandKey([]string{"make", "all"}, "src", []string{"B=2", "A=1"}); got != command {
		t.Errorf("the key of a command is %q", got)
	}
}

// TestWhatKeysDependOn: each change of a step changes its key and those of the steps after it, and nothing else does.
func TestWhatKeysDependOn(t *testing.T) {
	changes := map[string]struct {
		change func(f *File, dir string)
		same   bool
	}{
		"nothing":        {func(*File, string) {}, true},
		"name":           {func(f *File, _ string) { f.Steps[0].Name = "other" }, true},
		"excluded file":  {func(_ *File, dir string) { write(t, filepath.Join(dir, "in/sub/c.o"), "x") }, true},
		"file elsewhere": {func(_ *File, dir string) { write(t, filepath.Join(dir, "other"), "x") }, true},
		"times": {func(_ *File, dir string) {
			if err := os.Chtimes(filepath.Join(dir, "in/a"), time.Time{}, time.Unix(1, 0)); err != nil {
				t.Fatal(err)
			}
		}, true},
		"run":       {func(f *File, _ string) { f.Steps[0].Run = "make all" }, false},
		"dir":       {func(f *File, _ string) { f.Steps[0].Dir = "." }, false},
		"to":        {func(f *File, _ string) { f.Steps[0].To = "" }, false},
		"env":       {func(f *File, _ string) { f.Steps[0].Env["MODE"] = "test" }, false},
		"all env":   {func(f *File, _ string) { f.Env["CI"] = "2" }, false},
		"secrets":   {func(f *File, _ string) { f.Steps[0].Secrets = nil }, false},
		"no copy":   {func(f *File, _ string) { f.Steps[0].Copy = nil }, false},
		"content":   {func(_ *File, dir string) { write(t, filepath.Join(dir, "in/a"), "Content") }, false},
		"new file":  {func(_ *File, dir string) { write(t, filepath.Join(dir, "in/new"), "") }, false},
		"empty dir": {func(_ *File, dir string) { _ = os.Mkdir(filepath.Join(dir, "in/dir"), 0o755) }, false},
		"mode":      {func(_ *File, dir string) { _ = os.Chmod(filepath.Join(dir, "in/a"), 0o600) }, false},
		"moved": {func(_ *File, dir string) {
			_ = os.Rename(filepath.Join(dir, "in/a"), filepath.Join(dir, "in/z"))
		}, false},
		"link": {func(_ *File, dir string) {
			_ = os.Remove(filepath.Join(dir, "in/sub/link"))
			_ = os.Symlink("../b", filepath.Join(dir, "in/sub/link"))
		}, false},
	}
	for name, c := range changes {
		t.Run(name, func(t *testing.T) {
			f, dir := world(t)
			before := sums(t, f)
			c.change(f, dir)
			after := sums(t, f)
			for i := range before {
				if (before[i] == after[i]) != c.same {
					t.Errorf("step %d: %s, then %s", i+1, before[i], after[i])
				}
			}
		})
	}

	// A change of a later step leaves the earlier ones alone.
	f, _ := world(t)
	before := sums(t, f)
	f.Steps[1].Run = "false"
	if after := sums(t, f); after[0] != before[0] || after[1] == before[1] {
		t.Errorf("%q, then %q", before, after)
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"golden = 1":                "line 1, column 10",
		"golden = \"a\"\nbogus = 1": `line 2: there is no key "bogus"`,
		"[[step]]\nrun = \"x\"\n[[step]]\nrum = \"x\"": `line 4: there is no key "step.rum"`,
		"x":                                                                "line 1",
		"from = \"b\"":                                                     "it has no step",
		"[[step]]":                                                         "step 1: it has neither run nor copy",
		"[[step]]\nrun = \"x\"\nto = \"y\"":                                "to and exclude need copy",
		"[[step]]\ncopy = [\"x\"]\ndir = \"y\"":                            "dir, env and secrets need run",
		"[[step]]\ncopy = [\"/etc\"]":                                      `"/etc" leads out`,
		"[[step]]\ncopy = [\"a/../../b\"]":                                 "leads out",
		"[[step]]\nrun = \"x\"\ndir = \"..\"":                              "leads out",
		"[[step]]\ncopy = [\"x\"]\nexclude = [\"[\"]":                      "malformed",
		"[[step]]\nrun = \"x\"\nenv = { PANDO_X = \"1\" }":                 "sets this variable itself",
		"[[step]]\nrun = \"x\"\nenv = { PWD = \"1\" }":                     "sets this variable itself",
		"[env]\n\"A B\" = \"1\"\n[[step]]\nrun = \"x\"":                    "not the name of a variable",
		"[[step]]\nrun = \"x\"\nenv = { A = \"1\" }\nsecrets = [\"A\"]":    "in env and in secrets",
		"[[step]]\nname = \"a b\"\nrun = \"x\"":                            "cannot be a name",
		"[[step]]\nname = \"2\"\nrun = \"x\"\n[[step]]\nrun = \"x\"":       `another step is named "2"`,
		"[[step]]\nname = \"a\"\nrun = \"x\"\n[[step]]\nrun = \"\\u0000\"": "NUL",
	} {
		_, err := parse("f", []byte(text))
		if !errs.Is(err, errs.Invalid) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
}

// TestCopyStaysInside: links in a clone do not lead a copy out of it, and a file that changes is noticed.
func TestCopyStaysInside(t *testing.T) {
	f, dir := world(t)
	s := &f.Steps[0]
	all, err := f.inputs(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}

	clone, outside := t.TempDir(), t.TempDir()
	if err := os.Symlink(outside, filepath.Join(clone, "src")); err != nil {
		t.Fatal(err)
	}
	if err := f.copyInputs(t.Context(), s, all, clone); err == nil {
		t.Error("it followed a link out of the clone")
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
		t.Errorf("it wrote outside: %v, %v", left, err)
	}

	// What is in the way is replaced, also a link to elsewhere.
	clone = t.TempDir()
	write(t, filepath.Join(outside, "victim"), "untouched")
	if err := os.MkdirAll(filepath.Join(clone, "src/in"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(outside, "victim"), filepath.Join(clone, "src/in/a")); err != nil {
		t.Fatal(err)
	}
	if err := f.copyInputs(t.Context(), s, all, clone); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(outside, "victim")); string(b) != "untouched" {
		t.Errorf("it wrote through a link: %q, %v", b, err)
	}
	if b, err := os.ReadFile(filepath.Join(clone, "src/in/a")); string(b) != "content" {
		t.Errorf("the copy has %q, %v", b, err)
	}
	if _, err := os.Lstat(filepath.Join(clone, "src/in/sub/b.o")); err == nil {
		t.Error("it copied what is excluded")
	}

	write(t, filepath.Join(dir, "in/a"), "changed")
	if err := f.copyInputs(t.Context(), s, all, clone); !errs.Is(err, errs.Conflict) {
		t.Errorf("a file that has changed: %v", err)
	}

	// Inputs are not read through links out of the directory of the build file.
	if err := os.Symlink(outside, filepath.Join(dir, "way-out")); err != nil {
		t.Fatal(err)
	}
	if _, err := f.inputs(t.Context(), &Step{Copy: []string{"way-out/victim"}}); err == nil {
		t.Error("it read an input outside")
	}
}

func TestEnvironment(t *testing.T) {
	caller := []string{"A=1", "B=2", "B=3", "PATH=/own"}
	env, err := Environment("test", []string{"B", "C=x=y", "HOME=/h"}, caller)
	want := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "B=3", "C=x=y",
		"HOME=/h"}
	if err != nil || !slices.Equal(env, want) {
		t.Errorf("%q, %v", env, err)
	}
	for _, bad := range []string{"", "=x", "D", "A B=1", "PANDO_POOL=x"} {
		if _, err := Environment("test", []string{bad}, caller); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestNamedLinks: a link that copy names is copied as a link, wherever it leads, and nothing behind it.
func TestNamedLinks(t *testing.T) {
	f, dir := world(t)
	links := map[string]string{"to-dir": "in", "to-file": "in/a", "out": "/etc/passwd", "dangling": "no"}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}

	s := &Step{Copy: []string{"to-dir", "to-file", "out", "dangling", "./to-dir"}}
	all, err := f.inputs(t.Context(), s)
	if err != nil || len(all) != 4 {
		t.Fatalf("%+v, %v", all, err)
	}
	to := t.TempDir()
	if err := f.copyInputs(t.Context(), s, all, to); err != nil {
		t.Fatal(err)
	}
	for name, target := range links {
		if got, err := os.Readlink(filepath.Join(to, name)); err != nil || got != target {
			t.Errorf("%s leads to %q, %v", name, got, err)
		}
	}
}

// TestEmptyPath: an empty path is a mistake, and not the directory with all its files.
func TestEmptyPath(t *testing.T) {
	_, err := parse("pando.toml", []byte("[[step]]\ncopy = [\"in\", \"\"]\n"))
	if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "empty path") {
		t.Errorf("%v", err)
	}
}

// TestInputBecomesPipe: a file that a pipe replaces after it was listed fails the build, which does not wait for a
// writer.
func TestInputBecomesPipe(t *testing.T) {
	f, dir := world(t)
	s := &Step{Copy: []string{"in/a"}}
	all, err := f.inputs(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "in/a")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "in/a"), 0o600); err != nil {
		t.Fatal(err)
	}

	done := make(chan error, 1)
	go func() { done <- f.copyInputs(t.Context(), s, all, t.TempDir()) }()
	select {
	case err := <-done:
		if !errs.Is(err, errs.Conflict) {
			t.Errorf("%v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("it waits for the pipe")
	}
}
