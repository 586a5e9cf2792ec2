// Package pooltest makes pools for tests of what stands above pools.
package pooltest

import (
	"context"
	"path/filepath"
	"testing"

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
