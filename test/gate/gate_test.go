// Package gate tests what decides which tests a change has to pass.
package gate

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// project is a small repository with scripts/changed.sh in it.
type project struct {
	t   *testing.T
	dir string
}

func newProject(t *testing.T) *project {
	p := &project{t, t.TempDir()}
	script, err := os.ReadFile("../../scripts/changed.sh")
	if err != nil {
		t.Fatal(err)
	}
	p.git("init", "-q", "-b", "main")
	p.write("scripts/changed.sh", string(script))
	p.write("README.md", "one")
	return p
}

func (p *project) run(name string, args ...string) string {
	p.t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.org")
	out, err := cmd.CombinedOutput()
	if err != nil {
		p.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

func (p *project) git(args ...string) string {
	p.t.Helper()
	return p.run("git", args...)
}

func (p *project) write(name, text string) {
	p.t.Helper()
	path := filepath.Join(p.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		p.t.Fatal(err)
	}
}

// commit commits all there is, and returns the commit.
func (p *project) commit() string {
	p.t.Helper()
	p.git("add", "-A")
	p.git("commit", "-q", "--allow-empty", "-m", "x")
	return p.git("rev-parse", "HEAD")
}

// changed compares with the commits that landed.
func (p *project) changed(landed ...string) string {
	p.t.Helper()
	p.write(".ci/landed", "# landed\n"+strings.Join(landed, "\n")+"\n")
	return strings.ReplaceAll(p.run("bash", "scripts/changed.sh"), "\n", " ")
}

func TestChanged(t *testing.T) {
	p := newProject(t)
	if got := p.run("bash", "scripts/changed.sh"); got != "everything" {
		t.Errorf("without any commit and mark: %q", got)
	}
	if got := p.run("bash", "scripts/changed.sh", "--base"); got != "" {
		t.Errorf("without any mark, the base is %q", got)
	}
	first := p.commit()
	p.write("a.go", "1")
	second := p.commit()
	p.git("checkout", "-q", "-b", "side", first)
	p.write("side.go", "1")
	side := p.commit()
	p.git("checkout", "-q", "main")
	p.git("mv", "README.md", "NEWS.md")
	p.commit()
	p.write("not-committed.go", "1")

	for _, c := range []struct {
		landed []string
		want   string
	}{
		{nil, "everything"},
		{[]string{side}, "everything"},
		{[]string{"0123456789012345678901234567890123456789"}, "everything"},
		{[]string{first}, ".ci/landed NEWS.md README.md a.go not-committed.go"},
		{[]string{second, side, first}, ".ci/landed NEWS.md README.md not-committed.go"},
		{[]string{first, second[:12]}, ".ci/landed NEWS.md README.md not-committed.go"},
	} {
		if got := p.changed(c.landed...); got != c.want {
			t.Errorf("landed %q: %q, want %q", c.landed, got, c.want)
		}
	}

	if got := p.run("bash", "scripts/changed.sh", "--base"); got != second[:12] {
		t.Errorf("the newest landed ancestor: %q, want %q", got, second[:12])
	}

	// A mark that hides all that stands before it counts for nothing.
	head := p.commit()
	if got := p.changed(head); got != "everything" {
		t.Errorf("only the mark has changed: %q", got)
	}
	p.git("merge", "-q", "-s", "ours", "-m", "merge", "side")
	if got := p.changed(side, second); !strings.Contains(got, "side.go") {
		t.Errorf("a commit that was merged with -s ours has landed: %q", got)
	}
}

// TestExtrasAreDue: what takes long runs for the changes that it says something about, and for no others.
func TestExtrasAreDue(t *testing.T) {
	const show = `eval "$(grep -E '^(gate|races|zfs|packages)=' ../../.ci/run)"; printf '%s\n' "$races" "$zfs" "$packages"`
	out, err := exec.Command("bash", "-c", show).Output()
	if err != nil {
		t.Fatal(err)
	}
	patterns := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(patterns) != 3 {
		t.Fatalf("%q", patterns)
	}

	for _, c := range []struct {
		file                 string
		races, zfs, packages bool
	}{
		{"README.md", false, false, false},
		{"internal/front/cli/ls.go", false, false, false},
		{"test/crash/crash_test.go", false, false, false},
		{"internal/engine/clone.go", true, false, false},
		{"internal/engine/catalog/tx.go", true, false, false},
		{"internal/engine/transfer_zfs_test.go", true, true, false},
		{"internal/remote/objstore/s3/s3.go", true, false, false},
		{"internal/driver/zfs/zfs.go", false, true, false},
		{"internal/driver/drivertest/basic.go", false, true, false},
		{"internal/linux/zfs/run.go", false, true, false},
		{"internal/tree/treestream/apply.go", false, true, false},
		{"test/zfsvm/build.sh", false, true, false},
		{"scripts/dist.sh", false, false, true},
		{"scripts/go.sh", false, false, true},
		{"scripts/lint.sh", false, false, false},
		{"scripts/test.sh", true, true, false},
		{"scripts/test-programs.sh", true, true, false},
		{"go.mod", false, false, true},
		{"tools/manpages/page.go", false, false, true},
		{".ci/run", true, true, false},
		{"tools/testreport/judge.go", true, true, false},
	} {
		for i, want := range []bool{c.races, c.zfs, c.packages} {
			if got := regexp.MustCompile(patterns[i]).MatchString(c.file); got != want {
				t.Errorf("%s: %q is due: %v", c.file, patterns[i], got)
			}
		}
	}
}
