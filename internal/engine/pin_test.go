package engine_test

import (
	"math"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// TestSpansThatCannotBe: a ttl or a pin that ends before now, or later than can be stored, is refused.
func TestSpansThatCannotBe(t *testing.T) {
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: "plain"})
	importTree(t, e, "g", source(t))
	clone(t, e, "g", "v", false)
	for _, span := range []time.Duration{-1, 200 * 365 * 24 * time.Hour, math.MaxInt64} {
		_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("c"), TTL: span})
		if !errs.Is(err, errs.Invalid) {
			t.Errorf("a clone for %s: %v", span, err)
		}
		if _, err := e.Pin(t.Context(), engine.PinRequest{Ref: ref.Ref{Name: "v"}, For: span}); !errs.Is(err, errs.Invalid) {
			t.Errorf("a pin for %s: %v", span, err)
		}
	}
	if d, err := e.Show(t.Context(), ref.Ref{Name: "v"}); err != nil || d.Pinned {
		t.Errorf("the volume is %+v, %v; want it without a pin", d, err)
	}
}
