// Package build runs the steps of a build file, each in a clone of the result of the one before, and keeps all results:
// a step runs again only if it, its input files, or a step before it has changed. With a remote, hosts share results.
package build

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/tomlfile"
)

const op = "build"

// File is a build file. Its form is stable: see docs/builds.md.
type File struct {
	Golden string            `toml:"golden"` // gets the result of the last step
	From   string            `toml:"from"`   // what the first step begins with
	Env    map[string]string `toml:"env"`    // of all commands
	Steps  []Step            `toml:"step"`

	dir  string // that input files are relative to
	path string
}

// Step is one step of a build file.
type Step struct {
	Name    string            `toml:"name"`    // for people, and to stop there; "": its number
	Copy    []string          `toml:"copy"`    // input files and directories, relative to the directory of the build file
	To      string            `toml:"to"`      // directory of the clone that they are copied to; "": its root
	Exclude []string          `toml:"exclude"` // patterns of paths or names that are not copied
	Run     string            `toml:"run"`     // shell commands; "": none
	Dir     string            `toml:"dir"`     // directory of the clone that they run in; "": its root
	Env     map[string]string `toml:"env"`     // of this command, in addition
	Secrets []string          `toml:"secrets"` // variables that the command gets from the caller, and no key depends on
}

// maxSteps limits the number of steps.
const maxSteps = 500

// ReadFile reads a build file. NotFound, Invalid (with the line).
func ReadFile(name string) (*File, error) {
	text, err := tomlfile.Read(op, "a build file", name)
	if err != nil {
		return nil, err
	}
	abs, err := filepath.Abs(name)
	if err != nil {
		return nil, errs.Wrap(op, name, err)
	}

	f, err := parse(name, text)
	if err != nil {
		return nil, err
	}
	f.dir = filepath.Dir(abs)
	return f, nil
}

// parse reads the text of a build file. Invalid.
func parse(name string, text []byte) (*File, error) {
	f := &File{path: name}
	err := tomlfile.Decode(op, name, text, f,
		"keys are golden, from and env, and of a step: name, copy, to, exclude, run, dir, env and secrets")
	if err != nil {
		return nil, err
	}
	return f, f.check()
}

// check refuses what no build can do. Invalid.
func (f *File) check() error {
	bad := func(step int, format string, args ...any) *errs.Error {
		text := fmt.Sprintf(format, args...)
		if step >= 0 {
			text = fmt.Sprintf("step %d: %s", step+1, text)
		}
		return errs.New(errs.Invalid, op, f.path, "%s", text)
	}

	switch {
	case len(f.Steps) == 0:
		return bad(-1, "it has no step").WithHint("begin one with the line [[step]]")
	case len(f.Steps) > maxSteps:
		return bad(-1, "it has %d steps, and at most %d are possible", len(f.Steps), maxSteps)
	}
	if err := checkEnv(f.Env); err != nil {
		return bad(-1, "env: %v", err)
	}

	names := map[string]bool{}
	for i := range f.Steps {
		s := &f.Steps[i]
		if s.Name == "" {
			s.Name = fmt.Sprint(i + 1)
		}
		if err := ref.CheckName(op, s.Name); err != nil {
			return bad(i, "%q cannot be a name", s.Name).WithHint("use letters, digits, . _ and -")
		}
		if names[s.Name] {
			return bad(i, "another step is named %q, too", s.Name)
		}
		names[s.Name] = true
		if text := s.problem(); text != "" {
			return bad(i, "%s", text)
		}
	}
	return nil
}

// problem returns why a step is impossible; "" if it is possible.
func (s *Step) problem() string {
	if s.Run == "" && len(s.Copy) == 0 {
		return "it has neither run nor copy"
	}
	if len(s.Copy) == 0 && (s.To != "" || len(s.Exclude) > 0) {
		return "to and exclude need copy"
	}
	if s.Run == "" && (s.Dir != "" || len(s.Env) > 0 || len(s.Secrets) > 0) {
		return "dir, env and secrets need run"
	}
	if strings.ContainsRune(s.Run, 0) {
		return "run contains a NUL character"
	}

	if slices.Contains(s.Copy, "") {
		return `copy contains an empty path: the directory of the build file is "."`
	}
	for _, p := range slices.Concat(s.Copy, []string{s.To, s.Dir}) {
		if p != "" && !filepath.IsLocal(p) {
			return fmt.Sprintf("%q leads out of its directory", p)
		}
	}
	for _, p := range s.Exclude {
		if _, err := path.Match(p, ""); err != nil {
			return fmt.Sprintf("the pattern %q is malformed", p)
		}
	}

	if err := checkEnv(s.Env); err != nil {
		return fmt.Sprintf("env: %v", err)
	}
	for _, name := range s.Secrets {
		if err := checkVariable(op, name); err != nil {
			return fmt.Sprintf("secrets: %v", err)
		}
		_, here := s.Env[name]
		if here {
			return fmt.Sprintf("%s is in env and in secrets", name)
		}
	}
	return ""
}

func checkEnv(env map[string]string) error {
	for name, value := range env {
		if err := checkVariable(op, name); err != nil {
			return err
		}
		if strings.ContainsRune(value, 0) {
			return fmt.Errorf("%s contains a NUL character", name)
		}
	}
	return nil
}

// environment returns the declared environment of a step, without its secrets.
func (f *File) environment(s *Step) []string {
	env := slices.Clone(standardEnv)
	for _, vars := range []map[string]string{f.Env, s.Env} {
		for name, value := range vars {
			env = set(env, name, value)
		}
	}
	slices.Sort(env)
	return env
}
