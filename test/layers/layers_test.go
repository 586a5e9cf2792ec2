// Package layers checks that packages import only what is below them. The table
// is the architecture: see ARCHITECTURE.md for what each package is for.
package layers

import (
	"bytes"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "pando/"

// layer says what a package may import of this module. Everything may import
// the standard library and the modules in go.mod.
type layer struct {
	imports []string // exact packages, or groups of them in braces
	tests   []string // and these its tests, besides all that imports lead to
	support bool     // it helps tests: only tests, and other such packages, may import it
}

// groups are names for several packages.
var groups = map[string][]string{
	// What any package may use: words, errors, numbers of progress.
	"{words}": {"internal/errs", "internal/ref", "internal/progress", "internal/waiting", "internal/warnings"},
	// Leaves: one thing of the kernel or of a file format each; they know
	// nothing of pools and volumes.
	"{leaves}": {"internal/kernel", "internal/loopdev", "internal/mount", "internal/extent", "internal/run",
		"internal/zfs", "internal/fsprobe", "internal/treewalk", "internal/treecopy", "internal/treediff", "internal/freeze", "internal/durable", "internal/btrfsstream", "internal/treestream", "internal/blockdev", "internal/stack", "internal/tracepoint", "internal/proof"},
	// What keeps objects, each in its own way; cmd/pando chooses.
	"{drivers}": {"internal/driver/reflink", "internal/driver/btrfs", "internal/driver/plain", "internal/driver/zfs"},
	// What makes tests short.
	"{support}": {"internal/testfs", "internal/faulttest", "internal/driver/drivertest", "internal/treecopy/treetest", "internal/objstore/storetest", "internal/objstore/servertest"},
}

// table is the order of the packages, top to bottom. A new package goes in here,
// with what it needs and no more.
var table = map[string]layer{
	"cmd/pando": {imports: []string{"internal/cli", "internal/engine", "{drivers}"}},

	// Front ends: the only ones that print.
	"internal/cli": {
		imports: []string{"internal/engine", "internal/check", "internal/replicate", "internal/bench", "internal/syncbench", "internal/diagnose", "internal/iostat", "internal/doctor", "internal/pool", "internal/driver", "{words}"},
		tests:   []string{"{drivers}"},
	},

	// What Pando does.
	"internal/bench": {
		imports: []string{"internal/iostat", "internal/engine", "internal/catalog", "internal/pool", "internal/driver", "{leaves}", "{words}"},
		tests:   []string{"{drivers}"},
	},
	"internal/replicate": {
		imports: []string{
			"internal/engine",
			"internal/repo",
			"internal/objstore",
			"internal/objstore/file",
			"internal/objstore/s3",
			"internal/objstore/gcs",
			"internal/driver",
			"internal/durable",
			"internal/fsprobe",
			"{words}",
		},
		tests: []string{"{drivers}"},
	},
	"internal/engine": {
		imports: []string{"internal/check", "internal/content", "internal/ledger", "internal/mountpoint", "internal/pool", "internal/catalog", "internal/driver", "{leaves}", "{words}"},
		tests:   []string{"{drivers}"},
	},

	// What is wrong with a pool, and mending it.
	"internal/check": {
		imports: []string{"internal/content", "internal/ledger", "internal/mountpoint", "internal/pool", "internal/catalog", "internal/driver", "{leaves}", "{words}"},
	},

	// Who is at work on what, and what is left of operations that are no more.
	"internal/ledger": {
		imports: []string{"internal/catalog", "internal/driver", "internal/kernel", "{words}"},
		tests:   []string{"{drivers}"},
	},

	// What makes the bytes of objects reachable: it keeps no records but those that it is given.
	"internal/content": {
		imports: []string{"internal/mountpoint", "internal/pool", "internal/catalog", "internal/driver", "{leaves}", "{words}"},
	},

	"internal/mountpoint": {imports: []string{"internal/driver", "internal/errs", "internal/kernel", "internal/mount"}},

	// What storage does, measured or watched: they know paths, and nothing of Pando's pools.
	"internal/syncbench": {imports: []string{"{leaves}", "{words}"}},
	"internal/diagnose":  {imports: []string{"{leaves}", "{words}"}},
	"internal/iostat":    {imports: []string{"{leaves}", "{words}"}},

	// What a host has, and what of it costs too much: it knows nothing of Pando's
	// pools.
	"internal/doctor": {imports: []string{"{leaves}", "{words}"}},

	// Remotes: the format of a repository knows objects in a store, and nothing of
	// pools.
	"internal/repo": {imports: []string{"internal/objstore", "internal/errs"}},

	// What it keeps, and where.
	"internal/catalog": {imports: []string{"internal/driver", "internal/durable", "internal/errs", "internal/kernel", "internal/ref", "internal/waiting"}},
	"internal/pool": {
		imports: []string{"internal/driver", "internal/durable", "internal/errs", "internal/kernel", "internal/loopdev", "internal/mount", "internal/run", "internal/waiting"},
		tests:   []string{"{drivers}"},
	},

	// Where remotes keep their objects: the contract, and one package for each kind
	// of place. They know nothing of repositories.
	"internal/objstore":      {imports: []string{"internal/errs"}, tests: []string{"internal/objstore/file"}},
	"internal/objstore/file": {imports: []string{"internal/objstore", "internal/errs"}, tests: []string{"internal/loopdev", "internal/mount", "internal/run"}},
	"internal/objstore/s3":   {imports: []string{"internal/objstore", "internal/objstore/web", "internal/errs"}},
	"internal/objstore/gcs":  {imports: []string{"internal/objstore", "internal/objstore/web", "internal/errs"}},
	"internal/objstore/web":  {imports: []string{"internal/objstore", "internal/errs"}},

	// Drivers know the contract and leaves: neither the catalogue, nor the
	// engine, nor each other.
	"internal/driver":         {imports: []string{"internal/errs"}},
	"internal/driver/objdir":  {imports: []string{"internal/driver", "internal/durable", "internal/errs"}},
	"internal/driver/imagefs": {imports: []string{"internal/driver", "internal/errs", "internal/run"}},
	"internal/driver/zfs":     {imports: []string{"internal/driver", "internal/waiting", "internal/driver/objdir", "internal/driver/imagefs", "{leaves}", "internal/errs"}},
	"internal/driver/reflink": {imports: []string{"internal/driver", "internal/driver/objdir", "internal/driver/imagefs", "{leaves}", "internal/errs"}},
	"internal/driver/btrfs":   {imports: []string{"internal/driver", "internal/driver/objdir", "{leaves}", "internal/errs"}},
	"internal/driver/plain":   {imports: []string{"internal/driver", "internal/driver/objdir", "{leaves}", "internal/errs"}},

	"internal/btrfsstream": {imports: []string{"internal/errs", "internal/kernel", "internal/treewalk"}},

	"internal/blockdev":   {},
	"internal/stack":      {imports: []string{"internal/blockdev", "internal/errs", "internal/mount", "internal/zfs"}},
	"internal/tracepoint": {imports: []string{"internal/errs", "internal/mount"}},
	"internal/proof":      {imports: []string{"internal/blockdev", "internal/stack", "internal/tracepoint", "internal/errs", "internal/mount", "internal/zfs"}},

	"internal/durable":  {},
	"internal/freeze":   {imports: []string{"internal/errs", "internal/kernel"}},
	"internal/treecopy": {imports: []string{"internal/errs", "internal/kernel", "internal/treewalk"}},
	"internal/treestream": {
		imports: []string{
			"internal/errs",
			"internal/kernel",
			"internal/treewalk",
			"internal/treecopy",
			"internal/treediff",
		},
	},
	"internal/treediff": {
		imports: []string{
			"internal/errs",
			"internal/kernel",
			"internal/extent",
			"internal/treewalk",
			"internal/treecopy",
		},
		tests: []string{"internal/mount", "internal/loopdev"},
	},
	"internal/extent": {
		imports: []string{"internal/treewalk", "internal/kernel"},
		tests:   []string{"internal/mount"},
	},
	"internal/treewalk": {imports: []string{"internal/errs", "internal/kernel"}, tests: []string{"internal/mount"}},
	"internal/mount":    {imports: []string{"internal/errs", "internal/kernel"}, tests: []string{"internal/loopdev"}},
	"internal/loopdev":  {imports: []string{"internal/errs", "internal/kernel"}},
	"internal/run":      {imports: []string{"internal/errs"}},
	"internal/zfs":      {imports: []string{"internal/errs", "internal/kernel", "internal/run"}},
	"internal/ref":      {imports: []string{"internal/errs"}},
	"internal/fsprobe":  {},
	"internal/kernel":   {tests: []string{"internal/errs", "internal/loopdev", "internal/mount"}},
	"internal/errs":     {},
	"internal/waiting":  {imports: []string{"internal/errs"}},
	"internal/warnings": {imports: []string{"internal/errs"}},
	"internal/progress": {},

	// For tests.
	"internal/testfs":              {support: true, imports: []string{"{leaves}", "internal/errs"}},
	"internal/faulttest":           {support: true, imports: []string{"internal/kernel"}},
	"internal/treecopy/treetest":   {support: true, imports: []string{"internal/kernel"}},
	"internal/driver/drivertest":   {support: true, imports: []string{"internal/driver", "internal/driver/objdir", "internal/testfs", "internal/treecopy/treetest", "{leaves}", "internal/errs"}},
	"internal/objstore/storetest":  {support: true, imports: []string{"internal/objstore", "internal/errs"}, tests: []string{"internal/objstore/file"}},
	"internal/faulttest/testdata":  {},
	"internal/objstore/servertest": {support: true},

	// Tests of the whole, and tools: they stand above everything.
	"test/model":       {tests: []string{"internal/engine", "{drivers}"}},
	"test/crash":       {tests: []string{"internal/bench", "internal/engine", "{drivers}"}},
	"test/zfs":         {},
	"test/remotechaos": {tests: []string{"internal/errs", "internal/objstore", "internal/replicate"}},
	"test/buckets":     {tests: []string{"internal/objstore/servertest"}},
	"test/layers":      {},
	"tools/isolate":    {support: true, imports: []string{"internal/testfs"}},
	"tools/testreport": {},
}

// imported is one import of one file.
type imported struct {
	file string // relative to the module
	pkg  string // that imports
	path string // that is imported, of this module
	test bool
}

// check returns what is wrong, and how to mend it.
func check(table map[string]layer, imports []imported) []string {
	var wrong []string
	unknown := map[string]bool{}
	for _, i := range imports {
		l, known := table[i.pkg]
		if !known {
			if !unknown[i.pkg] {
				unknown[i.pkg] = true
				wrong = append(wrong, fmt.Sprintf("package %s is not in the table of test/layers: put it where it belongs, with what it may import", i.pkg))
			}
			continue
		}
		if i.path == "" || i.path == i.pkg {
			continue // no import of this module, or an external test
		}
		target, known := table[i.path]
		switch {
		case !known: // reported when its own files are seen, if it has any
			wrong = append(wrong, fmt.Sprintf("%s imports %s, which is not in the table of test/layers", i.file, i.path))
		case target.support && !i.test && !l.support:
			wrong = append(wrong, fmt.Sprintf("%s imports %s, which is for tests only", i.file, i.path))
		case target.support && i.test:
		case i.test && mayTest(table, i.pkg, i.path):
		case !i.test && slices.Contains(expand(l.imports), i.path):
		default:
			wrong = append(wrong, fmt.Sprintf("%s: %s must not import %s: it may import %s. Move the code to where it belongs, or pass in what it needs",
				i.file, i.pkg, i.path, words(l.imports)))
		}
	}
	slices.Sort(wrong)
	return slices.Compact(wrong)
}

// mayTest reports whether tests of pkg may import path: what its table row says,
// and all that these lead to.
func mayTest(table map[string]layer, pkg, path string) bool {
	seen := map[string]bool{}
	var reach func(string) bool
	reach = func(p string) bool {
		if p == path {
			return true
		}
		if seen[p] {
			return false
		}
		seen[p] = true
		return slices.ContainsFunc(expand(table[p].imports), reach)
	}
	l := table[pkg]
	return slices.ContainsFunc(expand(append(slices.Clone(l.imports), l.tests...)), reach)
}

func expand(names []string) []string {
	var out []string
	for _, n := range names {
		if g, ok := groups[n]; ok {
			out = append(out, g...)
		} else {
			out = append(out, n)
		}
	}
	return out
}

func words(names []string) string {
	if len(names) == 0 {
		return "nothing of this module"
	}
	return strings.Join(names, ", ")
}

// A boot ID is no proof of another boot: containers have one of their own. What compares them takes
// what is in use for what an earlier boot has left, and destroys it.
func TestNobodyComparesBootIDs(t *testing.T) {
	compared := regexp.MustCompile(`[!=]=\s*kernel\.BootID\(|kernel\.BootID\(\)\s*[!=]=`)
	imports, err := readImports("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range imports {
		text, err := os.ReadFile(filepath.Join("../..", i.file))
		if err != nil {
			t.Fatal(err)
		}
		if i.test || !bytes.Contains(text, []byte("kernel.BootID(")) {
			continue
		}
		if found := compared.Find(text); found != nil {
			t.Errorf("%s has %q: ask kernel.EarlierBoot, which wants the time too", i.file, found)
		}
	}
}

// readImports lists the imports of all Go files below root, whatever their build
// constraints. A file without imports of this module is listed once, with none.
func readImports(root string) ([]imported, error) {
	var out []imported
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); path != root && (strings.HasPrefix(n, ".") || n == "vendor") {
				return filepath.SkipDir
			}
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil && path != root {
				return filepath.SkipDir // another module: servers for tests
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		one := imported{file: rel, pkg: filepath.ToSlash(filepath.Dir(rel)), test: strings.HasSuffix(rel, "_test.go")}
		if before, _, found := strings.Cut(one.pkg, "/testdata/"); found {
			one.pkg = before + "/testdata" // programs that tests build
		}
		out = append(out, one)
		for _, s := range f.Imports {
			p, err := strconv.Unquote(s.Path.Value)
			if err != nil {
				return err
			}
			if rest, ours := strings.CutPrefix(p, module); ours {
				one.path = rest
				out = append(out, one)
			}
		}
		return nil
	})
	return out, err
}

func TestLayers(t *testing.T) {
	imports, err := readImports("../..")
	if err != nil {
		t.Fatal(err)
	}
	if len(imports) < 100 {
		t.Fatalf("only %d imports found: this test looks in the wrong place", len(imports))
	}
	for _, w := range check(table, imports) {
		t.Error(w)
	}
}

// TestTableIsInOrder: the table itself must not allow what the design forbids.
func TestTableIsInOrder(t *testing.T) {
	seen := map[string]bool{}
	imports, err := readImports("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range imports {
		seen[i.pkg] = true
	}
	for pkg, l := range table {
		if !seen[pkg] {
			t.Errorf("%s is in the table, but there is no such package", pkg)
		}
		for _, n := range slices.Concat(l.imports, l.tests) {
			if _, isGroup := groups[n]; !isGroup && strings.HasPrefix(n, "{") {
				t.Errorf("%s: there is no group %s", pkg, n)
			}
		}
		for _, n := range expand(l.imports) {
			if _, known := table[n]; !known {
				t.Errorf("%s may import %s, which is not in the table", pkg, n)
			}
			if reaches(table, n, pkg, map[string]bool{}) {
				t.Errorf("%s and %s may import each other", pkg, n)
			}
		}
	}
	for _, d := range groups["{drivers}"] {
		for _, above := range append([]string{"internal/engine", "internal/catalog", "internal/pool"}, groups["{drivers}"]...) {
			if above != d && reaches(table, d, above, map[string]bool{}) {
				t.Errorf("driver %s can reach %s", d, above)
			}
		}
		if reaches(table, "internal/engine", d, map[string]bool{}) {
			t.Errorf("the engine can reach driver %s", d)
		}
	}
	for _, leaf := range groups["{leaves}"] {
		for _, above := range []string{"internal/driver", "internal/pool", "internal/catalog", "internal/engine"} {
			if reaches(table, leaf, above, map[string]bool{}) {
				t.Errorf("leaf %s can reach %s", leaf, above)
			}
		}
	}
}

func reaches(table map[string]layer, from, to string, seen map[string]bool) bool {
	if seen[from] {
		return false
	}
	seen[from] = true
	for _, n := range expand(table[from].imports) {
		if n == to || reaches(table, n, to, seen) {
			return true
		}
	}
	return false
}

// TestCheckFindsViolations: a made-up file for each rule must be found out.
func TestCheckFindsViolations(t *testing.T) {
	for _, c := range []struct {
		pkg, path string
		test      bool
		want      string // "" if it is allowed
	}{
		{pkg: "internal/kernel", path: "internal/engine", want: "must not import"},              // upwards
		{pkg: "internal/catalog", path: "internal/pool", want: "must not import"},               // sideways
		{pkg: "internal/driver/btrfs", path: "internal/driver/plain", want: "must not import"},  // driver to driver
		{pkg: "internal/driver/plain", path: "internal/catalog", want: "must not import"},       // driver to catalogue
		{pkg: "internal/engine", path: "internal/driver/reflink", want: "must not import"},      // not the contract
		{pkg: "internal/engine", path: "internal/driver/objdir", want: "must not import"},       // nor its storage
		{pkg: "internal/cli", path: "internal/catalog", want: "must not import"},                // past the engine
		{pkg: "internal/engine", path: "internal/testfs", want: "for tests only"},               // support in the program
		{pkg: "cmd/pando", path: "internal/driver/drivertest", want: "for tests only"},          //
		{pkg: "internal/brandnew", path: "internal/errs", want: "not in the table"},             // unknown package
		{pkg: "internal/engine", path: "internal/brandnew", want: "not in the table"},           //
		{pkg: "internal/catalog", path: "internal/engine", test: true, want: "must not import"}, // upwards in a test
		{pkg: "internal/engine", path: "internal/catalog"},                                      //
		{pkg: "internal/engine", path: "internal/driver/reflink", test: true},                   // real drivers
		{pkg: "internal/engine", path: "internal/driver/objdir", test: true},                    // below a driver
		{pkg: "internal/engine", path: "internal/testfs", test: true},                           //
		{pkg: "internal/driver/drivertest", path: "internal/testfs"},                            // support on support
		{pkg: "internal/driver/reflink", path: "internal/driver/drivertest", test: true},        //
		{pkg: "internal/mount", path: "internal/mount", test: true},                             // an external test
	} {
		got := check(table, []imported{{file: "made-up.go", pkg: c.pkg, path: c.path, test: c.test}})
		switch {
		case c.want == "" && len(got) > 0:
			t.Errorf("%s importing %s (test %v) is refused: %v", c.pkg, c.path, c.test, got)
		case c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)):
			t.Errorf("%s importing %s (test %v): got %q, want one complaint with %q", c.pkg, c.path, c.test, got, c.want)
		}
	}
}

// TestReadImportsFindsAViolation: the same through real files, and build
// constraints do not hide one.
func TestReadImportsFindsAViolation(t *testing.T) {
	root := t.TempDir()
	for path, text := range map[string]string{
		"internal/kernel/k.go":       "package kernel\n",
		"internal/kernel/k_plan9.go": "//go:build plan9\n\npackage kernel\n\nimport _ \"pando/internal/engine\"\n",
	} {
		if err := os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	imports, err := readImports(root)
	if err != nil {
		t.Fatal(err)
	}
	got := check(table, imports)
	if len(got) != 1 || !strings.Contains(got[0], "internal/kernel must not import internal/engine") {
		t.Errorf("got %q from %v", got, slices.Collect(maps.Keys(table)))
	}
}
