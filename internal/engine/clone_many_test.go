package engine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// TestManyClonesShareFlushes: clones made in one call do not wait for the disk one by one.
func TestManyClonesShareFlushes(t *testing.T) {
	const count = 60
	for _, pool := range []struct{ driver, fs string }{{"reflink", "xfs"}, {"reflink", "btrfs"}, {"plain", "ext4"},
		{"plain", "btrfs"}} {
		t.Run(pool.driver+" on "+pool.fs, func(t *testing.T) {
			fs := testfs.New(t, pool.fs, 1<<30)
			e := newPool(t, fs.Dir(), engine.InitRequest{Driver: pool.driver})
			importTree(t, e, "g", source(t))

			before := fs.Flushes()
			q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Count: count}
			if _, err := e.Clone(t.Context(), q); err != nil {
				t.Fatal(err)
			}
			if n := fs.Flushes() - before; n == 0 || n > count/2 {
				t.Errorf("%d flushes for %d clones", n, count)
			}
		})
	}
}

// TestCanceledClonesLeaveNothing: clones are made all or none when the call is interrupted.
func TestCanceledClonesLeaveNothing(t *testing.T) {
	const count = 400
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{Driver: "reflink"})
	importTree(t, e, "g", source(t))
	objects := filepath.Join(e.Dir(), "data", "objects")
	before := countFiles(t, objects)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for ctx.Err() == nil {
			if names, err := os.ReadDir(objects); err == nil && len(names) > before+20 {
				cancel()
			}
		}
	}()
	q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Count: count}
	_, err := e.Clone(ctx, q)
	cancel()
	<-stopped

	volumes, lerr := e.Volumes(t.Context(), false)
	if lerr != nil {
		t.Fatal(lerr)
	}
	switch {
	case err == nil: // it was faster
		if len(volumes) != count {
			t.Errorf("%d volumes of %d", len(volumes), count)
		}
	case !errors.Is(err, context.Canceled):
		t.Errorf("interrupted: %v", err)
	case len(volumes) > 0 || countFiles(t, objects) != before:
		t.Errorf("%d volumes, and %d files of %d before", len(volumes), countFiles(t, objects), before)
	}
}

func countFiles(t *testing.T, dir string) int {
	t.Helper()
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}
