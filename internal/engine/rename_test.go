package engine_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// TestRenameWaits: a golden gets its new name only when nobody refreshes it or clones it, or builds a golden of the new
// name. What was being made of it has the new name, too.
func TestRenameWaits(t *testing.T) {
	e, other := firstBuild(t)
	rename := func(from, to string, ended chan<- error) {
		_, err := e.Rename(t.Context(), engine.RenameRequest{Ref: ref.Ref{Name: from}, Name: ref.MustName(to)})
		ended <- err
	}
	const patience = 300 * time.Millisecond

	for _, c := range []struct{ from, to, locked string }{{"other", "one", "other"}, {"one", "two", "two"}} {
		_, unlock, _, err := other.LockSource(t.Context(), ref.MustName(c.locked))
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go rename(c.from, c.to, ended)
		select {
		case err := <-ended:
			t.Fatalf("renamed while the source of %s was locked: %v", c.locked, err)
		case <-time.After(patience):
		}
		unlock()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}

	ended := make(chan error, 1)
	q := engine.CloneRequest{From: ref.Ref{Name: "two"}, Name: ref.MustName("v")}
	prepare := func(context.Context, string, string) error {
		go rename("two", "three", ended)
		select {
		case err := <-ended:
			t.Errorf("renamed while it was being cloned: %v", err)
			ended <- err
		case <-time.After(patience):
		}
		return nil
	}
	if _, err := other.CloneAndPrepare(t.Context(), q, prepare); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if d, err := e.Show(t.Context(), ref.Ref{Name: "v"}); err != nil || d.Golden != "three" || d.Origin != "three@1" {
		t.Errorf("%+v, %v", d.Object, err)
	}
}

// TestRenameKeepsLineage: points keep their lineage in a rename, and what has the name later has another one.
func TestRenameKeepsLineage(t *testing.T) {
	e, _ := firstBuild(t)
	rename := func(from, to string) {
		t.Helper()
		q := engine.RenameRequest{Ref: ref.Ref{Name: from}, Name: ref.MustName(to)}
		if _, err := e.Rename(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	names := func(name string) engine.Names {
		t.Helper()
		n, err := e.Transfer().NamesOf(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	clone(t, e, "other", "volume", false)
	golden, volume := names("other"), names("volume")

	// Many names: the first one stays known.
	from := []string{"other", "volume"}
	for i := range 12 {
		to := []string{"g" + string(rune('a'+i)), "v" + string(rune('a'+i))}
		rename(from[0], to[0])
		rename(from[1], to[1])
		from = to
	}
	for i, was := range []engine.Names{golden, volume} {
		n := names(from[i])
		if n.Lineage != was.Lineage || n.All[0] != from[i] || n.All[len(n.All)-1] != was.All[0] || len(n.All) != 9 {
			t.Errorf("%+v, was %+v", n, was)
		}
	}

	importTree(t, e, "other", source(t))
	clone(t, e, "other", "volume", false)
	if n := names("other"); n.Lineage == golden.Lineage || len(n.All) != 1 {
		t.Errorf("another golden: %+v", n)
	}
	if n := names("volume"); n.Lineage == volume.Lineage || len(n.All) != 1 {
		t.Errorf("another volume: %+v", n)
	}

	// Nothing remains of the names of what is destroyed.
	destroy(t, e, "*")
	for _, golden := range []string{"other", from[0]} {
		if _, err := e.RemoveGolden(t.Context(), ref.Ref{Name: golden}); err != nil {
			t.Fatal(err)
		}
	}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(e.Dir(), "catalog.db")+"?mode=ro")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var left int
	if err := db.QueryRow("SELECT count(*) FROM meta WHERE key LIKE 'names-%'").Scan(&left); err != nil || left != 0 {
		t.Errorf("%d former names are left, %v", left, err)
	}
}

// TestRewindOfRenamed: a volume that gets the name of one that is being rewound is left as it is.
func TestRewindOfRenamed(t *testing.T) {
	e, other := firstBuild(t)
	for _, name := range []string{"v", "w"} {
		clone(t, e, "other", name, name == "v")
		_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(name), Name: ref.MustName("s")})
		must(t, err)
	}
	w, err := e.Show(t.Context(), ref.Ref{Name: "w"})
	must(t, err)

	engine.AtStep(t, func(step string) {
		if step == "detached" {
			for _, names := range [][2]string{{"v", "moved"}, {"w", "v"}} {
				_, err := other.Rename(t.Context(), engine.RenameRequest{Ref: ref.Ref{Name: names[0]},
					Name: ref.MustName(names[1])})
				must(t, err)
			}
		}
	})
	_, err = e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName("v"), Snapshot: ref.MustName("s"),
		Detach: true})
	if !errs.Is(err, errs.Conflict) {
		t.Errorf("%v", err)
	}
	v, err := e.Show(t.Context(), ref.Ref{Name: "v"})
	if err != nil || v.ID != w.ID || v.Mounted() {
		t.Errorf("%+v, %v", v.Object, err)
	}
}
