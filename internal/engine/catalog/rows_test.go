package catalog

import (
	"fmt"
	"slices"
	"strings"
	"testing"

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
