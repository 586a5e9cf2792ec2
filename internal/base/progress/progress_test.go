package progress

import (
	"context"
	"testing"
)

// TestStages: each stage has words of its own.
func TestStages(t *testing.T) {
	said := map[string]Stage{}
	for s := None + 1; int(s) < len(stages); s++ {
		words := s.String()
		if other, twice := said[words]; words == "" || twice {
			t.Errorf("stage %d says %q, as stage %d", s, words, other)
		}
		said[words] = s
	}
}

// TestFrom: what a context has begun is seen by who asks the tracker, unless the context was told to report nothing.
func TestFrom(t *testing.T) {
	From(t.Context()).StartOf(Pushing, "v@s", 1, 2) // to nobody
	tracker := &Tracker{}
	ctx := With(t.Context(), tracker)
	From(ctx).StartOf(Pushing, "v@s", 3, 4)
	From(context.WithoutCancel(ctx)).Add(1, 2)
	From(With(ctx, nil)).Start(Pulling, 0, 0)
	want := State{Stage: Pushing, Of: "v@s", Files: 1, Bytes: 2, TotalFiles: 3, TotalBytes: 4}
	if got := tracker.State(); got != want || got.Words() != "pushing v@s" {
		t.Errorf("%+v, %q", got, got.Words())
	}
}
