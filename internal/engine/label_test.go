package engine_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"
)

func selector(t *testing.T, words ...string) driver.LabelSelector {
	t.Helper()
	s, err := driver.ParseLabelSelector("test", words...)
	must(t, err)
	return s
}

// TestChosenByLabelIsCheckedAgain: a volume whose label was removed before destroy or prune claimed it stays, even if
// it was chosen already.
func TestChosenByLabelIsCheckedAgain(t *testing.T) {
	verbs := map[string]func(*engine.Engine) (gone []string, err error){
		"destroy": func(e *engine.Engine) (gone []string, err error) {
			r, err := e.Destroy(t.Context(), engine.DestroyRequest{Labels: selector(t, "old=yes")})
			if err != nil {
				return nil, err
			}
			for _, d := range r.Destroyed {
				gone = append(gone, d.Ref)
			}
			return gone, errors.Join(r.Failed...)
		},
		"prune": func(e *engine.Engine) (gone []string, err error) {
			r, err := e.Prune(t.Context(), engine.PruneRequest{Labels: selector(t, "old=yes"), Idle: time.Nanosecond})
			if err != nil {
				return nil, err
			}
			for _, c := range r.Candidates {
				if c.Destroyed {
					gone = append(gone, c.Ref)
				}
			}
			return gone, nil
		},
	}
	for name, verb := range verbs {
		t.Run(name, func(t *testing.T) {
			e := newPool(t, t.TempDir(), engine.InitRequest{Driver: "plain"})
			importTree(t, e, "g", source(t))
			const count = 200 // they are claimed in several batches
			labels, err := driver.ParseLabels("test", []string{"old=yes"})
			must(t, err)
			_, err = e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Count: count,
				Labels: labels})
			must(t, err)

			kept := map[string]bool{}
			var wg sync.WaitGroup
			wg.Go(func() { removeLabels(t, e.Dir(), count, kept) })
			gone, err := verb(e)
			must(t, err)
			wg.Wait()

			left, err := pooltest.VolumeNames(t.Context(), e)
			must(t, err)
			t.Logf("%d volumes lost their label in time", len(kept))
			if len(left)+len(gone) != count {
				t.Errorf("%d of %d volumes are gone, %d left", len(gone), count, len(left))
			}
			for _, name := range left {
				if !kept[name] {
					t.Errorf("%s has the label, and is left", name)
				}
			}
			for _, name := range gone {
				if kept[name] {
					t.Errorf("%s is gone after its label was removed", name)
				}
			}
		})
	}
}

// removeLabels removes the labels of the volumes v-1 to v-count that still exist, from the last one on, as another
// process would, and notes in kept which.
func removeLabels(t *testing.T, dir string, count int, kept map[string]bool) {
	other := open(t, dir)
	defer other.Close()
	for i := count; i > 0; i-- {
		name := fmt.Sprint("v-", i)
		q := engine.LabelRequest{Ref: ref.Ref{Name: name}, Remove: []string{"old"}}
		if _, err := other.SetLabels(t.Context(), q); err == nil {
			kept[name] = true
		} else if !errs.Is(err, errs.NotFound) {
			t.Error(err)
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

// TestLabelsWaitForNextGeneration: labels that a golden gets while its next generation is being built are not lost.
func TestLabelsWaitForNextGeneration(t *testing.T) {
	e, builder := firstBuild(t)
	finish := sync.OnceFunc(heldImport(t, builder, engine.ImportRequest{Name: ref.MustName("other"), Update: true}, false))
	defer finish()

	q := engine.LabelRequest{Ref: ref.Ref{Name: "other"}, Set: map[string]string{"a": "b"}}
	tracker := &progress.Tracker{}
	set := make(chan error, 1)
	go func() {
		_, err := e.SetLabels(progress.With(t.Context(), tracker), q)
		set <- err
	}()

	// It must wait, for the import to record the golden as it was when it began.
	for waits := false; !waits; {
		select {
		case err := <-set:
			t.Fatalf("did not wait: %v", err)
		case <-time.After(time.Millisecond):
			waits = tracker.State().Stage == progress.WaitingForBuild
		}
	}
	finish()
	must(t, <-set)
	if l, err := e.Labels(t.Context(), q.Ref); err != nil || l.String() != "a=b" {
		t.Errorf("labels %q, %v", l, err)
	}

	// The identity has them, too.
	builder.Close()
	e.Close()
	_, err := engine.Rebuild(t.Context(), e.Dir(), drivers)
	must(t, err)
	again := open(t, e.Dir())
	defer again.Close()
	if l, err := again.Labels(t.Context(), q.Ref); err != nil || l.String() != "a=b" {
		t.Errorf("labels of the identity %q, %v", l, err)
	}
}
