package engine_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

func selector(t *testing.T, words ...string) driver.LabelSelector {
	t.Helper()
	s, err := driver.ParseLabelSelector("test", words...)
	must(t, err)
	return s
}

// TestDestroyByLabelChecksAgain: a volume whose label was removed before destroy claimed it stays, even if it was
// chosen already.
func TestDestroyByLabelChecksAgain(t *testing.T) {
	dir := t.TempDir()
	e := newPool(t, dir, engine.InitRequest{Driver: "plain"})
	importTree(t, e, "g", source(t))
	const count = 200 // destroy claims them in several batches
	labels, err := driver.ParseLabels("test", []string{"old=yes"})
	must(t, err)
	_, err = e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Count: count,
		Labels: labels})
	must(t, err)

	// Remove labels, from the last volume on, while all volumes with the label are being destroyed.
	other := open(t, e.Dir())
	defer other.Close()
	kept := map[string]bool{}
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := count; i > 0; i-- {
			name := fmt.Sprint("v-", i)
			_, err := other.SetLabels(t.Context(), engine.LabelRequest{Ref: ref.Ref{Name: name}, Remove: []string{"old"}})
			if err == nil {
				kept[name] = true
			} else if !errs.Is(err, errs.NotFound) {
				t.Error(err)
			}
		}
	})
	r, err := e.Destroy(t.Context(), engine.DestroyRequest{Labels: selector(t, "old=yes")})
	must(t, err)
	wg.Wait()

	must(t, errors.Join(r.Failed...))
	left, err := e.VolumeNames(t.Context())
	must(t, err)
	t.Logf("%d volumes lost their label in time", len(kept))
	if len(left)+len(r.Destroyed) != count {
		t.Errorf("%d of %d volumes destroyed, %d left", len(r.Destroyed), count, len(left))
	}
	for _, name := range left {
		if !kept[name] {
			t.Errorf("%s has the label, and is left", name)
		}
	}
	for _, d := range r.Destroyed {
		if kept[d.Ref] {
			t.Errorf("%s was destroyed after its label was removed", d.Ref)
		}
	}
}

// TestLabelsFitIntoIdentities: the longest labels fit beside the longest names, with every driver. With a long source,
// labels of a golden are refused before anything changes.
func TestLabelsFitIntoIdentities(t *testing.T) {
	pools := map[string]func(*testing.T) string{
		"plain": func(t *testing.T) string { return t.TempDir() },
		"reflink": func(t *testing.T) string {
			return testfs.XFS(t, 2<<30)
		},
	}
	for name, dir := range pools {
		t.Run(name, func(t *testing.T) {
			e := newPool(t, dir(t), engine.InitRequest{Driver: name})
			long := func(first string) string { return first + strings.Repeat("x", ref.MaxNameBytes-1) }
			importTree(t, e, long("g"), source(t))
			clone(t, e, long("g"), long("v"), false)
			snap := ref.MustName(long("s"))
			_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(long("v")), Name: snap})
			must(t, err)

			most := map[string]string{}
			for i := range 3 {
				most[fmt.Sprint("k", i)] = strings.Repeat("<", 220) // six bytes each in JSON
			}
			for _, r := range []ref.Ref{{Name: long("g")}, {Name: long("v")}, {Name: long("v"), At: long("s")}} {
				out, err := e.SetLabels(t.Context(), engine.LabelRequest{Ref: r, Set: most})
				if err != nil || len(out.Labels.Map()) != len(most) {
					t.Errorf("%v, %v", out.Labels, err)
				}
			}
			out, err := e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName(long("v")), Snapshot: snap})
			if err != nil || len(out.Labels.Map()) != len(most) {
				t.Errorf("%v, %v", out.Labels, err)
			}

			source := `{"git":{"url":"` + strings.Repeat("u", 3000) + `"}}`
			q := engine.PublishRequest{Golden: ref.MustName("sourced"), Volume: ref.MustName(long("v")),
				Filled: &engine.Filled{Source: source, Origin: "u#1"}}
			_, err = e.Publish(t.Context(), q)
			must(t, err)
			golden := engine.LabelRequest{Ref: ref.Ref{Name: "sourced"}, Set: map[string]string{"a": "b"}}
			_, err = e.SetLabels(t.Context(), golden)
			must(t, err)
			golden.Set = most
			if _, err := e.SetLabels(t.Context(), golden); !errs.Is(err, errs.Invalid) {
				t.Errorf("%v", err)
			}
			if l, err := e.Labels(t.Context(), golden.Ref); err != nil || l.String() != "a=b" {
				t.Errorf("%v, %v", l, err)
			}
			again, r := maintained(t, e.Dir())
			defer again.Close()
			if r.Undone > 0 || len(r.Warnings) > 0 {
				t.Errorf("there was something to clean up: %+v", r)
			}
		})
	}
}
