package catalog

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/driver"
)

// TestManyVolumesInOrder: volumes come in order of name, with all that they hold, however
// many there are, and whatever else there is.
func TestManyVolumesInOrder(t *testing.T) {
	c := openCatalog(t)
	var want []Row
	put := func(kind driver.Kind, n int) {
		if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
			for range n {
				name := fmt.Sprintf("v%d", rand.Int64())
				r := Row{Identity: driver.Identity{ID: driver.NewID(), Kind: kind, Name: name, FS: driver.Ext4,
					SizeBytes: rand.Int64()}}
				if kind == driver.Volume {
					want = append(want, r)
				}
				if err := tx.PutObject(r); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(scans bool) {
		t.Helper()
		slices.SortFunc(want, func(a, b Row) int { return strings.Compare(a.Name, b.Name) })
		if err := c.View(t.Context(), func(tx *Tx) error {
			if is, err := tx.mostlyVolumes(); err != nil || is != scans {
				t.Errorf("mostly volumes: %v, %v", is, err)
			}
			var got []Row
			err := tx.Rows(driver.Volume, func(r Row) error { got = append(got, r); return nil })
			if !slices.Equal(got, want) {
				t.Errorf("%d volumes of %d, or others, or in another order", len(got), len(want))
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	put(driver.Volume, 100)
	check(false)
	put(driver.Volume, 1000)
	check(true)
	put(driver.Snapshot, 2000)
	check(false)
}

// TestExpiring lists volumes in the order in which they expire, from the index of these times alone.
func TestExpiring(t *testing.T) {
	c := openCatalog(t)
	now := time.Now()
	put := func(tx *Tx, name string, kind driver.Kind, in, pin time.Duration) driver.ObjectID {
		r := Row{Identity: driver.Identity{ID: driver.NewID(), Kind: kind, Name: name, FS: driver.Ext4}}
		if in != 0 {
			r.ExpiresAt = now.Add(in)
		}
		if pin != 0 {
			r.Pinned = now.Add(pin)
		}
		if err := tx.PutObject(r); err != nil {
			t.Fatal(err)
		}
		return r.ID
	}

	var want []driver.ObjectID
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		third := put(tx, "third", driver.Volume, time.Hour, 0)
		put(tx, "never", driver.Volume, 0, 0)
		put(tx, "pinned", driver.Volume, -time.Hour, time.Hour)
		first := put(tx, "first", driver.Volume, -time.Minute, -time.Second)
		put(tx, "snapshot", driver.Snapshot, -time.Minute, 0)
		second := put(tx, "second", driver.Volume, time.Minute, 0)
		put(tx, "fourth", driver.Volume, 2*time.Hour, 0)
		want = []driver.ObjectID{first, second, third}
		return nil
	}); err != nil {
		t.Fatal(err)
	}

	if err := c.View(t.Context(), func(tx *Tx) error {
		var got []driver.ObjectID
		all, err := tx.Expiring(now, 3)
		if err != nil {
			return err
		}
		for _, v := range all {
			got = append(got, v.ID)
		}
		if !slices.Equal(got, want) || !all[0].At.Equal(now.Add(-time.Minute)) {
			t.Errorf("got %v, want %v", all, want)
		}

		var id, parent, unused int
		var plan string
		err = tx.queryRow(`EXPLAIN QUERY PLAN `+expiringQuery, toNano(now), 3).Scan(&id, &parent, &unused, &plan)
		if err != nil || plan != "SEARCH objects USING INDEX expiry (expires_at>?)" {
			t.Errorf("%v: %s", err, plan)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkExpiring: 47,000 volumes, all of which expire later.
func BenchmarkExpiring(b *testing.B) {
	c := openCatalog(b)
	now := time.Now()
	if err := c.Update(b.Context(), Soft, func(tx *Tx) error {
		for i := range 47_000 {
			r := Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Volume, Name: fmt.Sprint("v", i),
				FS: driver.Ext4, ExpiresAt: now.Add(time.Hour + time.Duration(rand.Int64N(int64(time.Hour))))}}
			if err := tx.PutObject(r); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := c.View(b.Context(), func(tx *Tx) error {
			_, err := tx.Expiring(now, 257)
			return err
		}); err != nil {
			b.Fatal(err)
		}
	}
}
