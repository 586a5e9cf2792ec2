package replicate

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

func init() {
	children["pull"] = func(args []string) error {
		return killedAt(args, func(ctx context.Context, e *engine.Engine, r *Remote) error {
			_, err := Pull(ctx, e, r, PullRequest{Ref: ref.Ref{Name: "v"}, TakeOver: true})
			return err
		})
	}
	children["prune"] = func(args []string) error {
		return killedAt(args, func(ctx context.Context, _ *engine.Engine, r *Remote) error {
			_, err := Prune(ctx, nil, r, PruneRequest{Policy: Policy{Last: 1}, Patience: -1})
			return err
		})
	}
}

// killedAt does something with a remote: POOL AT WHEN. The process is killed at that
// operation of the store, if it is not negative, before or after its effect.
func killedAt(args []string, do func(context.Context, *engine.Engine, *Remote) error) error {
	ctx := context.Background()
	e, err := engine.Open(ctx, args[0], testDrivers)
	if err != nil {
		return err
	}
	defer e.Close()
	r, err := Load(args[0], "r", Access{})
	if err != nil {
		return err
	}
	at, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	if at < 0 {
		return do(ctx, e, r)
	}
	f := storetest.Fault{At: at, Do: func(storetest.Call) { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL); select {} }}
	if args[2] == "after" {
		f.When = storetest.After
	}
	r.wrap = func(s objstore.Store) objstore.Store { return storetest.Faulty(s, f) }
	return do(ctx, e, r)
}

// kill runs a child, and reports whether it was killed.
func kill(t *testing.T, name string, args ...string) bool {
	t.Helper()
	out, err := runChild(t, name, args...)
	var ended *exec.ExitError
	if err != nil && (!errors.As(err, &ended) || ended.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL) {
		t.Fatalf("the child failed: %v: %s", err, out)
	}
	return err != nil
}

// TestPullKilled: a pull that takes over is killed at every operation of the store.
// Nothing of it is left but what was restored first, the next one does it, and a prune
// ends its session.
func TestPullKilled(t *testing.T) {
	testfs.NotShort(t, "other processes do the work")
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 5*mib) })
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, mib, 8192) })
	w.push("v")
	rp := w.open()
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	killed := 0
	for _, when := range []string{"before", "after"} {
		for at := faulttest.Draw(t, 2, when); ; at += faulttest.DrawStep(2) {
			// The volume is the first pool's again.
			if _, err := w.tryPull("v", PullRequest{TakeOver: true, Update: true}); err != nil {
				t.Fatal(err)
			}
			want := w.sum("v")
			before, _, err := rp.Head(t.Context(), "v")
			if err != nil {
				t.Fatal(err)
			}
			dead := kill(t, "pull", o.dir, strconv.Itoa(at), when)
			if dead {
				killed++
			}
			again := openEngine(t, o.dir) // which cleans up
			again.Close()
			p := o.pull("v", PullRequest{TakeOver: true})
			if o.sum("v") != want || p.Epoch != before.Epoch+1 {
				t.Fatalf("killed %s %d, and again: %+v after epoch %d", when, at, p, before.Epoch)
			}
			if r, err := o.e.Destroy(t.Context(), toDestroy("v")); err != nil || len(r.Failed) > 0 {
				t.Fatal(err, r)
			}
			if _, err := o.e.RemoveGolden(t.Context(), refs(t, "g")); err != nil {
				t.Fatal(err)
			}
			if n := len(o.state()); n != 0 {
				t.Fatalf("killed %s %d: left\n%s", when, at, o.state())
			}
			if !dead {
				break
			}
		}
	}
	t.Logf("%d pulls were killed", killed)
	for range 2 { // seen, and then ended
		if _, err := Prune(t.Context(), nil, w.r, PruneRequest{Patience: -1}); err != nil {
			t.Fatal(err)
		}
	}
	w.noSessions(rp)
	if v, err := Verify(t.Context(), nil, w.r, VerifyRequest{ReadPercent: 100}); err != nil || v.Err() != nil ||
		v.GarbageCount != 0 {
		t.Errorf("%v, %+v", err, v)
	}
}

// TestPruneKilled: a prune is killed at every operation of the store. All that is
// listed is whole, and the next prune does the rest.
func TestPruneKilled(t *testing.T) {
	testfs.NotShort(t, "other processes do the work")
	w := newWorld(t)
	rp := w.open()
	for _, when := range []string{"before", "after"} {
		for at := faulttest.Draw(t, 2, when); ; at += faulttest.DrawStep(2) {
			w.importImage("g", 16*mib, func(f *os.File) { noise(t, f, uint64(at), 0, mib) })
			w.push("g")
			old := rp.NewSession(repo.Push, []string{"g", "none"}, repo.Writer{Pool: w.e.PoolID()}) // of somebody who has died
			if err := rp.PutSession(t.Context(), &old); err != nil {
				t.Fatal(err)
			}
			if _, err := Prune(t.Context(), nil, w.r, PruneRequest{}); err != nil { // sees the session
				t.Fatal(err)
			}
			dead := kill(t, "prune", w.dir, strconv.Itoa(at), when)
			if v, err := Verify(t.Context(), nil, w.r, VerifyRequest{ReadPercent: 100}); err != nil || v.Err() != nil {
				t.Fatalf("killed %s %d: %v, %+v", when, at, err, v.Problems)
			}
			for range 2 {
				if _, err := Prune(t.Context(), nil, w.r, PruneRequest{Policy: Policy{Last: 1}, Patience: -1}); err != nil {
					t.Fatalf("killed %s %d, and again: %v", when, at, err)
				}
			}
			w.noSessions(rp)
			v, err := Verify(t.Context(), nil, w.r, VerifyRequest{})
			if err != nil || v.Err() != nil || v.Points != 1 || v.GarbageCount != 0 {
				t.Fatalf("killed %s %d, and again: %v, %+v", when, at, err, v)
			}
			w.checkPoint(rp, "g", w.image("g"))
			if !dead {
				break
			}
		}
	}
}
