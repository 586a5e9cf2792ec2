package catalog

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"pando/internal/driver"
	"pando/internal/linux/kernel"
)

// in runs fn in a transaction that must succeed.
func (c *Catalog) in(t testing.TB, fn func(*Tx) error) {
	t.Helper()
	if err := c.Update(context.Background(), Soft, fn); err != nil {
		t.Fatal(err)
	}
}

// totals reads the totals.
func (c *Catalog) totals(t testing.TB) (out Totals) {
	t.Helper()
	c.in(t, func(tx *Tx) (err error) {
		out, err = tx.Totals()
		return err
	})
	return out
}

func volumeRow(name, golden string, owned int64) Row {
	return Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Volume, Name: name, Golden: golden,
		Generation: 1, FS: driver.Ext4, CreatedAt: time.Now()},
		Usage: driver.Usage{LogicalBytes: 1000, ExclusiveBytes: owned}}
}

func generationRow(golden string, n int) Row {
	return Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Generation, Golden: golden, Generation: n,
		FS: driver.Ext4, CreatedAt: time.Unix(int64(n), 0)}}
}

func TestTotals(t *testing.T) {
	c := openCatalog(t)
	if empty := c.totals(t); len(empty.Kinds) != 0 || len(empty.Goldens) != 0 || empty.Mounted != 0 {
		t.Errorf("an empty catalogue: %+v", empty)
	}

	old := volumeRow("old", "web", 100)
	old.ExpiresAt = time.Now().Add(-time.Hour)
	mounted, own := volumeRow("mounted", "web", 200), volumeRow("own", "", 400)
	built := generationRow("web", 2)
	built.Build.Key = "k"
	measured := time.Unix(0, 1700000000_000000000).UTC()
	c.in(t, func(tx *Tx) error {
		for _, r := range []Row{generationRow("web", 1), built, old, mounted, own} {
			if err := tx.PutObject(r); err != nil {
				return err
			}
		}
		for _, err := range []error{
			tx.PutGolden(Golden{Name: "web", Current: 2, Next: 3, CreatedAt: time.Now()}),
			tx.SetUsage(old.ID, old.Usage, measured.Add(time.Hour)),
			tx.SetUsage(mounted.ID, mounted.Usage, measured),
			tx.RecordMount(MountRecord{ID: mounted.ID, BootID: kernel.BootID(), At: time.Now()}),
			tx.RecordMount(MountRecord{ID: own.ID, BootID: "an earlier one", At: time.Unix(1, 0)}),
			tx.AddTombstone(Tombstone{ID: driver.NewID(), Bytes: 30, At: time.Unix(7, 0)}),
			tx.AddTombstone(Tombstone{ID: driver.NewID(), Bytes: 12, At: time.Unix(8, 0)}),
			tx.SetUnsealed(built.ID),
		} {
			if err != nil {
				return err
			}
		}
		return nil
	})

	for range 2 { // without the index, and with it
		got := c.totals(t)
		volumes := got.Kinds[driver.Volume]
		if volumes.Objects != 3 || volumes.Unmeasured != 1 || volumes.OwnedBytes != 700 || volumes.LogicalBytes != 3000 ||
			!volumes.OldestMeasurement.Equal(measured) {
			t.Errorf("volumes: %+v", volumes)
		}
		web := got.Goldens["web"]
		if web == nil || web.Clones.Objects != 2 || web.Clones.OwnedBytes != 300 || web.Generations.Objects != 2 ||
			web.Builds != 1 || !web.CurrentAt.Equal(time.Unix(2, 0)) || len(web.PushedAt) > 0 {
			t.Errorf("golden: %+v", web)
		}
		if got.Mounted != 1 || got.Expired != 1 || got.Unsealed != 1 || got.Unreclaimed != 2 || got.UnreclaimedBytes != 42 ||
			!got.OldestUnreclaimed.Equal(time.Unix(7, 0)) {
			t.Errorf("%+v", got)
		}
		if err := c.IndexMetrics(t.Context()); err != nil {
			t.Fatal(err)
		}
	}

	// The largest volumes.
	c.in(t, func(tx *Tx) error {
		largest, err := tx.LargestVolumes(2)
		if len(largest) != 2 || largest[0].Name != "own" || largest[0].Mounted || largest[1].Name != "mounted" ||
			!largest[1].Mounted || largest[1].Golden != "web" || largest[1].OwnedBytes != 200 {
			t.Errorf("%+v", largest)
		}
		return err
	})
}

// TestTotalsReadsTheIndex: neither query sorts all objects or reads them from the table.
func TestTotalsReadsTheIndex(t *testing.T) {
	c := openCatalog(t)
	if err := c.IndexMetrics(t.Context()); err != nil {
		t.Fatal(err)
	}
	plan := func(query string) string {
		var out []string
		c.in(t, func(tx *Tx) error {
			return tx.eachRow("EXPLAIN QUERY PLAN "+query, []any{0, ""}[:strings.Count(query, "?2")/2+1], func(s scanner) error {
				var id, parent, unused int
				var detail string
				err := s.Scan(&id, &parent, &unused, &detail)
				out = append(out, detail)
				return err
			})
		})
		return strings.Join(out, "\n")
	}
	if p := plan(totalsQuery); !strings.Contains(p, "SCAN objects USING COVERING INDEX metrics") ||
		!strings.Contains(p, "SCAN objects USING INDEX build_result") || strings.Contains(p, "INDEX volume_name") ||
		strings.Contains(p, "SCAN objects\n") {
		t.Errorf("totals:\n%s", p)
	}
	if p := plan(largestQuery); !strings.Contains(p, "SEARCH objects USING COVERING INDEX metrics (kind=?)") {
		t.Errorf("largest:\n%s", p)
	}

	// Queries of others do not choose it.
	for _, query := range []string{
		`SELECT id FROM objects WHERE kind = 'volume' AND name > ? ORDER BY name LIMIT 10`,
		`SELECT id FROM objects WHERE kind = 'generation' AND golden = ? ORDER BY generation`,
	} {
		if p := plan(query); strings.Contains(p, "metrics") {
			t.Errorf("%s:\n%s", query, p)
		}
	}
}

// TestPushed: the times of pushes follow renames, and go with what was pushed.
func TestPushed(t *testing.T) {
	c := openCatalog(t)
	gen, vol := generationRow("web", 1), volumeRow("v", "web", 1)
	snap := Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Snapshot, Name: "s", Volume: vol.ID,
		FS: driver.Ext4, CreatedAt: time.Now()}}
	c.in(t, func(tx *Tx) error {
		for _, r := range []Row{gen, vol, snap} {
			if err := tx.PutObject(r); err != nil {
				return err
			}
		}
		if err := tx.PutGolden(Golden{Name: "web", Current: 1, Next: 2, CreatedAt: time.Now()}); err != nil {
			return err
		}
		for i, id := range []driver.ObjectID{gen.ID, snap.ID, driver.NewID()} {
			if err := tx.SetPushed(id, "r1", time.Unix(int64(i+1), 0)); err != nil {
				return err
			}
		}
		return tx.SetPushed(gen.ID, "r2", time.Unix(9, 0))
	})
	times := func(m map[string]time.Time) string {
		return strings.TrimPrefix(fmt.Sprint(parsePushed(formatPushed(m))), "map")
	}
	want := fmt.Sprintf("[r1:%v r2:%v]", time.Unix(1, 0).UTC(), time.Unix(9, 0).UTC())
	if got := c.totals(t); times(got.Goldens["web"].PushedAt) != want ||
		!got.PushedAt["r1"].Equal(time.Unix(3, 0)) || !got.PushedAt["r2"].Equal(time.Unix(9, 0)) {
		t.Errorf("got %+v, %v", got.Goldens["web"], got.PushedAt)
	}

	c.in(t, func(tx *Tx) error {
		largest, err := tx.LargestVolumes(1)
		if len(largest) != 1 || !largest[0].PushedAt["r1"].Equal(time.Unix(2, 0)) {
			t.Errorf("volume: %+v", largest)
		}
		return err
	})
	c.in(t, func(tx *Tx) error { return tx.RenameGolden("web", "site") })
	if got := c.totals(t); got.Goldens["web"] != nil || times(got.Goldens["site"].PushedAt) != want {
		t.Errorf("renamed: %+v", got.Goldens)
	}

	c.in(t, func(tx *Tx) error {
		for _, id := range []driver.ObjectID{gen.ID, snap.ID, vol.ID} {
			if err := tx.DeleteObject(id); err != nil {
				return err
			}
		}
		if err := tx.DropRemote("r1"); err != nil {
			return err
		}
		return tx.DeleteEmptyGolden("site")
	})
	c.in(t, func(tx *Tx) error {
		query := `SELECT key FROM meta WHERE key LIKE 'pushed-%' AND key <> 'pushed-to-r2'`
		return tx.eachRow(query, nil, func(s scanner) error {
			var key string
			err := s.Scan(&key)
			t.Errorf("left behind: %s", key)
			return err
		})
	})
}

// BenchmarkTotals reads the totals of a catalogue with 47,000 volumes that are all mounted, expire and were pushed.
func BenchmarkTotals(b *testing.B) {
	c := openCatalog(b)
	c.in(b, func(tx *Tx) error {
		for i := range 47000 {
			r := volumeRow(fmt.Sprintf("v%05d", i), fmt.Sprint("g", i%20), int64(i))
			r.ExpiresAt = time.Now().Add(time.Hour)
			if err := tx.PutObject(r); err != nil {
				return err
			}
			m := MountRecord{ID: r.ID, Mountpoint: "/m", BootID: kernel.BootID(), At: time.Now()}
			if err := tx.RecordMount(m); err != nil {
				return err
			}
			at := formatPushed(map[string]time.Time{string(driver.NewID()): time.Now()})
			if err := tx.SetMeta(pushedKey(r.ID), at); err != nil {
				return err
			}
		}
		return nil
	})
	if err := c.IndexMetrics(b.Context()); err != nil {
		b.Fatal(err)
	}
	for _, volumes := range []int{0, 100} {
		b.Run(fmt.Sprint("volumes=", volumes), func(b *testing.B) {
			for range b.N {
				c.totals(b)
				if volumes > 0 {
					c.in(b, func(tx *Tx) error {
						_, err := tx.LargestVolumes(volumes)
						return err
					})
				}
			}
		})
	}
}
