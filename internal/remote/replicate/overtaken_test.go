package replicate

import (
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// overtaken is a repository in which the first write of a head takes effect, but its answer is lost, and another writer
// is faster than the next attempt, which conflicts.
func (b *bench) overtaken(other func()) *repo.Repo {
	b.t.Helper()
	r, _ := b.faulty(storetest.Fault{
		Match: func(c storetest.Call) bool { return c.Op == storetest.Put && strings.HasPrefix(c.Key, "heads/") },
		When:  storetest.After,
		Do:    func(storetest.Call) { other() },
		Err:   storetest.Permanent(errs.Conflict),
	})
	return r
}

// pushAnother returns a function that pushes another point of a volume.
func (b *bench) pushAnother(volume, point string, base *made) func() {
	rnd := faulttest.Rand(b.t)
	return func() { b.must(volume, point, small, base, randomChange(rnd, small, 5), false) }
}

// TestOvertakenPrune: a prune reports what it removed, though it found it gone.
func TestOvertakenPrune(t *testing.T) {
	b := newBench(t)
	last := b.history(faulttest.Rand(t), "v", nil, 4)
	r := b.overtaken(b.pushAnother("v", "p5", last))
	out, err := prune(t.Context(), r, PruneRequest{Policy: Policy{Last: 1}})
	if err != nil {
		t.Fatal(err)
	}

	var names []string
	for _, p := range out.Points {
		names = append(names, p.Name)
	}
	if left := b.points("v"); left != "p4 p5" || strings.Join(names, " ") != "p1 p2 p3" || out.Kept != 2 {
		t.Errorf("left %q, removed %q: %+v", left, names, out)
	}
	b.whole()
}

// TestOvertakenRemoval: removing a point removes one point, even if an older one has its name, and removing a volume
// removes it once.
func TestOvertakenRemoval(t *testing.T) {
	b := newBench(t)
	last := b.history(faulttest.Rand(t), "v", nil, 3)
	h, version, err := b.repo.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	h.Recent[0].Name = "p2"
	if _, err := b.repo.PutHead(t.Context(), h, version); err != nil {
		t.Fatal(err)
	}

	// One point.
	out, err := removeVolume(t.Context(), b.overtaken(b.pushAnother("v", "p4", last)), ref.Ref{Name: "v", At: "p2"})
	if left := b.points("v"); err != nil || left != "p2 p3 p4" || !slices.Equal(out.Points, []string{"p2"}) || out.Whole {
		t.Errorf("left %q: %+v, %v", left, out, err)
	}

	// The volume, while another point is pushed.
	out, err = removeVolume(t.Context(), b.overtaken(b.pushAnother("v", "p5", nil)), ref.Ref{Name: "v"})
	if err != nil || !slices.Equal(out.Points, []string{"p2", "p3", "p4", "p5"}) || !out.Whole {
		t.Errorf("%+v, %v", out, err)
	}
	if h, _, err := b.repo.Head(t.Context(), "v"); err != nil || !h.Gone {
		t.Errorf("the volume is there: %+v, %v", h, err)
	}

	// A volume that somebody else removes as well.
	b.history(faulttest.Rand(t), "w", nil, 2)
	both := func() {
		h, version, err := b.repo.Head(t.Context(), "w")
		if err != nil || !h.Gone {
			t.Errorf("%+v, %v", h, err)
		}
		if _, err := b.repo.PutHead(t.Context(), h, version); err != nil {
			t.Error(err)
		}
	}
	out, err = removeVolume(t.Context(), b.overtaken(both), ref.Ref{Name: "w"})
	if err != nil || !slices.Equal(out.Points, []string{"p1", "p2"}) {
		t.Errorf("%+v, %v", out, err)
	}
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "w"}); !errs.Is(err, errs.NotFound) {
		t.Errorf("a volume was removed twice: %v", err)
	}
}

// TestOvertakenRemovalOfUnreadable: a point that may still be there, in a page that cannot be read, does not count as
// removed.
func TestOvertakenRemovalOfUnreadable(t *testing.T) {
	b := newBench(t)
	b.history(faulttest.Rand(t), "v", nil, 2)
	lengthen(t, b.repo, "v", 5000, 0)
	page := b.pagesOf("v")[0]
	r, _ := b.faulty(storetest.Fault{
		Match: func(c storetest.Call) bool { return c.Op == storetest.Put && strings.HasPrefix(c.Key, "heads/") },
		Do: func(storetest.Call) {
			if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "p1"}); err != nil {
				t.Error(err)
			}
			b.flip(page, 100)
		},
		Err: storetest.Permanent(errs.Conflict),
	})
	if out, err := removeVolume(t.Context(), r, ref.Ref{Name: "v", At: "h100"}); !errs.Is(err, errs.Damaged) {
		t.Errorf("%+v, %v", out, err)
	}
}
