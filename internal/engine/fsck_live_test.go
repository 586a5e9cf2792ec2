package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/engine/check"
)

// TestFsckAtEveryMount: what fsck sees while an overlay is made, mounted and read is not wrong.
func TestFsckAtEveryMount(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		seen, looking := map[string]int{}, false
		engine.AtStep(t, func(step string) {
			if looking {
				return
			}
			looking = true
			defer func() { looking = false }()
			seen[step]++
			if r := fsck(t, e.Dir(), false); !r.OK {
				t.Errorf("%s: found\n%s", step, findings(r))
			}
		})
		_, err := e.RunFunc(t.Context(), engine.RunRequest{From: ref.Ref{Name: "g"}, Overlay: true},
			func(context.Context, api.Object) error { return nil })
		must(t, err)
		_, err = e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("o"), Overlay: true})
		must(t, err)
		edit(t, e, "o", func(dir string) { changeOverlay(t, dir) })
		_, err = e.Diff(t.Context(), engine.DiffRequest{A: ref.Ref{Name: "g"}, B: ref.Ref{Name: "o"}})
		must(t, err)
		if seen["layers mounted"] == 0 || seen["mounted"] < 2 || seen["unmounting"] < 2 {
			t.Errorf("it looked at %v", seen)
		}
	})
}

// TestFsckWhileOthersWork: what other commands are just changing is not wrong.
func TestFsckWhileOthersWork(t *testing.T) {
	for _, k := range poolKinds {
		t.Run(k.name, func(t *testing.T) {
			e := k.make(t)
			importTree(t, e, "g", source(t))
			stop := make(chan struct{})
			var wg sync.WaitGroup
			for i := range 3 {
				name := fmt.Sprint("v", i)
				own := open(t, e.Dir()) // another process would
				wg.Go(func() {
					defer own.Close()
					ctx := context.Background()
					for {
						select {
						case <-stop:
							return
						default:
						}
						_, err := own.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(name), Mount: true})
						if err == nil {
							_, err = own.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName(name), Name: ref.MustName("s")})
						}
						if err == nil {
							// A child that the others have forked, and that has not come to
							// exec, holds what this process has open: real ones do not share.
							for again := true; again; again = errs.Is(err, errs.InUse) {
								_, err = own.Rewind(ctx, engine.RewindRequest{Volume: ref.MustName(name), Snapshot: ref.MustName("s"),
									Detach: true})
							}
						}
						if err == nil {
							_, err = own.Pin(ctx, engine.PinRequest{Ref: ref.Ref{Name: name}})
						}
						if err == nil {
							_, err = own.Publish(ctx, engine.PublishRequest{Golden: ref.MustName("of-" + name), Volume: ref.MustName(name)})
						}
						if err == nil {
							_, err = own.Unpin(ctx, ref.Ref{Name: name})
						}
						if err == nil {
							_, err = own.RemoveGolden(ctx, ref.Ref{Name: "of-" + name})
						}
						for again := err == nil; again; again = errs.Is(err, errs.InUse) {
							var r *engine.DestroyReport
							if r, err = own.Destroy(ctx, toDestroy(name)); err == nil {
								err = errors.Join(r.Failed...)
							}
						}
						if err != nil {
							t.Errorf("%s: %v", name, err)
							return
						}
					}
				})
			}
			looked := 0
			for i := range 12 {
				r := fsck(t, e.Dir(), i%2 > 0)
				looked += r.Checked.Objects
				if !r.OK || slices.ContainsFunc(r.Findings, func(f check.Finding) bool {
					return f.Severity != "note" || f.Repaired != ""
				}) {
					t.Errorf("found\n%s", findings(r))
				}
			}
			close(stop)
			wg.Wait()
			if looked < 20 {
				t.Errorf("it looked at %d objects: too few to show anything", looked)
			}
			if r := fsck(t, e.Dir(), false); len(r.Findings) > 0 {
				t.Errorf("in the end\n%s", findings(r))
			}
		})
	}
}
