package catalog

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pando/internal/driver"
)

// unnoted are the functions that write rows which users see, and need not note a change. The value says why.
var unnoted = map[string]string{
	"SetUsage":    "a measurement",
	"SetUsed":     "only when it was last used",
	"SetBase":     "part of a publish, which is noted",
	"putMount":    "RecordMount notes it",
	"deleteMount": "its callers note what it is part of",
	"setName":     "RenameVolume and RenameSnapshot note it",

	"DeleteEmptyGolden": "the end of its last generation is noted",
}

// writes matches statements that change rows which users see.
var writes = regexp.MustCompile(`(INSERT( OR [A-Z]+)? INTO|UPDATE|DELETE FROM)\s+(objects|goldens|attachments)\b`)

// TestEveryChangeIsNoted: a function that writes to the tables of objects, goldens or mounts notes a change for the
// history, or unnoted says why not.
func TestEveryChangeIsNoted(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}

	writers := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || !writesRows(fn) {
				continue
			}
			writers++
			name := fn.Name.Name
			if _, excused := unnoted[name]; excused == notes(fn) {
				t.Errorf("%s must note a change, or else be in unnoted (is: %v)", name, excused)
			}
		}
	}
	if writers < 15 {
		t.Errorf("found only %d functions that write", writers)
	}
}

func writesRows(fn *ast.FuncDecl) (found bool) {
	ast.Inspect(fn, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			text, err := strconv.Unquote(lit.Value)
			found = found || err == nil && writes.MatchString(strings.ReplaceAll(text, "\n", " "))
		}
		return true
	})
	return found
}

// notes reports whether a function calls one of those that note a change.
func notes(fn *ast.FuncDecl) (found bool) {
	ast.Inspect(fn, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			found = found || slices.Contains([]string{"note", "noteID", "noteDestroyed", "noteGolden", "addNote"}, s.Sel.Name)
		}
		return true
	})
	return found
}

// TestOnlyCommittedChangesAreTold: what a transaction that failed has changed is not told.
func TestOnlyCommittedChangesAreTold(t *testing.T) {
	c, ctx := openCatalog(t), t.Context()
	var told []Change
	c.OnChange(func(_ context.Context, all []Change) { told = append(told, all...) })
	put := func(name string, then error) error {
		return c.Update(ctx, Soft, func(tx *Tx) error {
			id := driver.Identity{ID: driver.NewID(), Kind: driver.Volume, Name: name}
			return errors.Join(tx.PutObject(Row{Identity: id}), then)
		})
	}

	failed := errors.New("failed")
	if err := put("a", failed); !errors.Is(err, failed) || len(told) > 0 {
		t.Errorf("%v, told %+v", err, told)
	}
	if err := put("b", nil); err != nil || len(told) != 1 || told[0].Ref != "b" || told[0].Kind != Made {
		t.Errorf("%v, told %+v", err, told)
	}
}
