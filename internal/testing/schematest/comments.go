package schematest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
)

// comments are the comments of fields, as they are in the source.
type comments struct {
	byType map[string]map[string]string // comments by field, by package path and type
}

// of returns the comment of a field. Where it names fields of its struct, it has their names in JSON.
func (c *comments) of(f field) string {
	id := f.in.PkgPath() + "." + f.in.Name()
	if c.byType[id] == nil {
		c.read(f.in.PkgPath())
	}
	text := c.byType[id][f.Name]
	for _, other := range fieldsOf(f.in) {
		word := regexp.MustCompile(`\b` + other.Name + `\b`)
		if other.Name != other.name && len(other.Name) > 2 {
			text = word.ReplaceAllString(text, "`"+other.name+"`")
		}
	}
	return text
}

// read reads the comments of a package.
func (c *comments) read(path string) {
	if c.byType == nil {
		c.byType = map[string]map[string]string{}
	}
	files, _ := filepath.Glob(filepath.Join(root(), strings.TrimPrefix(path, "pando/"), "*.go")) // the pattern is good
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			continue // it does not compile: the test that reads it cannot run
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if t, ok := n.(*ast.TypeSpec); ok {
				if s, ok := t.Type.(*ast.StructType); ok {
					c.byType[path+"."+t.Name.Name] = commentsOf(s)
				}
			}
			return true
		})
	}
}

// commentsOf are the comments of the fields of a struct.
func commentsOf(s *ast.StructType) map[string]string {
	out := map[string]string{}
	for _, f := range s.Fields.List {
		text := f.Doc.Text() + f.Comment.Text()
		for _, n := range f.Names {
			out[n.Name] = strings.Join(strings.Fields(text), " ")
		}
	}
	return out
}

// root is the directory of the module.
var root = sync.OnceValue(func() string {
	dir, err := os.Getwd()
	for err == nil && dir != "/" {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return "."
})
