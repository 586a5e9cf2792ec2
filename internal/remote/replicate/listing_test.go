package replicate

import (
	"fmt"
	"os"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// listings counts how often each prefix was listed.
func listings(calls []storetest.Call) map[string]int {
	out := map[string]int{}
	for _, c := range calls {
		if c.Op == storetest.List {
			out[c.Key]++
		}
	}
	return out
}

// listsOnce wants that no object of data was listed more than once: all of the bucket, or segments, or manifests, which
// are what there are many of.
func listsOnce(t *testing.T, what string, calls []storetest.Call) {
	t.Helper()
	n := listings(calls)
	t.Logf("%s lists %v", what, n)
	for _, prefix := range []string{"segments/", "manifests/", "points/"} {
		if n[prefix]+n[""] > 1 {
			t.Errorf("%s lists %s %d times, and all of the bucket %d times", what, prefix, n[prefix], n[""])
		}
	}
}

// TestCommandsListOnce: no command lists the whole bucket, or what most of it is, more than once.
func TestCommandsListOnce(t *testing.T) {
	rnd := faulttest.Rand(t)
	all, q := wastefulBench(t, rnd)
	all.prune(q)
	for i := range 3 { // what is repacked again, and garbage
		last := all.truth["v"][fmt.Sprint("p", i+2)]
		all.must("v", fmt.Sprint("p", i+3), 512<<10, last, scattered(rnd, 512<<10, 100), false)
	}
	for name, do := range map[string]func(*repo.Repo) error{
		"prune": func(r *repo.Repo) error { _, err := prune(t.Context(), r, q); return err },
		"verify": func(r *repo.Repo) error {
			_, err := verify(t.Context(), r, VerifyRequest{ReadPercent: 100})
			return err
		},
		"ls":     func(r *repo.Repo) error { _, err := listVolumes(t.Context(), r); return err },
		"repair": func(r *repo.Repo) error { _, err := (&repairer{repo: r}).runRepair(t.Context()); return err },
		"delete": func(r *repo.Repo) error {
			_, err := removeVolume(t.Context(), r, ref.Ref{Name: "w"})
			return err
		},
		"pull": func(r *repo.Repo) error {
			m := all.truth["v"]["p5"]
			_, _, err := all.restored(r, m, nil)
			return err
		},
	} {
		b := all.copied(t)
		r, f := b.faulty()
		before := len(f.Calls())
		if err := do(r); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		listsOnce(t, name, f.Calls()[before:])
	}
}

// TestPushAndPullListOnce is TestCommandsListOnce for what needs a pool.
func TestPushAndPullListOnce(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	calls := func(do func()) []storetest.Call {
		before := len(w.store.Calls())
		do()
		return w.store.Calls()[before:]
	}
	listsOnce(t, "the first push", calls(func() { w.push("v") }))
	w.edit("v", func(f *os.File) { noise(t, f, 2, 8*mib, mib) })
	listsOnce(t, "the next push", calls(func() { w.push("v") }))
	listsOnce(t, "pull", calls(func() {
		if _, err := Pull(t.Context(), w.e, w.r, PullRequest{Ref: ref.Ref{Name: "v"}, As: ref.MustName("back")}); err != nil {
			t.Fatal(err)
		}
	}))
	listsOnce(t, "prune", calls(func() {
		if _, err := Prune(t.Context(), nil, w.r, PruneRequest{MaxRepack: -1}); err != nil {
			t.Fatal(err)
		}
	}))
}
