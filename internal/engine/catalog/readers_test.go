package catalog

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"
)

// volumeExists reports whether a transaction sees a volume.
func volumeExists(t *testing.T, tx *Tx, name string) bool {
	t.Helper()
	_, ok, err := tx.Volume(name)
	if err != nil {
		t.Error(err)
	}
	return ok
}

func putVolume(tx *Tx, name string) error {
	return tx.PutObject(Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Volume, Name: name}})
}

// TestReadsBesideWrites: nobody who reads waits for somebody who writes, nor the other way round, and each reads one
// state.
func TestReadsBesideWrites(t *testing.T) {
	c := openCatalog(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // a transaction that waits fails then
	defer cancel()

	for range prepareAt + 2 { // queries are prepared in the last rounds, and not in the first
		if err := c.Update(ctx, Durable, func(tx *Tx) error {
			if err := putVolume(tx, "v"); err != nil {
				return err
			}
			return c.View(ctx, func(beside *Tx) error {
				if volumeExists(t, beside, "v") || !volumeExists(t, tx, "v") {
					t.Error("what is being written can be read by others, or not by itself")
				}
				return nil
			})
		}); err != nil {
			t.Fatal(err)
		}

		if err := c.View(ctx, func(tx *Tx) error {
			before, ok, err := tx.Volume("v")
			if err != nil || !ok {
				t.Errorf("not there: %v", err)
			}
			err = c.Update(ctx, Durable, func(tx *Tx) error { return tx.Bury(Tombstone{ID: before.ID, Ref: "v"}, "") })
			if !volumeExists(t, tx, "v") {
				t.Error("what is read has changed")
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestConnections: who does one thing after the other pays for one connection, and those that were needed at once stay.
func TestConnections(t *testing.T) {
	c := openCatalog(t)
	putVolumes(t, c, prepareAt+2)
	for range prepareAt + 2 {
		if err := c.View(t.Context(), func(tx *Tx) error { return tx.Rows("", func(Row) error { return nil }) }); err != nil {
			t.Fatal(err)
		}
	}
	if n := c.db.Stats().OpenConnections; n != 1 {
		t.Errorf("%d connections", n)
	}

	view := func(fn func() error) error { return c.View(t.Context(), func(*Tx) error { return fn() }) }
	none := func() error { return nil }
	if err := view(func() error { return view(func() error { return view(none) }) }); err != nil {
		t.Error(err)
	}
	if n := c.db.Stats().OpenConnections; n != 3 || len(c.db.free) != 3 {
		t.Errorf("%d connections, %d are free", n, len(c.db.free))
	}
}

// TestLogBesideReaders: the log stays short although somebody reads at every moment, whoever reads and writes.
func TestLogBesideReaders(t *testing.T) {
	for name, writer := range map[string]func(c *Catalog) (w *Catalog, end func() error){
		"the same": func(c *Catalog) (*Catalog, func() error) { return c, func() error { return nil } },
		"others, each once": func(c *Catalog) (*Catalog, func() error) {
			w, err := Open(t.Context(), c.dir, "pool")
			if err != nil {
				t.Fatal(err)
			}
			return w, w.Close
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := openCatalog(t)
			putVolumes(t, c, 300)
			var reads atomic.Int64
			var done atomic.Bool
			var wg sync.WaitGroup
			for range 4 * sharedReaders {
				wg.Go(func() {
					for !done.Load() {
						if err := c.View(t.Context(), func(tx *Tx) error {
							return tx.Rows("", func(Row) error { return nil })
						}); err != nil {
							t.Error(err)
						}
						reads.Add(1)
					}
				})
			}

			// One reads for so long that the log cannot become short, but not for ever.
			begun, held := make(chan bool, 1), make(chan bool)
			release := sync.OnceFunc(func() { close(held) })
			if name != "the same" { // each of the others would wait for that reader
				release()
			}
			wg.Go(func() {
				if err := c.View(t.Context(), func(tx *Tx) error {
					_, err := tx.Count()
					begun <- true
					<-held
					return err
				}); err != nil {
					t.Error(err)
				}
			})
			<-begun

			text := strings.Repeat("x", 20*pageBytes)
			const most = 4 * logBytes
			for n := 0; n < most; n += len(text) {
				if n > most/4 {
					release()
				}
				w, end := writer(c)
				if err := errors.Join(w.Update(t.Context(), Soft, func(tx *Tx) error { return tx.SetMeta("test", text) }),
					end()); err != nil {
					t.Fatal(err)
				}
			}
			done.Store(true)
			wg.Wait()

			log, err := os.Stat(filepath.Join(c.dir, "catalog.db-wal"))
			t.Logf("%d bytes, %d reads", log.Size(), reads.Load())
			if err != nil || log.Size() > 2*logBytes {
				t.Errorf("a log of %d bytes, %v", log.Size(), err)
			}
			if reads.Load() == 0 {
				t.Error("nobody has read")
			}

			// Whoever writes then is as patient as before.
			for _, s := range c.db.free {
				var patience int64
				err := s.queryRow(t.Context(), "PRAGMA busy_timeout").Scan(&patience)
				if err != nil || patience != busyTimeout.Milliseconds() {
					t.Errorf("waits for %d ms, %v", patience, err)
				}
			}
		})
	}
}

// TestReplacedFile: whoever has a catalogue open uses that one, or is refused, when another one has taken its place.
func TestReplacedFile(t *testing.T) {
	c := openCatalog(t)
	putVolumes(t, c, 1)
	other := t.TempDir()
	if err := Create(t.Context(), other, "pool", api.EventRebuild); err != nil {
		t.Fatal(err)
	}
	for _, ext := range []string{"", "-wal", "-shm"} {
		if err := os.Rename(c.path+ext, c.path+ext+".old"); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(filepath.Join(other, "catalog.db"), c.path); err != nil {
		t.Fatal(err)
	}

	seen := func(tx *Tx) error {
		if !volumeExists(t, tx, "v000") {
			t.Error("it reads the other one")
		}
		return nil
	}
	if err := c.View(t.Context(), func(tx *Tx) error {
		// A transaction beside this one needs another connection.
		if err := c.View(t.Context(), seen); !errs.Is(err, errs.Conflict) {
			t.Errorf("another connection: %v", err)
		}
		return seen(tx)
	}); err != nil {
		t.Error(err)
	}
	if err := c.View(t.Context(), seen); err != nil {
		t.Error(err)
	}
}

// TestCloseWaits: Close waits for transactions that have begun, and lets no others begin.
func TestCloseWaits(t *testing.T) {
	for name, transaction := range map[string]func(*Catalog, func(*Tx) error) error{
		"view":   func(c *Catalog, fn func(*Tx) error) error { return c.View(context.Background(), fn) },
		"update": func(c *Catalog, fn func(*Tx) error) error { return c.Update(context.Background(), Durable, fn) },
	} {
		t.Run(name, func(t *testing.T) {
			c := openCatalog(t)
			putVolumes(t, c, 3)
			started, release := make(chan bool), make(chan bool)
			first, waiting, closed := make(chan error, 1), make(chan error, 1), make(chan error, 1)
			seen := 0
			go func() {
				first <- transaction(c, func(tx *Tx) error {
					started <- true
					<-release
					return tx.Rows("", func(Row) error { seen++; return nil })
				})
			}()
			<-started
			unused := func(*Tx) error { t.Error("a transaction began"); return nil }
			if name == "update" { // a second writer waits for its turn, or comes too late
				go func() { waiting <- transaction(c, unused) }()
			} else {
				waiting <- errDatabaseClosed
			}
			for range 1000 {
				runtime.Gosched()
			}

			go func() { closed <- c.Close() }()
			for !c.db.closed.Load() {
				runtime.Gosched()
			}
			if err := transaction(c, unused); !errs.Is(err, errs.Canceled) {
				t.Errorf("a later transaction: %v", err)
			}
			for range 10_000 {
				select {
				case err := <-closed:
					t.Fatalf("did not wait: %v", err)
				default:
					runtime.Gosched()
				}
			}

			close(release)
			if err := errors.Join(<-first, <-closed); err != nil || seen != 3 {
				t.Errorf("%v, %d rows", err, seen)
			}
			if err := <-waiting; !errs.Is(err, errs.Canceled) {
				t.Errorf("one that waited: %v", err)
			}
			if err := transaction(c, unused); !errs.Is(err, errs.Canceled) {
				t.Errorf("after Close: %v", err)
			}
			if c.seen.f != nil {
				t.Error("a file is still open")
			}
		})
	}
}
