//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/testing/faulttest"
)

// lifecycle are the verbs that deal with volumes over time.
var lifecycle = []operation{
	{name: "snapshot", command: func(*world) []string { return []string{"snapshot", "base", "s"} },
		prepare: func(w *world) { w.noSnapshots("base") },
		want:    beforeVolumes("snapshot base@s clean\n")},
	{name: "snapshot-mounted", command: func(*world) []string { return []string{"snapshot", "base", "s"} },
		prepare: func(w *world) { w.noSnapshots("base"); w.scribble("base") },
		want:    beforeVolumes("snapshot base@s clean\n")},
	{name: "snapshot-kill-guard", all: true, command: func(*world) []string { return []string{"snapshot", "base", "s"} },
		prepare: func(w *world) { w.noSnapshots("base"); w.scribble("base") },
		want:    beforeVolumes("snapshot base@s clean\n")},
	{name: "fork-mounted", command: func(*world) []string { return []string{"fork", "base", "v", "--mount"} },
		prepare: func(w *world) { w.gone("v"); w.scribble("base") },
		want:    func(before string) string { return before + "volume v from base mounted at /mnt/v\n" }},
	{name: "publish-mounted", command: func(*world) []string {
		return []string{"golden", "publish", "g2", "base", "--no-progress"}
	},
		prepare: func(w *world) { w.goldenGone("g2"); w.scribble("base") },
		want: func(before string) string {
			lines := strings.SplitAfterN(before, "\n", 2)
			return lines[0] + "golden g2@1 of 1\n" + lines[1]
		}},
	{name: "rewind", command: func(*world) []string { return []string{"rewind", "base", "s"} },
		prepare: func(w *world) { w.onlySnapshot("base", "s"); w.pando("umount", "base") },
		want:    rewound, middle: rewoundUnmounted},
	{name: "rewind-detach", command: func(*world) []string { return []string{"rewind", "base", "s", "--detach"} },
		prepare: func(w *world) { w.onlySnapshot("base", "s"); w.pando("mount", "base") },
		want:    rewound, middle: rewoundUnmounted},
	{name: "diff-mounted", command: func(*world) []string { return []string{"diff", "g@1", "base"} },
		prepare: func(w *world) { w.scribble("base") }},
	{name: "export-mounted", every: 2, command: func(w *world) []string {
		return []string{"export", "base", filepath.Join(w.source, "..", "exported.tar"), "--force", "--no-progress"}
	},
		prepare: func(w *world) { w.scribble("base") }},
	{name: "rebase", every: 2, command: func(*world) []string {
		return []string{"rebase", "base", "g@2", "--no-progress"}
	},
		prepare: func(w *world) {
			if !strings.Contains(w.peek(), "golden g@2") {
				w.pando(append(w.importArgs("g"), "--update")...)
			}
			w.gone("base")
			w.pando("clone", "g@1", "base")
			w.scribble("base")
			w.pando("umount", "base")
		},
		want: func(before string) string {
			after := beforeVolumes("snapshot base@before-rebase clean\n")(before)
			return strings.Replace(after, "volume base from g@1 ", "volume base from g@2 ", 1)
		}},
	{name: "pin", command: func(*world) []string { return []string{"pin", "base"} },
		prepare: func(w *world) { w.pando("unpin", "base") },
		want:    func(before string) string { return strings.Replace(before, " idle at", " pinned idle at", 1) }},
	{name: "unpin", command: func(*world) []string { return []string{"unpin", "base"} },
		prepare: func(w *world) { w.pando("pin", "base", "--for", "2h") },
		want:    func(before string) string { return strings.Replace(before, " pinned", "", 1) }},
	{name: "set", command: func(*world) []string { return []string{"set", "base", "--ttl", "none"} },
		prepare: func(w *world) { w.pando("set", "base", "--ttl", "2h") },
		want:    func(before string) string { return strings.Replace(before, " expires", "", 1) }},
	{name: "golden-keep", command: func(*world) []string { return []string{"golden", "keep", "g2", "1"} },
		prepare: func(w *world) {
			w.goldenGone("g2")
			w.pando("golden", "publish", "g2", "base", "--no-progress")
			w.pando("golden", "publish", "g2", "base", "--no-progress")
		},
		want: func(before string) string { return strings.Replace(before, "golden g2@2 of 2", "golden g2@2 of 1", 1) }},
	{name: "golden-set", command: func(*world) []string { return []string{"golden", "set", "g2", "overlay=never"} },
		prepare: func(w *world) {
			w.goldenGone("g2")
			w.pando("golden", "publish", "g2", "base", "--no-progress")
		},
		want: func(before string) string {
			return strings.Replace(before, "golden g2@1 of 1", "golden g2@1 of 1 overlays never", 1)
		}},
	{name: "destroy-with-snapshots", command: func(*world) []string { return []string{"destroy", "base2"} },
		prepare: func(w *world) {
			w.gone("base2*")
			w.pando("fork", "base", "base2")
			w.pando("snapshot", "base2", "a")
			w.pando("snapshot", "base2", "b")
		},
		want: func(before string) string { return without(before, "base2") }},
	{name: "prune", command: func(*world) []string { return []string{"prune", "--idle", "1ms"} },
		prepare: func(w *world) { w.pando("mount", "base"); w.there("v"); w.there("w") },
		want:    func(before string) string { return without(without(before, "volume v "), "volume w ") },
		middle: func(before, after string) bool {
			return after == without(before, "volume v ") || after == without(before, "volume w ")
		}},
	{name: "gc-explain", command: func(*world) []string { return []string{"gc", "--explain"} },
		prepare: func(w *world) { w.pando("mount", "base") }},
	{name: "fsck", every: 4, command: func(*world) []string { return []string{"fsck", "--no-progress"} },
		prepare: func(w *world) { w.there("v"); w.scribble("base") }},
	{name: "fsck-repair", every: 8, command: func(*world) []string {
		return []string{"fsck", "--repair", "--no-progress"}
	},
		prepare: func(w *world) { w.fresh("base"); w.damage("base") },
		wantOf: func(w *world, before string) string {
			if w.kind.name == "reflink" { // its filesystem was damaged too
				return beforeVolumes("snapshot base@before-fsck clean\n")(before)
			}
			return before
		}},
}

// beforeVolumes adds lines to a state.
func beforeVolumes(lines string) func(string) string {
	return func(before string) string {
		at := strings.Index(before, "volume ")
		return before[:at] + lines + before[at:]
	}
}

// without takes the lines that mention something out of a state.
func without(state, what string) string {
	var b strings.Builder
	for line := range strings.Lines(state) {
		if !strings.Contains(line, what) {
			b.WriteString(line)
		}
	}
	return b.String()
}

func rewound(before string) string {
	after := beforeVolumes("snapshot base@before-rewind clean\n")(before)
	return strings.Replace(after, "volume base from g@1 ", "volume base from base@s ", 1)
}

// rewoundUnmounted: --detach takes three steps, each whole.
func rewoundUnmounted(before, after string) bool {
	idle := strings.NewReplacer("mounted at /mnt/base\n", "idle at \n").Replace
	return after == idle(before) || after == idle(rewound(before))
}

// scribble mounts a volume and writes into it.
func (w *world) scribble(volume string) {
	w.t.Helper()
	w.pando("mount", volume)
	if err := os.WriteFile(filepath.Join(w.dir, "mnt", volume, "scribble"), []byte(strings.Repeat("x", 10000)),
		0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) noSnapshots(volume string) {
	w.t.Helper()
	for _, s := range w.snapshots(volume) {
		w.pando("destroy", s.Ref)
	}
}

// onlySnapshot makes a volume as it was cloned from g, with one snapshot.
func (w *world) onlySnapshot(volume, name string) {
	w.t.Helper()
	w.gone(volume)
	w.pando("clone", "g@1", volume)
	w.pando("snapshot", volume, name)
}

// TestFrozenThenKilled kills pando between freeze and thaw, once with the guard
// that would thaw, and once without it.
func TestFrozenThenKilled(t *testing.T) {
	t.Parallel()
	for _, guard := range []string{"with its guard alive", "with its guard killed too"} {
		t.Run(guard, func(t *testing.T) {
			w := newWorld(t, kinds[0])
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "base")
			w.scribble("base")
			var froze bool
			plan := faulttest.Plan{Mode: faulttest.KillBefore, Match: func(s faulttest.Step) bool {
				return s.Name == "ioctl" && strings.Contains(s.Detail, "FITHAW")
			}}
			res, err := faulttest.Run(t.Context(), []string{pando, "--pool", w.dir, "snapshot", "base", "s", "--freeze"},
				faulttest.Options{Plan: plan, KillGroup: true, FollowProcesses: guard != "with its guard alive"})
			if err != nil {
				t.Fatal(err)
			}
			if froze = res.Fired; !froze {
				t.Fatalf("it did not come to thaw: %s", res.Stderr)
			}
			if guard == "with its guard alive" {
				// Nobody but the guard helps here; this would hang.
				if err := os.WriteFile(filepath.Join(w.dir, "mnt", "base", "late"), []byte("x"), 0o600); err != nil {
					t.Error(err)
				}
				w.pando("ls")
			} else {
				if !frozen(t, filepath.Join(w.dir, "mnt", "base")) {
					t.Error("it is not frozen: this test shows nothing")
				}
				w.pando("ls")
			}
			if frozen(t, filepath.Join(w.dir, "mnt", "base")) {
				t.Error("LEAK: the filesystem stays frozen")
			}
			w.check()
			w.pando("snapshot", "base", "s")
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}
