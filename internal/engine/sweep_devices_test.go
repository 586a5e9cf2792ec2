package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/linux/loopdev"
	"pando/internal/testing/testfs"
)

// TestStrayLoopDevices: gc takes a loop device away that no volume accounts for, and reports one that something holds.
func TestStrayLoopDevices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: loop devices need root: run the tests as root")
	}
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	v, w := clone(t, e, "g", "v", false), clone(t, e, "g", "w", false)
	clone(t, e, "g", "mounted", true) // whose device is accounted for

	image := func(of api.Object) string { return filepath.Join(e.Dir(), "data", "objects", string(of.ID)+".img") }
	attach := func(of api.Object, o loopdev.Options) *loopdev.Device {
		f, err := os.OpenFile(image(of), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		d, err := loopdev.Attach(t.Context(), f, o)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	stray, held := attach(v, loopdev.Options{KeepOpen: true}), attach(w, loopdev.Options{})
	defer held.Close()
	if err := stray.Close(); err != nil {
		t.Fatal(err)
	}

	// Destroying such a volume says what is in the way.
	d, err := e.Destroy(t.Context(), toDestroy("v"))
	if err := errors.Join(append(d.Failed, err)...); !errs.Is(err, errs.InUse) ||
		!strings.Contains(err.Error(), stray.Path+" is attached to its image") {
		t.Errorf("destroy of v: %v", err)
	}

	r, err := e.GC(t.Context(), engine.GCRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := held.Path + " of w is held by something that Pando did not create or has lost track of"
	if r.Loops != 1 || len(r.Kept) != 1 || r.Kept[0].String() != want {
		t.Errorf("%d taken away, kept: %v", r.Loops, r.Kept)
	}
	// Not by its number, which another process may have by now.
	if on, err := loopdev.Attached(image(v)); on || err != nil {
		t.Errorf("%s is still there: %v", stray.Path, err)
	}
	if _, err := loopdev.Lookup(held.Index); err != nil {
		t.Errorf("%s went: %v", held.Path, err)
	}
}
