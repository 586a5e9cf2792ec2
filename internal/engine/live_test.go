package engine_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/freeze"
	"pando/internal/linux/kernel"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// livePool makes a pool on a filesystem of a kind, with a golden g of another.
func livePool(t *testing.T, pool string, fs driver.FS) *engine.Engine {
	t.Helper()
	e := newPool(t, testfs.New(t, pool, 1<<30).Dir(), engine.InitRequest{Driver: "reflink"})
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: source(t), FS: fs,
		SizeBytes: 320 << 20}); err != nil {
		t.Fatal(err)
	}
	return e
}

// counter is a file that holds a number, which only grows.
type counter struct {
	f    *os.File
	done atomic.Uint64 // the last number whose write, and sync if it is synced, has returned
}

func newCounter(t *testing.T, dir, name string) *counter {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	c := &counter{f: f}
	if err := errors.Join(c.write(0), f.Sync()); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *counter) write(n uint64) error {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], n)
	_, err := c.f.WriteAt(b[:], 0)
	return err
}

func (c *counter) sync(n uint64) error {
	err := errors.Join(c.write(n), c.f.Sync())
	c.done.Store(n)
	return err
}

func readCounter(t *testing.T, dir, name string) uint64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil || len(b) != 8 {
		t.Fatalf("%s: %d bytes, %v", name, len(b), err)
	}
	return binary.LittleEndian.Uint64(b)
}

// writers write to a mounted volume until stop.
type writers struct {
	a, b, loose *counter // a is synced before b is written; loose is never synced
	stop        func()
}

func startWriters(t *testing.T, dir string) *writers {
	t.Helper()
	w := &writers{a: newCounter(t, dir, "a"), b: newCounter(t, dir, "b"), loose: newCounter(t, dir, "loose")}
	var wg sync.WaitGroup
	done := make(chan struct{})
	forever := func(step func(n uint64) error) {
		wg.Go(func() {
			for n := uint64(1); ; n++ {
				select {
				case <-done:
					return
				default:
				}
				if err := step(n); err != nil {
					t.Errorf("a writer: %v", err)
					return
				}
			}
		})
	}
	forever(func(n uint64) error { return errors.Join(w.a.sync(n), w.b.sync(n)) })
	forever(func(n uint64) error {
		err := w.loose.write(n)
		w.loose.done.Store(n)
		return err
	})
	forever(func(n uint64) error { // keeps the log busy
		sub := filepath.Join(dir, fmt.Sprint("dir", n%8))
		return errors.Join(os.MkdirAll(sub, 0o755), os.WriteFile(filepath.Join(sub, "f"), make([]byte, n%16<<10), 0o644),
			os.Rename(filepath.Join(sub, "f"), filepath.Join(sub, "g")), os.RemoveAll(filepath.Join(dir,
				fmt.Sprint("dir", (n+4)%8))))
	})
	w.stop = sync.OnceFunc(func() {
		close(done)
		wg.Wait()
		for _, c := range []*counter{w.a, w.b, w.loose} {
			c.f.Close()
		}
	})
	t.Cleanup(w.stop)
	return w
}

// checkImage runs the program that checks filesystems on an image as it lies in the pool.
func checkImage(t *testing.T, e *engine.Engine, fs driver.FS, id driver.ObjectID) {
	t.Helper()
	path := filepath.Join(e.Dir(), "data", "objects", string(id)+".img")
	args := []string{"e2fsck", "-fn", path}
	if fs == driver.XFS {
		args = []string{"xfs_repair", "-n", "-f", path}
	}
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Errorf("%s: %v: %s", args[0], err, out)
	}
}

// TestCopiesOfBusyVolume takes snapshots of a volume under load. Each holds what was written before the command
// began, is in the order in which its programs have synced, and needs no replay.
func TestCopiesOfBusyVolume(t *testing.T) {
	testfs.NotShort(t, "it loads a volume")
	rounds := 4
	if testfs.Full() {
		rounds = 100
	}
	for _, c := range []struct {
		pool string
		fs   driver.FS
	}{{"xfs", driver.Ext4}, {"xfs", driver.XFS}, {"btrfs", driver.Ext4}} {
		t.Run(c.pool+"/"+string(c.fs), func(t *testing.T) {
			e := livePool(t, c.pool, c.fs)
			v := clone(t, e, "g", "v", true)
			w := startWriters(t, v.Mountpoint)
			for i := range rounds {
				freeze := engine.FreezeIfNeeded
				if i == rounds-1 {
					freeze = engine.FreezeAlways
				}
				a, b, loose := w.a.done.Load(), w.b.done.Load(), w.loose.done.Load()
				name := fmt.Sprint("s", i)
				s, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName(name),
					Freeze: freeze})
				if err != nil {
					t.Fatal(err)
				}
				if s.Consistency != "clean" {
					t.Errorf("consistency %q", s.Consistency)
				}
				checkImage(t, e, c.fs, driver.ObjectID(s.ID))
				out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "v", At: name}, Name: ref.MustName("c"),
					Mount: true})
				if err != nil {
					t.Fatal(err)
				}
				at := out[0].Mountpoint
				ga, gb, gl := readCounter(t, at, "a"), readCounter(t, at, "b"), readCounter(t, at, "loose")
				if ga < a || gb < b || gl < loose {
					t.Errorf("the copy has a=%d, b=%d, loose=%d: less than was written before, %d, %d and %d", ga, gb, gl, a, b, loose)
				}
				if gb > ga {
					t.Errorf("the copy has b=%d, but a=%d, which was synced before", gb, ga)
				}
				destroy(t, e, "c")
			}
			w.stop()
		})
	}
}

// TestCopiesAtOnce makes many copies of a mounted volume at the same time, all of which freeze it: they
// wait for each other.
func TestCopiesAtOnce(t *testing.T) {
	e := livePool(t, "xfs", driver.Ext4)
	clone(t, e, "g", "v", true)
	const each = 4
	var wg sync.WaitGroup
	for i := range each {
		for name, do := range map[string]func() error{
			"snapshot": func() error {
				_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"),
					Name: ref.MustName(fmt.Sprint("s", i)), Freeze: engine.FreezeAlways})
				return err
			},
			"fork": func() error {
				_, err := e.Fork(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "v"}, Name: ref.MustName(fmt.Sprint("f", i)),
					Freeze: engine.FreezeAlways})
				return err
			},
			"diff": func() error {
				_, err := e.Diff(t.Context(), engine.DiffRequest{A: ref.Ref{Name: "g"}, B: ref.Ref{Name: "v"},
					Freeze: engine.FreezeAlways})
				return err
			},
			"publish": func() error {
				_, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName(fmt.Sprint("p", i)),
					Volume: ref.MustName("v"), Freeze: engine.FreezeAlways})
				return err
			},
		} {
			wg.Go(func() {
				if err := do(); err != nil {
					t.Errorf("%s: %v (%s)", name, err, errs.HintOf(err))
				}
			})
		}
	}
	wg.Wait()
}

// TestFreezeRefused: what is in use and cannot be frozen is not copied as if it were; nothing is left of the attempt.
func TestFreezeRefused(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		q := engine.ImportRequest{Name: ref.MustName("g"), Source: source(t)}
		if e.Caps().FS[0].IsImage() { // an image without a filesystem cannot be frozen
			q.Source, q.FS = filepath.Join(top, "image"), driver.None
			must(t, os.WriteFile(q.Source, make([]byte, 1<<20), 0o600))
		}
		_, err := e.Import(t.Context(), q)
		must(t, err)
		clone(t, e, "g", "v", true)
		before := objects(t, e)
		v, frozen := ref.MustName("v"), engine.FreezeAlways
		snap := func() error {
			_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: v, Name: ref.MustName("s"), Freeze: frozen})
			return err
		}

		// The volume is in use.
		for name, do := range map[string]func() error{
			"snapshot": snap,
			"fork": func() error {
				_, err := e.Fork(t.Context(), engine.CloneRequest{From: v.Ref(), Name: ref.MustName("f"), Freeze: frozen})
				return err
			},
			"publish": func() error {
				_, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("p"), Volume: v, Freeze: frozen})
				return err
			},
			"diff": func() error {
				_, err := e.Diff(t.Context(), engine.DiffRequest{A: ref.Ref{Name: "g"}, B: v.Ref(), Freeze: frozen})
				return err
			},
		} {
			if err := do(); !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
				t.Errorf("%s: %v", name, err)
			}
		}
		if after := objects(t, e); !slices.Equal(before, after) {
			t.Errorf("there was %q, and now %q", before, after)
		}
		_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
		must(t, err, snap())
	})
}

// TestWithoutLogIsFrozen: an ext2 is frozen, as a copy of it would not be consistent; an ext4 is not. Somebody else has
// frozen
// both here, which is in the way of another freeze only.
func TestWithoutLogIsFrozen(t *testing.T) {
	e := livePool(t, "xfs", driver.Ext4)
	image := filepath.Join(t.TempDir(), "ext2.img")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 64<<20)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext2", "-q", image).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("old"), Source: image}); err != nil {
		t.Fatal(err)
	}
	for golden, frozen := range map[string]bool{"g": false, "old": true} {
		v := clone(t, e, golden, "v-"+golden, true)
		snapshot := func(name string, freeze engine.Freeze) (api.Object, error) {
			return e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v-" + golden), Name: ref.MustName(name),
				Freeze: freeze})
		}
		root, err := os.Open(v.Mountpoint)
		if err != nil {
			t.Fatal(err)
		}
		if err := kernel.Freeze(root); err != nil {
			t.Fatal(err)
		}
		_, err = snapshot("one", engine.FreezeIfNeeded)
		if frozen {
			if !errs.Is(err, errs.InUse) || !strings.Contains(errs.HintOf(err), "fsfreeze --unfreeze "+v.Mountpoint) {
				t.Errorf("%s: %v (hint %q), wanted InUse and how to thaw it", golden, err, errs.HintOf(err))
			}
		} else if err != nil {
			t.Errorf("%s: %v", golden, err)
		}
		if err := errors.Join(kernel.Thaw(root), root.Close()); err != nil {
			t.Fatal(err)
		}
		if s, err := snapshot("two", engine.FreezeIfNeeded); err != nil || s.Consistency != "clean" {
			t.Errorf("%s: %+v, %v", golden, s, err)
		}
	}
}

// TestThawedTooEarly thaws a volume while it is copied: the copy is made anew, and in the end refused. It never says
// that it is clean.
func TestThawedTooEarly(t *testing.T) {
	e := livePool(t, "xfs", driver.Ext4)
	v := clone(t, e, "g", "v", true)
	root, err := os.Open(v.Mountpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for often, works := range map[int]bool{1: true, 3: false} {
		freezes := 0
		engine.AtStep(t, func(step string) {
			if step != "frozen" {
				return
			}
			if freezes++; freezes <= often {
				if err := kernel.Thaw(root); err != nil {
					t.Error(err)
				}
			}
		})
		s, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"),
			Name: ref.MustName(fmt.Sprint("s", often)), Freeze: engine.FreezeAlways})
		switch {
		case works && (err != nil || s.Consistency != "clean" || freezes != often+1):
			t.Errorf("thawed %d times: %+v, %v, frozen %d times", often, s, err, freezes)
		case !works && (!errs.Is(err, errs.Conflict) || !errors.Is(err, freeze.ErrBroken)):
			t.Errorf("thawed %d times: %v, wanted a conflict", often, err)
		}
	}
	names, err := pooltest.SnapshotNames(t.Context(), e, "v")
	if err != nil || len(names) != 1 {
		t.Errorf("snapshots %v, %v", names, err)
	}
}

// TestStoppedSnapshot stops a process that has frozen a volume: others can write again, and the snapshot that it makes
// when it goes on
// is of a later freeze.
func TestStoppedSnapshot(t *testing.T) {
	testfs.NotShort(t, "it waits for a guard")
	t.Parallel()
	e := livePool(t, "xfs", driver.Ext4)
	v := clone(t, e, "g", "v", true)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "STOPPED_SNAPSHOT_OF="+e.Dir())
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(cmd.Process.Pid, &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("%v, status %#x", err, status)
	}

	// This hangs for good if nobody thaws.
	late := filepath.Join(v.Mountpoint, "late")
	if err := os.WriteFile(late, []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	if err := cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the snapshot: %v", err)
	}
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "v", At: "s"}, Name: ref.MustName("c"),
		Mount: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(out[0].Mountpoint, "late")); err != nil {
		t.Errorf("the snapshot is of the freeze that was broken: %v", err)
	}
}

// TestShowPredictsStall: of a volume in many pieces, show says for how long a copy may stop its writers.
func TestShowPredictsStall(t *testing.T) {
	e := livePool(t, "xfs", driver.Ext4)
	v := clone(t, e, "g", "v", true)
	show := func() api.Detail {
		d, err := e.Show(t.Context(), ref.Ref{Name: "v"})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if d := show(); d.StallSeconds != 0 {
		t.Errorf("of %d extents it predicts %v s", d.Extents, d.StallSeconds)
	}
	f, err := os.Create(filepath.Join(v.Mountpoint, "holes"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(64 << 20); err != nil {
		t.Fatal(err)
	}
	// Each write breaks what the copy before it shares in three.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, 64<<20); err != nil {
		t.Fatal(err)
	}
	for i := range int64(200) {
		if _, err := f.WriteAt([]byte("x"), i*300<<10); err != nil {
			t.Fatal(err)
		}
	}
	if d := show(); d.StallSeconds < float64(d.Extents)*20e-6 || d.StallSeconds > float64(d.Extents)*100e-6 ||
		d.Extents < 200 {
		t.Errorf("of %d extents it predicts %v s", d.Extents, d.StallSeconds)
	}
}
