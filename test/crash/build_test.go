//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"path/filepath"
	"strings"
)

// builds are the verbs that run commands and publish what these leave. The command must be gone with pando, and what it
// has written, too, unless the build was complete.
var builds = []operation{
	{name: "golden-build", every: 3, root: true,
		command: func(*world) []string {
			return []string{"golden", "build", "g2", "--from", "g", "--key", "k", "--no-progress", "--",
				"/bin/sh", "-c", "echo new > new"}
		},
		prepare: func(w *world) { w.goldenGone("g2") },
		want:    func(before string) string { return withGolden(before, "golden g2@1 of 1\n") }},
	{name: "golden-build-again", every: 6, root: true,
		command: func(*world) []string {
			return []string{"golden", "build", "g2", "--from", "g", "--key", "k", "--no-cache", "--no-progress", "--",
				"/bin/sh", "-c", "echo new > new"}
		},
		prepare: func(w *world) {
			w.goldenGone("g2")
			w.pando("golden", "build", "g2", "--from", "g", "--key", "k", "--", "/bin/true")
		},
		want: func(before string) string {
			return strings.Replace(before, "golden g2@1 of 1\n", "golden g2@2 of 2\n", 1)
		}},
	{name: "build-file", every: 12, root: true,
		command: func(w *world) []string { return []string{"build", "-f", w.buildFile(), "--no-progress"} },
		prepare: func(w *world) { w.goldenGone("g2"); w.goldenGone("g2.steps") },
		want: func(before string) string {
			return withGolden(before, "golden g2@1 of 1\ngolden g2.steps@1 of 1\n")
		},
		middle: func(before, after string) bool { return after == withGolden(before, "golden g2.steps@1 of 1\n") }},
}

// buildFile returns the path of a file with two steps.
func (w *world) buildFile() string {
	w.t.Helper()
	path := filepath.Join(w.source, "pando.toml")
	text := "golden = \"g2\"\nfrom = \"g@1\"\n[[step]]\nrun = \"echo 1 > one\"\n" +
		"[[step]]\ncopy = [\"sub\"]\nto = \"copied\"\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return path
}
