package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/engine"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

// TestLivesInService: one engine serves many callers at the same time for a long time, as in a service. Whatever their
// calls come to, nothing adds up: no memory, no descriptors, no goroutines, no marks.
func TestLivesInService(t *testing.T) {
	ops := 400
	if testfs.Full() {
		ops = 100_000
	}
	if n, err := strconv.Atoi(os.Getenv("PANDO_TEST_OPS")); err == nil {
		ops = n
	}
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		importTree(t, e, "g", source(t))
		e.Close() // SQLite keeps what one has closed for as long as another of the same process has it open
		s := &service{t: t, e: open(t, e.Dir()), counts: map[string]int{}}

		// What is made once and kept, such as prepared statements, is there after the first part.
		s.serve(ops / 4)
		before := s.settle()
		s.serve(ops - ops/4)
		after := s.settle()
		t.Logf("%d operations: %v", ops, s.counts)
		t.Logf("after a quarter: %v; in the end: %v", before, after)
		if after.goroutines > before.goroutines || after.files > before.files {
			t.Errorf("left behind: %v, then %v\n%s", before, after, strings.Join(openFiles(t), "\n"))
		}
		if after.heap > before.heap+2<<20 {
			t.Errorf("the heap has grown: %v, then %v", before, after)
		}

		s.e.Close()
		if left := deadOperations(t, e); len(left) > 0 {
			t.Errorf("operations are left: %v", left)
		}
		if left := testfs.OpenFiles(t, e.Dir()); len(left) > 0 {
			t.Errorf("open after Close: %q", left)
		}
		again := open(t, e.Dir())
		defer again.Close()
		healthy(t, again)
	})
}

// service is an engine that many use.
type service struct {
	t *testing.T
	e *engine.Engine

	mu     sync.Mutex
	counts map[string]int // of outcomes, by operation and kind of error
}

// callers use the service at once, and volumes are few enough for them to meet.
const (
	callers = 16
	volumes = 12
)

// serve makes some calls, and returns when all have.
func (s *service) serve(calls int) {
	var left atomic.Int64
	left.Store(int64(calls))
	var wg sync.WaitGroup
	for i := range callers {
		r := faulttest.Rand(s.t, i)
		wg.Go(func() {
			for left.Add(-1) >= 0 && !s.t.Failed() {
				s.call(r)
			}
		})
	}
	wg.Wait()
}

// call makes one random call, some of which are given up at once or soon.
func (s *service) call(r *rand.Rand) {
	ctx, said := context.Background(), &warnings.List{}
	switch r.IntN(10) {
	case 0:
		gone, cancel := context.WithCancel(ctx)
		cancel()
		ctx = gone
	case 1:
		soon, cancel := context.WithTimeout(ctx, time.Duration(r.IntN(5000))*time.Microsecond)
		defer cancel()
		ctx = soon
	}
	op := serviceCalls[r.IntN(len(serviceCalls))]
	err := op.do(warnings.Collect(ctx, said), s.e, r)

	kind := errs.KindOf(err)
	allowed := []errs.Kind{errs.NotFound, errs.Exists, errs.InUse, errs.Conflict, errs.Canceled}
	if err != nil && !slices.Contains(allowed, kind) && ctx.Err() == nil {
		s.t.Errorf("%s: %+v (%s)", op.name, err, kind)
	}
	for _, w := range said.Messages() {
		if ctx.Err() == nil {
			s.t.Errorf("%s warned: %s", op.name, w)
		}
	}
	if err == nil {
		kind = "done"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[op.name+" "+string(kind)]++
}

// serviceCalls are what callers do.
var serviceCalls = []struct {
	name string
	do   func(ctx context.Context, e *engine.Engine, r *rand.Rand) error
}{
	{"clone", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(someVolume(r)),
			Mount: r.IntN(2) == 0, Ephemeral: r.IntN(3) == 0})
		return err
	}},
	{"clone for a moment", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(someVolume(r)),
			TTL: time.Millisecond})
		return err
	}},
	{"clone of nothing", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "nothing"}, Name: ref.MustName(someVolume(r))})
		return err
	}},
	{"fork", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Fork(ctx, engine.CloneRequest{From: ref.Ref{Name: someVolume(r)}, Name: ref.MustName(someVolume(r))})
		return err
	}},
	{"mount", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Mount(ctx, engine.MountRequest{Volume: ref.MustName(someVolume(r))})
		return err
	}},
	{"umount", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName(someVolume(r))})
		return err
	}},
	{"snapshot", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName(someVolume(r)), Name: ref.MustName("s")})
		return err
	}},
	{"rewind", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Rewind(ctx, engine.RewindRequest{Volume: ref.MustName(someVolume(r)), Snapshot: ref.MustName("s"),
			Detach: r.IntN(2) == 0})
		return err
	}},
	{"destroy", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		report, err := e.Destroy(ctx, toDestroy(someVolume(r)))
		if err == nil && len(report.Failed) > 0 {
			err = report.Failed[0]
		}
		return err
	}},
	{"show", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Show(ctx, ref.Ref{Name: someVolume(r)})
		return err
	}},
	{"list", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Volumes(ctx, engine.VolumesRequest{})
		return err
	}},
	{"pin and unpin", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		v := ref.Ref{Name: someVolume(r)}
		_, err := e.Pin(ctx, engine.PinRequest{Ref: v, For: time.Minute})
		for err == nil {
			if _, err = e.Unpin(context.WithoutCancel(ctx), v); err == nil || errs.Is(err, errs.InUse) {
				return err
			}
		}
		return err
	}},
	{"publish", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.Publish(ctx, engine.PublishRequest{Golden: ref.MustName("of-" + someVolume(r)),
			Volume: ref.MustName(someVolume(r))})
		return err
	}},
	{"remove golden", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		_, err := e.RemoveGolden(ctx, ref.Ref{Name: "of-" + someVolume(r)})
		return err
	}},
	{"maintain", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		m, err := e.Maintain(ctx, time.Now())
		if err == nil && len(m.Warnings) > 0 && ctx.Err() == nil {
			err = errs.New(errs.Internal, "maintain", "", "%q", m.Warnings)
		}
		return err
	}},
	{"gc", func(ctx context.Context, e *engine.Engine, r *rand.Rand) error {
		g, err := e.GC(ctx, engine.GCRequest{})
		if err == nil && len(g.Warnings)+len(g.Missing)+len(g.Kept) > 0 && ctx.Err() == nil {
			err = errs.New(errs.Internal, "gc", "", "%q %q %q", g.Warnings, g.Missing, g.Kept)
		}
		return err
	}},
}

func someVolume(r *rand.Rand) string { return fmt.Sprint("v", r.IntN(volumes)) }

// held is what a process has.
type held struct {
	goroutines, files int
	heap              uint64
}

func (h held) String() string {
	return fmt.Sprintf("%d goroutines, %d files, %d KiB", h.goroutines, h.files, h.heap>>10)
}

// settle destroys everything but the golden g, and measures what the process has then.
func (s *service) settle() held {
	t := s.t
	t.Helper()
	infos, err := s.e.Volumes(t.Context(), engine.VolumesRequest{})
	must(t, err)
	for _, v := range infos {
		_, _ = s.e.Unpin(t.Context(), ref.Ref{Name: v.Name})
		destroy(t, s.e, v.Name)
	}
	goldens, err := s.e.Goldens(t.Context())
	must(t, err)
	for _, g := range goldens {
		if g.Name != "g" {
			_, err := s.e.RemoveGolden(t.Context(), ref.Ref{Name: g.Name})
			must(t, err)
		}
	}
	_, err = s.e.GC(t.Context(), engine.GCRequest{})
	must(t, err)

	var m runtime.MemStats
	for range 3 { // what has a finalizer goes in the second round, and what it held in the third
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return held{goroutines: runtime.NumGoroutine(), files: len(openFiles(t)) - len(keptFiles(t)), heap: m.HeapAlloc}
}

// openFiles lists what this process has open.
func openFiles(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(testfs.OpenFiles(t, ""), func(path string) bool { return strings.HasPrefix(path, "/proc/") })
}

// keptFiles lists those of which an engine keeps some, as many as were needed at once: proofs of life, and connections
// to the catalogue.
func keptFiles(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(openFiles(t), func(path string) bool {
		return !strings.Contains(path, "/live/p-") && !strings.Contains(path, "/catalog.db")
	})
}
