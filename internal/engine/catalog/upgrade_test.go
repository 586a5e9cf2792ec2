package catalog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// oldCatalog makes a catalogue as version 1 did, with a golden of one generation
// and a volume that was cloned from it.
func oldCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 1,
		"INSERT INTO goldens VALUES ('g', 4, 5, 7)",
		"INSERT INTO objects VALUES ('gen', 'generation', '', 'g', 4, '', 'ext4', 1, 2, '', '', 3, 0, 0, 'b', 4, 5, 6, 7, "+
			"8, 9)",
		"INSERT INTO objects VALUES ('vol', 'volume', 'v', '', 0, '', 'ext4', 1, 2, 'g@4', 'gen', 3, 0, 0, 'b', 4, 5, 6, "+
			"7, 8, 9)",
		"INSERT INTO objects VALUES ('lone', 'volume', 'w', '', 0, '', 'ext4', 1, 2, 'h@1', 'gone', 3, 0, 0, 'b', 4, 5, "+
			"6, 7, 8, 9)",
		"INSERT INTO marks VALUES ('m', 'clone', 'x', 'gen', '', 0, 'p-1', 1, 2, 'b', 3)")
}

// secondCatalog makes one as version 2 did.
func secondCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 2,
		"INSERT INTO goldens VALUES ('g', 4, 5, 7, 6)",
		"INSERT INTO objects VALUES ('gen', 'generation', '', 'g', 4, '', 'ext4', 1, 2, '', '', 3, 0, 0, 'b', 4, 5, 6, 7, "+
			"8, 9, 0, '')",
		"INSERT INTO objects VALUES ('vol', 'volume', 'v', 'h', 2, '', 'ext4', 1, 2, 'g@4', 'gen', 3, 0, 0, 'b', 4, 5, 6, "+
			"7, 8, 9, 10, '')",
		"INSERT INTO objects VALUES ('snap', 'snapshot', 's', 'h', 2, 'vol', 'ext4', 1, 2, 'v', 'vol', 3, 0, 0, 'b', 4, "+
			"5, 6, 7, 8, 9, 0, 'clean')",
		"INSERT INTO marks VALUES ('m', 'clone', 'x', 'gen', '', 0, 1, 'p-1', 1, 2, 'b', 3)")
}

// thirdCatalog makes one as version 3 did, which remembered no next points.
func thirdCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 3, "INSERT INTO remote_heads VALUES ('r', 'v', 'l', 6, 'm', 7)")
}

// fourthCatalog is a catalogue from before there were overlays, with a volume.
func fourthCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 4, "INSERT INTO objects VALUES "+
		"('i', 'volume', 'v', 'g', 1, '', 'ext4', 5, 512, 'g@1', 'o', 6, 0, 0, 'b', 7, 1, 2, 3, 4, 8, 0, '')")
}

// fifthCatalog is a catalogue whose goldens did not decide about overlays.
func fifthCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 5, "INSERT INTO goldens VALUES ('g', 4, 5, 7, 6)")
}

// sixthCatalog is a catalogue whose goldens had no sources.
func sixthCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 6, "INSERT INTO goldens VALUES ('g', 4, 5, 7, 6, 'never')")
}

// seventhCatalog is a catalogue that did not know which generations were made from sources, with one.
func seventhCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 7, "INSERT INTO goldens VALUES ('g', 4, 5, 7, 6, '', '{}')",
		"INSERT INTO objects VALUES ('i', 'generation', '', 'g', 4, '', 'ext4', 5, 512, 'x#1', 'o', 6, 0, 0, 'b', 7, 1, "+
			"2, 3, 4, 8, 0, '', '')")
}

// eighthCatalog is a catalogue whose goldens and volumes had no labels, with one of each.
func eighthCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 8, "INSERT INTO goldens VALUES ('g', 4, 5, 7, 6, '', '')",
		"INSERT INTO objects VALUES ('i', 'volume', 'v', 'g', 4, '', 'ext4', 5, 512, 'g@4', 'o', 6, 0, 0, 'b', 7, 1, "+
			"2, 3, 4, 8, 0, '', '', 0)")
}

// ninthCatalog is a catalogue whose snapshots were in the order of their dates, with two of the year 2255.
func ninthCatalog(t *testing.T) string {
	t.Helper()
	return catalogOf(t, 9,
		"INSERT INTO objects VALUES ('b', 'snapshot', 'b', '', 0, 'v', 'ext4', 5, 512, 'v', 'v', 9000000000000000002, 0, 0, "+
			"'b', 7, 1, 2, 3, 4, 8, 0, 'clean', '', 0, '')",
		"INSERT INTO objects VALUES ('a', 'snapshot', 'a', '', 0, 'v', 'ext4', 5, 512, 'v', 'v', 9000000000000000000, 0, 0, "+
			"'b', 7, 1, 2, 3, 4, 8, 0, 'clean', '', 0, '')")
}

// catalogOf makes a catalogue of a version, whose schema is frozen in testdata.
func catalogOf(t *testing.T, version int, rows ...string) string {
	t.Helper()
	dir := t.TempDir()
	schema, err := os.ReadFile(fmt.Sprintf("testdata/v%d.sql", version))
	if err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", dsn(filepath.Join(dir, "catalog.db")))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, stmt := range append([]string{"PRAGMA journal_mode=WAL", string(schema),
		fmt.Sprintf("PRAGMA user_version=%d", version),
		"INSERT INTO meta VALUES ('pool', 'p')"}, rows...) {
		if _, err := db.Exec(stmt); err != nil {
			t.Fatalf("%s: %v", stmt, err)
		}
	}
	for _, d := range []string{"live", "locks"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestOldCatalogueIsBroughtUpToDate(t *testing.T) {
	dir := oldCatalog(t)
	ctx := context.Background()
	// Several processes may open it at once.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			c, err := Open(ctx, dir, "p")
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			if err := c.View(ctx, func(tx *Tx) error {
				v, ok, err := tx.Volume("v")
				if err != nil || !ok || v.Golden != "g" || v.Generation != 4 || v.Usage.Extents != 8 {
					t.Errorf("%+v, %v, %v", v, ok, err)
				}
				if v, ok, err = tx.Volume("w"); err != nil || !ok || v.Golden != "" {
					t.Errorf("%+v, %v, %v", v, ok, err)
				}
				g, ok, err := tx.Golden("g")
				if err != nil || !ok || g.Current != 4 || g.Keep != 0 {
					t.Errorf("%+v, %v, %v", g, ok, err)
				}
				m, err := tx.Marks()
				if err != nil || len(m) != 1 || m[0].Freezes || m[0].Owner != "p-1" {
					t.Errorf("%+v, %v", m, err)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestUpgradedIsAsNew compares the two schemas.
func TestUpgradedIsAsNew(t *testing.T) {
	ctx := context.Background()
	fresh := t.TempDir()
	if err := Create(ctx, fresh, "p"); err != nil {
		t.Fatal(err)
	}
	columns := func(dir string) map[string]bool {
		c, err := Open(ctx, dir, "p")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		out := map[string]bool{}
		if err := c.View(ctx, func(tx *Tx) error {
			return tx.eachRow(`SELECT m.name || '.' || coalesce(c.name, m.type) || ' ' || coalesce(c.type, '') ||
			coalesce(c."notnull", '') || coalesce(c.pk, '')
				FROM sqlite_master m LEFT JOIN pragma_table_info(m.name) c WHERE m.name NOT LIKE 'sqlite_%'`, nil,
				func(s scanner) error {
					var text string
					err := s.Scan(&text)
					out[text] = true
					return err
				})
		}); err != nil {
			t.Fatal(err)
		}
		return out
	}
	b := columns(fresh)
	if len(b) < 50 {
		t.Errorf("only %d columns and indices seen", len(b))
	}
	for version, old := range []string{oldCatalog(t), secondCatalog(t), thirdCatalog(t)} {
		a := columns(old)
		for k := range a {
			if !b[k] {
				t.Errorf("only a catalogue upgraded from version %d has %s", version+1, k)
			}
		}
		for k := range b {
			if !a[k] {
				t.Errorf("only a new catalogue has %s, not one upgraded from version %d", k, version+1)
			}
		}
	}
}

// TestSecondCatalogueIsBroughtUpToDate: nothing of it changes.
func TestSecondCatalogueIsBroughtUpToDate(t *testing.T) {
	ctx := t.Context()
	dir := secondCatalog(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			c, err := Open(ctx, dir, "p")
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			if wrong, err := c.Check(ctx); err != nil || len(wrong) > 0 {
				t.Errorf("%v, %v", wrong, err)
			}
			if err := c.View(ctx, func(tx *Tx) error {
				v, ok, err := tx.Volume("v")
				if err != nil || !ok || v.Golden != "h" || v.Generation != 2 || v.Usage.Extents != 8 || toNano(v.Pinned) != 10 {
					t.Errorf("%+v, %v, %v", v, ok, err)
				}
				s, ok, err := tx.Snapshot("vol", "s")
				if err != nil || !ok || s.Consistency != driver.Clean {
					t.Errorf("%+v, %v, %v", s, ok, err)
				}
				g, ok, err := tx.Golden("g")
				if err != nil || !ok || g.Current != 4 || g.Keep != 6 {
					t.Errorf("%+v, %v, %v", g, ok, err)
				}
				m, err := tx.Marks()
				if err != nil || len(m) != 1 || !m[0].Freezes {
					t.Errorf("%+v, %v", m, err)
				}
				points, err := tx.RemotePoints("")
				heads, herr := tx.RemoteHeads("")
				if err != nil || herr != nil || len(points)+len(heads) != 0 {
					t.Errorf("%v, %v, %v, %v", points, heads, err, herr)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestThirdCatalogueIsBroughtUpToDate: what it remembers of heads stays.
func TestThirdCatalogueIsBroughtUpToDate(t *testing.T) {
	c, err := Open(t.Context(), thirdCatalog(t), "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var heads []RemoteHead
	if err := c.View(t.Context(), func(tx *Tx) (err error) {
		heads, err = tx.RemoteHeads("r")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if len(heads) != 1 || heads[0].Epoch != 6 || heads[0].NextSeq != 0 || heads[0].Manifest != "m" {
		t.Errorf("%+v", heads)
	}
}

func TestNewerCatalogueIsRefused(t *testing.T) {
	dir := oldCatalog(t)
	db, err := sql.Open("sqlite", dsn(filepath.Join(dir, "catalog.db")))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec("PRAGMA user_version=99"); err != nil {
		t.Fatal(err)
	}
	db.Close()
	if _, err := Open(context.Background(), dir, "p"); !errs.Is(err, errs.TooNew) {
		t.Errorf("got %v", err)
	}
}

// TestCatalogueWithoutOverlays: the volumes of a catalogue from before there were overlays are none, and overlays can
// be added.
func TestCatalogueWithoutOverlays(t *testing.T) {
	ctx := t.Context()
	c, err := Open(ctx, fourthCatalog(t), "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Update(ctx, Durable, func(tx *Tx) error {
		v, ok, err := tx.Volume("v")
		if err != nil || !ok || v.IsOverlay() || v.Usage.Extents != 4 {
			t.Errorf("%+v, %v, %v", v, ok, err)
		}
		v.ID, v.Name, v.Lower = "i2", "v2", "o"
		return tx.PutObject(v)
	}); err != nil {
		t.Fatal(err)
	}
}

// TestCatalogueWithoutPolicies: goldens of a catalogue that had no policies for overlays allow them, and can get one.
func TestCatalogueWithoutPolicies(t *testing.T) {
	ctx := t.Context()
	c, err := Open(ctx, fifthCatalog(t), "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Update(ctx, Durable, func(tx *Tx) error {
		g, ok, err := tx.Golden("g")
		if err != nil || !ok || g.Overlay != driver.OverlayAllowed || g.Keep != 6 {
			t.Errorf("%+v, %v, %v", g, ok, err)
		}
		g.Overlay = driver.OverlayNever
		return tx.PutGolden(g)
	}); err != nil {
		t.Fatal(err)
	}

	if err := c.View(ctx, func(tx *Tx) error {
		all, err := tx.Goldens()
		if err != nil || len(all) != 1 || all[0].Overlay != driver.OverlayNever {
			t.Errorf("%+v, %v", all, err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestCatalogueWithoutSources: goldens of a catalogue that had no sources can get one, and keep what they had.
func TestCatalogueWithoutSources(t *testing.T) {
	ctx := t.Context()
	c, err := Open(ctx, sixthCatalog(t), "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want := driver.GoldenProperties{Keep: 6, Overlay: driver.OverlayNever}
	if err := c.Update(ctx, Durable, func(tx *Tx) error {
		g, ok, err := tx.Golden("g")
		if err != nil || !ok || g.GoldenProperties != want {
			t.Errorf("%+v, %v, %v", g, ok, err)
		}
		g.Source = "{}"
		return tx.PutGolden(g)
	}); err != nil {
		t.Fatal(err)
	}

	want.Source = "{}"
	if err := c.View(ctx, func(tx *Tx) error {
		all, err := tx.Goldens()
		if err != nil || len(all) != 1 || all[0].GoldenProperties != want {
			t.Errorf("%+v, %v", all, err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestCatalogueWithoutMirrors: no generation of a catalogue that did not know is a mirror, and one can become it.
func TestCatalogueWithoutMirrors(t *testing.T) {
	ctx := t.Context()
	c, err := Open(ctx, seventhCatalog(t), "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, mirror := range []bool{false, true} {
		if err := c.Update(ctx, Durable, func(tx *Tx) error {
			gens, err := tx.Generations("g")
			if err != nil || len(gens) != 1 || gens[0].Mirror != mirror || gens[0].Origin != "x#1" {
				t.Errorf("%+v, %v", gens, err)
				return err
			}
			gens[0].Mirror = true
			return tx.SetIdentity(gens[0].Identity)
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCatalogueWithoutLabels: nothing of a catalogue that had no labels has some, and everything can get them.
func TestCatalogueWithoutLabels(t *testing.T) {
	ctx := t.Context()
	c, err := Open(ctx, eighthCatalog(t), "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, text := range []string{"", `{"k":"v"}`} {
		if err := c.Update(ctx, Durable, func(tx *Tx) error {
			g, _, gerr := tx.Golden("g")
			v, _, verr := tx.Object("i")
			if err := errors.Join(gerr, verr); err != nil {
				return err
			}
			if g.Labels.Text() != text || v.Labels.Text() != text || v.Name != "v" {
				t.Errorf("golden %q, volume %q, not %q", g.Labels.Text(), v.Labels.Text(), text)
			}

			g.Labels = driver.StoredLabels(`{"k":"v"}`)
			v.Labels = g.Labels
			return errors.Join(tx.PutGolden(g), tx.SetIdentity(v.Identity))
		}); err != nil {
			t.Fatal(err)
		}
	}

	// The row of a golden has the labels of its generations, and theirs have none.
	if err := c.Update(ctx, Durable, func(tx *Tx) error {
		gen := Row{Identity: driver.Identity{ID: "n", Kind: driver.Generation, Golden: "g", Generation: 5}}
		gen.Labels = driver.StoredLabels(`{"k":"v"}`)
		if err := tx.PutObject(gen); err != nil {
			return err
		}
		got, _, err := tx.Object("n")
		if got.Labels.Text() != "" {
			t.Errorf("the row of a generation has labels %q", got.Labels.Text())
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// TestPlaces: snapshots are in the order in which they came into the pool, also after the clock was set back, and after
// the newest were destroyed. A catalogue that did not record places has those of the dates.
func TestPlaces(t *testing.T) {
	ctx := t.Context()
	c, err := Open(ctx, ninthCatalog(t), "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

	early := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	take := func(tx *Tx, name string, at time.Time) Row {
		r := Row{Identity: driver.Identity{ID: driver.ObjectID(name), Kind: driver.Snapshot, Name: name, Volume: "v",
			CreatedAt: at}}
		if r.Order, err = tx.NextPlace(at); err != nil {
			t.Fatal(err)
		}
		if err := tx.PutObject(r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	names := func(tx *Tx) (out string) {
		rows, err := tx.Snapshots("v")
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rows {
			out += r.Name
		}
		if err := tx.Rows(driver.Snapshot, func(r Row) error { out += r.Name; return nil }); err != nil {
			t.Fatal(err)
		}
		return out
	}
	if err := c.Update(ctx, Durable, func(tx *Tx) error {
		third := take(tx, "c", early)
		if got := names(tx); got != "abcabc" {
			t.Errorf("the order is %s", got)
		}
		if err := errors.Join(tx.DeleteObject("b"), tx.DeleteObject("c")); err != nil {
			return err
		}
		fourth := take(tx, "d", early)
		if third.Place() != 9000000000000000003 || fourth.Place() != third.Place()+1 {
			t.Errorf("after %d, d has place %d", third.Place(), fourth.Place())
		}
		late := take(tx, "e", time.Date(2260, 1, 1, 0, 0, 0, 0, time.UTC))
		if late.Place() != late.CreatedAt.UnixNano() || names(tx) != "adeade" {
			t.Errorf("e has place %d; the order is %s", late.Place(), names(tx))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestLayers: a generation that overlays need becomes a layer, and goes with the last of them.
func TestLayers(t *testing.T) {
	dir := t.TempDir()
	ctx := t.Context()
	if err := Create(ctx, dir, "p"); err != nil {
		t.Fatal(err)
	}
	c, err := Open(ctx, dir, "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

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
		if err := tx.DeleteObject("a"); err != nil {
			return err
		}
		if err := tx.KeepAsLayer("g1"); err != nil {
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
		if err := tx.DeleteObject("b"); err != nil {
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
