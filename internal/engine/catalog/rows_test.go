package catalog

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/testing/faulttest"
)

// TestManyVolumesInOrder: volumes come in order of name, with all that they hold, however
// many there are, and whatever else there is.
func TestManyVolumesInOrder(t *testing.T) {
	c := openCatalog(t)
	var want []Row
	rnd := faulttest.Rand(t)
	put := func(kind driver.Kind, n int) {
		if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
			for range n {
				name := fmt.Sprintf("v%d", rnd.Int64())
				r := Row{Identity: driver.Identity{ID: driver.NewID(), Kind: kind, Name: name, FS: driver.Ext4,
					SizeBytes: rnd.Int64()}}
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

// TestPlaces: snapshots are in the order in which they came into the pool, also after the clock was set back, after the
// newest were destroyed, and after a rebuild.
func TestPlaces(t *testing.T) {
	ctx := t.Context()
	c := openCatalog(t)
	late, early := time.Date(2255, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	if err := c.Update(ctx, Durable, func(tx *Tx) error {
		take := func(name string, at time.Time, want int64) {
			t.Helper()
			r := Row{Identity: driver.Identity{ID: driver.ObjectID(name), Kind: driver.Snapshot, Name: name, Volume: "v",
				CreatedAt: at}}
			var err error
			if r.Order, err = tx.NextPlace(at); err != nil || r.Order != want {
				t.Fatalf("%s has place %d, want %d: %v", name, r.Order, want, err)
			}
			if err := tx.PutObject(r); err != nil {
				t.Fatal(err)
			}
		}
		inOrder := func(want string) {
			t.Helper()
			rows, err := tx.Snapshots("v")
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			for _, r := range rows {
				got += r.Name
			}
			if err := tx.Rows(driver.Snapshot, func(r Row) error { got += r.Name; return nil }); err != nil {
				t.Fatal(err)
			}
			if got != want+want {
				t.Errorf("the order is %s, not %s", got, want+want)
			}
		}

		take("b", early, early.UnixNano())
		take("d", late, late.UnixNano())
		take("a", early, late.UnixNano()+1)
		take("c", early, late.UnixNano()+2)
		inOrder("bdac")
		if err := errors.Join(tx.Bury(Tombstone{ID: "a"}, ""), tx.Bury(Tombstone{ID: "c"}, "")); err != nil {
			return err
		}
		take("a", early, late.UnixNano()+3)
		if err := tx.forgetMeta(metaPlace); err != nil { // as after a rebuild
			return err
		}
		take("c", early, late.UnixNano()+4)
		take("e", late.Add(time.Hour), late.Add(time.Hour).UnixNano())
		inOrder("bdace")
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestLayers: a generation that overlays need becomes a layer, and goes with the last of them.
func TestLayers(t *testing.T) {
	ctx := t.Context()
	c := openCatalog(t)

	row := func(id string, kind driver.Kind, name string, lower driver.ObjectID) Row {
		return Row{Identity: driver.Identity{ID: driver.ObjectID(id), Kind: kind, Name: name, Golden: "g", Generation: 1,
			FS: driver.Ext4, Lower: lower}}
	}
	state := func(tx *Tx) (kind driver.Kind, tombstone bool) {
		r, _, err := tx.Object("g1")
		if err != nil {
			t.Fatal(err)
		}
		if tombstone, err = tx.HasTombstone("g1"); err != nil {
			t.Fatal(err)
		}
		return r.Kind, tombstone
	}
	if err := c.Update(ctx, Durable, func(tx *Tx) error {
		if err := errors.Join(tx.PutObject(row("g1", driver.Generation, "", "")), tx.PutObject(row("a", driver.Volume, "a",
			"g1")), tx.PutObject(row("b", driver.Volume, "b", "g1"))); err != nil {
			return err
		}
		if n, err := tx.CountOverlays("g1"); n != 2 || err != nil {
			t.Errorf("%d overlays: %v", n, err)
		}

		// A generation stays when its last overlay goes; a layer does not.
		if err := tx.Bury(Tombstone{ID: "a"}, ""); err != nil {
			return err
		}
		if err := tx.KeepAsLayer(row("g1", driver.Generation, "", ""), ""); err != nil {
			return err
		}
		if kind, dead := state(tx); kind != driver.Layer || dead {
			t.Errorf("kept as a layer it is a %s, tombstone %v", kind, dead)
		}
		if _, ok, err := tx.Generation("g", 1); ok || err != nil {
			t.Errorf("the layer is still a generation: %v", err)
		}
		if err := tx.PutObject(row("g2", driver.Generation, "", "")); err != nil {
			t.Errorf("another generation cannot have its number: %v", err)
		}
		if err := tx.Bury(Tombstone{ID: "b"}, ""); err != nil {
			return err
		}
		if kind, dead := state(tx); kind != "" || !dead {
			t.Errorf("without overlays it is a %q, tombstone %v", kind, dead)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestFreeNames: volumes and goldens share one name space.
func TestFreeNames(t *testing.T) {
	c := openCatalog(t)
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		if err := errors.Join(putVolume(tx, "v"), tx.PutGolden(Golden{Name: "g", Current: 1, Next: 2})); err != nil {
			return err
		}
		for name, free := range map[string]bool{"v": false, "g": false, "w": true} {
			if err := tx.CheckFree("clone", name); (err == nil) != free || !free && !errs.Is(err, errs.Exists) {
				t.Errorf("%s: %v", name, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestBuryMounted: the mount record of an object goes with it.
func TestBuryMounted(t *testing.T) {
	c := openCatalog(t)
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		if err := errors.Join(putVolume(tx, "v"), putVolume(tx, "w")); err != nil {
			return err
		}
		v, _, _ := tx.Volume("v")
		w, _, _ := tx.Volume("w")
		if err := errors.Join(tx.RecordMount(MountRecord{ID: v.ID, Mountpoint: "/v"}),
			tx.RecordMount(MountRecord{ID: w.ID, Mountpoint: "/w"}), tx.Bury(Tombstone{ID: v.ID, Ref: "v"}, "")); err != nil {
			return err
		}
		records, err := tx.MountRecords()
		if len(records) != 1 || records[w.ID].Mountpoint != "/w" {
			t.Errorf("mount records: %v", records)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
