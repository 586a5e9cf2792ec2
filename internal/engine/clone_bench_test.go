package engine_test

import (
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/engine"
)

// BenchmarkCloneDestroy measures a mounted clone and its destruction in one process: clone-us and destroy-us are
// microseconds each takes.
func BenchmarkCloneDestroy(b *testing.B) {
	e := benchPool(b)
	name := ref.MustName("v")
	q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: name, Mount: true}
	var clones, destroys time.Duration
	for range b.N {
		start := time.Now()
		if _, err := e.Clone(b.Context(), q); err != nil {
			b.Fatal(err)
		}
		cloned := time.Now()
		r, err := e.Destroy(b.Context(), engine.DestroyRequest{What: []ref.Pattern{{Ref: ref.Ref{Name: name.String()}}}})
		if err != nil || len(r.Failed) > 0 {
			b.Fatal(err, r)
		}
		clones += cloned.Sub(start)
		destroys += time.Since(cloned)
	}
	b.ReportMetric(float64(clones.Microseconds())/float64(b.N), "clone-us")
	b.ReportMetric(float64(destroys.Microseconds())/float64(b.N), "destroy-us")
}
