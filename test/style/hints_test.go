package style

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A hint is followed without thinking: it must never cost data, or give files to somebody. It may name the help of a
// command that does.

// destroyers are the operations that remove what users made, or let go of it.
var destroyers = []string{"destroy", "deinit", "prune", "golden rm", "remote rm", "remote delete", "remote prune"}

// harmful matches the texts of hints that cost data.
var harmful = regexp.MustCompile("(?i)`?\\b(rm|chown|mkfs|wipefs|zpool destroy|zfs destroy)\\b [^.]|" +
	"\\b(destroy|discard|delete) (it|them|the|that)\\b|--(force|discard|lose-keys)\\b")

// allowedHints are harmful by these rules, and right.
var allowedHints = []string{
	"bring it up to date with %s, or publish it anyway with %s", // no generation is lost
	"deletion of this pool was interrupted; finish it with %s",  // what is left is no pool
	"move it away or unmount it, then run %s again",             // the user has asked for it
	"move them to another dataset, then run %s again",           // the same
	"restore the newer state of the remote if you can; to continue from the older one, run %s",
}

// forceable are packages whose --force destroys nothing: images that are imported in spite of doubts, and comparisons.
var forceable = []string{"import_image.go", "inside.go", "compare.go", "import.go"}

// badHints lists the hints in a file that cost data.
func badHints(name string, f *ast.File) (bad []string) {
	ast.Inspect(f, func(n ast.Node) bool {
		text, args := hintOf(n)
		if text == "" || slices.Contains(allowedHints, text) {
			return true
		}
		if harmful.MatchString(text) || slices.ContainsFunc(args, func(a ast.Expr) bool { return destroys(name, a) }) {
			bad = append(bad, text)
		}
		return true
	})
	return bad
}

// hintOf returns the text of a hint, and its arguments: of calls of WithHint and Messagef, and of values of Hint.
func hintOf(n ast.Node) (string, []ast.Expr) {
	switch n := n.(type) {
	case *ast.CallExpr:
		if name := calledName(n); (name == "WithHint" || name == "Messagef") && len(n.Args) > 0 {
			return joined(n.Args[0]), n.Args[1:]
		}
	case *ast.KeyValueExpr:
		if k, ok := n.Key.(*ast.Ident); ok && k.Name == "Hint" {
			return joined(n.Value), nil
		}
	case *ast.ValueSpec:
		for i, v := range n.Names {
			if strings.HasSuffix(v.Name, "Hint") && i < len(n.Values) {
				return joined(n.Values[i]), nil
			}
		}
	case *ast.AssignStmt:
		for i, l := range n.Lhs {
			s, is := l.(*ast.SelectorExpr)
			v, isVar := l.(*ast.Ident)
			if i < len(n.Rhs) && (is && s.Sel.Name == "Hint" || isVar && v.Name == "hint") {
				return joined(n.Rhs[i]), nil
			}
		}
	}
	return "", nil
}

// destroys reports whether an argument of a hint is an operation that costs data, or the parameter force of one.
func destroys(file string, a ast.Expr) bool {
	c, ok := a.(*ast.CallExpr)
	if !ok || len(c.Args) == 0 {
		return false
	}

	what := joined(c.Args[0])
	switch calledName(c) {
	case "Param":
		return slices.Contains([]string{"discard", "lose-keys"}, what) ||
			what == "force" && !slices.Contains(forceable, file)
	case "Run":
		help := slices.ContainsFunc(c.Args[1:], func(a ast.Expr) bool {
			p, ok := a.(*ast.CallExpr)
			return ok && calledName(p) == "Param" && slices.Contains([]string{"help", "dry-run"}, joined(p.Args[0]))
		})
		return !help && (slices.Contains(destroyers, what) ||
			slices.ContainsFunc(c.Args[1:], func(a ast.Expr) bool { return destroys(file, a) }))
	}
	return false
}

// calledName returns the name of the function that is called, without its package.
func calledName(c *ast.CallExpr) string {
	switch f := c.Fun.(type) {
	case *ast.SelectorExpr:
		return f.Sel.Name
	case *ast.Ident:
		return f.Name
	}
	return ""
}

// joined returns the text of an expression of string literals; a constant counts as its name, opDeinit as "deinit".
func joined(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, _ := strconv.Unquote(e.Value)
		return text
	case *ast.BinaryExpr:
		return joined(e.X) + joined(e.Y)
	case *ast.Ident:
		return strings.ToLower(strings.TrimPrefix(e.Name, "op"))
	case *ast.CallExpr:
		if calledName(e) == "Sprintf" {
			return joined(e.Args[0])
		}
	}
	return ""
}

// TestHintsCostNoData: no hint tells to destroy, overwrite or give away anything.
func TestHintsCostNoData(t *testing.T) {
	seen := 0
	err := filepath.WalkDir("../../internal", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		seen++
		for _, text := range badHints(d.Name(), f) {
			t.Errorf("%s: a hint costs data: %q", path, text)
		}
		return nil
	})
	if err != nil || seen < 100 {
		t.Errorf("read %d files, %v", seen, err)
	}
}

// TestBadHintsAreFound: the check finds what it is for.
func TestBadHintsAreFound(t *testing.T) {
	for code, bad := range map[string]bool{
		"e.WithHint(\"free space with %s\", errs.Run(\"destroy\", name))":                          true,
		"e.WithHint(\"finish with %s\", errs.Run(opDeinit, errs.Param(\"force\")))":                true,
		"e.WithHint(\"overwrite it with %s\", errs.Param(\"force\"))":                              true,
		"e.WithHint(\"give it up with %s\", errs.Run(\"umount\", errs.Param(\"discard\")))":        true,
		"e.WithHint(\"take it: `chown %d %s`\", 0, dir)":                                           true,
		"e.Hint = \"run `rm -r DIR`\"":                                                             true,
		"hint = fmt.Sprintf(\"destroy it first: %s\", x)":                                          true,
		"e.WithHint(\"see what it removes with %s\", errs.Run(\"destroy\", errs.Param(\"help\")))": false,
		"e.WithHint(\"remove %s\", errs.Param(\"size\"))":                                          false,
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\nfunc f() { "+code+" }", 0)
		if err != nil {
			t.Fatal(err)
		}
		if found := badHints("x.go", f); (len(found) > 0) != bad {
			t.Errorf("%s: found %q", code, found)
		}
	}
}
