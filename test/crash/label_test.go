package crash

import (
	"os"
	"strings"
	"testing"

	"pando/internal/api"
)

// labels are changes of labels, of a mounted volume and of a golden; and verbs on what has labels.
var labels = []operation{
	{name: "label-set", command: func(*world) []string { return []string{"label", "set", "v", "a=2", "b=3"} },
		prepare: func(w *world) {
			w.gone("*")
			w.pando("clone", "g", "v", "--mount", "--label", "a=1")
		}, want: replaced(" labels a=1", " labels a=2, b=3")},
	{name: "label-golden", command: func(*world) []string { return []string{"label", "set", "g", "a=2"} },
		prepare: func(w *world) {
			w.gone("*")
			w.pando("label", "set", "g", "a=1")
		}, want: replaced(" labels a=1", " labels a=2")},
	{name: "label-rewind", command: func(*world) []string { return []string{"rewind", "base", "s"} },
		prepare: func(w *world) {
			w.gone("*")
			w.pando("clone", "g", "base", "--label", "a=1")
			w.pando("snapshot", "base", "s")
		}, want: func(before string) string { // the labels stay those of the volume
			before = strings.Replace(before, "volume ", "snapshot base@before-rewind clean\nvolume ", 1)
			return strings.Replace(before, " from g@1", " from base@s", 1)
		}},
	{name: "label-destroy", command: func(*world) []string { return []string{"destroy", "--label", "a"} },
		prepare: func(w *world) {
			w.gone("*")
			w.pando("clone", "g", "base")
			w.pando("clone", "g", "v", "--label", "a=1")
		}, want: func(before string) string { return before[:strings.Index(before, "volume v ")] }},
}

// labelled describes the labels of what has some.
func labelled(i api.Object) string {
	if s := i.Labels.String(); s != "" {
		return " labels " + s
	}
	return ""
}

// TestLabelsAtEveryStep: whatever interrupts it, everything has its old labels or the new ones afterwards, in the
// catalogue and in the identities.
func TestLabelsAtEveryStep(t *testing.T) {
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
			for _, op := range labels {
				w.sweepFaults(t, op, op.name+"-")
			}
			w.gone("*")
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}
