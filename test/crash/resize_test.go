package crash

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"pando/internal/api"
)

// resizes are the ways of enlarging a volume. A mounted ext4 needs a capability that containers lack; see
// TestResize of the engine.
var resizes = []operation{
	{name: "resize", command: func(*world) []string { return []string{"resize", "v", "512M", "--no-progress"} },
		prepare: func(w *world) { w.gone("v"); w.pando("clone", "g", "v") }, want: grown("")},
	{name: "resize-mounted", command: func(*world) []string { return []string{"resize", "v", "512M", "--no-progress"} },
		prepare: func(w *world) { w.gone("v"); w.pando("clone", "x", "v", "--mount") }, want: grown(" with room")},
}

// resizedBytes is the size that volumes get.
const resizedBytes = 512 << 20

// resized says whether a volume has been enlarged, and whether the filesystem has too, if that is mounted.
func (w *world) resized(v api.Object) string {
	w.t.Helper()
	if v.SizeBytes != resizedBytes {
		return ""
	}
	if v.Mountpoint == "" {
		return " of 512M"
	}

	var st syscall.Statfs_t
	if err := syscall.Statfs(v.Mountpoint, &st); err != nil {
		w.t.Fatal(err)
	}
	if int64(st.Blocks)*st.Bsize < resizedBytes*8/10 {
		return " of 512M without room"
	}
	return " of 512M with room"
}

// grown is the state in which v has been enlarged.
func grown(room string) func(before string) string {
	return func(before string) string {
		var out string
		for line := range strings.Lines(before) {
			if strings.HasPrefix(line, "volume v ") {
				line = strings.TrimSuffix(line, "\n") + " of 512M" + room + "\n"
			}
			out += line
		}
		return out
	}
}

// TestResizeAtEveryStep: whatever interrupts it, a volume has its old size or the new one afterwards, and so have its
// image, its identity, its block device and its filesystem.
func TestResizeAtEveryStep(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	for _, op := range resizes {
		t.Run(op.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, kinds[0])
			w.initPool()
			w.importGolden("g")
			w.pando("golden", "import", "x", w.source, "--fs", "xfs", "--size", "320M", "--no-progress")
			w.sweepFaults(t, op, "")
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}
