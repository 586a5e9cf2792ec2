package replicate

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// TestPushLeavesNoSnapshotOfOverlays: overlays, which cannot be pushed, are refused before anything is left of the
// push, and the others are pushed.
func TestPushLeavesNoSnapshotOfOverlays(t *testing.T) {
	w := newWorld(t)
	w.importDir("g", smallFile)
	w.overlay("g", "o")
	w.clone("g", "v")
	for range 2 {
		out, err := Push(t.Context(), w.e, w.r, PushRequest{All: true})
		wantKind(t, err, errs.Unsupported, `parameter "overlay"`)
		if len(out) == 0 || out[len(out)-1].Volume != "v" {
			t.Errorf("pushed %+v", out)
		}
	}
	_, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{{Name: "o"}}})
	wantKind(t, err, errs.Unsupported, `parameter "overlay"`)

	names, err := w.e.SnapshotNames(t.Context(), ref.MustName("o"))
	if err != nil || len(names) > 0 {
		t.Errorf("snapshots of the overlay: %v, %v", names, err)
	}
	left, err := os.ReadDir(filepath.Join(w.r.dir, journalDir))
	if err != nil || len(left) > 0 {
		t.Errorf("journals are left: %v, %v", left, err)
	}
}

// TestPushFlattened: a volume that was an overlay is pushed and pulled as others, although it keeps snapshots from
// before.
func TestPushFlattened(t *testing.T) {
	w := newWorld(t)
	w.importDir("g", smallFile)
	w.overlay("g", "o")
	w.snapshot("o", "before")
	if _, err := w.e.Flatten(t.Context(), engine.FlattenRequest{Volume: ref.MustName("o")}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{{Name: "o"}}}); err != nil {
			t.Fatal(err)
		}
	}
	if s := w.pushSnapshots("o"); len(s) != 1 {
		t.Errorf("pushes left %v, want the snapshot that the next one builds upon", s)
	}
	w.pull("o", PullRequest{As: ref.MustName("again")})
}

func smallFile(dir string) {
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("content of a"), 0o600); err != nil {
		panic(err)
	}
}

// overlay clones a golden as an overlay.
func (w *world) overlay(golden, name string) {
	w.t.Helper()
	if os.Geteuid() != 0 {
		w.t.Skip("SKIPPED: overlays need root: run the tests as root")
	}
	if _, err := w.e.Clone(w.t.Context(), engine.CloneRequest{From: ref.Ref{Name: golden}, Name: ref.MustName(name),
		Overlay: true}); err != nil {
		w.t.Fatal(err)
	}
}
