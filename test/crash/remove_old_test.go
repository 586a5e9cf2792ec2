//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"slices"
	"strings"
)

// removals are the imports that delete their source.
var removals = []operation{
	{name: "import-remove-old", command: (*world).removeOldArgs, prepare: (*world).prepareOld, always: (*world).checkOld,
		every: 3, wantOf: func(w *world, before string) string { return w.outcome(operation{name: "adopt"}, before) }},
}

func init() { operations = slices.Concat(operations, removals) }

func (w *world) removeOldArgs() []string {
	return append([]string{"golden", "import", "g2", w.live(), "--no-progress", "--remove-old"}, w.kind.size...)
}

// prepareOld makes the live directory, which the last run may have removed.
func (w *world) prepareOld() {
	w.t.Helper()
	w.goldenGone("g2")
	w.pando("gc")
	if _, err := os.Lstat(w.live()); err != nil {
		w.write(w.live())
		if err := os.Chmod(w.live(), 0o700); err != nil {
			w.t.Fatal(err)
		}
	}
	w.checkLive()
}

// checkOld: after the next command, the old directory is whole at its place, or it is on its way out, and then its
// golden is there and gc removes what is left of it.
func (w *world) checkOld() {
	w.t.Helper()
	state := w.state()
	asides := w.asides()
	if _, err := os.Lstat(w.live()); err == nil {
		w.checkLive()
		if len(asides) > 0 {
			w.t.Errorf("LEAK: %v", asides)
		}
		return
	}

	if !strings.Contains(state, "golden g2@1 ") {
		w.t.Errorf("the directory was removed, but its golden does not exist:\n%s", state)
	}
	w.pando("gc")
	if left := w.asides(); len(left) > 0 {
		w.t.Errorf("gc leaves %v of %v", left, asides)
	}
}
