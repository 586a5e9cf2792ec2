// Package pooltest makes pools for tests of what stands above pools.
package pooltest

import (
	"cmp"
	"context"
	"path/filepath"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// New makes a pool of a driver below a directory, which is removed at the end, and opens it.
func New(t testing.TB, drivers engine.Drivers, driver, below string) *engine.Engine {
	t.Helper()
	dir := filepath.Join(below, "pool")
	if _, err := engine.Init(t.Context(), engine.InitRequest{Dir: dir, Driver: driver}, drivers); err != nil {
		t.Fatal(err)
	}
	e, err := engine.Open(t.Context(), dir, drivers)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		q := engine.DeinitRequest{Dir: dir, Force: true}
		if _, err := engine.Deinit(context.Background(), q, drivers, nil); err != nil {
			t.Errorf("the pool cannot be removed: %v", err)
		}
	})
	return e
}

// VolumeNames lists the names of all volumes, sorted.
func VolumeNames(ctx context.Context, e *engine.Engine) ([]string, error) {
	return names(ctx, e, "*", api.KindVolume)
}

// SnapshotNames lists the names of a volume's snapshots, the oldest first. NotFound.
func SnapshotNames(ctx context.Context, e *engine.Engine, volume string) ([]string, error) {
	name, err := ref.ParseName("test", volume)
	if err == nil {
		_, err = e.Mountpoints(ctx, "test", name)
	}
	if err != nil {
		return nil, err
	}
	return names(ctx, e, volume+"@*", api.KindSnapshot)
}

// names lists what stands last in the references that a glob matches; that may be nothing.
func names(ctx context.Context, e *engine.Engine, glob string, kind api.Kind) (out []string, _ error) {
	found, err := e.Match(ctx, engine.MatchRequest{Op: "test", What: []ref.Pattern{{Glob: glob}}, Kinds: []api.Kind{kind}})
	if errs.Is(err, errs.NotFound) {
		return nil, nil
	}
	for _, r := range found {
		out = append(out, cmp.Or(r.At, r.Name))
	}
	return out, err
}
