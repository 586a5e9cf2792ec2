package layers

import (
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"testing"
)

// slowAtStart are functions whose work every command would wait for if a package variable called them: all commands
// start the whole program. Wrap them in sync.OnceValue.
var slowAtStart = []string{"regexp.MustCompile", "template.Must"}

func TestNothingSlowAtStart(t *testing.T) {
	libraryFiles(t, func(path, pkg string, f *ast.File) {
		if pkg == "internal/testing/servertest" {
			return // no part of the program
		}
		for _, call := range callsAtStart(f) {
			if slices.Contains(slowAtStart, call) {
				t.Errorf("%s calls %s when the program starts: use sync.OnceValue", path, call)
			}
		}
	})
}

func TestSlowStartIsFound(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "a.go", `package a
var bad = regexp.MustCompile("a")
var good = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile("a") })
func alsoGood() { regexp.MustCompile("a") }`, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := callsAtStart(f); !slices.Equal(got, []string{"regexp.MustCompile", "sync.OnceValue"}) {
		t.Errorf("%q", got)
	}
}

// callsAtStart lists the functions of packages that the package variables of a file call.
func callsAtStart(f *ast.File) []string {
	var calls []string
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.VAR {
			continue
		}
		ast.Inspect(g, func(n ast.Node) bool {
			if _, ok := n.(*ast.FuncLit); ok {
				return false // runs later
			}
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			if s, ok := call.Fun.(*ast.SelectorExpr); ok {
				if x, ok := s.X.(*ast.Ident); ok {
					calls = append(calls, x.Name+"."+s.Sel.Name)
				}
			}
			return true
		})
	}
	return calls
}
