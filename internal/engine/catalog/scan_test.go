package catalog

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/driver"
)

// scanned makes a catalogue with volumes, many of which are equal in what they can be ordered by.
func scanned(t testing.TB, n int) (*Catalog, []Row) {
	t.Helper()
	c := openCatalog(t)
	rnd := rand.New(rand.NewPCG(1, 2))
	moment := func(least int) time.Time { return fromNano(int64(least+rnd.IntN(50)) * int64(time.Hour)) } // 0: never
	var rows []Row
	for i := range n {
		r := Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Volume, Name: fmt.Sprint("v", i), FS: driver.Ext4,
			SizeBytes: int64(rnd.IntN(9)), Golden: fmt.Sprint("g", i%7), Generation: 1, Owner: uint32(i % 3),
			CreatedAt: moment(1), ExpiresAt: moment(0)}, UsedAt: moment(1), MeasuredAt: moment(0)}
		r.Usage = driver.Usage{LogicalBytes: int64(rnd.IntN(9)), ExclusiveBytes: int64(rnd.IntN(9)),
			SharedBytes: int64(rnd.IntN(9)), Extents: int64(rnd.IntN(9))}
		if i%11 == 0 {
			r.Golden = "" // its origin may tell
		}
		r.Labels = driver.StoredLabels(fmt.Sprintf(`{"team":"t%d"}`, i%20))
		rows = append(rows, r)
	}
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		for i, r := range rows {
			if err := tx.PutObject(r); err != nil {
				return err
			}
			if i%5 == 0 {
				if err := tx.RecordMount(MountRecord{ID: r.ID, Mountpoint: "/m"}); err != nil {
					return err
				}
			}
		}
		return tx.PutObject(Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Generation, Golden: "v"}})
	}); err != nil {
		t.Fatal(err)
	}
	return c, rows
}

// keyIn is what an order goes by.
func keyIn(by VolumeOrder, r Row) int64 {
	time := func(n int64) int64 {
		if n == 0 {
			return math.MaxInt64
		}
		return n
	}
	return map[VolumeOrder]int64{ByName: 0, ByCreated: toNano(r.CreatedAt), ByUsed: time(toNano(r.UsedAt)),
		ByExpires: time(toNano(r.ExpiresAt)), ByMeasured: time(toNano(r.MeasuredAt)), BySize: r.SizeBytes,
		ByLogical: r.Usage.LogicalBytes, ByExclusive: r.Usage.ExclusiveBytes, ByShared: r.Usage.SharedBytes,
		ByExtents: r.Usage.Extents}[by]
}

// TestScanVolumes: from any place on, all volumes come once, in order, and those that are mounted are known.
func TestScanVolumes(t *testing.T) {
	c, rows := scanned(t, 3000)
	for _, by := range []VolumeOrder{ByName, ByCreated, ByUsed, ByExpires, ByMeasured, BySize, ByLogical, ByExclusive,
		ByShared, ByExtents} {
		for _, desc := range []bool{false, true} {
			slices.SortFunc(rows, func(a, b Row) int {
				order := cmp.Compare(keyIn(by, a), keyIn(by, b))
				if by == ByName {
					order = strings.Compare(a.Name, b.Name)
				}
				if desc {
					order = -order
				}
				return cmp.Or(order, strings.Compare(a.Name, b.Name))
			})

			for _, from := range []int{0, 1, 777, 2999, 3000} {
				q := VolumeScan{By: by, Desc: desc}
				if from > 0 {
					q.After = &VolumePlace{keyIn(by, rows[from-1]), rows[from-1].Name}
				}
				for _, most := range []int{5, 1 << 20} {
					var got []Row
					mounts := 0
					if err := c.View(t.Context(), func(tx *Tx) error {
						return tx.ScanVolumes(q, func(r Row, mounted bool) (bool, error) {
							got = append(got, r)
							if mounted {
								mounts++
							}
							return len(got) < most, nil
						})
					}); err != nil {
						t.Fatal(err)
					}
					want := rows[from:min(from+most, len(rows))]
					if !slices.Equal(got, want) {
						t.Fatalf("%s, desc %v, from %d: %d volumes, not these %d", by, desc, from, len(got), len(want))
					}
					if from == 0 && most > 5 && mounts != 600 {
						t.Errorf("%d are mounted", mounts)
					}
				}
			}
		}
	}
	if err := c.View(t.Context(), func(tx *Tx) error {
		return tx.ScanVolumes(VolumeScan{By: "name; DROP TABLE objects"}, nil)
	}); err == nil {
		t.Error("an order that does not exist")
	}
}

// TestScanConditions: conditions leave out what they should, and nothing else.
func TestScanConditions(t *testing.T) {
	c, rows := scanned(t, 3*walkMost)
	owner, root := uint32(2), uint32(0)
	mounted := map[driver.ObjectID]bool{}
	for i, r := range rows {
		mounted[r.ID] = i%5 == 0
	}
	for what, test := range map[string]struct {
		q     VolumeScan
		holds func(Row) bool
	}{
		"prefix":  {VolumeScan{NamePrefix: "v1"}, func(r Row) bool { return strings.HasPrefix(r.Name, "v1") }},
		"golden":  {VolumeScan{Golden: "g3"}, func(r Row) bool { return r.Golden == "g3" || r.Golden == "" }},
		"owner":   {VolumeScan{Owner: &owner}, func(r Row) bool { return r.Owner == 2 }},
		"root":    {VolumeScan{Owner: &root}, func(r Row) bool { return r.Owner == 0 }},
		"label":   {VolumeScan{Label: `"team":"t7"`}, func(r Row) bool { return r.Labels.Map()["team"] == "t7" }},
		"mounted": {VolumeScan{Mounted: true}, func(r Row) bool { return mounted[r.ID] }},
		"all": {VolumeScan{Label: `"team":`, Golden: "g1", Owner: &owner, NamePrefix: "v"}, func(r Row) bool {
			return (r.Golden == "g1" || r.Golden == "") && r.Owner == 2
		}},
	} {
		for i, by := range []VolumeOrder{ByName, ByCreated, BySize, ByName} {
			test.q.By, test.q.Desc = by, i > 1
			n := 0
			if err := c.View(t.Context(), func(tx *Tx) error {
				return tx.ScanVolumes(test.q, func(r Row, _ bool) (bool, error) {
					if n++; !test.holds(r) {
						t.Errorf("%s by %s: %+v", what, by, r)
					}
					return true, nil
				})
			}); err != nil {
				t.Fatal(err)
			}
			want := len(slices.DeleteFunc(slices.Clone(rows), func(r Row) bool { return !test.holds(r) }))
			if n != want || want == 0 {
				t.Errorf("%s by %s: %d volumes, not %d", what, by, n, want)
			}
		}
	}
}

// BenchmarkPage reads pages of 100 of 47,000 volumes.
func BenchmarkPage(b *testing.B) {
	c, rows := scanned(b, 47000)
	owner := uint32(2)
	for what, q := range map[string]VolumeScan{
		"name":        {By: ByName, After: &VolumePlace{Name: rows[20000].Name}},
		"name-desc":   {By: ByName, Desc: true},
		"prefix":      {By: ByName, NamePrefix: "v99"},
		"golden":      {By: ByName, Golden: "g3"},
		"golden-none": {By: ByName, Golden: "none"},
		"label":       {By: ByName, Label: `"team":"t7"`},
		"label-none":  {By: ByName, Label: `"team":"none"`},
		"owner":       {By: ByName, Owner: &owner},
		"owner-used":  {By: ByUsed, Owner: &owner},
		"created":     {By: ByCreated, Desc: true},
		"created-mid": {By: ByCreated, After: &VolumePlace{keyIn(ByCreated, rows[20000]), rows[20000].Name}},
		"used":        {By: ByUsed},
		"exclusive":   {By: ByExclusive, Desc: true},
	} {
		b.Run(what, func(b *testing.B) {
			for range b.N {
				n := 0
				if err := c.View(b.Context(), func(tx *Tx) error {
					return tx.ScanVolumes(q, func(Row, bool) (bool, error) { n++; return n < 100, nil })
				}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
