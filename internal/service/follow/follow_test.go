package follow

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/testing/pooltest"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestFollower: a follower gets each event once, page for page, also those since a rebuild, and with a reference only
// those of what it names, under all its later names.
func TestFollower(t *testing.T) {
	ctx := t.Context()
	drivers := engine.Drivers{plain.Name: plain.Open}
	e := pooltest.New(t, drivers, plain.Name, t.TempDir())

	src := t.TempDir()
	must(t, os.WriteFile(filepath.Join(src, "file"), []byte("content"), 0o600))
	_, err := e.Import(ctx, engine.ImportRequest{Name: ref.MustName("g"), Source: src})
	must(t, err)
	clone := func(name string) {
		t.Helper()
		_, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(name)})
		must(t, err)
	}
	rename := func(from, to string) {
		t.Helper()
		_, err := e.Rename(ctx, engine.RenameRequest{Ref: ref.Ref{Name: from}, Name: ref.MustName(to)})
		must(t, err)
	}
	clone("a")

	newest := New(engine.HistoryRequest{Limit: 1})
	ofA := New(engine.HistoryRequest{Ref: ref.Ref{Name: "a"}})
	newest.page, ofA.page = 2, 2
	reads := func(f *Follower, calls int, want ...string) {
		t.Helper()
		var got []string
		n := 0
		for more := true; more; n++ {
			var events []api.Event
			events, more, err = f.Next(ctx, e)
			must(t, err)
			for _, v := range events {
				got = append(got, string(v.Event)+" "+v.Ref)
			}
		}
		if n != calls || !slices.Equal(got, want) {
			t.Errorf("%d calls read %q, wanted %d, %q", n, got, calls, want)
		}
	}

	if newest.Begun() {
		t.Error("begun before the first call")
	}
	reads(newest, 1, "create a")
	reads(ofA, 1, "create a")
	if !newest.Begun() {
		t.Error("not begun after the first call")
	}
	reads(newest, 1)

	// Five events are three pages; four are two.
	clone("b")
	rename("a", "c")
	clone("a")
	rename("c", "d")
	clone("e")
	reads(newest, 3, "create b", "rename c", "create a", "rename d", "create e")
	reads(ofA, 3, "rename c", "rename d")
	for _, name := range []string{"f", "g-1", "h", "i"} {
		clone(name)
	}
	reads(newest, 2, "create f", "create g-1", "create h", "create i")

	// What reads after a number gets all events since, whatever its limit is.
	first, err := e.History(ctx, engine.HistoryRequest{Limit: 3})
	must(t, err)
	reads(New(engine.HistoryRequest{After: first.Events[0].Seq, Limit: 1}), 1, "create h", "create i")

	// An error is no end, and a rebuild is noticed.
	ended, stop := context.WithCancel(ctx)
	stop()
	clone("j")
	if events, more, err := newest.Next(ended, e); err == nil || events != nil || more {
		t.Errorf("in an ended context: %v, %v, %v", events, more, err)
	}
	reads(newest, 1, "create j")
	e.Close()
	_, err = engine.Rebuild(ctx, e.Dir(), drivers)
	must(t, err)
	e, err = engine.Open(ctx, e.Dir(), drivers)
	must(t, err)
	defer e.Close()
	reads(newest, 1, "gap ", "rebuild ")
	reads(ofA, 1, "gap ")
}
