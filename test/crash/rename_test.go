//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"strings"
	"testing"
)

// renames are those of a mounted volume with a clone, of a snapshot, and of a golden that a volume and a clone of that
// descend from.
var renames = []operation{
	{name: "rename", command: func(*world) []string { return []string{"rename", "v", "u"} },
		prepare: func(w *world) {
			w.gone("*")
			w.pando("clone", "g", "v", "--mount")
			w.pando("fork", "v", "w")
		}, want: replaced("volume v ", "volume u ", " from v ", " from u ")},
	{name: "rename-snapshot", command: func(*world) []string { return []string{"rename", "base@a", "b"} },
		prepare: func(w *world) {
			w.gone("*")
			w.pando("clone", "g", "base")
			w.pando("snapshot", "base", "a")
			w.pando("clone", "base@a", "w")
		}, want: replaced("snapshot base@a ", "snapshot base@b ", " from base@a ", " from base@b ")},
	{name: "rename-golden", command: func(*world) []string { return []string{"rename", "g", "h", "--no-progress"} },
		prepare: func(w *world) {
			w.gone("*")
			if strings.Contains(w.pando("golden", "ls", "-q"), "h\n") {
				w.pando("rename", "h", "g")
			}
			w.pando("clone", "g", "v", "--mount")
			w.pando("clone", "v", "w")
		}, want: replaced("golden g@", "golden h@", " from g@", " from h@")},
}

// replaced is the state in which all of some texts have become others.
func replaced(texts ...string) func(before string) string {
	return strings.NewReplacer(texts...).Replace
}

// TestRenameAtEveryStep: whatever interrupts it, everything has its old name or the new one afterwards, in the
// catalogue and in the identities.
func TestRenameAtEveryStep(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, kind)
			w.initPool()
			w.importGolden("g")
			for _, op := range renames {
				w.sweepFaults(t, op, op.name+"-")
			}
			w.gone("*")
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}
