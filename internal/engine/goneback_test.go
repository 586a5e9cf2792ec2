package engine_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/drivertest"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// catalogFiles are what a catalogue consists of, by name, as they are now.
func catalogFiles(t *testing.T, dir string, names ...string) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	for _, n := range names {
		b, err := os.ReadFile(filepath.Join(dir, n))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		out[n] = b
	}
	return out
}

// putBack makes files what they were; nil is a file that was not there.
func putBack(t *testing.T, dir string, files map[string][]byte) {
	t.Helper()
	files["catalog.db-shm"] = nil
	for n, b := range files {
		err := os.Remove(filepath.Join(dir, n))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if b == nil {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, n), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// names of the volumes of a pool.
func volumeNames(t *testing.T, e *engine.Engine) string {
	t.Helper()
	names, err := pooltest.VolumeNames(t.Context(), e)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(names, " ")
}

// TestCatalogueGoesBack: whatever earlier state a catalogue is put back to, nothing is
// destroyed, no command works on by it, and a rebuild brings everything back.
func TestCatalogueGoesBack(t *testing.T) {
	for _, k := range poolKinds {
		for _, c := range []struct {
			name  string
			spoil func(t *testing.T, dir string, before map[string][]byte)
		}{
			{"an old copy", func(t *testing.T, dir string, before map[string][]byte) { putBack(t, dir, before) }},
			{"its log is cut", func(t *testing.T, dir string, _ map[string][]byte) {
				if err := os.Truncate(filepath.Join(dir, "catalog.db-wal"), 0); err != nil {
					t.Fatal(err)
				}
				putBack(t, dir, map[string][]byte{})
			}},
			{"a bit of its log is flipped", func(t *testing.T, dir string, _ map[string][]byte) {
				now := catalogFiles(t, dir, "catalog.db-wal")
				now["catalog.db-wal"][32+24+100] ^= 4 // in the page of the first frame (sqlite.org/fileformat2.html)
				putBack(t, dir, now)
			}},
		} {
			t.Run(k.name+"/"+c.name, func(t *testing.T) {
				ctx := t.Context()
				e := k.make(t)
				dir := e.Dir()
				importTree(t, e, "g", source(t))
				clone(t, e, "g", "before", false)
				e.Close() // writes the log back
				before := catalogFiles(t, dir, "catalog.db", "catalog.db-wal")

				e = open(t, dir)
				clone(t, e, "g", "after", false)
				if _, err := e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName("after"),
					Name: ref.MustName("s")}); err != nil {
					t.Fatal(err)
				}
				now := catalogFiles(t, dir, "catalog.db", "catalog.db-wal")
				e.Close()
				putBack(t, dir, now) // as if it had been killed
				c.spoil(t, dir, before)

				e, recovered := maintained(t, dir)
				if w := fmt.Sprint(recovered.Warnings); !strings.Contains(w, "it lost its last") ||
					!strings.Contains(w, `operation "init" with parameter "rebuild"`) {
					t.Errorf("warnings %q", w)
				}
				if got := volumeNames(t, e); got != "before" {
					t.Fatalf("volumes %q: the catalogue did not go back", got)
				}
				refused := func(what string, err error) {
					t.Helper()
					if !errs.Is(err, errs.Damaged) || !strings.Contains(errs.HintOf(err),
						`operation "init" with parameter "rebuild"`) {
						t.Errorf("%s: %v (hint %q)", what, err, errs.HintOf(err))
					}
				}
				_, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("after")})
				refused("clone", err)
				_, err = e.GC(ctx, engine.GCRequest{})
				refused("gc", err)
				report, err := e.Destroy(ctx, toDestroy("before"))
				if err != nil || len(report.Failed) != 1 {
					t.Fatalf("destroy: %+v, %v", report, err)
				}
				refused("destroy", report.Failed[0])
				e.Close()
				r := fsck(t, dir, true)
				if got := findings(r); r.OK || !strings.Contains(got, "catalogue-lost") ||
					!strings.Contains(got, "object-unknown") {
					t.Errorf("fsck found\n%s", got)
				}

				if _, err := engine.Rebuild(ctx, dir, drivers); err != nil {
					t.Fatal(err)
				}
				e, recovered = maintained(t, dir)
				if got := volumeNames(t, e); got != "after before" || len(recovered.Warnings) > 0 {
					t.Errorf("rebuilt: volumes %q, warnings %q", got, recovered.Warnings)
				}
				if _, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "after", At: "s"},
					Name: ref.MustName("again")}); err != nil {
					t.Error(err)
				}
				e.Close()
				if r := fsck(t, dir, false); len(r.Findings) > 0 {
					t.Errorf("in the end fsck found\n%s", findings(r))
				}
			})
		}
	}
}

// TestRestoredCatalogueAfterBoot: the copy that is put back includes the count of what was
// seen, and the host has been started since. What is noted as committed stays.
func TestRestoredCatalogueAfterBoot(t *testing.T) {
	for _, k := range poolKinds {
		t.Run(k.name, func(t *testing.T) {
			e := k.make(t)
			dir := e.Dir()
			importTree(t, e, "g", source(t))
			e.Close()
			before := catalogFiles(t, dir, "catalog.db", "catalog.db-wal", "catalog.seen")

			e = open(t, dir)
			clone(t, e, "g", "v", false)
			d, err := e.Show(t.Context(), ref.Ref{Name: "v"})
			if err != nil {
				t.Fatal(err)
			}
			e.Close()
			putBack(t, dir, before)
			meta := drivertest.MetaPath(filepath.Join(dir, "data"), driver.ObjectID(d.ID))
			if st, err := os.Lstat(meta); err != nil || st.Mode().Perm() != 0o400 {
				t.Errorf("it is not noted as committed: %v, %v", st, err)
			}

			// Another boot than the one in which it was made, and in which the pool was swept last.
			text := beforeBoot(t, drivertest.ReadMeta(meta))
			if err := drivertest.WriteMeta(meta, drivertest.Sealed(text)); err != nil {
				t.Fatal(err)
			}
			db, err := sql.Open("sqlite", filepath.Join(dir, "catalog.db"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := db.Exec(`UPDATE meta SET value = iif(key = 'boot', 'another', '0')
				WHERE key IN ('boot', 'boot_at')`); err != nil {
				t.Fatal(err)
			}
			db.Close()

			e, recovered := maintained(t, dir)
			if s := recovered.Swept; s == nil || s.Garbage > 0 || len(s.Kept) != 1 ||
				!strings.Contains(s.Kept[0].String(), `operation "init" with parameter "rebuild"`) {
				t.Errorf("the sweep: %+v", s)
			}
			e.Close()
			if _, err := engine.Rebuild(context.Background(), dir, drivers); err != nil {
				t.Fatal(err)
			}
			e = open(t, dir)
			if got := volumeNames(t, e); got != "v" {
				t.Errorf("rebuilt: volumes %q", got)
			}
			e.Close()
		})
	}
}

// TestDeinitOfLostCatalogue: a catalogue that went back does not decide what a pool holds.
// Without force nothing changes, with force all of it goes, what is mounted too.
func TestDeinitOfLostCatalogue(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 512<<20), engine.InitRequest{Driver: "reflink", MinFreePercent: 1})
	dir := e.Dir()
	importTree(t, e, "g", source(t))
	e.Close()
	before := catalogFiles(t, dir, "catalog.db", "catalog.db-wal")
	e = open(t, dir)
	at := clone(t, e, "g", "v", true).Mountpoint
	e.Close()
	putBack(t, dir, before)

	_, err := engine.Deinit(t.Context(), engine.DeinitRequest{Dir: dir}, drivers, nil)
	if !errs.Is(err, errs.Damaged) || !strings.Contains(errs.HintOf(err), `operation "init" with parameter "rebuild"`) {
		t.Errorf("deinit: %v (hint %q)", err, errs.HintOf(err))
	}
	file := filepath.Join(dir, "data", "file")
	must(t, os.WriteFile(file, nil, 0o600))
	_, err = engine.Deinit(t.Context(), engine.DeinitRequest{Dir: dir, Force: true}, drivers, nil)
	wantKind(t, err, errs.InUse, "does not belong to the pool")
	must(t, os.Remove(file))
	if m, err := kernel.MountAt(unix.AT_FDCWD, at); err != nil || !m.Root {
		t.Errorf("refused, and %s is not mounted any more: %v", at, err)
	}
	// newPool removes it with force.
}
