package catalog

import (
	"math"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"
)

// TestRemotes: rows of remotes are kept as they are put, go with what they are about,
// and one repository does not touch another's.
func TestRemotes(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	if err := Create(ctx, dir, "p", api.EventInit); err != nil {
		t.Fatal(err)
	}
	c, err := Open(ctx, dir, "p")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	update := func(fn func(*Tx) error) {
		t.Helper()
		if err := c.Update(ctx, Soft, fn); err != nil {
			t.Fatal(err)
		}
	}
	at := time.Unix(1000, 7).UTC()
	want := func(what string, points, heads int) (p []RemotePoint, h []RemoteHead) {
		t.Helper()
		update(func(tx *Tx) (err error) {
			if p, err = tx.RemotePoints("r"); err == nil {
				h, err = tx.RemoteHeads("r")
			}
			return err
		})
		if len(p) != points || len(h) != heads {
			t.Errorf("%s: %v, %v", what, p, h)
		}
		return p, h
	}
	update(func(tx *Tx) error {
		for _, id := range []driver.ObjectID{"a", "b"} {
			if err := tx.PutObject(Row{Identity: driver.Identity{ID: id, Kind: driver.Volume, Name: string(id)}}); err != nil {
				return err
			}
		}
		for i, p := range []RemotePoint{{"r", "m1", "a", at}, {"r", "m2", "b", at.Add(-1)}, {"r", "m1", "b", at},
			{"other", "m1", "a", at}, {"r", "m1", "a", at.Add(time.Duration(1))}} {
			if err := tx.PutRemotePoint(p); err != nil {
				t.Errorf("%d: %v", i, err)
			}
		}
		for _, h := range []RemoteHead{{"r", "web", "l", 1, "m1", at, 2}, {"r", "web", "l", math.MaxUint64, "m2", at, 0},
			{"other", "web", "l", 2, "m3", at, 1}} {
			if err := tx.PutRemoteHead(h); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
	p, h := want("all", 3, 1)
	if len(p) == 3 && (p[0].Manifest != "m2" || p[2] != RemotePoint{"r", "m1", "a", at.Add(1)}) {
		t.Errorf("%v", p)
	}
	if len(h) == 1 && (h[0] != RemoteHead{"r", "web", "l", math.MaxUint64, "m2", at, 0}) {
		t.Errorf("%v", h)
	}
	if err := c.Update(ctx, Soft, func(tx *Tx) error {
		return tx.PutRemotePoint(RemotePoint{"r", "m9", "none", at})
	}); !errs.Is(err, errs.NotFound) {
		t.Errorf("a row about no object: %v", err)
	}
	update(func(tx *Tx) error { return tx.Bury(Tombstone{ID: "b"}, "") })
	want("one object destroyed", 1, 1)
	update(func(tx *Tx) error { return tx.DropRemotePoint("r", "m1") })
	want("one manifest dropped", 0, 1)
	update(func(tx *Tx) error { return tx.DropRemoteHead("r", "web") })
	want("the head dropped", 0, 0)
	update(func(tx *Tx) error {
		if err := tx.PutRemotePoint(RemotePoint{"r", "m1", "a", at}); err != nil {
			return err
		}
		return tx.PutRemoteHead(RemoteHead{"r", "web", "l", 1, "m1", at, 1})
	})
	update(func(tx *Tx) error { return tx.DropRemote("r") })
	want("the repository dropped", 0, 0)
	update(func(tx *Tx) error {
		all, err := tx.RemotePoints("")
		heads, herr := tx.RemoteHeads("")
		if err != nil || herr != nil || len(all) != 1 || len(heads) != 1 || heads[0].Manifest != "m3" {
			t.Errorf("the other repository's: %v, %v, %v, %v", all, heads, err, herr)
		}
		return nil
	})
}

// TestRemoteHeadNeverGoesBack: the epoch that was seen only grows, and the next point with it, as unsigned numbers.
func TestRemoteHeadNeverGoesBack(t *testing.T) {
	ctx := t.Context()
	c := openCatalog(t)
	at := time.Unix(1000, 7).UTC()
	for _, step := range []struct {
		saw             bool
		epoch, next     uint64
		manifest, is    string
		isEpoch, isNext uint64
	}{
		{true, 1, 3, "", "", 1, 3},
		{true, 1, 2, "", "", 1, 3},
		{false, 1, 2, "m1", "m1", 1, 3},
		{false, 1, 4, "m2", "m2", 1, 4},
		{true, 2, 1, "", "m2", 2, 1},
		{true, 1, 9, "", "m2", 2, 1},
		{false, 1, 9, "m3", "m3", 2, 1},
		{true, 2, math.MaxUint64, "", "m3", 2, math.MaxUint64},
		{true, 2, 7, "", "m3", 2, math.MaxUint64},
		{true, math.MaxUint64, 1, "", "m3", math.MaxUint64, 1},
		{false, 7, 7, "m4", "m4", math.MaxUint64, 1},
	} {
		h := RemoteHead{Repo: "r", Name: "v", Epoch: step.epoch, NextSeq: step.next, Manifest: step.manifest, At: at}
		var all []RemoteHead
		if err := c.Update(ctx, Soft, func(tx *Tx) (err error) {
			put := tx.PutRemoteHead
			if step.saw {
				put = tx.PutSeenRemoteHead
			}
			if err := put(h); err != nil {
				return err
			}
			all, err = tx.RemoteHeads("r")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if len(all) != 1 || all[0].Epoch != step.isEpoch || all[0].NextSeq != step.isNext || all[0].Manifest != step.is {
			t.Errorf("after %+v: %+v", step, all)
		}
	}
}
