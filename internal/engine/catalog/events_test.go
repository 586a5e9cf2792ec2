package catalog

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"pando/internal/base/principal"
	"pando/internal/driver"
)

// eventless are the methods of Tx that write no events, and why.
var eventless = map[string]string{
	"Mark": "a mark", "Unmark": "a mark", "StopReading": "a mark", "MarkFreezes": "a mark", "MoveMark": "a mark",
	"AddTombstone": "a tombstone", "SetReclaimed": "a tombstone", "ForgetReclaimed": "a tombstone",
	"SetUsage": "a measurement", "SetUsed": "a measurement",
	"SetLost": "what the kernel says", "ForgetLost": "what the kernel says",
	"PutRemotePoint": "of a remote", "DropRemotePoint": "of a remote", "DropRemote": "of a remote",
	"PutRemoteHead": "of a remote", "PutSeenRemoteHead": "of a remote", "DropRemoteHead": "of a remote",
	"SetMeta": "no object", "SetMended": "no object", "NextPlace": "no object", "WithoutEvents": "for a rebuild",
}

// TestChangesHaveEvents: each method that changes what the catalogue says of objects and goldens, and of where they are
// mounted, writes an event.
func TestChangesHaveEvents(t *testing.T) {
	now := time.Now()
	row := func(id string, kind driver.Kind, name string) Row {
		return Row{Identity: driver.Identity{ID: driver.ObjectID(id), Kind: kind, Name: name, Owner: 7}}
	}
	gen, vol, snap := row("g1", driver.Generation, ""), row("v", driver.Volume, "vol"), row("s", driver.Snapshot, "snap")
	gen.Golden, gen.Generation, vol.Origin, snap.Volume = "g", 1, "g@1", "v"
	next := row("n", driver.Volume, "vol")
	next.Volume = "v"
	g := Golden{Name: "g", Current: 1, CreatedAt: now, Owner: 7}
	kept := g
	kept.Keep, kept.Labels = 3, driver.StoredLabels(`{"a":"b"}`)
	based := vol.Identity
	based.Golden, based.Generation = "g", 2
	larger := based
	larger.SizeBytes = 4096

	var tx *Tx
	calls := []struct {
		name string
		call func() error
		want string
	}{
		{"PutGolden", func() error { return tx.PutGolden(g) }, "create generation g ()"},
		{"PutGolden", func() error { return tx.PutGolden(kept) },
			`change generation g (keep=3), change generation g (labels={"a":"b"})`},
		{"PutObject", func() error { return tx.PutObject(gen) }, "create generation g@1 ()"},
		{"PutObject", func() error { return tx.PutObject(vol) }, "create volume vol (g@1)"},
		{"PutObject", func() error { return tx.PutObject(snap) }, "create snapshot vol@snap ()"},
		{"SetBase", func() error { return tx.SetBase("v", "g", 2) }, "change volume vol (base=g@2)"},
		{"SetPinned", func() error { return tx.SetPinned("s", time.Unix(1, 0)) },
			"change snapshot vol@snap (pinned=1970-01-01T00:00:01Z)"},
		{"SetPinned", func() error { return tx.SetPinned("s", time.Unix(1, 0)) }, ""},
		{"SetPinned", func() error { return tx.SetPinned("s", time.Time{}) }, "change snapshot vol@snap (pinned=)"},
		{"SetLabels", func() error { return tx.SetLabels("v", kept.Labels) }, `change volume vol (labels={"a":"b"})`},
		{"SetLabels", func() error { return tx.SetLabels("v", kept.Labels) }, ""},
		{"SetExpires", func() error { return tx.SetExpires("v", time.Unix(1, 0)) },
			"change volume vol (expires=1970-01-01T00:00:01Z)"},
		{"SetExpires", func() error { return tx.SetExpires("v", time.Unix(1, 0)) }, ""},
		{"SetBase", func() error { return tx.SetBase("v", "g", 2) }, ""},
		{"SetIdentity", func() error { return tx.SetIdentity(larger) }, "change volume vol (size=4096)"},
		{"SetIdentity", func() error { return tx.SetIdentity(based) }, "change volume vol (size=0)"},
		{"RecordFirstMount", func() error {
			return tx.RecordFirstMount(vol, MountRecord{ID: vol.ID, Mountpoint: "/first"})
		}, "mount volume vol (/first)"},
		{"ForgetMount", func() error { return tx.ForgetMount("v") }, "umount volume vol (/first)"},
		{"RecordMount", func() error { return tx.RecordMount(MountRecord{ID: "v", Mountpoint: "/m"}) },
			"mount volume vol (/m)"},
		{"RecordMount", func() error { return tx.RecordMount(MountRecord{ID: "v", Mountpoint: "/m"}) }, ""},
		{"RecordMount", func() error { return tx.RecordMount(MountRecord{ID: "v", Mountpoint: "/n"}) },
			"umount volume vol (/m), mount volume vol (/n)"},
		{"ForgetMount", func() error { return tx.ForgetMount("v") }, "umount volume vol (/n)"},
		{"RenameSnapshot", func() error { return tx.RenameSnapshot(snap, "s2") }, "rename snapshot vol@s2 (vol@snap)"},
		{"RenameVolume", func() error { return tx.RenameVolume(vol, "v2") }, "rename volume v2 (vol)"},
		{"ReplaceVolume", func() error {
			was, now := row("", "", "before"), next
			was.Volume, now.Name, now.SizeBytes = "v", "v2", 8192
			return tx.ReplaceVolume("v", was, now)
		}, "replace volume v2 (v2@before), create snapshot v2@before (v2), change volume v2 (size=8192), " +
			"change volume v2 (base=)"},
		{"RenameGolden", func() error { return tx.RenameGolden(g, "h") }, "rename generation h (g)"},
		{"KeepAsLayer", func() error {
			now := gen
			now.Golden = "h"
			return tx.KeepAsLayer(now, "old")
		}, "destroy generation h@1 (old)"},
		{"DeleteEmptyGolden", func() error { return tx.DeleteEmptyGolden("h") }, "destroy generation h ()"},
		{"Bury", func() error { return tx.Bury(Tombstone{ID: "s", Ref: "v2@s2"}, "") }, "destroy snapshot v2@s2 ()"},
		{"SetIdentity", func() error {
			now := row("v", driver.Volume, "found").Identity
			return tx.SetIdentity(now)
		}, "destroy snapshot v2@before (), create volume found (v2@before)"},
		{"SetSwept", func() error { return tx.SetSwept() }, ""}, // the host has not started again since
		{"SetSwept", func() error {
			return errors.Join(tx.SetMeta(metaBoot, "another"), tx.SetMeta(metaBootAt, "1"), tx.SetSwept())
		}, "boot   ()"},
	}

	tested := map[string]bool{}
	c := openCatalog(t)
	ctx := principal.With(t.Context(), principal.Principal{UID: 1234})
	if err := c.Update(ctx, Soft, func(tx *Tx) error { _, err := tx.exec(`DELETE FROM events`); return err }); err != nil {
		t.Fatal(err)
	}
	for _, call := range calls {
		tested[call.name] = true
		if err := c.Update(ctx, Soft, func(x *Tx) error { tx = x; return call.call() }); err != nil {
			t.Fatalf("%s: %v", call.name, err)
		}
		got := lastEvents(t, c)
		if text := strings.Join(got, ", "); text != call.want {
			t.Errorf("%s: events %s, wanted %s", call.name, text, call.want)
		}
	}

	all := reflect.TypeFor[*Tx]()
	for i := range all.NumMethod() {
		name := all.Method(i).Name
		if writes.MatchString(name) && (eventless[name] == "") != tested[name] {
			t.Errorf("%s must be either in the list of calls or in that of the others", name)
		}
	}
}

// writes matches the names of methods that write.
var writes = regexp.MustCompile(`^(Add|Bury|Delete|Drop|Forget|Keep|Mark$|MarkF|Move|Next|Put|Record|Rename|` +
	`Replace|Set|Stop|Unmark|Without)`)

// lastEvents returns the events of the last transaction, and removes them. Everything in them is checked that is not in
// their text.
func lastEvents(t *testing.T, c *Catalog) (out []string) {
	t.Helper()
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		out = nil
		last := int64(0)
		if err := tx.Events(0, false, func(v Event) (bool, error) {
			if v.Seq <= last || time.Since(v.At).Abs() > time.Hour || v.Who != 1234 || (v.Owner == 7) != (v.Object != "") ||
				(v.ID != "") != (v.Object != "" && v.Object != driver.Generation || strings.Contains(v.Ref, "@")) {
				t.Errorf("event %+v", v)
			}
			last = v.Seq
			out = append(out, fmt.Sprintf("%s %s %s (%s)", v.Kind, v.Object, v.Ref, v.Detail))
			return true, nil
		}); err != nil {
			return err
		}
		_, err := tx.exec(`DELETE FROM events`)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestEventNumbers: numbers rise, whatever the clock says and whatever was lost, and the newest events stay.
func TestEventNumbers(t *testing.T) {
	keeps := eventsKept
	t.Cleanup(func() { eventsKept = keeps })
	eventsKept = 10

	c := openCatalog(t)
	const total = 3 * trimEvery
	ahead := time.Now().Add(time.Hour).UnixMicro()
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		if err := tx.PutObject(Row{Identity: driver.Identity{ID: "v", Kind: driver.Volume, Name: "v"}}); err != nil {
			return err
		}
		if _, err := tx.exec(`UPDATE events SET seq = ? WHERE kind = 'create'`, ahead); err != nil {
			return err
		}
		for i := range total {
			if err := tx.SetPinned("v", time.Unix(int64(i+1), 0)); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}

	var seqs []int64
	if err := c.View(t.Context(), func(tx *Tx) error {
		return tx.Events(0, true, func(v Event) (bool, error) { seqs = append(seqs, v.Seq); return true, nil })
	}); err != nil {
		t.Fatal(err)
	}
	last := seqs[0]
	if n := len(seqs); last != ahead+total || n != 10+int(last%trimEvery) || seqs[n-1] != last-int64(n)+1 {
		t.Errorf("%d events, the last one %d after the clock that was ahead, the first one %d before that", n, last-ahead,
			last-seqs[n-1])
	}

	if err := c.View(t.Context(), func(tx *Tx) error {
		removed, end, err := tx.EventRange()
		if removed != seqs[len(seqs)-1]-1 || end != last {
			t.Errorf("the first one is %d after those removed, the last one %d too early", seqs[len(seqs)-1]-removed, last-end)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}

	// What replaces the catalogue goes on behind the last number.
	next := openCatalog(t)
	if err := next.Update(t.Context(), Soft, func(tx *Tx) error {
		if err := tx.ContinueEvents(LastEvent(t.Context(), c.dir, "pool")); err != nil {
			return err
		}
		removed, end, err := tx.EventRange()
		if removed != last || end != last+1 {
			t.Errorf("a new catalogue begins %d after the last number, and its events %d", removed-last, end-last)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
