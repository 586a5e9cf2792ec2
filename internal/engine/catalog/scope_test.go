package catalog

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
)

// owned is a volume of a user.
func owned(name string, uid, gid uint32, size int64) Row {
	return Row{Identity: driver.Identity{ID: driver.ObjectID("id-" + name), Kind: driver.Volume, Name: name,
		SizeBytes: size, Owner: driver.Owner{UID: uid, GID: gid}}}
}

// TestVolumesOfAUserAreFoundByIndex: a page of a user's volumes does not take longer the more volumes others have.
func TestVolumesOfAUserAreFoundByIndex(t *testing.T) {
	c := openCatalog(t)
	if err := c.View(t.Context(), func(tx *Tx) error {
		for query, sorted := range map[string]bool{
			`SELECT name FROM objects WHERE ` + ofUser + ` AND name > '' ORDER BY name LIMIT 5`: true,
			`SELECT count(*), coalesce(sum(size), 0) FROM objects WHERE ` + ofUser:              false,
		} {
			text := ""
			if err := tx.eachRow(`EXPLAIN QUERY PLAN `+query, []any{uidKey(1)}, func(s scanner) error {
				var id, parent, unused int
				var detail string
				err := s.Scan(&id, &parent, &unused, &detail)
				text += detail + "\n"
				return err
			}); err != nil {
				return err
			}
			want := "volume_owner (<expr>=?"
			if sorted {
				want += " AND name>?)"
			}
			if !strings.Contains(text, want) || strings.Contains(text, "TEMP B-TREE") {
				t.Errorf("%s is answered by %s", query, text)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestScope: within the scope of a user, names lead to the user's volumes and the goldens that it admits.
func TestScope(t *testing.T) {
	c := openCatalog(t)
	snap := Row{Identity: driver.Identity{ID: "s", Kind: driver.Snapshot, Name: "s", Volume: "id-bobs"}}
	gen := Row{Identity: driver.Identity{ID: "g", Kind: driver.Generation, Golden: "g", Generation: 1}}
	if err := c.Update(t.Context(), Durable, func(tx *Tx) error {
		for _, r := range []Row{owned("roots", 0, 0, 1), owned("alices", 1001, 5, 10), owned("alices-2", 1001, 6, 20),
			owned("bobs", 100, 1001, 40), snap, gen} {
			if err := tx.PutObject(r); err != nil {
				return err
			}
		}
		return tx.PutGolden(Golden{Name: "g", Current: 1, Next: 2})
	}); err != nil {
		t.Fatal(err)
	}

	sees := func(what string) func(string) bool { return func(name string) bool { return name == what } }
	for _, c2 := range []struct {
		s    Scope
		want string // what is found of each name: y, n(ot found), p(ermission)
	}{
		{Scope{UID: 1001, Golden: sees("g")}, "roots:n alices:y bobs:n bobs@s:n g:y g@1:y g@2:n"},
		{Scope{UID: 100}, "roots:n alices:n bobs:y bobs@s:y g:n g@1:n g@2:n"},
		{Scope{UID: 1001, Golden: sees("g"), Owned: true}, "roots:n alices:y bobs:n bobs@s:n g:p g@1:p g@2:p"},
		{Scope{UID: 1001, All: true}, "roots:p alices:y bobs:p bobs@s:p g:n g@1:n g@2:n"},
		{Scope{UID: 1001, All: true, Reads: true}, "roots:y alices:y bobs:y bobs@s:y g:n g@1:n g@2:n"},
	} {
		got := ""
		ctx := Within(t.Context(), c2.s)
		if err := c.View(ctx, func(tx *Tx) error {
			for _, name := range []string{"roots", "alices", "bobs", "bobs@s", "g", "g@1", "g@2"} {
				r, err := ref.Parse("test", name)
				if err != nil {
					return err
				}
				_, err = tx.Resolve("test", r)
				answer := "y"
				switch {
				case errs.Is(err, errs.NotFound):
					answer = "n"
				case errs.Is(err, errs.Permission):
					answer = "p"
				case err != nil:
					return err
				}
				got += " " + name + ":" + answer
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if got[1:] != c2.want {
			t.Errorf("%+v:\n%s, wanted\n %s", c2.s, got, c2.want)
		}
	}

	if name := c.RefOf(Within(t.Context(), Scope{UID: 1001}), "s"); name != "s" {
		t.Errorf("a message would name %s", name)
	}
	if name := c.RefOf(Within(t.Context(), Scope{UID: 100}), "s"); name != "bobs@s" {
		t.Errorf("a message would name %s", name)
	}
}

// TestLimitsAtCommit: a transaction that would give a user more than the limits is not committed, and what others have
// or get does not count.
func TestLimitsAtCommit(t *testing.T) {
	c := openCatalog(t)
	put := func(ctx context.Context, rows ...Row) error {
		return c.Update(ctx, Durable, func(tx *Tx) error {
			for _, r := range rows {
				if err := tx.PutObject(r); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := put(t.Context(), owned("a", 7, 7, 10), owned("other", 8, 7, 1<<40), owned("b", 7, 9, 10)); err != nil {
		t.Fatal(err)
	}

	ctx := Within(t.Context(), Scope{UID: 7, MaxVolumes: 3, MaxBytes: 60})
	snapshot := func(name string, of driver.ObjectID, size int64) Row {
		return Row{Identity: driver.Identity{ID: driver.ObjectID(name), Kind: driver.Snapshot, Name: name, Volume: of,
			SizeBytes: size}}
	}
	for i, step := range []struct {
		rows []Row
		kind errs.Kind // "": it is committed
	}{
		{[]Row{owned("c", 7, 7, 41)}, errs.NoSpace},
		{[]Row{owned("c", 7, 7, 10), owned("d", 7, 7, 10)}, errs.NoSpace},
		{[]Row{owned("c", 7, 7, 0)}, errs.Unsupported},
		{[]Row{owned("e", 8, 8, 1<<40)}, ""}, // the work of another, which is being finished
		{[]Row{owned("c", 7, 7, 10)}, ""},
		{[]Row{owned("d", 7, 7, 1)}, errs.NoSpace},
		{[]Row{snapshot("s", "id-a", 31)}, errs.NoSpace},
		{[]Row{snapshot("s", "id-a", 30)}, ""},
		{[]Row{snapshot("t", "id-a", 1)}, errs.NoSpace},
		{[]Row{snapshot("o", "id-other", 1<<40)}, ""},
	} {
		err := put(ctx, step.rows...)
		if step.kind == "" && err != nil || step.kind != "" && !errs.Is(err, step.kind) {
			t.Errorf("step %d: %v, wanted %s", i, err, step.kind)
		}
		if err := c.View(t.Context(), func(tx *Tx) error {
			for _, r := range step.rows {
				if _, ok, err := tx.Object(r.ID); err != nil || ok != (step.kind == "") {
					t.Errorf("step %d: %s exists: %v, %v", i, fmt.Sprint(r.ID), ok, err)
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}
