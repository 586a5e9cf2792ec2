// Package style holds what can be checked of how Pando's source reads: phrases that sound translated, and long
// functions without paragraphs.
package style

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// longFunction is the length, in lines, above which a function needs paragraphs.
const longFunction = 25

// phrase is a wording that is refused.
type phrase struct {
	refused *regexp.Regexp
	instead string
}

// readPhrases reads phrases.txt.
func readPhrases(t *testing.T) (out []phrase) {
	t.Helper()
	text, err := os.ReadFile("phrases.txt")
	if err != nil {
		t.Fatal(err)
	}

	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "#") {
			continue
		}
		re, instead, ok := strings.Cut(line, "\t")
		if !ok {
			t.Fatalf("phrases.txt: %q has no tab", line)
		}
		out = append(out, phrase{regexp.MustCompile(re), instead})
	}

	return out
}

// sourceFiles returns the project's files that people read, relative to this package.
func sourceFiles(t *testing.T, suffixes ...string) (out []string) {
	t.Helper()
	const root = "../.."
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "style":
			return filepath.SkipDir // this list itself
		case d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "bin" || name == "out" || name == "dist"):
			return filepath.SkipDir
		case !d.IsDir() && slices.Contains(suffixes, filepath.Ext(name)):
			out = append(out, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 100 {
		t.Fatalf("only %d files found: this test looks in the wrong place", len(out))
	}
	return out
}

// findPhrases returns the lines of text that contain a refused phrase.
func findPhrases(phrases []phrase, name string, text []byte) (out []string) {
	for i, line := range bytes.Split(text, []byte("\n")) {
		for _, p := range phrases {
			if found := p.refused.Find(line); found != nil {
				out = append(out, name+":"+strconv.Itoa(i+1)+`: "`+string(found)+`": `+p.instead)
			}
		}
	}
	return out
}

func TestPhrases(t *testing.T) {
	phrases := readPhrases(t)
	for _, path := range sourceFiles(t, ".go", ".md", ".txtar", ".sh", ".py") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range findPhrases(phrases, strings.TrimPrefix(path, "../../"), text) {
			t.Error(found)
		}
	}
}

// TestPhrasesAreFound: the check itself finds each phrase of a sample.
func TestPhrasesAreFound(t *testing.T) {
	sample := []byte("it was gone on with\nthis is fine\n" + "it is no directory, also if mounted\n")
	got := findPhrases(readPhrases(t), "sample", sample)
	if len(got) != 3 || !strings.HasPrefix(got[0], "sample:1:") || !strings.HasPrefix(got[2], "sample:3:") {
		t.Errorf("%q", got)
	}
}

// withoutParagraphs returns the long functions of a file that have no blank line.
func withoutParagraphs(t *testing.T, name string, text []byte) (out []string) {
	t.Helper()
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, name, text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}

	lines := bytes.Split(text, []byte("\n"))
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Body == nil || len(fn.Body.List) < 2 {
			continue // one statement, such as a switch or a literal, is one paragraph
		}

		first, last := files.Position(fn.Body.Lbrace).Line, files.Position(fn.Body.Rbrace).Line
		if last-first-1 <= longFunction {
			continue
		}

		blank := func(l []byte) bool { return len(bytes.TrimSpace(l)) == 0 }
		if !slices.ContainsFunc(lines[first:last-1], blank) {
			out = append(out, name+":"+strconv.Itoa(first)+": "+fn.Name.Name+" has "+strconv.Itoa(last-first-1)+
				" lines and no blank one: separate its steps")
		}
	}

	return out
}

func TestLongFunctionsHaveParagraphs(t *testing.T) {
	for _, path := range sourceFiles(t, ".go") {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range withoutParagraphs(t, strings.TrimPrefix(path, "../../"), text) {
			t.Error(found)
		}
	}
}

func TestLongFunctionIsFound(t *testing.T) {
	body := strings.Repeat("\tx()\n", longFunction+1)
	if got := withoutParagraphs(t, "a.go", []byte("package a\nfunc f() {\n"+body+"}\n")); len(got) != 1 {
		t.Errorf("%q", got)
	}
	if got := withoutParagraphs(t, "a.go", []byte("package a\nfunc f() {\n\tx()\n\n"+body+"}\n")); len(got) != 0 {
		t.Errorf("%q", got)
	}
}

// TestChildrenKeepTheirThread: the kernel sends the signal of Pdeathsig when the thread ends that started the child,
// not the process. A goroutine that is not locked to its thread may leave it to one that ends with it.
func TestChildrenKeepTheirThread(t *testing.T) {
	dies, locked := map[string]bool{}, map[string]bool{} // by package
	for _, path := range sourceFiles(t, ".go") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Dir(path)
		dies[dir] = dies[dir] || bytes.Contains(text, []byte("Pdeathsig:"))
		locked[dir] = locked[dir] || bytes.Contains(text, []byte("runtime.LockOSThread()"))
	}

	for dir := range dies {
		if dies[dir] && !locked[dir] {
			t.Errorf("%s starts a child with Pdeathsig, and does not lock its thread", dir)
		}
	}
}
