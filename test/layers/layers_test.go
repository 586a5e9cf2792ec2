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

// districts are the folders of internal/, each with what belongs there, what does not, and the districts that its
// packages may import besides their own. The table below says the same of single packages, more strictly.
var districts = map[string]struct {
	belongs string
	below   []string
}{
	"front": {"front ends, a package each: their words, and nothing that another one would need too; only they print",
		[]string{"*"}},
	"service": {"use cases that all front ends share, above pools; no words for people",
		[]string{"engine", "remote", "source", "api", "driver", "linux", "base"}},
	"bench": {"measures what pools promise, on a pool of its own; nothing that other packages call", []string{"*"}},
	"engine": {"use cases of a pool, with the catalogue and content below them; no words for people",
		[]string{"api", "driver", "tree", "linux", "base"}},
	"api": {"the things that Pando speaks of, as other programs see them: types whose JSON is a promise, and no more",
		[]string{"driver", "base"}},
	"driver": {"how copies are made, a package each; no catalogue, and no driver knows another",
		[]string{"tree", "linux", "base"}},
	"remote": {"volumes in object stores: the planner, the format, the stores",
		[]string{"engine", "api", "driver", "linux", "base"}},
	"source": {"goldens that other programs fill and refresh, such as git: use cases above a pool",
		[]string{"engine", "api", "driver", "linux", "base"}},
	"observe": {"what storage does, measured or watched: it knows paths and devices, never pools",
		[]string{"linux", "tree", "base"}},
	"tree":    {"files below a directory: copied, compared, sent; no pools, no images", []string{"linux", "base"}},
	"linux":   {"one thing of the kernel, of a tool or of its file formats each; no idea of Pando's", []string{"base"}},
	"base":    {"what any package may use: errors, references, progress; nothing of this project below it", nil},
	"testing": {"what makes tests short: only tests import it", []string{"*"}},
}

// groups are names for several packages.
var groups = map[string][]string{
	"{base}": in("base", "errs", "logs", "ref", "principal", "progress", "similar", "units", "waiting", "warnings"),
	"{linux}": in("linux", "kernel", "loopdev", "mount", "extent", "run", "zfs", "fsprobe", "treewalk", "freeze",
		"durable",
		"btrfsstream", "qcow2"),
	"{tree}": in("tree", "treecopy", "treediff", "treestream"),
	// Facts about devices and paths, which others of the district build upon.
	"{facts}": in("observe", "blockdev", "stack", "tracepoint", "proof"),
	// What keeps objects, each in its own way; cmd/pando chooses.
	"{drivers}": in("driver", "reflink", "btrfs", "plain", "zfs"),
	"{support}": append(in("testing", "testfs", "faulttest", "treetest", "storetest", "servertest", "pooltest"),
		"internal/driver/drivertest"),
}

// in returns the paths of packages of a district.
func in(district string, packages ...string) []string {
	out := make([]string, len(packages))
	for i, p := range packages {
		out[i] = "internal/" + district + "/" + p
	}
	return out
}

// table is the order of the packages, top to bottom. A new package goes in here,
// with what it needs and no more.
var table = map[string]layer{
	"cmd/pando": {imports: []string{"internal/front/cli", "internal/front/rest", "internal/engine",
		"internal/service/users", "{drivers}"}},

	// Front ends: the only ones that print.
	"internal/front/cli": {
		imports: []string{"internal/api", "internal/engine", "internal/engine/check", "internal/remote/replicate",
			"internal/source/git",
			"internal/bench", "internal/service/follow", "internal/service/listing", "internal/service/restore",
			"internal/service/rounds",
			"internal/observe/syncbench", "internal/observe/diagnose", "internal/observe/iostat", "internal/observe/doctor",
			"internal/engine/pool", "internal/driver", "internal/linux/account",
			"internal/service/policy", "internal/service/users", "{base}"},
		tests: []string{"{drivers}"},
	},
	"internal/front/rest": {
		imports: []string{"internal/api", "internal/engine", "internal/driver", "internal/service/listing",
			"internal/service/users", "internal/linux/kernel", "{base}"},
		tests: []string{"{drivers}", "internal/service/policy"},
	},

	// What all front ends do in the same way.
	"internal/service/policy": {imports: []string{"internal/api", "internal/engine", "internal/linux/account",
		"internal/base/errs", "internal/base/principal", "internal/base/units"}},
	"internal/service/users": {imports: []string{"internal/api", "internal/engine", "internal/driver",
		"internal/linux/kernel", "internal/service/listing", "internal/service/policy", "internal/base/errs",
		"internal/base/principal", "internal/base/ref"}},
	"internal/service/follow": {imports: []string{"internal/api", "internal/engine"},
		tests: []string{"{drivers}", "internal/base/ref"}},
	"internal/service/restore": {imports: []string{"internal/api", "internal/engine", "internal/driver",
		"internal/remote/replicate", "internal/base/errs", "internal/base/ref"}, tests: []string{"{drivers}"}},
	"internal/service/rounds": {imports: []string{"internal/remote/replicate", "internal/base/errs"}},
	"internal/service/listing": {imports: []string{"internal/api", "internal/engine", "internal/driver",
		"internal/base/errs", "internal/base/ref", "internal/base/units"},
		tests: []string{"{drivers}", "internal/base/principal"}},

	// What Pando does.
	"internal/bench": {
		imports: []string{"internal/observe/iostat", "internal/api", "internal/engine", "internal/engine/catalog",
			"internal/engine/pool", "internal/driver", "{facts}", "{tree}", "{linux}", "{base}"},
		tests: []string{"{drivers}"},
	},
	"internal/remote/replicate": {
		imports: []string{
			"internal/api",
			"internal/engine",
			"internal/remote/repo",
			"internal/remote/objstore",
			"internal/remote/objstore/file",
			"internal/remote/objstore/s3",
			"internal/remote/objstore/gcs",
			"internal/driver",
			"internal/linux/durable",
			"internal/linux/fsprobe",
			"{base}",
		},
		tests: []string{"{drivers}"},
	},
	"internal/source/git": {
		imports: []string{"internal/api", "internal/engine", "internal/driver", "internal/linux/run",
			"internal/linux/treewalk", "{base}"},
		tests: []string{"{drivers}"},
	},
	"internal/engine": {
		imports: []string{"internal/api", "internal/engine/check", "internal/engine/content", "internal/engine/ledger",
			"internal/engine/mountpoint", "internal/engine/pool", "internal/engine/catalog", "internal/engine/preset",
			"internal/driver", "{tree}", "{linux}", "{base}"},
		tests: []string{"{drivers}"},
	},

	// What clones of a program's directory must not share.
	"internal/engine/preset": {imports: []string{"internal/driver", "internal/linux/mount", "internal/linux/treewalk",
		"internal/base/errs", "internal/base/waiting"}},

	// What is wrong with a pool, and mending it.
	"internal/engine/check": {
		imports: []string{"internal/api", "internal/engine/content", "internal/engine/ledger", "internal/engine/mountpoint",
			"internal/engine/pool", "internal/engine/catalog", "internal/driver", "{linux}", "{base}"},
	},

	// Operations at work, and traces of those that died.
	"internal/engine/ledger": {
		imports: []string{"internal/engine/catalog", "internal/driver", "internal/linux/kernel", "{base}"},
		tests:   []string{"{drivers}"},
	},

	// What makes the bytes of objects reachable: it keeps no records but those that it is given.
	"internal/engine/content": {
		imports: []string{"internal/engine/mountpoint", "internal/engine/pool", "internal/engine/catalog", "internal/driver",
			"internal/tree/treecopy", "{linux}", "{base}"},
	},

	"internal/engine/mountpoint": {imports: []string{"internal/driver", "internal/base/errs", "internal/linux/kernel",
		"internal/linux/mount"}},

	// What storage does, measured or watched: they know paths, and nothing of Pando's pools.
	"internal/observe/syncbench": {imports: []string{"{facts}", "{linux}", "{base}"}},
	"internal/observe/diagnose":  {imports: []string{"{facts}", "{linux}", "{base}"}},
	"internal/observe/iostat":    {imports: []string{"{facts}", "{linux}", "{base}"}},

	// What a host has, and what of it costs too much: it knows nothing of Pando's
	// pools.
	"internal/observe/doctor": {imports: []string{"{facts}", "{linux}", "{base}"}},

	// Remotes: the format of a repository knows objects in a store, and nothing of
	// pools.
	"internal/remote/repo": {imports: []string{"internal/remote/objstore", "internal/base/errs"}},

	// What it keeps, and where.
	"internal/engine/catalog": {imports: []string{"internal/api", "internal/driver", "internal/linux/durable",
		"internal/base/errs", "internal/base/principal",
		"internal/linux/kernel", "internal/base/ref", "internal/base/similar", "internal/base/waiting"}},
	"internal/engine/pool": {
		imports: []string{"internal/driver", "internal/linux/durable", "internal/base/errs", "internal/linux/kernel",
			"internal/linux/loopdev", "internal/linux/mount", "internal/linux/run", "internal/linux/freeze",
			"internal/linux/fsprobe", "internal/base/waiting"},
		tests: []string{"{drivers}"},
	},

	// Where remotes keep their objects: the contract, and one package for each kind
	// of place. They know nothing of repositories.
	"internal/remote/objstore": {imports: []string{"internal/base/errs", "internal/base/logs"},
		tests: []string{"internal/remote/objstore/file"}},
	"internal/remote/objstore/file": {imports: []string{"internal/remote/objstore", "internal/base/errs"},
		tests: []string{"internal/linux/loopdev", "internal/linux/mount", "internal/linux/run"}},
	"internal/remote/objstore/s3": {imports: []string{"internal/remote/objstore", "internal/remote/objstore/web",
		"internal/base/errs"}},
	"internal/remote/objstore/gcs": {imports: []string{"internal/remote/objstore", "internal/remote/objstore/web",
		"internal/base/errs"}},
	"internal/remote/objstore/web": {imports: []string{"internal/remote/objstore", "internal/base/errs"}},

	// Drivers know the contract and leaves: neither the catalogue, nor the
	// engine, nor each other.
	"internal/api":            {imports: []string{"internal/driver", "internal/base/errs"}},
	"internal/driver":         {imports: []string{"internal/base/errs"}},
	"internal/driver/objdir":  {imports: []string{"internal/driver", "internal/linux/durable", "internal/base/errs"}},
	"internal/driver/imagefs": {imports: []string{"internal/driver", "internal/base/errs", "internal/linux/run"}},
	"internal/driver/zfs": {imports: []string{"internal/driver", "internal/base/waiting", "internal/driver/objdir",
		"internal/driver/imagefs", "{linux}", "internal/base/errs"}},
	"internal/driver/reflink": {imports: []string{"internal/driver", "internal/driver/objdir", "internal/driver/imagefs",
		"{linux}", "internal/base/errs"}},
	"internal/driver/btrfs": {imports: []string{"internal/driver", "internal/driver/objdir", "{linux}",
		"internal/base/errs"}},
	"internal/driver/plain": {imports: []string{"internal/driver", "internal/driver/objdir", "{tree}", "{linux}",
		"internal/base/errs"}},

	"internal/linux/btrfsstream": {imports: []string{"internal/base/errs", "internal/linux/kernel",
		"internal/linux/treewalk"}},

	"internal/observe/blockdev": {},
	"internal/observe/stack": {imports: []string{"internal/observe/blockdev", "internal/base/errs",
		"internal/linux/mount", "internal/linux/zfs"}},
	"internal/observe/tracepoint": {imports: []string{"internal/base/errs", "internal/linux/mount"}},
	"internal/observe/proof": {imports: []string{"internal/observe/blockdev", "internal/observe/stack",
		"internal/observe/tracepoint", "internal/base/errs", "internal/linux/mount", "internal/linux/zfs"}},

	"internal/linux/durable": {},
	"internal/linux/qcow2":   {},
	"internal/linux/freeze":  {imports: []string{"internal/base/errs", "internal/linux/kernel"}},
	"internal/tree/treecopy": {imports: []string{"internal/base/errs", "internal/linux/kernel",
		"internal/linux/treewalk"}},
	"internal/tree/treestream": {
		imports: []string{
			"internal/base/errs",
			"internal/linux/kernel",
			"internal/linux/treewalk",
			"internal/tree/treecopy",
			"internal/tree/treediff",
		},
	},
	"internal/tree/treediff": {
		imports: []string{
			"internal/base/errs",
			"internal/linux/kernel",
			"internal/linux/extent",
			"internal/linux/treewalk",
			"internal/tree/treecopy",
		},
		tests: []string{"internal/linux/mount", "internal/linux/loopdev"},
	},
	"internal/linux/extent": {
		imports: []string{"internal/linux/treewalk", "internal/linux/kernel"},
		tests:   []string{"internal/linux/mount"},
	},
	"internal/linux/treewalk": {imports: []string{"internal/base/errs", "internal/linux/kernel"},
		tests: []string{"internal/linux/mount"}},
	"internal/linux/mount":   {imports: []string{"internal/base/errs", "internal/linux/kernel", "internal/linux/loopdev"}},
	"internal/linux/account": {imports: []string{"internal/base/errs", "internal/base/principal", "internal/linux/run"}},
	"internal/linux/loopdev": {imports: []string{"internal/base/errs", "internal/linux/kernel"},
		tests: []string{"internal/linux/run"}},
	"internal/linux/run":     {imports: []string{"internal/base/errs"}},
	"internal/linux/zfs":     {imports: []string{"internal/base/errs", "internal/linux/kernel", "internal/linux/run"}},
	"internal/base/ref":      {imports: []string{"internal/base/errs"}},
	"internal/linux/fsprobe": {},
	"internal/linux/kernel":  {tests: []string{"internal/base/errs", "internal/linux/loopdev", "internal/linux/mount"}},
	"internal/base/errs":     {},
	"internal/base/waiting":  {imports: []string{"internal/base/errs", "internal/base/logs"}},
	"internal/base/warnings": {imports: []string{"internal/base/errs", "internal/base/logs"}},
	"internal/base/logs":     {},
	"internal/base/progress": {},

	"internal/base/principal": {},
	"internal/base/similar":   {},
	"internal/base/units":     {imports: []string{"internal/base/errs"}},

	// For tests.
	"internal/testing/testfs": {support: true, imports: []string{"internal/testing/faulttest", "{facts}", "{linux}",
		"internal/base/errs"}},
	"internal/testing/faulttest": {support: true, imports: []string{"internal/linux/kernel"}},
	"internal/testing/treetest":  {support: true, imports: []string{"internal/linux/kernel"}},
	"internal/testing/tracetest": {support: true,
		imports: []string{"internal/observe/tracepoint", "internal/testing/testfs"}},
	"internal/driver/drivertest": {support: true,
		imports: []string{"internal/driver", "internal/driver/objdir", "internal/testing/testfs",
			"internal/testing/faulttest", "internal/testing/treetest", "{linux}", "internal/base/errs"}},
	"internal/testing/storetest": {support: true,
		imports: []string{"internal/remote/objstore", "internal/testing/faulttest", "internal/base/errs"},
		tests:   []string{"internal/remote/objstore/file"}},
	"internal/testing/faulttest/testdata": {},
	"internal/testing/servertest":         {support: true},
	"internal/testing/schematest": {support: true, imports: []string{"internal/api", "internal/bench", "internal/driver",
		"internal/engine", "internal/engine/check", "internal/observe/diagnose", "internal/observe/doctor",
		"internal/observe/iostat", "internal/observe/syncbench", "internal/remote/replicate", "internal/source/git",
		"internal/front/rest", "internal/base/errs"}},
	"internal/testing/pooltest": {support: true, imports: []string{"internal/api", "internal/engine", "internal/base/errs",
		"internal/base/ref"}},

	// Tests of the whole, and tools: they stand above everything.
	"test/model": {tests: []string{"internal/engine", "{drivers}"}},
	"test/requests": {tests: []string{"internal/driver", "internal/engine", "internal/engine/check",
		"internal/observe/diagnose", "internal/observe/doctor", "internal/remote/replicate", "internal/service/listing",
		"internal/service/restore", "internal/service/users", "internal/source/git"}},
	"test/crash":    {tests: []string{"internal/bench", "internal/front/cli", "internal/engine", "{drivers}"}},
	"test/examples": {},
	"test/foreign":  {tests: []string{"internal/engine", "{drivers}"}},
	"test/zfs":      {},
	"test/remotechaos": {
		tests: []string{"internal/base/errs", "internal/remote/objstore", "internal/remote/replicate"}},
	"test/buckets":           {tests: []string{"internal/testing/servertest"}},
	"test/gate":              {},
	"test/layers":            {},
	"test/style":             {},
	"tools/isolate":          {support: true, imports: []string{"internal/testing/testfs"}},
	"tools/testreport":       {},
	"tools/testrun":          {},
	"tools/explore":          {imports: []string{"tools/testrun"}},
	"tools/explore/testdata": {},
	"tools/newtests":         {imports: []string{"tools/testrun"}},
	"tools/manpages":         {imports: []string{"internal/front/cli"}},
	"tools/sbom":             {},
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
				wrong = append(wrong,
					fmt.Sprintf("package %s is not in the table of test/layers: put it where it belongs, with what it may import",
						i.pkg))
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
			wrong = append(wrong,
				fmt.Sprintf("%s: %s must not import %s: it may import %s. Move the code to where it belongs, or pass in what it "+
					"needs",
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
	districtsHold(t, seen)

	for _, d := range groups["{drivers}"] {
		for _, above := range append([]string{"internal/engine", "internal/engine/catalog", "internal/engine/pool"},
			groups["{drivers}"]...) {
			if above != d && reaches(table, d, above, map[string]bool{}) {
				t.Errorf("driver %s can reach %s", d, above)
			}
		}
		if reaches(table, "internal/engine", d, map[string]bool{}) {
			t.Errorf("the engine can reach driver %s", d)
		}
	}
	for _, leaf := range slices.Concat(groups["{linux}"], groups["{tree}"], groups["{facts}"]) {
		for _, above := range []string{"internal/driver", "internal/engine/pool", "internal/engine/catalog",
			"internal/engine"} {
			if reaches(table, leaf, above, map[string]bool{}) {
				t.Errorf("leaf %s can reach %s", leaf, above)
			}
		}
	}
}

// districtsHold checks that each package is in a district, and that the table allows no more than the districts do.
func districtsHold(t *testing.T, packages map[string]bool) {
	t.Helper()
	populated := map[string]bool{}
	for pkg := range packages {
		own, internal := districtOf(pkg)
		if !internal {
			continue
		}
		populated[own] = true
		d, known := districts[own]
		if !known {
			t.Errorf("%s is in none of the districts", pkg)
		}
		for _, n := range expand(table[pkg].imports) {
			to, _ := districtOf(n)
			if own == "front" && to == own && n != pkg {
				t.Errorf("%s may import %s: move what both need to district service", pkg, n)
			}
			if to != own && !slices.Contains(d.below, to) && !slices.Contains(d.below, "*") && !table[pkg].support {
				t.Errorf("%s may import %s, but district %s stands on %s only", pkg, n, own, words(d.below))
			}
		}
	}
	for name := range districts {
		if !populated[name] {
			t.Errorf("district %s has no package", name)
		}
	}
}

// districtOf returns the folder of internal/ that a package is in.
func districtOf(pkg string) (string, bool) {
	rest, internal := strings.CutPrefix(pkg, "internal/")
	name, _, _ := strings.Cut(rest, "/")
	return name, internal
}

// TestDistrictsAreDocumented: the architecture's page has the sentence of each district.
func TestDistrictsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, d := range districts {
		if row := fmt.Sprintf("| `internal/%s` | %s |", name, d.belongs); !bytes.Contains(page, []byte(row)) {
			t.Errorf("ARCHITECTURE.md lacks this row:\n%s", row)
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
		{pkg: "internal/linux/kernel", path: "internal/engine", want: "must not import"},         // upwards
		{pkg: "internal/engine/catalog", path: "internal/engine/pool", want: "must not import"},  // sideways
		{pkg: "internal/driver/btrfs", path: "internal/driver/plain", want: "must not import"},   // driver to driver
		{pkg: "internal/driver/plain", path: "internal/engine/catalog", want: "must not import"}, // driver to catalogue
		{pkg: "internal/engine", path: "internal/driver/reflink", want: "must not import"},       // not the contract
		{pkg: "internal/engine", path: "internal/driver/objdir", want: "must not import"},        // nor its storage
		{pkg: "internal/front/cli", path: "internal/engine/catalog", want: "must not import"},    // front end and catalogue
		// support in the program
		{pkg: "internal/engine", path: "internal/testing/testfs", want: "for tests only"},
		{pkg: "cmd/pando", path: "internal/driver/drivertest", want: "for tests only"},                 //
		{pkg: "internal/brandnew", path: "internal/base/errs", want: "not in the table"},               // unknown package
		{pkg: "internal/engine", path: "internal/brandnew", want: "not in the table"},                  //
		{pkg: "internal/engine/catalog", path: "internal/engine", test: true, want: "must not import"}, // upwards in a test
		{pkg: "internal/engine", path: "internal/engine/catalog"},                                      //
		{pkg: "internal/engine", path: "internal/driver/reflink", test: true},                          // real drivers
		{pkg: "internal/engine", path: "internal/driver/objdir", test: true},                           // below a driver
		{pkg: "internal/engine", path: "internal/testing/testfs", test: true},                          //
		{pkg: "internal/driver/drivertest", path: "internal/testing/testfs"},                           // support on support
		{pkg: "internal/driver/reflink", path: "internal/driver/drivertest", test: true},               //
		{pkg: "internal/linux/mount", path: "internal/linux/mount", test: true},                        // an external test
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
		"internal/linux/kernel/k.go":       "package kernel\n",
		"internal/linux/kernel/k_plan9.go": "//go:build plan9\n\npackage kernel\n\nimport _ \"pando/internal/engine\"\n",
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
	if len(got) != 1 || !strings.Contains(got[0], "internal/linux/kernel must not import internal/engine") {
		t.Errorf("got %q from %v", got, slices.Collect(maps.Keys(table)))
	}
}
