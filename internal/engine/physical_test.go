package engine_test

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// TestPoolCountsSharedBlocksOnce: a chain of clones of clones takes the space of the first.
func TestPoolCountsSharedBlocksOnce(t *testing.T) {
	const generations, data = 12, 8 << 20
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			src := t.TempDir()
			random := make([]byte, data)
			_, _ = rand.Read(random) // never fails
			if err := os.WriteFile(filepath.Join(src, "data"), random, 0o644); err != nil {
				t.Fatal(err)
			}
			for i := range 200 { // so small that btrfs keeps them in its metadata
				if err := os.WriteFile(filepath.Join(src, fmt.Sprint("small", i)), random[:1000], 0o644); err != nil {
					t.Fatal(err)
				}
			}
			e := newPool(t, testfs.New(t, kind, 2<<30).Dir(), engine.InitRequest{MinFreePercent: 1})
			importTree(t, e, "g", src)
			from := "g"
			for i := range generations {
				name := fmt.Sprint("v", i)
				clone(t, e, from, name, false)
				from = name
			}

			quick := quickly(t, e)
			one := physical(t, e)
			for _, n := range []int64{quick, quickly(t, e)} { // with figures from when they were made, and with new ones
				if n < one/3 || n > 3*one {
					t.Errorf("the quick figure is %d, the exact one %d", n, one)
				}
			}
			if one < data || one > 2*data {
				t.Errorf("%d bytes for one tree of %d and %d clones in a chain", one, data, generations)
			}

			// What only the last one has counts too.
			v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(from)})
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(v.Mountpoint, "more"), random[:data/2], 0o644); err != nil {
				t.Fatal(err)
			}
			if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(from)}); err != nil {
				t.Fatal(err)
			}
			if more := physical(t, e) - one; more < data/2 || more > data {
				t.Errorf("%d bytes more for a file of %d", more, data/2)
			}
		})
	}
}

// TestQuickFigure: whatever volumes descend from, and whether that is still there, the quick figure is near the
// exact one.
func TestQuickFigure(t *testing.T) {
	const data = 8 << 20
	e := newPool(t, testfs.XFS(t, 2<<30), engine.InitRequest{MinFreePercent: 1})
	src := t.TempDir()
	random := make([]byte, data)
	_, _ = rand.Read(random) // never fails
	if err := os.WriteFile(filepath.Join(src, "data"), random, 0o644); err != nil {
		t.Fatal(err)
	}
	importTree(t, e, "g", src)
	near := func(what string) {
		t.Helper()
		quick, exact := quickly(t, e), physical(t, e)
		if quick < exact/3 || quick > 3*exact {
			t.Errorf("%s: the quick figure is %d, the exact one %d", what, quick, exact)
		}
	}
	// Volumes of clones that are gone.
	for i := range 12 {
		clone(t, e, "g", fmt.Sprint("middle", i), false)
		clone(t, e, fmt.Sprint("middle", i), fmt.Sprint("last", i), false)
		if _, err := e.Destroy(t.Context(), toDestroy(fmt.Sprint("middle", i))); err != nil {
			t.Fatal(err)
		}
	}
	near("clones of what is gone")
	// Snapshots of volumes that have written much.
	for i := range 12 {
		name := fmt.Sprint("last", i)
		v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(name)})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(v.Mountpoint, "more"), random[i:data/2], 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(name)}); err != nil {
			t.Fatal(err)
		}
		at := ref.MustName("s")
		if _, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(name), Name: at}); err != nil {
			t.Fatal(err)
		}
	}
	near("snapshots of what was written")
}

// quickly is the figure that is not measured.
func quickly(t *testing.T, e *engine.Engine) int64 {
	t.Helper()
	p, err := e.Pool(t.Context(), engine.PoolRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return p.PhysicalBytes
}

func physical(t *testing.T, e *engine.Engine) int64 {
	t.Helper()
	p, err := e.Pool(t.Context(), engine.PoolRequest{Exact: true})
	if err != nil {
		t.Fatal(err)
	}
	return p.PhysicalBytes
}
