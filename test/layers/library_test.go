package layers

import (
	"fmt"
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

// Packages below the front ends live in processes that are not theirs: of the command line today, of
// services later. What belongs to the process, its front end reads and passes on; and how people ask
// for something, its front end says.

// isFrontEnd reports whether a package may do what is forbidden to others: programs, front ends,
// and help for tests.
func isFrontEnd(pkg string) bool {
	top, _, _ := strings.Cut(pkg, "/")
	return top == "cmd" || top == "tools" || top == "test" || table[pkg].support ||
		strings.HasPrefix(pkg, "internal/front/") || strings.HasSuffix(pkg, "/testdata")
}

// ofTheFrontEnd are the functions, variables and types by which a package would use what belongs to
// the process, or word what people read, by import path; "*" is all of a package.
var ofTheFrontEnd = map[string][]string{
	"os": {"Getenv", "LookupEnv", "Environ", "ExpandEnv", "Setenv", "Unsetenv", "Clearenv", "Args", "Executable",
		"Exit", "TempDir", "UserHomeDir", "UserCacheDir", "UserConfigDir", "Chdir", "Stdin", "Stdout", "Stderr"},
	"os/signal":             {"*"},
	"flag":                  {"*"},
	"log":                   {"*"},
	"syscall":               {"Getenv", "Setenv", "Environ", "Exec", "Umask", "Chdir"},
	"golang.org/x/sys/unix": {"Getenv", "Setenv", "Environ", "Exec", "Umask", "Chdir"},
	// What is printed to people is rendered by the front end: HintIn has the data.
	"pando/internal/base/errs": {"HintOf", "Neutral"},
	"net/http":                 {"ProxyFromEnvironment", "DefaultClient", "DefaultTransport"},
	"golang.org/x/oauth2/google": {"FindDefaultCredentials", "FindDefaultCredentialsWithParams", "DefaultClient",
		"DefaultTokenSource"},
	"github.com/minio/minio-go/v7/pkg/credentials": {"EnvAWS", "NewEnvAWS", "EnvMinio", "NewEnvMinio",
		"FileAWSCredentials", "NewFileAWSCredentials", "FileMinioClient", "NewFileMinioClient", "IAM", "NewIAM"},
}

// allowed are the uses that there are good reasons for, by file.
var allowed = map[string][]string{
	"internal/observe/doctor/host.go": {"pando/internal/base/errs.Neutral"}, // unless its front end has words of its own
	// Main calls it first: from there on the process is the guard's, and nothing else's.
	"internal/linux/freeze/freeze.go": {"os/signal.Ignore", "os.Exit", "/proc/self/exe"},
	"internal/linux/mount/idmap.go":   {"/proc/self/exe"}, // a program that is there; not one instruction of it runs
	// Access.Ambient permits it.
	"internal/remote/objstore/gcs/open.go": {"golang.org/x/oauth2/google.FindDefaultCredentials"},
	"internal/remote/objstore/s3/credentials.go": {"github.com/minio/minio-go/v7/pkg/credentials.FileAWSCredentials",
		"github.com/minio/minio-go/v7/pkg/credentials.IAM"},
}

// frontEndUses lists what a file uses of these.
func frontEndUses(f *ast.File) []string {
	names := map[string]string{} // of imports
	for _, s := range f.Imports {
		path, _ := strconv.Unquote(s.Path.Value)
		if _, watched := ofTheFrontEnd[path]; !watched {
			continue
		}
		name := path[strings.LastIndex(path, "/")+1:]
		if s.Name != nil {
			name = s.Name.Name
		}
		names[name] = path
	}
	var used []string
	if path, dot := names["."]; dot {
		used = append(used, path+".*")
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && names[x.Name] != "" {
				if path := names[x.Name]; slices.Contains(ofTheFrontEnd[path], n.Sel.Name) || ofTheFrontEnd[path][0] == "*" {
					used = append(used, path+"."+n.Sel.Name)
				}
			}
		case *ast.CallExpr: // a temporary file without a directory is wherever a variable says
			if s, ok := n.Fun.(*ast.SelectorExpr); ok && len(n.Args) > 0 &&
				(s.Sel.Name == "MkdirTemp" || s.Sel.Name == "CreateTemp") {
				if dir, ok := n.Args[0].(*ast.BasicLit); ok && dir.Value == `""` {
					used = append(used, "os."+s.Sel.Name+`("")`)
				}
			}
		case *ast.BasicLit:
			if text, err := strconv.Unquote(n.Value); err == nil && strings.Contains(text, "/proc/self/exe") {
				used = append(used, "/proc/self/exe")
			}
		}
		return true
	})
	return used
}

// speakers may write words of the command line: they run pando's commands, or print what to type in a
// shell, and are part of the command line for that.
var speakers = []string{"internal/bench", "internal/observe/syncbench", "internal/observe/doctor",
	"internal/observe/diagnose", "internal/observe/iostat"}

// systemCalls are words of the kernel that look like flags.
var systemCalls = []string{"mount --make-rprivate /"}

var (
	otherProgram = regexp.MustCompile("`[^`]*`")
	flag         = regexp.MustCompile(`(^|[^-\w])--[a-z]`)
	ourCommand   = regexp.MustCompile("`pando\\b")
)

// commandWords lists the texts in which a file names commands or flags of the command line.
// hintsOnly: only texts of messages.
func commandWords(f *ast.File, hintsOnly bool) []string {
	var found []string
	look := func(n ast.Node) bool {
		lit, ok := n.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING {
			return true
		}
		text, err := strconv.Unquote(lit.Value)
		if err != nil || slices.Contains(systemCalls, text) {
			return true
		}
		plain := otherProgram.ReplaceAllStringFunc(text, func(s string) string {
			if ourCommand.MatchString(s) {
				return s
			}
			return ""
		})
		// Arguments of other programs are single words.
		if ourCommand.MatchString(plain) || flag.MatchString(plain) && (hintsOnly || strings.ContainsAny(text, " \n")) {
			found = append(found, text)
		}
		return true
	}
	if !hintsOnly {
		ast.Inspect(f, look)
		return found
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if s, ok := n.Fun.(*ast.SelectorExpr); ok && slices.Contains([]string{"WithHint", "Messagef"}, s.Sel.Name) {
				for _, a := range n.Args {
					ast.Inspect(a, look)
				}
			}
		case *ast.KeyValueExpr:
			if k, ok := n.Key.(*ast.Ident); ok && k.Name == "Hint" {
				ast.Inspect(n.Value, look)
			}
		case *ast.AssignStmt:
			for i, l := range n.Lhs {
				if s, ok := l.(*ast.SelectorExpr); ok && s.Sel.Name == "Hint" && i < len(n.Rhs) {
					ast.Inspect(n.Rhs[i], look)
				}
			}
		}
		return true
	})
	return found
}

// libraryFiles calls fn for each file below the front ends that is no test.
func libraryFiles(t *testing.T, fn func(path, pkg string, f *ast.File)) {
	t.Helper()
	const root = "../.."
	seen := 0
	err := filepath.WalkDir(filepath.Join(root, "internal"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		pkg := filepath.ToSlash(filepath.Dir(rel))
		if isFrontEnd(pkg) || strings.Contains(pkg, "/testdata/") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		seen++
		fn(rel, pkg, f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 100 {
		t.Fatalf("only %d files found: this test looks in the wrong place", seen)
	}
}

func TestLibrariesLeaveTheProcessAlone(t *testing.T) {
	unused := map[string]bool{}
	for file, uses := range allowed {
		for _, u := range uses {
			unused[file+": "+u] = true
		}
	}
	libraryFiles(t, func(path, _ string, f *ast.File) {
		for _, use := range frontEndUses(f) {
			delete(unused, path+": "+use)
			if !slices.Contains(allowed[path], use) {
				t.Errorf("%s uses %s, which belongs to the front end: let that do it, and pass on what is needed", path,
					use)
			}
		}
	})
	for u := range unused {
		t.Errorf("%s is allowed, but nothing uses it", u)
	}
}

func TestLibrariesDoNotSpeakOfTheCommandLine(t *testing.T) {
	libraryFiles(t, func(path, pkg string, f *ast.File) {
		for _, text := range commandWords(f, slices.Contains(speakers, pkg)) {
			t.Errorf("%s: %q has words of the command line: use errs.Run, errs.Param and errs.Variable in a message", path, text)
		}
	})
}

// A made-up file for each rule must be found out.
func TestLibraryRulesFindViolations(t *testing.T) {
	for _, c := range []struct{ text, used, words, hints string }{
		{"import \"os\"\nvar x = os.Getenv(\"X\")", "[os.Getenv]", "[]", "[]"},
		{"import \"os\"\nvar x = os.LookupEnv", "[os.LookupEnv]", "[]", "[]"},
		{"import o \"os\"\nfunc init() { if o.Args[0] == \"x\" { o.Exit(1) } }", "[os.Args os.Exit]", "[]", "[]"},
		{"import \"os\"\nvar x, _ = os.MkdirTemp(\"\", \"x\")", `[os.MkdirTemp("")]`, "[]", "[]"},
		{"import \"os\"\nvar x, _ = os.MkdirTemp(dir, \"x\")", "[]", "[]", "[]"},
		{"import \"os/signal\"\nfunc f() { signal.Notify(nil) }", "[os/signal.Notify]", "[]", "[]"},
		{"import . \"os/signal\"\nfunc f() { Notify(nil) }", "[os/signal.*]", "[]", "[]"},
		{"import \"os/exec\"\nvar x = exec.Command(\"/proc/self/exe\", \"--size=1\")", "[/proc/self/exe]", "[]", "[]"},
		{"import \"net/http\"\nvar x = http.ProxyFromEnvironment", "[net/http.ProxyFromEnvironment]", "[]", "[]"},
		{"func f() { e.WithHint(\"leave --size out\") }", "[]", "[leave --size out]", "[leave --size out]"},
		{"func f() { e.WithHint(\"%s\", \"--size\") }", "[]", "[]", "[--size]"},
		{"func f() { e.Hint = \"`pando gc`\" }", "[]", "[`pando gc`]", "[`pando gc`]"},
		{"var x = errs.Error{Hint: \"`pando gc`\"}", "[]", "[`pando gc`]", "[`pando gc`]"},
		{"var x = errs.Messagef(\"see `pando ls`\")", "[]", "[see `pando ls`]", "[see `pando ls`]"},
		{"var x = \"see `pando ls`\"", "[]", "[see `pando ls`]", "[]"},
		{"func f() { e.WithHint(\"`fsfreeze --unfreeze %s` thaws it\", dir) }", "[]", "[]", "[]"},
		{"// see `pando ls --json`\nvar x = \"mkfs\"", "[]", "[]", "[]"},
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "made-up.go", "package x\n"+c.text, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(frontEndUses(f)); got != c.used {
			t.Errorf("%s\nuses %s, want %s", c.text, got, c.used)
		}
		if got := fmt.Sprint(commandWords(f, false)); got != c.words {
			t.Errorf("%s\nhas words %s, want %s", c.text, got, c.words)
		}
		if got := fmt.Sprint(commandWords(f, true)); got != c.hints {
			t.Errorf("%s\nhas words in hints %s, want %s", c.text, got, c.hints)
		}
	}
}
