package engine_test

import (
	"sync"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// TestRequestsAreFoundAgain: what a request with a key has made is found by its key, whatever happened to it since,
// also by another process and after the catalogue was rebuilt, until it is destroyed.
func TestRequestsAreFoundAgain(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		ctx := t.Context()
		importTree(t, e, "g", source(t))
		r := engine.Request{Key: "00", Sum: "aa"}
		asked := engine.WithRequest(ctx, r)
		q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("job")}
		_, err := e.Clone(asked, q)
		must(t, err)

		found := func(what string, e *engine.Engine, key string, names ...string) {
			t.Helper()
			got, infos, err := e.MadeBy(ctx, key)
			must(t, err)
			var have []string
			for _, i := range infos {
				have = append(have, i.Name)
			}
			if len(have) != len(names) || len(names) > 0 && (have[0] != names[0] || got.Key != key) {
				t.Errorf("%s: %q of %v, want %q", what, have, got, names)
			}
		}
		found("the clone", e, "00", "job")
		found("another key", e, "0")
		found("no key", e, "")

		// A repetition makes nothing, whatever name it asks for.
		q.Name = ref.MustName("job2")
		if _, err := e.Clone(asked, q); !errs.Is(err, errs.Exists) {
			t.Errorf("a repetition: %v", err)
		}

		// It follows the volume, and neither its snapshots nor its clones have it.
		_, err = e.Rename(ctx, engine.RenameRequest{Ref: ref.Ref{Name: "job"}, Name: ref.MustName("task")})
		must(t, err)
		_, err = e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName("task"), Name: ref.MustName("s")})
		must(t, err)
		_, err = e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "task"}, Name: ref.MustName("copy")})
		must(t, err)
		_, err = e.Rewind(ctx, engine.RewindRequest{Volume: ref.MustName("task"), Snapshot: ref.MustName("s")})
		must(t, err)
		found("after a rename and a rewind", e, "00", "task")

		// Snapshots and generations.
		_, err = e.Snapshot(engine.WithRequest(ctx, engine.Request{Key: "01", Sum: "aa"}),
			engine.SnapshotRequest{Volume: ref.MustName("task")})
		must(t, err)
		_, err = e.Publish(engine.WithRequest(ctx, engine.Request{Key: "02", Sum: "aa"}),
			engine.PublishRequest{Golden: ref.MustName("h"), Volume: ref.MustName("task")})
		must(t, err)
		if _, err = e.Publish(engine.WithRequest(ctx, engine.Request{Key: "02", Sum: "aa"}),
			engine.PublishRequest{Golden: ref.MustName("h"), Volume: ref.MustName("task")}); !errs.Is(err, errs.Exists) {
			t.Errorf("a repeated publish: %v", err)
		}

		// The pool is the truth.
		dir := e.Dir()
		e.Close()
		_, err = engine.Rebuild(ctx, dir, drivers)
		must(t, err)
		again := open(t, dir)
		defer again.Close()
		found("rebuilt", again, "00", "task")
		if _, infos, err := again.MadeBy(ctx, "01"); err != nil || len(infos) != 1 || infos[0].Kind != "snapshot" {
			t.Errorf("rebuilt snapshot: %+v, %v", infos, err)
		}
		if _, infos, err := again.MadeBy(ctx, "02"); err != nil || len(infos) != 1 || infos[0].Golden != "h" {
			t.Errorf("rebuilt generation: %+v, %v", infos, err)
		}

		destroy(t, again, "task")
		found("destroyed", again, "00")
	})
}

// TestOneOfManyRequests: repetitions at the same time make one object, also in different processes, which here are
// engines of their own.
func TestOneOfManyRequests(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		importTree(t, e, "g", source(t))
		_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v")})
		must(t, err)
		other := open(t, e.Dir())
		defer other.Close()

		ctx := engine.WithRequest(t.Context(), engine.Request{Key: "00", Sum: "aa"})
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				_, err := []*engine.Engine{e, other}[i%2].Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName("v")})
				if err != nil && !errs.Is(err, errs.Exists) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if _, infos, err := e.MadeBy(t.Context(), "00"); err != nil || len(infos) != 1 {
			t.Errorf("%d snapshots, %v", len(infos), err)
		}
		healthy(t, e)
	})
}
