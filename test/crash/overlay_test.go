//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/testing/testfs"
)

// overlays are the verbs whose work on overlays differs from that on other volumes.
var overlays = []operation{
	{name: "overlay-clone", root: true, every: 3,
		command: func(*world) []string { return []string{"clone", "g", "v", "--overlay"} },
		prepare: func(w *world) { w.gone("v") },
		want:    func(before string) string { return before + "volume v from g@1 idle at \n" }},
	{name: "overlay-clone-mount", root: true, every: 3, command: func(*world) []string {
		return []string{"clone", "g", "v", "--overlay", "--mount"}
	},
		prepare: func(w *world) { w.gone("v") },
		want:    func(before string) string { return before + "volume v from g@1 mounted at /mnt/v\n" }},
	{name: "overlay-umount", root: true, every: 3,
		command: func(*world) []string { return []string{"umount", "v"} },
		prepare: func(w *world) { w.overlayThere("v"); w.scribble("v") },
		want:    func(before string) string { return strings.Replace(before, "mounted at /mnt/v\n", "idle at \n", 1) }},
	{name: "overlay-destroy-mounted", root: true, every: 3,
		command: func(*world) []string { return []string{"destroy", "v"} },
		prepare: func(w *world) { w.overlayThere("v"); w.scribble("v") },
		want:    func(before string) string { return without(before, "volume v ") },
		middle: func(before, after string) bool { // unmounted first
			return after == strings.Replace(before, "mounted at /mnt/v\n", "idle at \n", 1)
		}},
	{name: "overlay-fork", root: true, every: 3,
		command: func(*world) []string { return []string{"fork", "v", "v2", "--mount"} },
		prepare: func(w *world) { w.gone("v2"); w.overlayThere("v") },
		want:    func(before string) string { return before + "volume v2 from v mounted at /mnt/v2\n" }},
	{name: "overlay-publish-mounted", root: true, every: 24, all: true,
		command: func(w *world) []string {
			how := "--freeze"
			if w.kind.name == "btrfs" { // it cannot
				how = "--no-freeze"
			}
			return []string{"golden", "publish", "g2", "base2", how, "--no-progress"}
		},
		prepare: func(w *world) {
			w.goldenGone("g2")
			w.overlayThere("base2")
			w.scribble("base2")
			if w.kind.name == "plain" { // it does not copy an overlay that is mounted
				w.pando("umount", "base2")
			}
		},
		want: func(before string) string {
			lines := strings.SplitAfterN(before, "\n", 2)
			return lines[0] + "golden g2@1 of 1\n" + lines[1]
		}},
	{name: "overlay-snapshot", root: true, every: 3,
		command: func(*world) []string { return []string{"snapshot", "base2", "s"} },
		prepare: func(w *world) {
			w.overlayThere("base2")
			w.noSnapshots("base2")
			w.scribble("base2")
			if w.kind.name == "plain" {
				w.pando("umount", "base2")
			}
		},
		want: beforeVolumes("snapshot base2@s clean\n")},
	{name: "overlay-rebase", root: true, every: 6,
		command: func(*world) []string { return []string{"rebase", "base", "g@2", "--no-progress"} },
		prepare: func(w *world) {
			if !strings.Contains(w.peek(), "golden g@2") {
				w.pando(append(w.importArgs("g"), "--update")...)
			}
			w.gone("base")
			w.pando("clone", "g@1", "base", "--overlay")
			w.scribble("base")
			w.pando("umount", "base")
		},
		want: func(before string) string {
			after := beforeVolumes("snapshot base@before-rebase clean\n")(before)
			return strings.Replace(after, "volume base from g@1 ", "volume base from g@2 ", 1)
		}},
	{name: "overlay-flatten", root: true, every: 6,
		command: func(*world) []string { return []string{"flatten", "v", "--no-progress"} },
		prepare: func(w *world) {
			w.gone("v")
			w.pando("clone", "g", "v", "--overlay")
			w.scribble("v")
			w.pando("umount", "v")
		},
		want: func(before string) string { return before }}, // what it reads is the same
	{name: "overlay-golden-rm", root: true, every: 2,
		command: func(*world) []string { return []string{"golden", "rm", "g2"} },
		prepare: func(w *world) { w.overlayOnly("g2", "v") },
		want:    func(before string) string { return without(before, "golden g2@") },
		always:  func(w *world) { w.readable("v") }},
	{name: "overlay-destroy-last", root: true, every: 2,
		command: func(*world) []string { return []string{"destroy", "v"} },
		prepare: func(w *world) { w.overlayOnly("g2", "v"); w.pando("umount", "v"); w.goldenGone("g2") },
		want:    func(before string) string { return without(before, "volume v ") }},
}

// overlayThere makes a volume an overlay on g, unless it is one.
func (w *world) overlayThere(name string) {
	w.t.Helper()
	if !strings.Contains(w.pando("ls", "-q"), name+"\n") {
		w.pando("clone", "g", name, "--overlay")
	}
}

// overlayOnly makes a golden, and a volume that is a mounted overlay on it.
func (w *world) overlayOnly(golden, volume string) {
	w.t.Helper()
	w.gone(volume)
	w.goldenGone(golden)
	w.pando("golden", "publish", golden, "base", "--no-progress")
	w.pando("clone", golden, volume, "--overlay", "--mount")
}

// lowerUnchanged wants the golden of overlays to be as it was imported, which a clone of it shows.
func (w *world) lowerUnchanged() {
	w.t.Helper()
	w.pando("clone", "g@1", "look", "--mount")
	w.readable("look")
	if _, err := os.Lstat(filepath.Join(w.dir, "mnt", "look", "scribble")); !os.IsNotExist(err) {
		w.t.Errorf("what was written to an overlay is in its golden: %v", err)
	}
	w.gone("look")
}

// readable wants the file a in a mounted volume.
func (w *world) readable(volume string) {
	w.t.Helper()
	b, err := os.ReadFile(filepath.Join(w.dir, "mnt", volume, "a"))
	if err != nil || string(b) != "content of a" {
		w.t.Errorf("%s has %q: %v", volume, b, err)
	}
}

// TestOverlayOutlivesGolden: an overlay is mounted again with what was written to it after its golden was removed, and
// nothing of it was written to the golden.
func TestOverlayOutlivesGolden(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			if os.Geteuid() != 0 {
				t.Skip("SKIPPED: overlays need root: run the tests as root")
			}
			if k.name == "zfs-native" && !testfs.ZFSHasOverlays() {
				t.Skip("does not apply: this OpenZFS lacks what overlayfs needs")
			}
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "v", "--overlay")
			w.scribble("v")
			w.lowerUnchanged()
			w.pando("golden", "rm", "g")
			w.pando("umount", "v")
			w.pando("mount", "v")
			w.readable("v")
			if b, err := os.ReadFile(filepath.Join(w.dir, "mnt", "v", "scribble")); err != nil || len(b) != 10000 {
				t.Errorf("the overlay lacks what was written: %d bytes, %v", len(b), err)
			}
			w.pando("destroy", "v")
			w.pando("deinit", "--force")
		})
	}
}
