//go:build linux

// Package sample has tests that fail with some shards, and for a fuzzer.
package sample

import (
	"testing"

	"pando/internal/testing/faulttest"
)

// TestSweep pretends that a program has eight steps. A kill at one of them shows a fault.
func TestSweep(t *testing.T) {
	t.Run("of 8's", func(t *testing.T) {
		s := faulttest.Sweep{Plan: faulttest.Plan{Mode: faulttest.KillBefore}, Every: 4}
		s.Each(t, func(p faulttest.Plan) faulttest.Result {
			step := faulttest.Step{Index: p.At}
			return faulttest.Result{Fired: p.At < 8, FiredAt: step, Steps: []faulttest.Step{step}}
		}, func(r faulttest.Result) {
			if r.FiredAt.Index == 6 {
				t.Error("the sample's fault")
			}
		})
	})
}

// TestDraws fails with one shard of three. Six cover everything.
func TestDraws(t *testing.T) {
	faulttest.DrawInside(t, 2, 3)
	if faulttest.Draw(t, 3) == 1 {
		t.Error("the sample's fault")
	}
}

func TestSeeds(t *testing.T) { faulttest.Rand(t) }

func TestDrawsNothing(t *testing.T) {}

func FuzzFails(f *testing.F) {
	f.Add([]byte("a"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 0 && b[0] != 'a' {
			t.Error("the fuzzer's fault")
		}
	})
}
