package engine_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/engine"
)

// BenchmarkBesideClones measures how long it takes to show a volume while others clone all the time, and how many
// clones they make in that time.
func BenchmarkBesideClones(b *testing.B) {
	const cloners = 4
	e := benchPool(b)
	cloneMany(b, e, benchVolumes(b))
	var clones atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, stop := context.WithCancel(b.Context())
	defer stop()
	for who := range cloners {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(fmt.Sprintf("of-%d-%d", who, i))}
				if _, err := e.Clone(ctx, q); err != nil && ctx.Err() == nil {
					b.Error(err)
					return
				}
				clones.Add(1)
			}
		})
	}

	var took []time.Duration
	before := clones.Load()
	for b.Loop() {
		begun := time.Now()
		if _, err := e.Show(ctx, ref.Ref{Name: "v-1"}); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begun))
	}
	b.ReportMetric(float64(clones.Load()-before)/b.Elapsed().Seconds(), "clones/s")
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "us-median")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "us-p99")
}
