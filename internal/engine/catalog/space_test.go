package catalog_test

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

const spaceID = "00000000000000000000000000"

// newTight makes a catalogue on a filesystem that is going to be full.
func newTight(t *testing.T, fs string) (dir string) {
	t.Helper()
	switch fs {
	case "inodes":
		dir = testfs.Ext4With(t, 64<<20, "-N", "64")
	default:
		dir = testfs.New(t, fs, 64<<20).Dir()
	}
	if err := catalog.Create(t.Context(), dir, spaceID, api.EventInit); err != nil {
		t.Fatal(err)
	}
	if err := catalog.MakeSpares(dir); err != nil {
		t.Fatal(err)
	}
	catalog.Preallocate(dir)
	return dir
}

// fillUp leaves neither a block nor an inode.
func fillUp(t *testing.T, dir string) {
	t.Helper()
	for i := 0; ; i++ {
		f, err := os.Create(filepath.Join(dir, "filler"+strconv.Itoa(i)))
		if errs.KindOf(err) == errs.NoSpace {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			for buf := make([]byte, 1<<20); len(buf) > 0; {
				if _, err := f.Write(buf); err != nil {
					buf = buf[:len(buf)/2]
				} else if err := f.Sync(); err != nil {
					t.Fatal(err)
				}
			}
		}
		f.Close()
		if unix.Access(f.Name(), unix.F_OK) != nil || i > 100_000 {
			t.Fatal("the filesystem does not become full")
		}
	}
}

func live(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "live"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestLastInodes: the last process that closes a catalogue removes its log and index. They are made again on a disk
// that has no other inodes, although those are not free while a child between fork and exec has the removed files open.
func TestLastInodes(t *testing.T) {
	dir := newTight(t, "inodes")
	c, err := catalog.Open(t.Context(), dir, spaceID)
	if err != nil {
		t.Fatal(err)
	}
	var held []int
	for _, name := range []string{"catalog.db-wal", "catalog.db-shm"} {
		fd, err := unix.Open(filepath.Join(dir, name), unix.O_PATH|unix.O_CLOEXEC, 0) // which keeps SQLite's locks
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, fd)
	}
	fillUp(t, dir)
	if err := c.Close(); err != nil {
		t.Error(err)
	}

	catalog.OnWaitForInode(t, func() {
		for _, fd := range held {
			_ = unix.Close(fd)
		}
		held = nil
	})
	catalog.Preallocate(dir)
	if len(held) > 0 {
		t.Error("it did not wait")
	}
	if c, err = catalog.Open(t.Context(), dir, spaceID); err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// TestFullDisk: marks and commits need nothing of a disk that has neither a block nor an
// inode left.
func TestFullDisk(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "inodes"} {
		t.Run(fs, func(t *testing.T) {
			dir := newTight(t, fs)
			spares := live(t, dir)
			fillUp(t, dir)
			c := openFull(t, dir)
			id := driver.NewID()
			op := mark(t, c, id)
			if n := len(live(t, dir)); fs != "ext4" && n != len(spares) { // its directories have room for names
				t.Errorf("%d files in live/, wanted %d", n, len(spares))
			}
			if err := c.Update(op.In(t.Context()), catalog.Durable, func(tx *catalog.Tx) error {
				if err := tx.AddTombstone(catalog.Tombstone{ID: id, Ref: "x"}); err != nil {
					return err
				}
				return tx.Unmark(id)
			}); err != nil {
				t.Fatal(err)
			}
			op.End()
			c.RemoveIdleLiveFiles()
			if names := live(t, dir); !slices.Equal(names, spares) {
				t.Errorf("in live/ are %v, wanted %v", names, spares)
			}
		})
	}
}

func openFull(t *testing.T, dir string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Open(t.Context(), dir, spaceID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // on a full disk its log may stay
	return c
}

func mark(t *testing.T, c *catalog.Catalog, id driver.ObjectID) *catalog.Operation {
	t.Helper()
	op := c.Begin("test")
	if err := c.Update(op.In(t.Context()), catalog.Soft, func(tx *catalog.Tx) error {
		return tx.Mark(catalog.Mark{ID: id, Op: "destroy"})
	}); err != nil {
		t.Fatal(err)
	}
	return op
}

// TestSparesAreNotDead: a spare is no dead process's, and of the process that has taken one
// its lock is the proof of life.
func TestSparesAreNotDead(t *testing.T) {
	dir := newTight(t, "inodes")
	fillUp(t, dir)
	c := openFull(t, dir)
	op := mark(t, c, driver.NewID())
	var marks []catalog.Mark
	if err := c.View(t.Context(), func(tx *catalog.Tx) (err error) {
		marks, err = tx.Marks()
		return err
	}); err != nil || len(marks) != 1 {
		t.Fatal(marks, err)
	}
	if g, err := c.LockOrphan(marks[0].Owner); err != nil || g != nil {
		t.Fatalf("a living process was locked as an orphan: %v, %v", g, err)
	}
	if stale, err := c.StaleOwners(nil); err != nil || len(stale) > 0 {
		t.Errorf("stale: %v, %v", stale, err)
	}
	before := live(t, dir)
	if err := c.RemoveStaleOwners(nil); err != nil || !slices.Equal(live(t, dir), before) {
		t.Errorf("left %v of %v, %v", live(t, dir), before, err)
	}

	// Its marks stay, as those of a process that has died with work at hand.
	op.End()
	g, err := c.LockOrphan(marks[0].Owner)
	if err != nil || g == nil {
		t.Fatalf("a dead process could not be locked as an orphan: %v", err)
	}
	if err := g.Close(true); err != nil {
		t.Fatal(err)
	}
	for _, name := range live(t, dir) {
		if !strings.HasPrefix(name, "spare-") {
			t.Errorf("%s is left in live/", name)
		}
	}
}

// TestOpenAlone: where there can be no index of the log, the catalogue can be used without.
func TestOpenAlone(t *testing.T) {
	dir := t.TempDir()
	if err := catalog.Create(t.Context(), dir, spaceID, api.EventInit); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere", filepath.Join(dir, "catalog.db-shm")); err != nil {
		t.Fatal(err)
	}
	if c, err := catalog.Open(t.Context(), dir, spaceID); err == nil {
		_ = c.Close()
		t.Fatal("opened with an index that cannot be: this shows nothing")
	}
	for range 2 {
		c, err := catalog.OpenAlone(t.Context(), dir, spaceID)
		if err != nil {
			t.Fatal(err)
		}
		id := driver.NewID()
		op := mark(t, c, id)
		if err := c.Update(op.In(t.Context()), catalog.Durable, func(tx *catalog.Tx) error {
			return tx.Unmark(id)
		}); err != nil {
			t.Error(err)
		}
		op.End()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}
