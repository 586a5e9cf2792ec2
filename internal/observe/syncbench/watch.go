package syncbench

import (
	"context"
	"time"

	"pando/internal/base/progress"
	"pando/internal/observe/proof"
)

const (
	// sampleTimes is how often a run is looked at closely: single syncs are followed
	// through the layers.
	sampleTimes = 3
	// samplePart of the run is looked at so, in all; each look between these:
	samplePart  = 0.03
	sampleLeast = 50 * time.Millisecond
	sampleMost  = time.Second
	// What others write is watched before a run for a part of its length.
	quietPart  = 0.05
	quietLeast = 200 * time.Millisecond
	quietMost  = 3 * time.Second
)

// prove makes one run and finds out whether its syncs have reached the disk.
func (b *bench) prove(ctx context.Context, p *plan, what string) (*Run, error) {
	w, err := proof.New(ctx, b.stack)
	if err != nil {
		return nil, err
	}

	defer w.Close()

	progress.From(ctx).StartOf(progress.Measuring, "other writes", 0, 0)
	quiet := time.Duration(quietPart * float64(b.Duration))
	if err := w.Baseline(ctx, min(quietMost, max(quietLeast, quiet))); err != nil {
		return nil, err
	}

	begin := w.Start
	if b.named {
		begin = w.StartOne
	}

	samples, err := b.start(ctx, p, b.Duration, what, begin, func(ctx context.Context) error {
		return sampleSyncs(ctx, w, b.Duration)
	})
	if err != nil {
		return nil, err
	}

	evidence, err := w.Stop()
	if err != nil {
		return nil, err
	}

	r := p.result(samples)
	r.Proof = evidence.Judge(proof.Load{
		Call: p.Sync, Syncs: r.Syncs, Writers: p.Writers, P50: r.Sync.P50, WritesPerSync: p.PerSync,
	})
	return &r, nil
}

// sampleSyncs follows single syncs at some moments of a run. That the run ends in the meantime is no error.
func sampleSyncs(ctx context.Context, w *proof.Watch, run time.Duration) error {
	each := min(sampleMost, max(sampleLeast, time.Duration(samplePart*float64(run)/sampleTimes)))
	tick := time.NewTicker(run / (sampleTimes + 1))
	defer tick.Stop()
	for range sampleTimes {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := w.Sample(ctx, each); err != nil && ctx.Err() == nil {
			return err
		}
	}

	return nil
}
