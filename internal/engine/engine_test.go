package engine_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
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
		q := engine.DeinitRequest{Dir: q.Dir, Force: true}
		if _, err := engine.Deinit(context.Background(), q, drivers, nil); err != nil {
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
	e, _ := maintained(t, dir)
	return e
}

// maintained opens a pool as a command does, and says what was cleaned up.
func maintained(t *testing.T, dir string) (*engine.Engine, engine.Recovery) {
	t.Helper()
	e, err := engine.Open(t.Context(), dir, drivers)
	if err != nil {
		t.Fatal(err)
	}
	r, err := e.Maintain(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return e, r
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
	importAs(t, e, name, src, "")
}

// importAs is importTree with the kind of its volumes; "": the default.
func importAs(t *testing.T, e *engine.Engine, name, src string, fs driver.FS) {
	t.Helper()
	q := engine.ImportRequest{Name: ref.MustName(name), Source: src, FS: fs}
	if cmp.Or(fs, e.Caps().FS[0]).IsImage() {
		q.SizeBytes = 256 << 20
	}
	if _, err := e.Import(t.Context(), q); err != nil {
		t.Fatal(err)
	}
}

func clone(t *testing.T, e *engine.Engine, from, name string, mount bool) api.Object {
	t.Helper()
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: from}, Name: ref.MustName(name),
		Mount: mount})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

// toDestroy is a request to destroy what words name.
func toDestroy(words ...string) engine.DestroyRequest {
	what, err := ref.ParsePatterns("destroy", words...)
	if err != nil {
		panic(err)
	}
	return engine.DestroyRequest{What: what}
}

func destroy(t *testing.T, e *engine.Engine, refs ...string) {
	t.Helper()
	r, err := e.Destroy(t.Context(), toDestroy(refs...))
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
	testfs.NotShort(t, "it is about space")
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			e := newPool(t, testfs.New(t, kind, 400<<20).Dir(), engine.InitRequest{MinFreePercent: 5})
			importTree(t, e, "g", source(t))
			v := clone(t, e, "g", "v", true)
			fill(t, filepath.Join(v.Mountpoint, "big"))
			fill(t, filepath.Join(filepath.Dir(e.Dir()), "filler"))
			if _, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"},
				Name: ref.MustName("w")}); errs.KindOf(err) != errs.NoSpace || errs.HintOf(err) == "" {
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
// wait and get what it made; so do clones that ask in the meantime.
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
			r, err := own.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src})
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
		_, err := e.ImportStream(ctx, engine.ImportRequest{Name: ref.MustName("g")}, r)
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

// TestPublishSeals: a volume whose file was overwritten block by block makes a
// golden of few extents, with the same content, and shares what it did not
// change.
func TestPublishSeals(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{MinFreePercent: 5})
	src := t.TempDir()
	const blocks = 16 << 10 // 64 MiB
	want := bytes.Repeat([]byte("original"), blocks*512)
	if err := os.WriteFile(filepath.Join(src, "file"), want, 0o644); err != nil {
		t.Fatal(err)
	}
	importTree(t, e, "g", src)
	v := clone(t, e, "g", "v", true)
	f, err := os.OpenFile(filepath.Join(v.Mountpoint, "file"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range blocks / 8 { // every other block of a quarter, from the end
		off := int64(blocks/4-2*i) * 4096
		if off < 0 {
			break
		}
		block := bytes.Repeat([]byte(fmt.Sprintf("%08d", i)), 512)
		copy(want[off:], block)
		if _, err := f.WriteAt(block, off); err != nil {
			t.Fatal(err)
		}
		if i%16 == 0 {
			if err := f.Sync(); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.Close()
	if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
		t.Fatal(err)
	}
	before, err := e.Show(t.Context(), ref.Ref{Name: "v"})
	if err != nil || before.Extents < 300 {
		t.Fatalf("the volume has %d extents (%v): too few to test anything", before.Extents, err)
	}
	g, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("g"), Volume: ref.MustName("v")})
	if err != nil {
		t.Fatal(err)
	}
	if g.Extents > 80 {
		t.Errorf("the golden has %d extents, the volume %d", g.Extents, before.Extents)
	}
	if g.Generation != 2 || g.SharedBytes < 16<<20 {
		t.Errorf("generation %d shares %d bytes with the one before it", g.Generation, g.SharedBytes)
	}
	w := clone(t, e, "g", "w", true)
	got, err := os.ReadFile(filepath.Join(w.Mountpoint, "file"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the content differs (%v)", err)
	}
}

// TestUsageIsExact: what a clone writes is its own, the rest is shared, and the
// last user of shared blocks owns them.
func TestUsageIsExact(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			e := newPool(t, testfs.New(t, kind, 1<<30).Dir(), engine.InitRequest{MinFreePercent: 5})
			src := t.TempDir()
			const size = 32 << 20
			if err := os.WriteFile(filepath.Join(src, "file"), bytes.Repeat([]byte("original"), size/8), 0o644); err != nil {
				t.Fatal(err)
			}
			importTree(t, e, "g", src)
			a := clone(t, e, "g", "a", true)
			show := func(name string) api.Detail {
				t.Helper()
				d, err := e.Show(t.Context(), ref.Ref{Name: name})
				if err != nil {
					t.Fatal(err)
				}
				if d.LogicalBytes != d.ExclusiveBytes+d.SharedBytes {
					t.Errorf("%s: %d logical, %d exclusive + %d shared", name, d.LogicalBytes, d.ExclusiveBytes, d.SharedBytes)
				}
				return d
			}
			const slack = 3 << 20 // a journal, and metadata inside
			if d := show("a"); d.ExclusiveBytes > slack || d.SharedBytes < size {
				t.Errorf("fresh: %d exclusive, %d shared", d.ExclusiveBytes, d.SharedBytes)
			}
			const wrote = 8 << 20
			if err := os.WriteFile(filepath.Join(a.Mountpoint, "new"), bytes.Repeat([]byte("y"), wrote), 0o644); err != nil {
				t.Fatal(err)
			}
			if d := show("a"); d.ExclusiveBytes < wrote || d.ExclusiveBytes > wrote+slack {
				t.Errorf("after writing %d: %d exclusive", wrote, d.ExclusiveBytes)
			}
			p, err := e.Pool(t.Context(), engine.PoolRequest{Exact: true})
			if err != nil {
				t.Fatal(err)
			}
			if e.Caps().FS[0].IsImage() && (p.PhysicalBytes < size+wrote || p.PhysicalBytes > size+wrote+24<<20) {
				t.Errorf("the pool holds %d bytes of data, wanted about %d", p.PhysicalBytes, size+wrote)
			}
			if _, err := e.RemoveGolden(t.Context(), ref.Ref{Name: "g"}); err != nil {
				t.Fatal(err)
			}
			deadline := time.Now().Add(60 * time.Second) // btrfs cleans up in the background
			for d := show("a"); d.ExclusiveBytes < size; d = show("a") {
				if time.Now().After(deadline) {
					t.Fatalf("the last user owns %d bytes only", d.ExclusiveBytes)
				}
				if err := e.Sync(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestImportInTightPool: a tree that takes more than half of the pool can be
// imported, although an import makes two images.
func TestImportInTightPool(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	e := newPool(t, testfs.XFS(t, 500<<20), engine.InitRequest{MinFreePercent: 5})
	src := t.TempDir()
	rng := rand.NewChaCha8([32]byte{1})
	want := map[string][32]byte{}
	for i := range 30 {
		b := make([]byte, 9<<20)
		_, _ = rng.Read(b)
		name := fmt.Sprint("file", i)
		want[name] = sha256.Sum256(b)
		if err := os.WriteFile(filepath.Join(src, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src,
		SizeBytes: 512 << 20}); err != nil {
		t.Fatal(err)
	}
	v := clone(t, e, "g", "v", true)
	for name, sum := range want {
		b, err := os.ReadFile(filepath.Join(v.Mountpoint, name))
		if err != nil || sha256.Sum256(b) != sum {
			t.Errorf("%s differs (%v)", name, err)
		}
	}
	// What cannot fit at all is refused, and leaves the rest alone.
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("h"), Source: src,
		SizeBytes: 512 << 20}); !errs.Is(err, errs.NoSpace) {
		t.Errorf("a second one: %v, wanted NoSpace", err)
	}
	if g, err := e.Goldens(t.Context()); err != nil || len(g) != 1 {
		t.Errorf("%v %v", g, err)
	}
}
