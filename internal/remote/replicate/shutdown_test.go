package replicate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
)

// tripwire is a store that calls trip before it is read for the first time.
type tripwire struct {
	objstore.Store
	once sync.Once
	trip func()
}

func (s *tripwire) Get(ctx context.Context, key string, off, n int64) ([]byte, objstore.Info, error) {
	s.once.Do(s.trip)
	return s.Store.Get(ctx, key, off, n)
}

// watched is a context that calls asked when somebody begins to wait for its end. Shutdown does so when no operation
// can begin any more.
type watched struct {
	context.Context
	asked func()
}

func (c *watched) Done() <-chan struct{} {
	c.asked()
	return c.Context.Done()
}

// shutDownDuring calls do with a remote in whose first request the pool begins to be closed, with a context that has
// ended unless patient, and returns the errors of both. The pool is open again then.
func (w *world) shutDownDuring(patient bool, do func(ctx context.Context, e *engine.Engine, r *Remote) error) (
	done, closed error) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	if !patient {
		cancel()
	}

	e := w.e
	ended := make(chan error, 1)
	w.load()
	w.r.wrap = func(s objstore.Store) objstore.Store {
		return &tripwire{Store: w.store, trip: func() {
			begun := make(chan bool)
			go func() { ended <- e.Shutdown(&watched{Context: ctx, asked: sync.OnceFunc(func() { close(begun) })}) }()
			<-begun
		}}
	}
	done = do(w.t.Context(), e, w.r)
	closed = <-ended
	w.e = openEngine(w.t, w.dir)
	w.t.Cleanup(w.e.Close)
	w.load()
	return done, closed
}

// TestShutdown: a push, a pull and a repair are one operation each: one that has begun ends before the pool is closed,
// or it is cancelled.
func TestShutdown(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 8*mib, func(f *os.File) {
		if _, err := f.Write(bytes.Repeat([]byte("content"), mib)); err != nil {
			t.Fatal(err)
		}
	})
	w.clone("g", "v")
	push := func(ctx context.Context, e *engine.Engine, r *Remote) error {
		_, err := Push(ctx, e, r, PushRequest{Refs: []ref.Ref{refs(t, "v")}})
		return err
	}
	pull := func(ctx context.Context, e *engine.Engine, r *Remote) error {
		_, err := Pull(ctx, e, r, PullRequest{Ref: refs(t, "v"), As: ref.MustName("w")})
		return err
	}

	damaged := 0
	repair := func(ctx context.Context, e *engine.Engine, r *Remote) error {
		for o, err := range w.store.List(ctx, "segments/") {
			if err == nil {
				err = w.store.Delete(ctx, o.Key)
			}
			if err != nil {
				return err
			}
			damaged++
		}
		v, err := VerifyRepair(ctx, e, r, VerifyRequest{})
		if err == nil && (v.TotalProblems > 0 || len(v.Repaired) == 0) {
			return fmt.Errorf("repaired %v, left %v", v.Repaired, v.Problems)
		}
		return err
	}

	for _, c := range []struct {
		name string
		do   func(context.Context, *engine.Engine, *Remote) error
	}{{"push", push}, {"repair", repair}, {"pull", pull}} {
		done, closed := w.shutDownDuring(false, c.do)
		if !errors.Is(done, context.Canceled) && !errs.Is(done, errs.Canceled) || !errs.Is(closed, errs.Canceled) {
			t.Errorf("cancelled %s: %v, and the pool %v", c.name, done, closed)
		}
		if done, closed = w.shutDownDuring(true, c.do); done != nil || closed != nil {
			t.Errorf("%s: %v, and the pool %v", c.name, done, closed)
		}
	}

	if damaged == 0 {
		t.Error("nothing was damaged, so nothing was repaired")
	}

	// The snapshot was made by the push, and the volume by the pull.
	h, err := w.e.History(t.Context(), engine.HistoryRequest{})
	if err != nil {
		t.Fatal(err)
	}
	made := map[string]string{}
	for _, v := range h.Events {
		if v.Event == api.EventCreate {
			made[v.Ref] = v.Op
		}
	}
	n := 0
	for r, op := range made {
		if r != "g" && r != "g@1" && r != "v" {
			n++
			want := opPush
			if r[0] == 'w' {
				want = opPull
			}
			if op != want {
				t.Errorf("%s was made by %s, wanted %s", r, op, want)
			}
		}
	}
	if n != 3 {
		t.Errorf("%v were made", made)
	}
}
