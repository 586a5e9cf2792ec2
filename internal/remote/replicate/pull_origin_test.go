package replicate

import (
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver/reflink"
	"pando/internal/testing/testfs"
)

// TestPullWithDamagedOrigin: a point whose own data is whole is restored, even if what it was cloned from has lost data
// that the clone has overwritten.
func TestPullWithDamagedOrigin(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 4*mib) })
	w.push("g")
	w.clone("g", "v")
	rp := w.open()
	segments := func() map[string]bool {
		out := map[string]bool{}
		for o, err := range rp.Objects(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(o.Key, "segments/") {
				out[o.Key] = true
			}
		}
		return out
	}

	// The origin has a block of its own, which the clone overwrites.
	before := segments()
	w.edit("v", func(f *os.File) { noise(t, f, 2, mib, 65536) })
	w.push("v")
	own := segments()
	maps.DeleteFunc(own, func(key string, _ bool) bool { return before[key] })
	w.clone("v@"+w.pushSnapshots("v")[0], "w")
	w.edit("w", func(f *os.File) { noise(t, f, 3, mib, 65536) })
	w.push("w")
	if len(own) == 0 {
		t.Fatal("the origin has no segment of its own")
	}

	// Damage that block. The map of the origin, which follows it in the segment, stays readable.
	damaged := func() *world {
		o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
		for key := range own {
			o.store.Add(flipAt(key, 30000))
		}
		return o
	}
	if _, err := damaged().tryPull("v", PullRequest{}); !errs.Is(err, errs.Damaged) {
		t.Fatalf("the origin is not damaged: %v", err)
	}

	o := damaged()
	p := o.pull("w", PullRequest{})
	if o.sum("w") != w.sum("w") {
		t.Error("the clone was not restored as it was pushed")
	}
	if p.Base != "g@1" {
		t.Errorf("it shares nothing with the golden that is here: its base is %q", p.Base)
	}
	if !slices.ContainsFunc(p.Notes, func(s string) bool { return strings.Contains(s, "which it was cloned from") }) {
		t.Errorf("no note says that it shares nothing with its origin: %q", p.Notes)
	}
}

// TestPullOriginCircle: a forged head, in which a point is its own origin, ends a pull, and leaves nothing.
func TestPullOriginCircle(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.push("g")
	rp := w.open()
	h, v, err := rp.Head(t.Context(), "g")
	if err != nil {
		t.Fatal(err)
	}
	pt := &h.Recent[0]
	pt.OriginRef, pt.OriginVol, pt.OriginID = "g@1", "g", pt.Manifest
	if _, err := rp.PutHead(t.Context(), h, v); err != nil {
		t.Fatal(err)
	}

	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	before := o.state()
	if p, err := o.tryPull("g", PullRequest{}); !errors.Is(err, errTooDeep) {
		t.Errorf("%+v, %v", p, err)
	}
	if after := o.state(); after != before {
		t.Errorf("it left:\n%s", after)
	}
}
