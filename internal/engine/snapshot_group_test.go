package engine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"
)

func refNames(names ...string) (out []ref.Name) {
	for _, n := range names {
		out = append(out, ref.MustName(n))
	}
	return out
}

func group(name string, volumes ...string) engine.SnapshotGroupRequest {
	return engine.SnapshotGroupRequest{Volumes: refNames(volumes...), Name: ref.MustName(name)}
}

// pairWriter writes numbers to a file in one volume and then to one in another, and syncs each before the next.
type pairWriter struct {
	first, second *counter
	stop          func()
}

func startPair(t *testing.T, first, second string) *pairWriter {
	t.Helper()
	w := &pairWriter{first: newCounter(t, first, "n"), second: newCounter(t, second, "n")}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for n := uint64(1); ; n++ {
			select {
			case <-done:
				return
			default:
			}
			if err := errors.Join(w.first.sync(n), w.second.sync(n)); err != nil {
				t.Errorf("the writer: %v", err)
				return
			}
		}
	}()
	w.stop = sync.OnceFunc(func() {
		close(done)
		<-ended
		w.first.f.Close()
		w.second.f.Close()
	})
	t.Cleanup(w.stop)
	return w
}

// awaitNext waits until the writer has written both numbers again, or for some time.
func (w *pairWriter) awaitNext(limit time.Duration) {
	from := w.second.done.Load()
	for end := time.Now().Add(limit); time.Now().Before(end) && w.second.done.Load() <= from+1; {
		runtime.Gosched()
	}
}

// readPair returns the numbers in snapshots of both volumes.
func readPair(t *testing.T, e *engine.Engine, first, second, at string) (a, b uint64) {
	t.Helper()
	read := func(volume string) uint64 {
		c := engine.CloneRequest{From: ref.Ref{Name: volume, At: at}, Name: ref.MustName("copy"), Mount: true}
		out, err := e.Clone(t.Context(), c)
		must(t, err)
		defer destroy(t, e, "copy")
		return readCounter(t, out[0].Mountpoint, "n")
	}
	return read(first), read(second)
}

// TestGroupIsOnePoint takes snapshots of two volumes while a program writes a number to the first and then to the
// second. No snapshot has a number in the second that is not in the first, nor one that is older by more than one.
// Between the two copies the program gets time to write: without a freeze it does, and this test sees it.
func TestGroupIsOnePoint(t *testing.T) {
	testfs.NotShort(t, "it loads volumes")
	rounds := 5
	if os.Getenv("PANDO_TEST_FULL") != "" {
		rounds = 100
	}

	for _, c := range []struct {
		pool          string
		first, second driver.FS
	}{{"xfs", driver.Ext4, driver.Ext4}, {"xfs", driver.XFS, driver.Ext4}, {"btrfs", driver.Ext4, driver.XFS}} {
		t.Run(fmt.Sprintf("%s/%s,%s", c.pool, c.first, c.second), func(t *testing.T) {
			e := livePool(t, c.pool, c.first)
			_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("h"), Source: source(t), FS: c.second,
				SizeBytes: 320 << 20})
			must(t, err)
			w := startPair(t, clone(t, e, "g", "data", true).Mountpoint, clone(t, e, "h", "wal", true).Mountpoint)
			patience := 50 * time.Millisecond
			engine.AtStep(t, func(step string) {
				if step == "copied one of a group" {
					w.awaitNext(patience)
				}
			})

			for i := range rounds {
				before := w.second.done.Load()
				s, err := e.SnapshotGroup(t.Context(), group(fmt.Sprint("s", i), "wal", "data"))
				must(t, err)
				if s.FrozenSeconds <= 0 || len(s.Snapshots) != 2 || s.Snapshots[0].Name != "wal@"+s.Name {
					t.Errorf("%+v", s)
				}

				a, b := readPair(t, e, "data", "wal", s.Name)
				if a < before || a != b && a != b+1 {
					t.Errorf("the group has %d and %d, and %d was written before", a, b, before)
				}
				for i, fs := range []driver.FS{c.second, c.first} {
					checkImage(t, e, fs, driver.ObjectID(s.Snapshots[i].ID))
					if s.Snapshots[i].Consistency != "clean" {
						t.Errorf("consistency %q", s.Snapshots[i].Consistency)
					}
				}
			}

			// Without a freeze the writer goes on.
			patience = 10 * time.Second
			q := group("loose", "data", "wal")
			q.Freeze = engine.FreezeNever
			s, err := e.SnapshotGroup(t.Context(), q)
			must(t, err)
			if a, b := readPair(t, e, "data", "wal", "loose"); b <= a || s.FrozenSeconds != 0 {
				t.Errorf("without a freeze: %d and %d, %+v: this test shows nothing", a, b, s)
			}
			w.stop()
		})
	}
}

// TestGroupsAtOnce takes group snapshots of the same volumes in opposite orders, and single ones, at the same time.
func TestGroupsAtOnce(t *testing.T) {
	e := livePool(t, "xfs", driver.Ext4)
	for _, v := range []string{"a", "b", "c"} {
		clone(t, e, "g", v, true)
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for i, volumes := range [][]string{{"a", "b", "c"}, {"c", "b", "a"}, {"b", "a"}, {"a", "c"}, {"c"}, {"b"}} {
		all.Go(func() {
			for n := range 3 {
				if _, err := e.SnapshotGroup(ctx, group(fmt.Sprintf("s%d-%d", i, n), volumes...)); err != nil {
					t.Errorf("%v: %v (%s)", volumes, err, errs.HintOf(err))
				}
			}
		})
	}
	all.Wait()
}

// notTaken checks that no snapshot called name exists, nothing is left of it, and the volumes can be written to.
func notTaken(t *testing.T, e *engine.Engine, name string, volumes ...engine.Info) {
	t.Helper()
	for _, v := range volumes {
		names, err := e.SnapshotNames(t.Context(), ref.MustName(v.Name))
		must(t, err)
		if slices.Contains(names, name) {
			t.Errorf("%s@%s exists", v.Name, name)
		}
		if v.Mountpoint != "" {
			must(t, os.WriteFile(filepath.Join(v.Mountpoint, "later"), []byte("x"), 0o600)) // hangs if it is frozen
		}
	}

	r, err := engine.Fsck(t.Context(), e.Dir(), check.Request{}, drivers)
	must(t, err)
	if len(r.Findings) != 0 {
		t.Errorf("left behind: %+v", r.Findings)
	}
}

// TestGroupIsAllOrNothing: if one snapshot of a group cannot be taken, none is.
func TestGroupIsAllOrNothing(t *testing.T) {
	e := livePool(t, "xfs", driver.Ext4)
	a, b, idle := clone(t, e, "g", "a", true), clone(t, e, "g", "b", true), clone(t, e, "g", "idle", false)
	snapshot := func(q engine.SnapshotGroupRequest) error {
		_, err := e.SnapshotGroup(t.Context(), q)
		return err
	}

	// The words.
	_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("b"), Name: ref.MustName("taken")})
	must(t, err)
	for name, c := range map[string]struct {
		q    engine.SnapshotGroupRequest
		kind errs.Kind
	}{
		"taken":  {group("taken", "a", "idle", "b"), errs.Exists},
		"absent": {group("absent", "a", "nobody"), errs.NotFound},
		"twice":  {group("twice", "a", "b", "a"), errs.Invalid},
		"none":   {group("none"), errs.Invalid},
	} {
		if err := snapshot(c.q); !errs.Is(err, c.kind) || errs.HintOf(err) == "" {
			t.Errorf("%s: %v (hint %q)", name, err, errs.HintOf(err))
		}
		notTaken(t, e, name, a, idle)
	}

	// Somebody else has frozen one of them.
	root, err := os.Open(b.Mountpoint)
	must(t, err)
	defer root.Close()
	must(t, kernel.Freeze(root))
	if err := snapshot(group("frozen", "a", "b", "idle")); !errs.Is(err, errs.InUse) ||
		!strings.Contains(errs.HintOf(err), "fsfreeze --unfreeze "+b.Mountpoint) {
		t.Errorf("%v (hint %q)", err, errs.HintOf(err))
	}
	must(t, os.WriteFile(filepath.Join(a.Mountpoint, "while"), []byte("x"), 0o600))
	must(t, kernel.Thaw(root))
	notTaken(t, e, "frozen", a, b, idle)

	// One of them is thawed too early.
	engine.AtStep(t, func(step string) {
		if step == "frozen" {
			must(t, kernel.Thaw(root))
		}
	})
	if err := snapshot(group("thawed", "a", "b", "idle")); !errs.Is(err, errs.Conflict) {
		t.Errorf("thawed too early: %v", err)
	}
	notTaken(t, e, "thawed", a, b, idle)

	// It is interrupted after the first copy.
	ctx, interrupt := context.WithCancel(t.Context())
	engine.AtStep(t, func(step string) {
		if step == "copied one of a group" {
			interrupt()
		}
	})
	if _, err := e.SnapshotGroup(ctx, group("interrupted", "a", "b", "idle")); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	notTaken(t, e, "interrupted", a, b, idle)
}

// TestGroupOfTrees: at most one volume in use may be one that cannot be frozen.
func TestGroupOfTrees(t *testing.T) {
	for _, c := range []struct {
		driver string
		fs     driver.FS
		most   int // of these in use at once
	}{{"btrfs", driver.Native, 1}, {"plain", driver.Native, 0}, {"reflink", driver.None, 1}} {
		t.Run(c.driver, func(t *testing.T) {
			e := newPool(t, testfs.New(t, "btrfs", 1<<30).Dir(), engine.InitRequest{Driver: c.driver})
			if c.fs == driver.None {
				image := filepath.Join(t.TempDir(), "raw.img")
				must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
				_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: image, FS: driver.None})
				must(t, err)
			} else {
				importTree(t, e, "g", source(t))
			}

			var volumes []engine.Info
			for i, name := range []string{"a", "b", "idle"} {
				volumes = append(volumes, clone(t, e, "g", name, i < c.most))
			}
			_, err := e.SnapshotGroup(t.Context(), group("allowed", "a", "b", "idle"))
			must(t, err)

			_, err = e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(volumes[c.most].Name)})
			must(t, err)
			_, err = e.SnapshotGroup(t.Context(), group("refused", "idle", "b", "a"))
			if !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
				t.Errorf("%v (hint %q)", err, errs.HintOf(err))
			}
			notTaken(t, e, "refused", engine.Info{Name: "a"}, engine.Info{Name: "b"}, engine.Info{Name: "idle"})

			q := group("promised", "a", "b", "idle")
			q.Freeze = engine.FreezeNever
			_, err = e.SnapshotGroup(t.Context(), q)
			must(t, err)
		})
	}
}
