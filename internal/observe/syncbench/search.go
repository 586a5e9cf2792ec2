package syncbench

import (
	"context"
	"fmt"
	"os/exec"
	"time"

	"pando/internal/base/errs"
)

// How long a step of the search is.
const (
	stepPart  = 6 // of a run, between these:
	stepLeast = 5 * time.Second
	stepMost  = 10 * time.Second
	stepQuick = 2 * time.Second
	// stepWriters is where the search ends.
	stepWriters = 256
)

// step is the length of a step of the search.
func (c *Config) step() time.Duration {
	if c.Quick {
		return min(c.Duration, stepQuick)
	}
	return min(c.Duration, stepMost, max(stepLeast, c.Duration/stepPart))
}

// search measures with 1, 2, 4, ... writers until the p99 is exceeded, and returns what it has found, and a
// sentence if it ended for another reason.
func (b *bench) search(ctx context.Context) (*Target, string, error) {
	t := &Target{P99: b.P99.Seconds(), Steps: []Step{}}
	d := b.step()
	for writers := 1; writers <= stepWriters; writers *= 2 {
		p, err := b.definition.plan(b.SizeBytes, writers)
		if err == nil {
			err = b.scratch.layout(ctx, p.files)
		}
		if err != nil {
			if writers > 1 && errs.Is(err, errs.Invalid, errs.NoSpace) {
				return t, fmt.Sprintf("the search for a p99 of %s ended at %s: there is no space for more",
					words(t.P99), errs.Plural(writers/2, "writer")), nil
			}
			return nil, "", err
		}

		samples, err := b.start(ctx, p, d, "with "+errs.Plural(writers, "writer"), (*exec.Cmd).Start, nil)
		if err != nil {
			return nil, "", err
		}

		r := p.result(samples)
		s := Step{Writers: writers, SyncsPerSecond: r.SyncsPerSecond, P99: r.Sync.P99, Keeps: r.Syncs > 0 &&
			r.Sync.P99 <= t.P99}
		t.Steps = append(t.Steps, s)
		if !s.Keeps {
			return t, "", nil
		}
		if s.SyncsPerSecond > t.Best {
			t.Best, t.Writers = s.SyncsPerSecond, s.Writers
		}
	}

	return t, fmt.Sprintf("the search for a p99 of %s ended at %d writers, the maximum, which keep it",
		words(t.P99), stepWriters), nil
}
