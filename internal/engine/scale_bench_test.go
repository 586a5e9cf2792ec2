package engine_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/engine/check"
)

// benchVolumes is how many volumes the benchmarks of large pools make:
// PANDO_BENCH_VOLUMES, or 1,000.
func benchVolumes(b *testing.B) int {
	b.Helper()
	text := os.Getenv("PANDO_BENCH_VOLUMES")
	if text == "" {
		return 1000
	}

	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		b.Fatalf("PANDO_BENCH_VOLUMES must be a positive number (got %q)", text)
	}
	return n
}

// benchPool makes a pool in a file, with a golden called g. It is removed at the end.
func benchPool(b *testing.B) *engine.Engine {
	b.Helper()
	e := emptyBenchPool(b, engine.InitRequest{Dir: filepath.Join(b.TempDir(), "pool"), SizeBytes: 20 << 30})
	src := b.TempDir()
	if err := os.WriteFile(filepath.Join(src, "file"), make([]byte, 1<<20), 0o644); err != nil {
		b.Fatal(err)
	}
	if _, err := e.Import(b.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src,
		SizeBytes: 256 << 20}); err != nil {
		b.Fatal(err)
	}
	return e
}

// emptyBenchPool makes a pool, which is removed at the end.
func emptyBenchPool(b *testing.B, q engine.InitRequest) *engine.Engine {
	b.Helper()
	if os.Geteuid() != 0 {
		b.Skip("SKIPPED: needs root")
	}
	if _, err := engine.Init(b.Context(), q, drivers); err != nil {
		b.Fatal(err)
	}

	e, err := engine.Open(b.Context(), q.Dir, drivers)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		e.Close()
		q := engine.DeinitRequest{Dir: q.Dir, Force: true}
		if _, err := engine.Deinit(context.Background(), q, drivers, nil); err != nil {
			b.Errorf("deinit: %v", err)
		}
	})
	return e
}

func cloneMany(b *testing.B, e *engine.Engine, n int) {
	b.Helper()
	q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Count: n}
	if _, err := e.Clone(b.Context(), q); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkScale measures what works on all of a pool with many volumes:
//
//	PANDO_BENCH_VOLUMES=47000 go test ./internal/engine -run '^$' -bench Scale -benchtime 1x
func BenchmarkScale(b *testing.B) {
	n := benchVolumes(b)

	b.Run("clone-count", func(b *testing.B) {
		for range b.N {
			b.StopTimer()
			e := benchPool(b)
			b.StartTimer()
			cloneMany(b, e, n)
		}
	})

	e := benchPool(b)
	cloneMany(b, e, n)
	b.Run("clone", func(b *testing.B) {
		for i := range b.N {
			q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(fmt.Sprintf("one-%d-%d", b.N, i))}
			if _, err := e.Clone(b.Context(), q); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("ls", func(b *testing.B) {
		for range b.N {
			if _, err := e.Volumes(b.Context(), engine.VolumesRequest{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("gc", func(b *testing.B) {
		for range b.N {
			if _, err := e.GC(b.Context(), engine.GCRequest{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("fsck", func(b *testing.B) {
		for range b.N {
			r, err := engine.Fsck(b.Context(), e.Dir(), check.Request{}, drivers)
			if err != nil || !r.OK {
				b.Fatalf("%+v, %v", r, err)
			}
		}
	})
}
