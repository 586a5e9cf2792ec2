package crash

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/testing/faulttest"
)

// TestPoolMoveAtEveryStep: whatever interrupts it, the pool is in one of the two directories, with everything in it.
func TestPoolMoveAtEveryStep(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}

	w := newWorld(t, kinds[0])
	w.initPool()
	w.importGolden("g")
	w.pando("clone", "g", "v")
	to := w.dir + "-moved"
	for _, f := range drawnFaults(t) {
		t.Run(f.name, func(t *testing.T) { w.sweepPoolMove(t, to, f.plan) })
	}

	w.t = t
	w.gone("*")
	w.pando("deinit", "--force")
	w.nothingLeft()
	_ = os.Remove(to) // empty
	if left, err := filepath.Glob(to + "*"); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// sweepPoolMove strikes at every step of a move to the directory to.
func (w *world) sweepPoolMove(t *testing.T, to string, plan faulttest.Plan) {
	w.t = t
	before := w.peek()
	last := w.sweepOf(plan, 2).Each(t, func(p faulttest.Plan) faulttest.Result {
		w.moveBack(to)
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		res, err := faulttest.Run(ctx, []string{pando, "--pool", w.dir, "pool", "move", to, "--no-progress"},
			faulttest.Options{Plan: p, KillGroup: true})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}, func(res faulttest.Result) {
		if _, err := os.Stat(filepath.Join(to, "pool.json")); res.ExitCode == 0 && res.Signal == 0 && err != nil {
			t.Errorf("it said that it had succeeded: %v: %s", err, res.Stderr)
		}
		w.moveBack(to)
		if after := w.state(); after != before {
			t.Errorf("before:\n%safter:\n%sexit %d: %s", before, after, res.ExitCode, res.Stderr)
		}
		w.check()
	})

	if last.ExitCode != 0 {
		t.Errorf("undisturbed, it failed: %s", last.Stderr)
	}
	w.moveBack(to)
	if after := w.state(); after != before {
		t.Errorf("undisturbed, it came to:\n%swanted:\n%s", after, before)
	}
}

// moveBack finds the pool, and moves it back to where it was.
func (w *world) moveBack(moved string) {
	w.t.Helper()
	at := func(dir string, args ...string) ([]byte, error) {
		return exec.Command(pando, append([]string{"--pool", dir}, args...)...).CombinedOutput()
	}

	here, errHere := at(w.dir, "ls", "-q")
	there, errThere := at(moved, "ls", "-q")
	if (errHere == nil) == (errThere == nil) {
		w.t.Fatalf("the pool must be in one place:\n%s: %v\n%s: %v", here, errHere, there, errThere)
	}
	if errHere == nil {
		return
	}

	// The same command finishes; if the old directory is already being removed, deinit does.
	if _, err := os.Stat(filepath.Join(w.dir, "move.inprogress")); err == nil {
		if out, err := at(w.dir, "pool", "move", moved); err != nil {
			w.t.Fatalf("finishing the move: %v: %s", err, out)
		}
	} else if _, err := os.Stat(filepath.Join(w.dir, "deinit.inprogress")); err == nil {
		if out, err := at(w.dir, "deinit"); err != nil {
			w.t.Fatalf("removing the rest: %v: %s", err, out)
		}
	}
	_ = os.Remove(w.dir) // a kill may leave the empty directory, which a move into it would keep for good
	if out, err := at(moved, "pool", "move", w.dir, "--no-progress"); err != nil {
		w.t.Fatalf("moving it back: %v: %s", err, out)
	}
}
