package catalog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/testing/testfs"
)

func openCatalog(t testing.TB) *Catalog {
	t.Helper()
	dir := t.TempDir()
	if err := Create(t.Context(), dir, "pool", api.EventInit); err != nil {
		t.Fatal(err)
	}
	c, err := Open(t.Context(), dir, "pool")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func putVolumes(t *testing.T, c *Catalog, n int) {
	t.Helper()
	for i := range n {
		if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
			return tx.PutObject(Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Volume,
				Name: fmt.Sprintf("v%03d", i),
				FS:   driver.Ext4}})
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPreparedQueriesNest: a query may be run while the rows of the same query
// are being read, even when it is kept prepared.
func TestPreparedQueriesNest(t *testing.T) {
	c := openCatalog(t)
	putVolumes(t, c, 10)
	for range prepareAt + 3 {
		var pairs int
		if err := c.View(t.Context(), func(tx *Tx) error {
			err := tx.Rows(driver.Volume, func(a Row) error {
				seen := 0
				err := tx.Rows(driver.Volume, func(b Row) error {
					seen++
					pairs++
					// One that is scanned at once, in between.
					got, ok, err := tx.Volume(a.Name)
					if err != nil || !ok || got.ID != a.ID {
						t.Errorf("volume %s: %v, %v, %v", a.Name, got.ID, ok, err)
					}
					return nil
				})
				if seen != 10 {
					t.Errorf("%d rows inside, want 10", seen)
				}
				return err
			})
			if len(tx.s.reading) > 0 {
				t.Error("a statement is still being read")
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if pairs != 100 {
			t.Fatalf("%d pairs, want 100", pairs)
		}
	}
	if len(c.db.free) != 1 || len(c.db.free[0].prepared) == 0 {
		t.Error("no query was kept prepared")
	}
}

// TestPreparedQueriesSurviveErrors: after a failed, a cancelled and a
// rolled-back transaction, everything still works.
func TestPreparedQueriesSurviveErrors(t *testing.T) {
	c := openCatalog(t)
	putVolumes(t, c, prepareAt+2)
	for range prepareAt + 2 {
		if err := c.Update(t.Context(), Durable, func(tx *Tx) error {
			return tx.PutObject(Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Volume, Name: "v000"}})
		}); err == nil {
			t.Fatal("a taken name was given again")
		}
		ctx, cancel := context.WithCancel(t.Context())
		if err := c.Update(ctx, Durable, func(tx *Tx) error {
			if err := putVolume(tx, "never"); err != nil {
				return err
			}
			cancel()
			return nil
		}); !errs.Is(err, errs.Canceled) {
			t.Fatalf("a cancelled transaction: %v", err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		if err := c.View(ctx, func(tx *Tx) error {
			seen := 0
			err := tx.Rows(driver.Volume, func(Row) error { seen++; cancel(); return nil })
			_, _, later := tx.Volume("v000")
			if seen != 1 || !errs.Is(err, errs.Canceled) || !errs.Is(later, errs.Canceled) {
				t.Errorf("a cancelled transaction has read %d rows: %v, then %v", seen, err, later)
			}
			return nil
		}); !errs.Is(err, errs.Canceled) {
			t.Fatalf("a transaction that was cancelled while it read: %v", err)
		}
		stop := fmt.Errorf("enough")
		if err := c.View(t.Context(), func(tx *Tx) error {
			return tx.Rows(driver.Volume, func(Row) error { return stop })
		}); err != stop {
			t.Fatalf("got %v, want the callback's error", err)
		}
		if err := c.View(t.Context(), func(tx *Tx) error {
			if _, ok, err := tx.Volume("never"); ok || err != nil {
				t.Errorf("the cancelled volume: %v, %v", ok, err)
			}
			n, err := tx.Count()
			if n.Volumes != prepareAt+2 {
				t.Errorf("%d volumes, want %d", n.Volumes, prepareAt+2)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestBrokenSession: a session whose transaction could not be ended serves no other one.
func TestBrokenSession(t *testing.T) {
	c := openCatalog(t)
	putVolumes(t, c, 1)
	var broken *session
	stop := errors.New("enough")
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		broken = tx.s
		if err := putVolume(tx, "never"); err != nil {
			return err
		}

		unusable, err := tx.s.conn.PrepareContext(t.Context(), "ROLLBACK")
		if err != nil {
			return err
		}
		tx.s.prepared["ROLLBACK"] = unusable
		return errors.Join(stop, unusable.Close())
	}); !errors.Is(err, stop) {
		t.Fatal(err)
	}
	if !broken.broken || slices.Contains(c.db.free, broken) {
		t.Error("the session is used again")
	}
	if err := c.View(t.Context(), func(tx *Tx) error {
		if !volumeExists(t, tx, "v000") || volumeExists(t, tx, "never") {
			t.Error("its transaction has not been rolled back")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}

	// SQLite ends a transaction by itself after some errors: that breaks no session.
	var ended *session
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		ended = tx.s
		_, err := tx.exec("ROLLBACK")
		return errors.Join(stop, err)
	}); !errors.Is(err, stop) || !slices.Contains(c.db.free, ended) {
		t.Errorf("%v; sessions: %v", err, c.db.free)
	}
}

// TestWaitEnds: who waits for a writer in another process stops when its context ends.
func TestWaitEnds(t *testing.T) {
	c := openCatalog(t)
	other, err := Open(t.Context(), c.dir, "pool") // it has turns of its own, as another process has
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()

	if err := c.Update(t.Context(), Soft, func(*Tx) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		begun := time.Now()
		err := other.Update(ctx, Soft, func(*Tx) error { t.Error("two write at once"); return nil })
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) > busyTimeout/2 {
			t.Errorf("after %v: %v", time.Since(begun), err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := other.Update(t.Context(), Soft, func(tx *Tx) error { return putVolume(tx, "v") }); err != nil {
		t.Error(err)
	}
}

// TestCommitsWait: SQLite waits for the disk (synchronous=FULL, 2) with each durable commit, and with no soft one.
func TestCommitsWait(t *testing.T) {
	c := openCatalog(t)
	for _, d := range []Durability{Soft, Durable, Durable, Soft, Soft, Durable} {
		if err := c.Update(t.Context(), d, func(tx *Tx) error {
			var level int
			err := tx.queryRow("PRAGMA synchronous").Scan(&level)
			if (level == 2) != bool(d) {
				t.Errorf("durable %v: level %d", d, level)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNothingStaysOpen: a closed catalogue has no file open, whether its queries were kept parsed or not.
func TestNothingStaysOpen(t *testing.T) {
	dir := t.TempDir()
	if err := Create(t.Context(), dir, "pool", api.EventInit); err != nil {
		t.Fatal(err)
	}
	for _, times := range []int{0, 1, prepareAt + 1} {
		for name, open := range map[string]func(context.Context, string, string) (*Catalog, error){
			"Open": Open, "OpenReadOnly": OpenReadOnly, "OpenAlone": OpenAlone,
		} {
			c, err := open(t.Context(), dir, "pool")
			if err != nil {
				t.Fatal(err)
			}
			for range times {
				if err := c.View(t.Context(), func(tx *Tx) error {
					return tx.Rows("", func(Row) error { return nil })
				}); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			if files := testfs.OpenFiles(t, dir); len(files) > 0 {
				t.Errorf("%s, %d queries: still open: %v", name, times, files)
			}
		}
	}
}

func TestPreparedQueriesConcurrently(t *testing.T) {
	c := openCatalog(t)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 20 {
				name := fmt.Sprintf("g%d-%d", g, i)
				id := driver.NewID()
				if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
					return tx.PutObject(Row{Identity: driver.Identity{ID: id, Kind: driver.Volume, Name: name}})
				}); err != nil {
					t.Error(err)
				}
				if err := c.View(t.Context(), func(tx *Tx) error {
					r, ok, err := tx.Volume(name)
					if !ok || r.ID != id {
						t.Errorf("%s: %v, %v", name, r.ID, ok)
					}
					return err
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// TestRowsAreAsLookedUp: listing reads rows in another way than looking one up.
func TestRowsAreAsLookedUp(t *testing.T) {
	c := openCatalog(t)
	now := time.Unix(1_700_000_000, 123).UTC()
	for i, r := range []Row{
		{Identity: driver.Identity{Kind: driver.Volume, Name: "a"}},
		{Identity: driver.Identity{Kind: driver.Volume, Name: "b", FS: driver.XFS, SizeBytes: 1 << 40, Sector: 4096,
			Origin: "web@3", OriginID: driver.NewID(),
			CreatedAt: now, ExpiresAt: now.Add(time.Hour), Ephemeral: true, BootID: "boot"}, UsedAt: now.Add(time.Minute),
			Usage: driver.Usage{LogicalBytes: 7, ExclusiveBytes: 3, SharedBytes: 4,
				Extents: 9}, MeasuredAt: now.Add(time.Second)},
		{Identity: driver.Identity{Kind: driver.Generation, Golden: "web", Generation: 3, FS: driver.Ext4}},
		{Identity: driver.Identity{Kind: driver.Snapshot, Name: "s", Volume: driver.NewID(), FS: driver.Native}},
	} {
		r.ID = driver.NewID()
		if err := c.Update(t.Context(), Soft, func(tx *Tx) error { return tx.PutObject(r) }); err != nil {
			t.Fatal(err)
		}
		if err := c.View(t.Context(), func(tx *Tx) error {
			want, ok, err := tx.Object(r.ID)
			if err != nil || !ok || want != r {
				t.Errorf("row %d: looked up %+v, %v, put %+v", i, want, err, r)
			}
			found := 0
			for _, kind := range []driver.Kind{r.Kind, ""} {
				if err := tx.Rows(kind, func(got Row) error {
					if got.ID != r.ID {
						return nil
					}
					found++
					if got != want {
						t.Errorf("row %d: listed %+v, looked up %+v", i, got, want)
					}
					return nil
				}); err != nil {
					return err
				}
			}
			if found != 2 {
				t.Errorf("row %d: listed %d times, want 2", i, found)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestParseRow(t *testing.T) {
	good := "id\x1fvolume\x1fname\x1f\x1f0\x1f\x1fext4\x1f1\x1f2\x1fo\x1foid" +
		"\x1f0\x1f0\x1f1\x1fb\x1f0\x1f1\x1f2\x1f3\x1f4\x1f0\x1f7\x1fcrash\x1flow\x1f1\x1f{\"k\":\"v\"}\x1f9\x1f4294967294"
	if r, err := parseRow(good); err != nil || r.Name != "name" || !r.Ephemeral || r.Usage.Extents != 4 || r.Sector != 2 ||
		r.Pinned.UnixNano() != 7 || r.Consistency != driver.Crash || r.Lower != "low" || !r.Mirror ||
		r.Labels.String() != "k=v" || r.Order != 9 || r.Owner != 4294967294 {
		t.Errorf("got %+v, %v", r, err)
	}
	for _, bad := range []string{"", "id", good + "\x1f0", good[:strings.LastIndex(good, "\x1f")],
		strings.Replace(good, "ext4\x1f1", "ext4\x1fx", 1)} {
		if r, err := parseRow(bad); err == nil {
			t.Errorf("parseRow(%q) = %+v", bad, r)
		}
	}
}
