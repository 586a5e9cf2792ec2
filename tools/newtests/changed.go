//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path"
	"reflect"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// test is a top-level test that the change adds or edits.
type test struct {
	pkg, name string  // its directory, below the module's
	seconds   float64 // that it takes; negative if that is not known yet
	often     int     // how often it is to run
	passed    int     // how often it has passed
	skipped   bool    // by itself
	failed    bool
}

// changedTests returns the tests of the work tree whose code differs from the commit's.
func changedTests(commit string) (all []*test, err error) {
	dirs, err := changedDirs(commit)
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		before, berr := testsOf(dir, func(name string) ([]byte, error) { return git("show", commit+":"+name) },
			"ls-tree", "-z", "--name-only", commit, dir+"/")
		after, aerr := testsOf(dir, os.ReadFile, "ls-files", "-z", "-co", "--exclude-standard", dir+"/")
		if err := errors.Join(berr, aerr); err != nil {
			return nil, err
		}
		for _, name := range slices.Sorted(maps.Keys(after)) {
			if after[name] != before[name] {
				all = append(all, &test{pkg: dir, name: name, seconds: -1})
			}
		}
	}
	return all, nil
}

// changedDirs returns the directories of test files that differ, without other modules and testdata.
func changedDirs(commit string) ([]string, error) {
	tracked, err := names("diff", "-z", "--no-renames", "--name-only", commit, "--", "*_test.go")
	if err != nil {
		return nil, err
	}
	untracked, err := names("ls-files", "-z", "-o", "--exclude-standard", "--", "*_test.go")
	if err != nil {
		return nil, err
	}

	dirs := map[string]bool{}
	for _, name := range slices.Concat(tracked, untracked) {
		if dir := path.Dir(name); isPackage(dir) {
			dirs[dir] = true
		}
	}
	return slices.Sorted(maps.Keys(dirs)), nil
}

// isPackage reports whether `./...` includes a directory.
func isPackage(dir string) bool {
	for ; dir != "."; dir = path.Dir(dir) {
		if _, err := os.Stat(path.Join(dir, "go.mod")); err == nil {
			return false
		}
		if base := path.Base(dir); base == "testdata" || strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") {
			return false
		}
	}
	return true
}

func git(args ...string) ([]byte, error) {
	cmd := exec.Command("git", args...)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("git %s: %w\n%s", strings.Join(args, " "), err, &complaint)
	}
	return out, nil
}

// names returns the names that a command of git prints with -z.
func names(args ...string) ([]string, error) {
	out, err := git(args...)
	return strings.FieldsFunc(string(out), func(r rune) bool { return r == 0 }), err
}

// testsOf returns the code of each test in a directory. A command of git lists its files.
func testsOf(dir string, read func(name string) ([]byte, error), list ...string) (map[string]string, error) {
	files, err := names(list...)
	if err != nil {
		return nil, err
	}

	code := map[string]string{}
	for _, name := range files {
		if path.Dir(name) != dir || !strings.HasSuffix(name, "_test.go") {
			continue
		}
		text, err := read(name)
		if errors.Is(err, os.ErrNotExist) { // removed, but not from the index
			continue
		}
		if err != nil {
			return nil, err
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && isTest(fn) {
				code[fn.Name.Name] = codeOf(fn)
			}
		}
	}
	return code, nil
}

// isTest reports whether a function is a test, as go test sees it.
func isTest(fn *ast.FuncDecl) bool {
	rest, ok := strings.CutPrefix(fn.Name.Name, "Test")
	first, _ := utf8.DecodeRuneInString(rest)
	return ok && fn.Recv == nil && !unicode.IsLower(first) && fn.Name.Name != "TestMain" && len(fn.Type.Params.List) == 1
}

// codeOf is a function's syntax tree, which does not depend on comments and format.
func codeOf(fn *ast.FuncDecl) string {
	var out strings.Builder
	isCode := func(_ string, v reflect.Value) bool { return v.Type() != reflect.TypeFor[token.Pos]() }
	if err := ast.Fprint(&out, nil, fn, isCode); err != nil {
		panic(err) // a Builder takes everything
	}
	return out.String()
}
