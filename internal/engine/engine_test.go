package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/progress"
	"pando/internal/ref"
	"pando/internal/testfs"
)

var drivers = engine.Drivers{reflink.Name: reflink.Open, btrfs.Name: btrfs.Open, plain.Name: plain.Open}

// newPool makes a pool on dir's filesystem, removed at the end of the test.
func newPool(t *testing.T, dir string, q engine.InitRequest) *engine.Engine {
	t.Helper()
	q.Dir = filepath.Join(dir, "pool")
	testfs.LeakCheck(t, dir)
	if _, err := engine.Init(t.Context(), q, drivers); err != nil {
		t.Fatal(err)
	}
	e := open(t, q.Dir)
	t.Cleanup(func() {
		e.Close()
		if _, err := engine.Deinit(context.Background(), q.Dir, true, drivers); err != nil {
			t.Errorf("deinit at the end: %v", err)
		}
		if _, err := os.Stat(q.Dir); err == nil {
			t.Errorf("LEAK: %s", q.Dir)
		}
	})
	return e
}

func open(t *testing.T, dir string) *engine.Engine {
	t.Helper()
	e, err := engine.Open(t.Context(), dir, drivers)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func source(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func importTree(t *testing.T, e *engine.Engine, name, src string) {
	t.Helper()
	q := engine.ImportRequest{Name: name, Source: src}
	if e.Caps().FS[0].IsImage() {
		q.SizeBytes = 256 << 20
	}
	if _, err := e.Import(t.Context(), q); err != nil {
		t.Fatal(err)
	}
}

func clone(t *testing.T, e *engine.Engine, from, name string, mount bool) engine.Info {
	t.Helper()
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: from}, Name: name, Mount: mount})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func destroy(t *testing.T, e *engine.Engine, refs ...string) {
	t.Helper()
	r, err := e.Destroy(t.Context(), refs, nil)
	if err == nil {
		err = errors.Join(r.Failed...)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestDestroyInFullPool: a filesystem that is full to the last block can be
// cleaned up, although the catalogue lies on it.
func TestDestroyInFullPool(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			e := newPool(t, testfs.New(t, kind, 400<<20).Dir(), engine.InitRequest{MinFreePercent: 5})
			importTree(t, e, "g", source(t))
			v := clone(t, e, "g", "v", true)
			fill(t, filepath.Join(v.Mountpoint, "big"))
			fill(t, filepath.Join(filepath.Dir(e.Dir()), "filler"))
			if _, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: "w"}); errs.KindOf(err) != errs.NoSpace || errs.HintOf(err) == "" {
				t.Errorf("clone in a full pool: %v, wanted NoSpace with a hint", err)
			}
			again := open(t, e.Dir())
			defer again.Close()
			destroy(t, again, "v")
			if err := os.Remove(filepath.Join(filepath.Dir(e.Dir()), "filler")); err != nil {
				t.Fatal(err)
			}
			clone(t, again, "g", "w", false)
		})
	}
}

// fill writes until there is no room.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for buf := bytes.Repeat([]byte("x"), 1<<20); len(buf) > 0; {
		if _, err = f.Write(buf); err == nil {
			err = f.Sync()
		}
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EIO) { // EIO: a full pool below an image
			buf = buf[:len(buf)/2]
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// TestImportsOfOneName: of several imports at once one does it, and the others
// wait and get what it made; so do clones that ask meanwhile.
func TestImportsOfOneName(t *testing.T) {
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name})
	src := source(t)
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(src, fmt.Sprint(i)), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	did, waited := 0, 0
	for range 6 {
		wg.Go(func() {
			own := open(t, e.Dir()) // another process would
			defer own.Close()
			r, err := own.Import(t.Context(), engine.ImportRequest{Name: "g", Source: src})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errs.Is(err, errs.Exists): // it came when all was done
			case err != nil:
				t.Error(err)
			case r.Waited:
				waited++
			default:
				did++
			}
			if err == nil && (r.Golden != "g" || r.Generation != 1) {
				t.Errorf("got %s@%d", r.Golden, r.Generation)
			}
		})
	}
	wg.Wait()
	if did != 1 || waited == 0 {
		t.Errorf("%d imports did it and %d waited, wanted one and some", did, waited)
	}
}

// TestCloneWaitsForGolden: who asks for a golden that is being built gets it.
func TestCloneWaitsForGolden(t *testing.T) {
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := e.Import(context.Background(), engine.ImportRequest{Name: "g", Source: "-", Stdin: r})
		done <- err
	}()
	// The import has begun, and cannot end, when it has taken the first bytes of
	// an archive that is larger than a pipe holds.
	tar := emptyTar(1 << 20)
	if _, err := w.Write(tar[:512<<10]); err != nil {
		t.Fatal(err)
	}
	own := open(t, e.Dir())
	defer own.Close()
	tracker := &progress.Tracker{}
	cloned := make(chan error, 1)
	go func() {
		_, err := own.Clone(context.Background(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: "v", Tracker: tracker})
		cloned <- err
	}()
	for !strings.HasPrefix(tracker.State().Stage, "waiting") {
		select {
		case err := <-cloned:
			t.Fatalf("it did not wait: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	if _, err := w.Write(tar[512<<10:]); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := <-cloned; err != nil {
		t.Fatal(err)
	}
}

// TestInterruptedImportLeavesNothing ends an import in the middle.
func TestInterruptedImportLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a pool of images needs root: run the tests as root")
	}
	e := newPool(t, t.TempDir(), engine.InitRequest{SizeBytes: 400 << 20})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := e.Import(ctx, engine.ImportRequest{Name: "g", Source: "-", Stdin: r})
		done <- err
	}()
	if _, err := w.Write(emptyTar(1 << 20)[:700<<10]); err != nil {
		t.Fatal(err)
	}
	cancel()
	w.Close()
	if err := <-done; err == nil {
		t.Fatal("it succeeded")
	}
	entries, err := os.ReadDir(filepath.Join(e.Dir(), "data", "objects"))
	if err != nil || len(entries) > 0 {
		t.Errorf("left: %v %v", entries, err)
	}
	if g, err := e.Goldens(t.Context()); err != nil || len(g) > 0 {
		t.Errorf("goldens %v, %v", g, err)
	}
	importTree(t, e, "g", source(t))
}
