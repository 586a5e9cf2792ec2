package engine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
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

	volumes, lerr := e.Volumes(t.Context(), engine.VolumesRequest{})
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

// TestClonesArePreparedInPrivate: while a clone is prepared, it is below the pool and not in the directory of the user,
// which others may be able to change. If that fails, nothing is there.
func TestClonesArePreparedInPrivate(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		theirs := filepath.Join(top, "theirs")
		must(t, os.Mkdir(theirs, 0o777))
		fail := false
		q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Count: 2, Mount: true, MountDir: theirs}
		prepare := func(_ context.Context, name, dir string) error {
			if st, err := os.Stat(filepath.Dir(dir)); err != nil || st.Mode().Perm()&0o077 != 0 ||
				!strings.HasPrefix(dir, e.Dir()+"/") {
				t.Errorf("others can get to %s: %v", dir, err)
			}
			if _, err := os.Lstat(filepath.Join(theirs, name)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is there already: %v", name, err)
			}
			if fail {
				return errors.New("failed")
			}
			return os.WriteFile(filepath.Join(dir, "prepared"), nil, 0o600)
		}
		out, err := e.CloneAndPrepare(t.Context(), q, prepare)
		must(t, err)
		for _, v := range out {
			if _, err := os.Stat(filepath.Join(theirs, v.Name, "prepared")); err != nil ||
				v.Mountpoint != filepath.Join(theirs, v.Name) {
				t.Errorf("mounted at %s, %v", v.Mountpoint, err)
			}
		}
		destroy(t, e, "v-1", "v-2")

		fail = true
		_, err = e.CloneAndPrepare(t.Context(), q, prepare)
		left, lerr := os.ReadDir(theirs)
		volumes, verr := e.Volumes(t.Context(), engine.VolumesRequest{})
		if err == nil || len(left) > 0 || len(volumes) > 0 || lerr != nil || verr != nil {
			t.Errorf("%v: left %v, %v, %v, %v", err, left, volumes, lerr, verr)
		}
		checkClean(t, e)
	})
}
