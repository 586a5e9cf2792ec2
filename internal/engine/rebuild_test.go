package engine_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/drivertest"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite"
)

// poolKinds are the kinds of pools that a pool can be rebuilt from.
var poolKinds = []struct {
	name string
	make func(t *testing.T) *engine.Engine
}{
	{"reflink", func(t *testing.T) *engine.Engine {
		if os.Geteuid() != 0 {
			t.Skip("SKIPPED: a pool of images needs root: run the tests as root")
		}
		return newPool(t, t.TempDir(), engine.InitRequest{SizeBytes: 2 << 30, MinFreePercent: 1})
	}},
	{"btrfs", func(t *testing.T) *engine.Engine {
		return newPool(t, testfs.Btrfs(t, 512<<20), engine.InitRequest{Driver: "btrfs", MinFreePercent: 1})
	}},
	{"plain", func(t *testing.T) *engine.Engine {
		return newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name, MinFreePercent: 1})
	}},
}

// richPool puts everything that there can be into a pool. Nothing is mounted
// in the end but "busy".
func richPool(t *testing.T, e *engine.Engine) {
	t.Helper()
	ctx := asUser(t, 1000) // some of it is root's, some another user's
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	parse := func(s string) ref.Ref {
		r, err := ref.Parse("test", s)
		must(err)
		return r
	}
	src := source(t)
	importTree(t, e, "g", src)
	for range 3 {
		q := engine.ImportRequest{Name: ref.MustName("g"), Source: src, Update: true}
		if e.Caps().FS[0].IsImage() {
			q.SizeBytes = 64 << 20
		}
		_, err := e.Import(ctx, q)
		must(err)
	}
	clone(t, e, "g", "job", false)
	clone(t, e, "g", "plainjob", false)
	keep := 2
	_, err := e.Publish(ctx, engine.PublishRequest{Golden: ref.MustName("made"), Volume: ref.MustName("job")})
	must(err)
	for range 3 { // the base of job is g's; that of "moved" moves
		_, err = e.Publish(ctx, engine.PublishRequest{Golden: ref.MustName("made"), Volume: ref.MustName("job"), Force: true,
			Keep: &keep})
		must(err)
	}
	clone(t, e, "made", "moved", false)
	for range 2 {
		_, err = e.Publish(ctx, engine.PublishRequest{Golden: ref.MustName("made"), Volume: ref.MustName("moved")})
		must(err)
	}
	_, err = e.Pin(ctx, engine.PinRequest{Ref: parse("made@6")})
	must(err)
	for _, r := range []string{"g", "job", "made"} {
		_, err = e.SetLabels(ctx, engine.LabelRequest{Ref: parse(r), Set: map[string]string{"of": r}})
		must(err)
	}
	must(func() error {
		_, err := e.Keep(ctx, engine.KeepRequest{Golden: ref.MustName("g"), Generations: 3})
		return err
	}())
	_, err = e.Pin(ctx, engine.PinRequest{Ref: parse("job"), For: 3 * time.Hour})
	must(err)
	_, err = e.Clone(ctx, engine.CloneRequest{From: parse("g"), Name: ref.MustName("short"), TTL: 5 * time.Hour})
	must(err)
	_, err = e.Clone(ctx, engine.CloneRequest{From: parse("g"), Name: ref.MustName("eph"), Ephemeral: true})
	must(err)
	for _, s := range []string{"one", "two"} {
		_, err = e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName("job"), Name: ref.MustName(s)})
		must(err)
	}
	_, err = e.Pin(ctx, engine.PinRequest{Ref: parse("job@one")})
	must(err)
	_, err = e.Fork(ctx, engine.CloneRequest{From: parse("job"), Name: ref.MustName("fork")})
	must(err)
	_, err = e.Clone(ctx, engine.CloneRequest{From: parse("job@two"), Name: ref.MustName("of-snapshot")})
	must(err)
	clone(t, e, "g", "busy", true)
	for _, freeze := range []engine.Freeze{engine.FreezeIfNeeded, engine.FreezeAlways, engine.FreezeNever} {
		if caps := e.Caps(); freeze == engine.FreezeAlways && !caps.FS[0].IsImage() && !caps.Unsynced {
			continue // see TestFreezeRefused
		}
		_, err = e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName("busy"),
			Name: ref.MustName(fmt.Sprint("s", freeze)), Freeze: freeze})
		must(err)
	}
	_, err = e.Rewind(ctx, engine.RewindRequest{Volume: ref.MustName("job"), Snapshot: ref.MustName("one")})
	must(err)
	_, err = e.Rewind(ctx, engine.RewindRequest{Volume: ref.MustName("job"), Snapshot: ref.MustName("two")})
	must(err)
	clone(t, e, "job", "of-rewound", false)
	if !e.Caps().FS[0].IsImage() {
		return
	}
	_, err = e.Import(ctx, engine.ImportRequest{Name: ref.MustName("x"), Source: src, FS: driver.XFS,
		SizeBytes: 320 << 20})
	must(err)
	clone(t, e, "x", "xjob", false)
	image := filepath.Join(t.TempDir(), "raw.img")
	must(os.WriteFile(image, []byte(strings.Repeat("0123456789abcdef", 1<<16)), 0o600))
	_, err = e.Import(ctx, engine.ImportRequest{Name: ref.MustName("raw"), Source: image, FS: driver.None})
	must(err)
	clone(t, e, "raw", "rawjob", false)
	_, err = e.Clone(ctx, engine.CloneRequest{From: parse("g"), Name: ref.MustName("grown"), SizeBytes: 96 << 20})
	must(err)
}

// dump is all that a catalogue holds, but for what a rebuild need not keep.
func dump(t *testing.T, dir string) []string {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "catalog.db")+"?mode=ro")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var out []string
	for _, q := range []string{
		`SELECT concat_ws('|', 'golden', name, current, next, created_at, keep, overlay, source, labels, owner) FROM goldens`,
		`SELECT concat_ws('|', kind, id, name, golden, generation, volume, fs, size, sector, origin, origin_id, created_at,
			expires_at, ephemeral, boot, pinned, consistency, lower, mirror, labels,
			ord, owner) FROM objects`,
		`SELECT concat_ws('|', 'mark', op, name) FROM marks`,
		`SELECT concat_ws('|', 'tombstone', ref) FROM tombstones WHERE reclaimed = 0`,
		`SELECT concat_ws('|', 'meta', key, value) FROM meta
			WHERE key NOT IN ('commits', 'boot_at', 'place', 'events_removed')`,
	} {
		rows, err := db.Query(q)
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
			var s string
			if err := rows.Scan(&s); err != nil {
				t.Fatal(err)
			}
			out = append(out, s)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		rows.Close()
	}
	slices.Sort(out)
	return out
}

// sameDump compares two dumps line by line.
func sameDump(t *testing.T, what string, before, after []string) {
	t.Helper()
	for _, l := range before {
		if !slices.Contains(after, l) {
			t.Errorf("%s: before only: %s", what, l)
		}
	}
	for _, l := range after {
		if !slices.Contains(before, l) {
			t.Errorf("%s: after only:  %s", what, l)
		}
	}
}

// TestRebuildLosesNothing: of a pool with everything in it, the catalogue is
// the same after a rebuild, but for last-use times, measurements and what is
// mounted.
func TestRebuildLosesNothing(t *testing.T) {
	for _, k := range poolKinds {
		t.Run(k.name, func(t *testing.T) {
			e := k.make(t)
			richPool(t, e)
			before := dump(t, e.Dir())
			if len(before) < 24 {
				t.Fatalf("only %d lines: too little to test anything", len(before))
			}
			e.Close()
			r, err := engine.Rebuild(t.Context(), e.Dir(), drivers)
			if err != nil {
				t.Fatal(err)
			}
			if len(r.Notes) > 0 || r.Garbage > 0 {
				t.Errorf("notes %q, %d objects removed", r.Notes, r.Garbage)
			}
			sameDump(t, "rebuilt", before, dump(t, e.Dir()))
			sameDump(t, "set aside", before, dumpOf(t, r.Old))
			again, recovered := maintained(t, e.Dir())
			defer again.Close()
			if recovered.Swept != nil || recovered.Undone > 0 {
				t.Errorf("the first command after a rebuild cleaned up: %+v", recovered)
			}
			if _, err := os.Lstat(filepath.Join(e.Dir(), "rebuild.inprogress")); err == nil {
				t.Error("LEAK: rebuild.inprogress")
			}

			// What a volume was before it was rewound is newer than the snapshots that it had by then.
			names, err := pooltest.SnapshotNames(t.Context(), again, "job")
			if err != nil || len(names) != 4 || names[0]+names[1] != "onetwo" {
				t.Errorf("the snapshots are %q: %v", names, err)
			}
		})
	}
}

// dumpOf dumps a catalogue that was set aside.
func dumpOf(t *testing.T, path string) []string {
	t.Helper()
	dir := t.TempDir()
	for _, ext := range []string{"", "-wal"} {
		b, err := os.ReadFile(path + ext)
		if os.IsNotExist(err) && ext != "" {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "catalog.db"+ext), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dump(t, dir)
}

// TestKilledPublishIsNoDamage: a publish that is killed once its generation is recorded leaves the identity of the
// volume without its new base. No check takes that for damage, and a rebuild finds the base.
func TestKilledPublishIsNoDamage(t *testing.T) {
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name})
	importTree(t, e, "g", source(t))
	if _, err := e.RunFunc(t.Context(), engine.RunRequest{From: ref.Ref{Name: "h"}, Name: ref.MustName("v"), Empty: true,
		Keep: true}, func(context.Context, api.Object) error { return nil }); err != nil {
		t.Fatal(err)
	}
	d, err := e.Show(t.Context(), ref.Ref{Name: "v"})
	if err != nil {
		t.Fatal(err)
	}
	meta := filepath.Join(e.Dir(), "data", "objects", string(d.ID)+".meta")
	unbased := drivertest.ReadMeta(meta)
	publish(t, e, "h", "v")
	if drivertest.ReadMeta(meta) == unbased {
		t.Fatal("the identity has not got the new base")
	}
	if err := drivertest.WriteMeta(meta, unbased); err != nil {
		t.Fatal(err)
	}

	before := dump(t, e.Dir())
	for _, rebuild := range []bool{false, true} {
		if e.Close(); rebuild {
			if _, err := engine.Rebuild(t.Context(), e.Dir(), drivers); err != nil {
				t.Fatal(err)
			}
		}
		if r := fsck(t, e.Dir(), false); len(r.Findings) > 0 {
			t.Errorf("rebuilt %v: %s", rebuild, findings(r))
		}
		sameDump(t, "checked or rebuilt", before, dump(t, e.Dir()))
	}
}

// TestRebuildGoesOn: a rebuild that died between any two of its renames, or
// while it wrote, is explained by the next command and finished by the next
// rebuild; the old catalogue stays together with its log.
func TestRebuildGoesOn(t *testing.T) {
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name})
	importTree(t, e, "g", source(t))
	clone(t, e, "g", "v", false)
	before := dump(t, e.Dir())
	path := func(name string) string { return filepath.Join(e.Dir(), name) }
	if err := os.MkdirAll(path("rebuild.inprogress/live"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path("rebuild.inprogress/catalog.db"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path("catalog.db"), path("catalog.damaged-20260101T000000.000000000.db")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path("catalog.db-wal")); err != nil {
		t.Fatalf("the catalogue has no log: this shows nothing: %v", err)
	}
	if _, err := engine.Open(t.Context(), e.Dir(), drivers); err == nil ||
		!strings.Contains(fmt.Sprintf("%+v", err), "missing") {
		t.Errorf("opened without a catalogue: %v", err)
	}
	r, err := engine.Rebuild(t.Context(), e.Dir(), drivers)
	if err != nil {
		t.Fatal(err)
	}
	if r.Old != path("catalog.damaged-20260101T000000.000000000.db") {
		t.Errorf("the old catalogue is %s", r.Old)
	}
	sameDump(t, "rebuilt", before, dump(t, e.Dir()))
	sameDump(t, "set aside", before, dumpOf(t, r.Old))
}

// TestRebuildUnmounts: what the new catalogue does not know to be mounted is not
// mounted any more, wherever it was.
func TestRebuildUnmounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	for _, k := range poolKinds {
		t.Run(k.name, func(t *testing.T) {
			e := k.make(t)
			importTree(t, e, "g", source(t))
			own := t.TempDir()
			for name, dir := range map[string]string{"own": own, "below": ""} {
				clone(t, e, "g", name, false)
				if _, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(name), Dir: dir}); err != nil {
					t.Fatal(err)
				}
			}
			if !isRoot(own) {
				t.Fatal("it is not mounted: this shows nothing")
			}
			e.Close()
			if _, err := engine.Rebuild(t.Context(), e.Dir(), drivers); err != nil {
				t.Fatal(err)
			}
			if isRoot(own) || isRoot(filepath.Join(e.Dir(), "mnt", "below")) {
				t.Error("still mounted")
			}
			if r := fsck(t, e.Dir(), false); len(r.Findings) > 0 {
				t.Errorf("found\n%s", findings(r))
			}
		})
	}
}

// isRoot reports whether something is mounted on path.
func isRoot(path string) bool {
	m, err := kernel.MountAt(unix.AT_FDCWD, path)
	return err == nil && m.Root
}
