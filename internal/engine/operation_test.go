package engine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"golang.org/x/sys/unix"
)

// failToUndo makes a volume's making fail, and what was made of it stay.
func failToUndo(t *testing.T, e *engine.Engine, volume string) {
	t.Helper()
	objects := filepath.Join(e.Dir(), "data", "objects")
	broken := errors.New("the remote is gone")
	q := receiveRaw(volume, func(context.Context, engine.Target) error {
		setImmutable(t, objects, true)
		return broken
	})
	_, err := q.into(t.Context(), e)
	setImmutable(t, objects, false)
	if !errors.Is(err, broken) {
		t.Fatalf("receive: %v", err)
	}
	entries, err := os.ReadDir(objects)
	must(t, err)
	if len(entries) == 0 {
		t.Fatal("it was undone")
	}
}

// receiveRaw asks for a raw volume with a snapshot s.
func receiveRaw(volume string, image func(context.Context, engine.Target) error) receipt {
	return receipt{engine.ReceiveRequest{Volume: ref.MustName(volume), Snapshot: ref.MustName("s"), FS: driver.None,
		SizeBytes: 1 << 20, Sector: 512, CreatedAt: time.Now(),
		Consistency: driver.Clean}, engine.Content{Image: image}}
}

// deadOperations lists the proofs of life that nobody holds.
func deadOperations(t *testing.T, e *engine.Engine) (dead []string) {
	t.Helper()
	live, err := filepath.Glob(filepath.Join(e.Dir(), "live", "p-*"))
	must(t, err)
	for _, path := range live {
		f, err := os.Open(path)
		must(t, err)
		if unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil {
			dead = append(dead, path)
		}
		f.Close()
	}
	return dead
}

func nothingThere(context.Context, engine.Target) error { return nil }

// TestFailedUndoIsCleanedUp: what an operation has left blocks nobody once it has ended, although the process lives.
func TestFailedUndoIsCleanedUp(t *testing.T) {
	for _, who := range []string{"the same", "another"} {
		t.Run(who, func(t *testing.T) {
			oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
				failToUndo(t, e, "v")
				next := e
				if who == "another" {
					next = open(t, e.Dir())
					defer next.Close()
				}
				if _, err := receiveRaw("v", nothingThere).into(t.Context(), next); err != nil {
					t.Fatalf("the name is blocked: %v", err)
				}
				if dead := deadOperations(t, e); len(dead) > 0 {
					t.Errorf("operations are left: %v", dead)
				}
				destroy(t, next, "v")
			})
		})
	}
}

// TestOperationsOfOneProcessExclude: two calls of one engine keep each other out as those of two processes do.
func TestOperationsOfOneProcessExclude(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		begun, goOn := make(chan struct{}), make(chan struct{})
		var first error
		var wg sync.WaitGroup
		wg.Go(func() {
			_, first = receiveRaw("v", func(context.Context, engine.Target) error {
				close(begun)
				<-goOn
				return nil
			}).into(t.Context(), e)
		})
		<-begun
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := receiveRaw("v", nothingThere).into(ctx, e)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the second did not wait: %v", err)
		}
		close(goOn)
		wg.Wait()
		must(t, first)
		if _, err := receiveRaw("v", nothingThere).into(t.Context(), e); !errs.Is(err, errs.Exists) {
			t.Errorf("the third: %v", err)
		}
		destroy(t, e, "v")
	})
}
