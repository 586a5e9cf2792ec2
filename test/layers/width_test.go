package layers

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// maxMethods is the number of methods that a type must stay below. One with more does several things: what is done on
// the way to one of them belongs to a type of its own, as cloning, importing and destruction are.
const maxMethods = 150

// widths counts the methods of the types in a directory, without those in tests.
func widths(t *testing.T, dir string) map[string]int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%v in %s", err, dir)
	}

	out := map[string]int{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			fn, is := d.(*ast.FuncDecl)
			if !is || fn.Recv == nil {
				continue
			}
			of := fn.Recv.List[0].Type
			if p, is := of.(*ast.StarExpr); is {
				of = p.X
			}
			if name, is := of.(*ast.Ident); is {
				out[name.Name]++
			}
		}
	}
	return out
}

// TestTypesAreNarrow: the engine and the transaction, which every verb uses, do not become the place for everything.
func TestTypesAreNarrow(t *testing.T) {
	for dir, widest := range map[string]string{"engine": "Engine", "engine/catalog": "Tx"} {
		found := widths(t, filepath.Join("../../internal", dir))
		if found[widest] < 50 {
			t.Errorf("only %d methods of %s found: this test looks in the wrong place", found[widest], widest)
		}
		for name, n := range found {
			if n >= maxMethods {
				t.Errorf("%s.%s has %d methods, wanted less than %d: move what one of them needs to a type of its own", dir,
					name, n, maxMethods)
			}
		}
	}
}
