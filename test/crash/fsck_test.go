//go:build linux && (amd64 || arm64)

package crash

import (
	"context"
	"database/sql"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/driver"
	"pando/internal/driver/drivertest"
	"pando/internal/testing/faulttest"
)

// fresh makes a volume as it was cloned from g, without snapshots.
func (w *world) fresh(volume string) {
	w.t.Helper()
	w.gone(volume)
	w.pando("clone", "g@1", volume)
}

func (w *world) ask(q string, args ...any) string {
	w.t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(w.dir, "catalog.db")+"?_pragma=busy_timeout(5000)")
	if err != nil {
		w.t.Fatal(err)
	}
	defer db.Close()
	var out sql.NullString
	if err := db.QueryRow(q, args...).Scan(&out); err != nil && err != sql.ErrNoRows {
		w.t.Fatalf("%s: %v", q, err)
	}
	return out.String
}

// damage breaks what a repair can mend, and what the other commands do not mind:
// an identity, the row of a golden, a mode or a filesystem.
func (w *world) damage(volume string) {
	w.t.Helper()
	must := func(err error) {
		if err != nil {
			w.t.Fatal(err)
		}
	}
	id := w.ask("SELECT id FROM objects WHERE kind = 'volume' AND name = ?", volume)
	if !driver.ValidID(id) {
		w.t.Fatalf("%s has the ID %q", volume, id)
	}
	objects := filepath.Join(w.dir, "data", "objects")
	meta := filepath.Join(objects, id+".meta")
	text := drivertest.ReadMeta(meta)
	must(drivertest.WriteMeta(meta, drivertest.Sealed(strings.Replace(text, `"origin":"g@1"`, `"origin":"other"`, 1))))
	w.ask("UPDATE goldens SET next = 1 WHERE name = 'g' RETURNING name")
	if w.kind.name != "reflink" {
		return
	}
	out, err := exec.Command("debugfs", "-w", "-R", "freeb 1 400", filepath.Join(objects, id+".img")).CombinedOutput()
	if err != nil {
		w.t.Fatalf("debugfs: %v: %s", err, out)
	}
}

// TestRebuildKilled kills a rebuild at every step. What comes after works or
// says what to do, and the next rebuild brings everything back.
func TestRebuildKilled(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "base")
			w.pando("snapshot", "base", "s")
			w.pando("pin", "base")
			w.pando("clone", "base", "v")
			before := w.peek()
			explained := 0
			sweep := w.sweepOf(faulttest.Plan{Mode: faulttest.KillBefore}, 1)
			last := sweep.Each(t, func(p faulttest.Plan) faulttest.Result {
				return w.traced(p, "init", "--rebuild")
			}, func(faulttest.Result) {
				if out, err := w.try("ls", "-q"); err != nil {
					if explained++; !strings.Contains(err.Error(), "hint: rebuild it from the pool: `pando init --rebuild`") {
						t.Errorf("not explained: %v", err)
					}
					w.pando("init", "--rebuild", "--json")
				} else if out != "base\nv\n" {
					t.Errorf("the catalogue is there, and not whole: %q", out)
				}
				if after := w.state(); after != before {
					t.Errorf("before:\n%safter:\n%s", before, after)
				}
				w.noOtherThan("rebuild.inprogress")
				w.check()
			})
			if last.ExitCode != 0 || explained == 0 && !sweep.Sampled() {
				t.Errorf("exit %d: %s; %d kills left no catalogue", last.ExitCode, last.Stderr, explained)
			}
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// noOtherThan: a directory that a killed rebuild left goes with the next.
func (w *world) noOtherThan(name string) {
	w.t.Helper()
	if _, err := os.Lstat(filepath.Join(w.dir, name)); err != nil {
		return
	}
	w.pando("init", "--rebuild")
	if _, err := os.Lstat(filepath.Join(w.dir, name)); err == nil {
		w.t.Errorf("LEAK: %s", name)
	}
}

// TestRebuildAfterKilledRewind kills a rewind at every step and then makes the
// catalogue anew: there is one volume of the name, as it was or rewound, and if
// rewound, the other is its snapshot.
func TestRebuildAfterKilledRewind(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "base")
			var before string
			both := 0
			sweep := w.sweepOf(faulttest.Plan{Mode: faulttest.KillBefore}, 1)
			sweep.Each(t, func(p faulttest.Plan) faulttest.Result {
				w.onlySnapshot("base", "s")
				before = w.peek()
				return w.traced(p, "rewind", "base", "s")
			}, func(faulttest.Result) {
				n := 0
				metas, _ := filepath.Glob(filepath.Join(w.dir, "data/objects/*.meta"))
				for _, m := range metas {
					if strings.Contains(drivertest.ReadMeta(m), `"kind":"volume","name":"base"`) {
						n++
					}
				}
				if n > 1 {
					both++
				}
				w.pando("init", "--rebuild")
				if after := w.state(); after != before && after != rewound(before) {
					t.Errorf("before:\n%safter:\n%swanted that or:\n%s", before, after, rewound(before))
				}
				w.check()
				if out, err := w.try("fsck", "--no-progress"); err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			})
			if both == 0 && !sweep.Sampled() && os.Getenv(faulttest.AtVariable) == "" {
				t.Error("no kill left two objects of the name: this shows nothing")
			}
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// traced runs a command under a plan.
func (w *world) traced(p faulttest.Plan, args ...string) faulttest.Result {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	res, err := faulttest.Run(ctx, append([]string{pando, "--pool", w.dir}, args...),
		faulttest.Options{Plan: p, KillGroup: true})
	if err != nil {
		w.t.Fatal(err)
	}
	return res
}
