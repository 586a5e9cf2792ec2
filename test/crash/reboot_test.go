//go:build linux && (amd64 || arm64)

package crash

import (
	"database/sql"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"pando/internal/driver/drivertest"
	"pando/internal/engine"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

// afterReboot runs a command as the first one after a reboot: with another boot
// ID, in a mount namespace of its own, the kernel just booted.
func (w *world) afterReboot(args ...string) string {
	w.t.Helper()
	out, err := testfs.Rebooted(w.t, testfs.OtherBoot(w.t, pando, append([]string{"--pool", w.dir}, args...)...))
	if err != nil {
		w.t.Fatalf("after a reboot, pando %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// age makes a volume older, by its identity. It reports whether it is there.
func (w *world) age(volume string, by time.Duration) bool {
	w.t.Helper()
	at := regexp.MustCompile(`"at":"([^"]*)"`)
	metas, err := filepath.Glob(filepath.Join(w.dir, "data/objects/*.meta"))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, m := range metas {
		text := drivertest.ReadMeta(m)
		if !strings.Contains(text, `"name":"`+volume+`"`) {
			continue
		}
		then, err := time.Parse(time.RFC3339, at.FindStringSubmatch(text)[1])
		if err != nil {
			w.t.Fatal(err)
		}
		text = strings.Replace(text, at.FindString(text), `"at":"`+then.Add(-by).Format(time.RFC3339)+`"`, 1)
		if err := drivertest.WriteMeta(m, drivertest.Sealed(text)); err != nil {
			w.t.Fatal(err)
		}
		return true
	}
	return false
}

// TestPowerLossTakesMarks: what was being made when the power went is garbage even if no
// mark of it has survived, but only after some time: it cannot be told from what was made
// and whose record was lost.
func TestPowerLossTakesMarks(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: another boot ID needs root: run the tests as root")
	}
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "v")
			before := w.state()
			w.dieAt(func(s faulttest.Step) bool {
				return s.Name == "fsync" && strings.Contains(s.Detail, "/objects") || strings.Contains(s.Detail, "SNAP_CREATE")
			}, "clone", "g", "lost")
			w.sql("DELETE FROM marks")
			// In the same boot nobody can know that it is garbage: it stays.
			if out := w.pando("gc", "--json"); !strings.Contains(out, "lost is in the pool but not in the catalogue") {
				t.Errorf("gc in the same boot: %s", out)
			}
			// In another boot nobody can know that it is garbage either, but it need not stay for ever.
			if out := w.afterReboot("gc", "--json"); !strings.Contains(out, "lost was being made when the host went down") {
				t.Errorf("after a reboot: %s", out)
			}
			if !w.age("lost", 8*24*time.Hour) {
				t.Fatal("lost is not there any more")
			}
			if out := w.afterReboot("show"); !strings.Contains(out, "removed 1 object") {
				t.Errorf("a week later: %s", out)
			}
			if after := w.state(); after != before {
				t.Errorf("before:\n%safter:\n%s", before, after)
			}
			w.check()
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// TestEphemeralAfterReboot: what a reboot ends is destroyed by the next gc, which says why it removed it.
func TestEphemeralAfterReboot(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: another boot ID needs root: run the tests as root")
	}
	w := newWorld(t, kinds[0])
	w.initPool()
	w.importGolden("g")
	before := w.state()
	w.pando("clone", "g", "v", "--ephemeral")

	var gc engine.GCReport
	if err := json.Unmarshal([]byte(w.afterReboot("gc", "--explain", "--json")), &gc); err != nil {
		t.Fatal(err)
	}
	if len(gc.Freed) != 1 || gc.Freed[0].Ref != "v" ||
		gc.Freed[0].Why != "it was ephemeral, and the host has started again" {
		t.Errorf("gc freed %+v", gc.Freed)
	}
	if after := w.state(); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}

	w.check()
	w.pando("deinit", "--force")
	w.nothingLeft()
}

func (w *world) sql(stmt string) {
	w.t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(w.dir, "catalog.db"))
	if err != nil {
		w.t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(stmt); err != nil {
		w.t.Fatal(err)
	}
}

// TestOldCatalogue: a catalogue that is restored from a copy knows less than the
// pool. Nothing is lost by that, not even after a reboot, and a rebuild brings
// all of it back.
func TestOldCatalogue(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: another boot ID needs root: run the tests as root")
	}
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "v")
			w.sql("PRAGMA wal_checkpoint(TRUNCATE)")
			old, err := os.ReadFile(filepath.Join(w.dir, "catalog.db"))
			if err != nil {
				t.Fatal(err)
			}
			w.pando("clone", "g", "w")
			w.pando("golden", "publish", "g2", "w", "--no-progress")
			want := w.state()
			for _, ext := range []string{"", "-wal", "-shm"} {
				if err := os.Remove(filepath.Join(w.dir, "catalog.db"+ext)); err != nil && !os.IsNotExist(err) {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(w.dir, "catalog.db"), old, 0o600); err != nil {
				t.Fatal(err)
			}
			// The copy was made in an earlier boot.
			w.sql("UPDATE meta SET value = 'an earlier boot' WHERE key = 'boot'")
			w.sql("UPDATE meta SET value = '0' WHERE key = 'boot_at'")
			if _, err := w.try("gc"); err == nil || !strings.Contains(err.Error(), "it lost its last") ||
				!strings.Contains(err.Error(), "init --rebuild") {
				t.Errorf("gc with an old catalogue: %v", err)
			}
			// The same if nothing tells that it is old.
			if err := os.Remove(filepath.Join(w.dir, "catalog.seen")); err != nil {
				t.Fatal(err)
			}
			if out := w.afterReboot("gc"); !strings.Contains(out, "init --rebuild") {
				t.Errorf("gc with an old catalogue: %s", out)
			}
			w.pando("init", "--rebuild")
			if after := w.state(); after != want {
				t.Errorf("wanted:\n%safter a rebuild:\n%s", want, after)
			}
			w.check()
			w.pando("clone", "g2", "x", "--mount")
			w.sameTree(w.source, filepath.Join(w.dir, "mnt", "x"))
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}
