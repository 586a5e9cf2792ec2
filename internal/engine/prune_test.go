package engine_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/testing/pooltest"
)

// TestPruneRemovesWhatItsVolumesKept: a superseded generation goes in the same prune as the last volume that was made
// from it, behind it, and stays with one that may not go.
func TestPruneRemovesWhatItsVolumesKept(t *testing.T) {
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: "plain"})
	src := source(t)
	importTree(t, e, "g", src)
	for _, name := range []string{"a", "b"} {
		clone(t, e, "g", name, false)
	}
	snapshot(t, e, "b", "s")
	publish(t, e, "g", "a")
	clone(t, e, "g", "pinned", false)
	publish(t, e, "g", "pinned")
	_, err := e.Pin(t.Context(), engine.PinRequest{Ref: ref.Ref{Name: "pinned"}})
	must(t, err)

	// The oldest generation has the volume that was used last.
	edit(t, e, "b", func(dir string) { must(t, os.WriteFile(filepath.Join(dir, "new"), nil, 0o644)) })

	r, err := e.Prune(t.Context(), engine.PruneRequest{KeepFreePercent: 99.9})
	must(t, err)
	var gone []string
	for _, c := range r.Candidates {
		if !c.Destroyed {
			t.Errorf("%s stays: %s", c.Ref, c.Kept)
		}
		gone = append(gone, c.Ref)
	}
	if want := []string{"a", "g@2", "b", "g@1"}; !slices.Equal(gone, want) {
		t.Errorf("prune removed %q, want %q", gone, want)
	}
	left, err := pooltest.VolumeNames(t.Context(), e)
	if err != nil || !slices.Equal(left, []string{"pinned"}) {
		t.Errorf("the volumes are %q (%v), want the pinned one", left, err)
	}
}
