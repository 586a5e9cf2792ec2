//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// gits are the verbs of goldens that come from git. The program git writes to a volume in the meantime, and must be
// gone with pando.
var gits = []operation{
	{name: "git-import", root: true, every: 40,
		command: func(w *world) []string {
			return []string{"golden", "import", "repo", w.repository("one"), "--git", "--no-progress"}
		},
		prepare: func(w *world) { w.goldenGone("repo") },
		want:    func(before string) string { return withGolden(before, "golden repo@1 of 1\n") }},
	{name: "git-refresh", root: true, every: 40,
		command: func(*world) []string { return []string{"golden", "refresh", "repo", "--no-progress"} },
		prepare: func(w *world) {
			w.goldenGone("repo")
			w.pando("golden", "import", "repo", w.repository("two"), "--git", "--no-progress")
			w.commit("two")
		},
		want: func(before string) string {
			return strings.Replace(before, "golden repo@1 of 1\n", "golden repo@2 of 2\n", 1)
		}},
	{name: "git-clone", root: true, every: 40,
		command: func(w *world) []string {
			return []string{"clone", "repo", "v", "--git-ref", "main", "--mount", w.ownDir(), "--no-progress"}
		},
		prepare: func(w *world) {
			w.gone("v")
			w.goldenGone("repo")
			w.pando("golden", "import", "repo", w.repository("three"), "--git", "--no-progress")
			w.commit("three")
		},
		wantOf: func(w *world, before string) string {
			v := "volume v from repo@1 mounted at " + strings.TrimPrefix(w.ownDir(), w.dir)
			if w.kind.name == "reflink" { // an empty volume is as large as the pool
				v += " of 512M with room"
			}
			return before + v + "\n"
		}},
}

// withGolden adds the line of a golden behind that of g.
func withGolden(state, line string) string {
	lines := strings.SplitAfterN(state, "\n", 2)
	return lines[0] + line + lines[1]
}

// repository returns the URL of a repository, which it makes if there is none.
func (w *world) repository(name string) string {
	w.t.Helper()
	dir := filepath.Join(filepath.Dir(w.source), "git-"+name)
	if _, err := os.Stat(dir); err != nil {
		if err := os.Mkdir(dir, 0o755); err != nil {
			w.t.Fatal(err)
		}
		w.git(dir, "init", "-q", "-b", "main")
		w.commit(name)
	}
	return "file://" + dir
}

// commit adds a commit to a repository.
func (w *world) commit(name string) {
	w.t.Helper()
	dir := filepath.Join(filepath.Dir(w.source), "git-"+name)
	w.git(dir, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-q", "--allow-empty", "-m", "x")
}

func (w *world) git(dir string, args ...string) {
	w.t.Helper()
	cmd := exec.Command("git", append([]string{"-C", dir}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("git %q: %v: %s", args, err, out)
	}
}
