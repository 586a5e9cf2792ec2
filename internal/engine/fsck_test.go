package engine_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/drivertest"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// fsck checks a pool.
func fsck(t *testing.T, dir string, repair bool, refs ...string) *check.Report {
	t.Helper()
	q := check.Request{Repair: repair}
	for _, s := range refs {
		r, err := ref.Parse("test", s)
		if err != nil {
			t.Fatal(err)
		}
		q.Refs = append(q.Refs, r)
	}
	r, err := engine.Fsck(t.Context(), dir, q, drivers)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func findings(r *check.Report) string {
	var b strings.Builder
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "%s %s %s: %s | %s | %s%s | %s\n", f.Severity, f.Code, f.Ref, f.Message, f.Repair, f.Repaired,
			f.Failed, f.Detail)
	}
	return b.String()
}

// TestFsckOfHealthyPool: a pool with everything in it, with volumes mounted and
// being written, has no finding; and checking it changes nothing.
func TestFsckOfHealthyPool(t *testing.T) {
	for _, k := range poolKinds {
		t.Run(k.name, func(t *testing.T) {
			e := k.make(t)
			richPool(t, e)
			vs, err := e.Volumes(t.Context(), engine.VolumesRequest{})
			if err != nil {
				t.Fatal(err)
			}
			stop, stopped := make(chan struct{}), make(chan struct{})
			for _, v := range vs {
				if v.Name == "busy" {
					go func() {
						defer close(stopped)
						for i := 0; ; i++ {
							select {
							case <-stop:
								return
							default:
								dir := filepath.Join(v.Mountpoint, fmt.Sprint("d", i%50))
								_ = os.RemoveAll(dir)
								_ = os.Mkdir(dir, 0o700)
								_ = os.WriteFile(filepath.Join(dir, "f"), bytes.Repeat([]byte("x"), i%100000), 0o600)
							}
						}
					}()
				}
			}
			before, objects := dump(t, e.Dir()), objectNames(t, e.Dir())
			for _, repair := range []bool{false, true} {
				r := fsck(t, e.Dir(), repair)
				if len(r.Findings) > 0 || !r.OK {
					t.Errorf("repair %v: found\n%s", repair, findings(r))
				}
				images := 0
				if e.Caps().FS[0].IsImage() {
					images = len(objects)/2 - 2 // raw and its clone have no filesystem
				}
				if k := r.Checked; k.Images+k.Shared != images || images+k.Trees+k.Raw != len(objects)/2 {
					t.Errorf("checked %+v of %d objects", r.Checked, len(objects)/2)
				}
			}
			close(stop)
			<-stopped
			sameDump(t, "checked", before, dump(t, e.Dir()))
			if after := objectNames(t, e.Dir()); !slices.Equal(objects, after) {
				t.Errorf("objects before %v, after %v", objects, after)
			}
		})
	}
}

func objectNames(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "data", "objects"))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// broken is a pool in which a test breaks something.
type broken struct {
	t   *testing.T
	e   *engine.Engine
	dir string
	ids map[string]string // by reference
}

func (b *broken) path(ref, ext string) string {
	b.t.Helper()
	if b.ids[ref] == "" {
		b.t.Fatalf("no object %s", ref)
	}
	return filepath.Join(b.dir, "data", "objects", b.ids[ref]+ext)
}

func (b *broken) data(ref string) string {
	for _, ext := range []string{".img", ".subvol", ".tree"} {
		if _, err := os.Lstat(b.path(ref, ext)); err == nil {
			return b.path(ref, ext)
		}
	}
	b.t.Fatalf("%s has no data", ref)
	return ""
}

func (b *broken) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *broken) sql(q string, args ...any) {
	b.t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(b.dir, "catalog.db")+"?_pragma=busy_timeout(5000)")
	b.must(err)
	defer db.Close()
	r, err := db.Exec(q, args...)
	b.must(err)
	if n, err := r.RowsAffected(); err != nil || n == 0 && !strings.HasPrefix(q, "DROP") {
		b.t.Fatalf("%s: changed %d rows, %v", q, n, err)
	}
}

// meta changes the identity of an object.
func (b *broken) meta(ref string, change func(string) string) {
	b.t.Helper()
	old := drivertest.ReadMeta(b.path(ref, ".meta"))
	next := change(old)
	if next == old {
		b.t.Fatalf("%s is not changed", old)
	}
	b.must(drivertest.WriteMeta(b.path(ref, ".meta"), drivertest.Sealed(next)))
}

func (b *broken) removeData(ref string) {
	b.t.Helper()
	data := b.data(ref)
	if strings.HasSuffix(data, ".subvol") {
		dir, err := os.Open(filepath.Dir(data))
		b.must(err)
		defer dir.Close()
		b.must(kernel.SubvolDestroy(dir, filepath.Base(data)))
		return
	}
	b.must(os.RemoveAll(data))
}

// flip overwrites metadata inside an image.
func (b *broken) flip(ref string, off int64, what []byte) {
	b.t.Helper()
	f, err := os.OpenFile(b.data(ref), os.O_RDWR, 0)
	b.must(err)
	defer f.Close()
	_, err = f.WriteAt(what, off)
	b.must(err)
	b.must(f.Sync())
}

// faults are what can be wrong, and what fsck makes of it.
var fsckFaults = []struct {
	name  string
	only  string // kind of pool
	spoil func(*broken)
	code  string
	left  bool   // it cannot be repaired
	note  bool   // it is no more than a note
	loses string // the line of a thing that is gone after the repair; the rest is as before
	gains bool   // something new is there after the repair
}{
	{name: "identity-edited", code: "identity-differs", spoil: func(b *broken) {
		b.meta("v", func(s string) string { return strings.Replace(s, `"name":"v"`, `"name":"other"`, 1) })
	}},
	{name: "identity-of-golden-keep", code: "identity-differs", spoil: func(b *broken) {
		b.sql("UPDATE goldens SET keep = 7 WHERE name = 'g'")
	}, gains: true},
	{name: "identity-pin-only-in-catalogue", code: "identity-differs", spoil: func(b *broken) {
		b.sql("UPDATE objects SET pinned = 4102444800000000000 WHERE name = 's'")
	}, gains: true},
	{name: "identity-owner-only-in-catalogue", code: "identity-differs", spoil: func(b *broken) {
		b.sql("UPDATE objects SET owner = 7 WHERE name = 's'")
	}, gains: true},
	{name: "identity-of-golden-labels", code: "identity-differs", spoil: func(b *broken) {
		b.sql(`UPDATE goldens SET labels = '{"k":"v"}' WHERE name = 'g'`)
	}, gains: true},
	{name: "identity-labels-only-in-pool", code: "identity-differs", spoil: func(b *broken) {
		b.meta("v", func(s string) string { return strings.Replace(s, `"name":"v"`, `"name":"v","labels":{"k":"v"}`, 1) })
	}},
	{name: "identity-garbage", code: "identity-unreadable", spoil: func(b *broken) {
		b.meta("v", func(string) string { return "{nonsense" })
	}},
	{name: "identity-foreign", code: "identity-unreadable", spoil: func(b *broken) {
		b.meta("v@s", func(s string) string { return strings.Replace(s, `"pool":"`, `"pool":"x`, 1) })
	}},
	{name: "identity-too-new", code: "identity-too-new", left: true, spoil: func(b *broken) {
		b.meta("v", func(s string) string { return strings.Replace(s, `"v":1`, `"v":9`, 1) })
	}},
	{name: "identity-gone", code: "identity-missing", spoil: func(b *broken) {
		b.must(os.Remove(b.path("g@1", ".meta")))
	}},
	{name: "identity-is-a-link", code: "identity-unreadable", spoil: func(b *broken) {
		b.must(os.Remove(b.path("v", ".meta")))
		b.must(os.Symlink("x", b.path("v", ".meta")))
	}},
	{name: "identity-bit-flipped", code: "identity-unreadable", spoil: func(b *broken) {
		b.must(drivertest.WriteMeta(b.path("v", ".meta"),
			strings.Replace(drivertest.ReadMeta(b.path("v", ".meta")), `"name":"v"`, `"name":"w"`, 1)))
	}},
	{name: "identity-leftover", code: "identity-leftover", note: true, spoil: func(b *broken) {
		b.must(os.Symlink("x", b.path("v", ".meta.new")))
	}},
	{name: "predecessor", code: "predecessor", spoil: func(b *broken) {
		b.meta("v@s", func(s string) string { return strings.Replace(s, `"kind":"snapshot"`, `"kind":"volume"`, 1) })
	}},
	{name: "volume-data-gone", code: "object-missing", loses: "w", spoil: func(b *broken) { b.removeData("w") }},
	{name: "volume-all-gone", code: "object-missing", loses: "w", spoil: func(b *broken) {
		b.removeData("w")
		b.must(os.Remove(b.path("w", ".meta")))
	}},
	{name: "current-generation-gone", code: "object-missing", loses: "g|2", gains: true, spoil: func(b *broken) {
		b.removeData("g@2")
	}},
	{name: "row-of-volume-gone", code: "object-unknown", spoil: func(b *broken) {
		b.sql("DELETE FROM objects WHERE name = 'w'")
	}},
	{name: "row-of-snapshot-gone", code: "object-unknown", spoil: func(b *broken) {
		b.sql("DELETE FROM objects WHERE name = 's'")
	}},
	{name: "row-of-volume-with-snapshot-gone", code: "object-unknown", spoil: func(b *broken) {
		b.sql("DELETE FROM objects WHERE name = 'v'")
	}},
	{name: "row-of-generation-gone", code: "object-unknown", spoil: func(b *broken) {
		b.sql("DELETE FROM objects WHERE kind = 'generation' AND generation = 2")
	}},
	{name: "row-of-golden-gone", code: "golden-missing", spoil: func(b *broken) { b.sql("DELETE FROM goldens") }},
	{name: "row-gone-name-taken", code: "object-unknown", gains: true, loses: "w", spoil: func(b *broken) {
		b.sql("DELETE FROM objects WHERE name = 'w'")
		clone(b.t, b.e, "g", "w", false)
	}},
	{name: "half-object", code: "object-half", spoil: func(b *broken) {
		b.must(os.Symlink("{}", filepath.Join(b.dir, "data/objects", string(driver.NewID())+".meta.new")))
	}},
	{name: "foreign-object", code: "identity-unreadable", left: true, spoil: func(b *broken) {
		b.must(os.Symlink("{}", filepath.Join(b.dir, "data/objects", string(driver.NewID())+".meta")))
	}},
	{name: "volume-and-row-gone", code: "snapshot-orphan", gains: true, loses: "v", spoil: func(b *broken) {
		b.removeData("v")
		b.must(os.Remove(b.path("v", ".meta")))
		b.sql("DELETE FROM objects WHERE kind = 'volume' AND name = 'v'")
	}},
	{name: "golden-current", code: "golden-current", spoil: func(b *broken) { b.sql("UPDATE goldens SET current = 5") }},
	{name: "golden-next", code: "golden-next", spoil: func(b *broken) { b.sql("UPDATE goldens SET next = 2") }},
	{name: "golden-empty", code: "golden-empty", spoil: func(b *broken) {
		b.sql("INSERT INTO goldens (name, current, next, created_at, owner) VALUES ('empty', 1, 2, 3, 0)")
	}},
	{name: "two-of-a-name", code: "catalogue", left: true, spoil: func(b *broken) {
		b.sql("UPDATE objects SET name = 'g' WHERE name = 'w'")
	}},
	{name: "index-gone", code: "catalogue", left: true, spoil: func(b *broken) { b.sql("DROP INDEX volume_name") }},
	{name: "attachment-gone", code: "attachment-gone", note: true, spoil: func(b *broken) {
		b.sql("INSERT INTO attachments VALUES (?, '/nowhere', -1, 77, 0, 0, 1, 0, -1, -1, 'another boot', 1)", b.ids["v"])
	}},
	{name: "attachment-orphan", code: "attachment-orphan", spoil: func(b *broken) {
		b.sql("INSERT INTO attachments VALUES (?, '/nowhere', -1, 77, 0, 0, 1, 0, -1, -1, 'another boot', 1)",
			string(driver.NewID()))
	}},
	{name: "tombstone", code: "tombstone", note: true, loses: "w", spoil: func(b *broken) {
		b.sql("INSERT INTO tombstones VALUES (?, 'w', 0, 1, 0)", b.ids["w"])
		b.sql("DELETE FROM objects WHERE id = ?", b.ids["w"])
	}},
	{name: "current-generation-at-work", code: "mark", note: true, spoil: func(b *broken) {
		b.sql("INSERT INTO marks SELECT id, 'pin', '', '', '', 0, 0, 'p-dead', 1, 1, 'x', 1 FROM objects WHERE golden = " +
			"'g' AND generation = 2 AND kind = 'generation'")
	}},
	{name: "mark-of-dead", code: "mark", note: true, spoil: func(b *broken) {
		b.sql("INSERT INTO marks VALUES (?, 'pin', '', '', '', 0, 0, 'p-dead', 1, 1, 'x', 1)", b.ids["v"])
	}},
	{name: "live-file-of-dead", code: "live", note: true, spoil: func(b *broken) {
		b.must(os.WriteFile(filepath.Join(b.dir, "live", "p-stale"), nil, 0o600))
	}},
	{name: "pool-mode", code: "pool-mode", spoil: func(b *broken) {
		b.must(os.Chmod(filepath.Join(b.dir, "mnt"), 0o777))
	}},
	{name: "catalogue-mode", code: "pool-mode", spoil: func(b *broken) {
		b.must(os.Chmod(filepath.Join(b.dir, "catalog.db"), 0o644))
	}},
	{name: "pool-missing", code: "pool-missing", spoil: func(b *broken) {
		b.must(os.Remove(filepath.Join(b.dir, "mnt")))
	}},

	{name: "subvolume-writable", only: "btrfs", code: "object-mode", spoil: func(b *broken) { b.readOnly("v@s", false) }},
	{name: "subvolume-read-only", only: "btrfs", code: "object-mode", spoil: func(b *broken) { b.readOnly("v", true) }},
	{name: "image-writable", only: "reflink", code: "object-mode", spoil: func(b *broken) {
		b.must(os.Chmod(b.data("g@1"), 0o600))
	}},
	{name: "image-open-to-all", only: "reflink", code: "object-mode", spoil: func(b *broken) {
		b.must(os.Chmod(b.data("v"), 0o666))
	}},
	{name: "image-long", only: "reflink", code: "image-long", gains: true, loses: "v|g", spoil: func(b *broken) {
		b.must(os.Truncate(b.data("v"), 80<<20))
	}},
	{name: "volume-short", only: "reflink", code: "image-short", gains: true, loses: "v|g", spoil: func(b *broken) {
		b.must(os.Truncate(b.data("w"), 60<<20))
	}},
	{name: "snapshot-short", only: "reflink", code: "image-short", left: true, spoil: func(b *broken) {
		b.must(os.Truncate(b.data("v@s"), 60<<20))
	}},
	{name: "loop-by-hand", only: "reflink", code: "loop", spoil: func(b *broken) {
		f, err := os.OpenFile(b.data("v"), os.O_RDWR, 0)
		b.must(err)
		defer f.Close()
		d, err := loopdev.Attach(context.Background(), f, loopdev.Options{KeepOpen: true})
		b.must(err)
		b.must(d.Close())
	}},
	{name: "ext4-inode-table", only: "reflink", code: "filesystem", gains: true, spoil: func(b *broken) {
		b.debugfs("w", "sif <2> links_count 7")
	}},
	{name: "ext4-bitmap", only: "reflink", code: "filesystem", gains: true, spoil: func(b *broken) {
		b.debugfs("w", "freeb 1 400")
	}},
	{name: "ext4-superblock", only: "reflink", code: "filesystem", gains: true, spoil: func(b *broken) {
		b.flip("big", 1024, make([]byte, 1024))
	}},
	{name: "ext4-superblock-without-backup", only: "reflink", code: "filesystem", left: true, spoil: func(b *broken) {
		b.flip("w", 1024, make([]byte, 1024))
	}},
	{name: "ext4-of-snapshot", only: "reflink", code: "filesystem", left: true, spoil: func(b *broken) {
		b.debugfs("v@s", "freeb 1 400")
	}},
	{name: "ext4-of-generation", only: "reflink", code: "filesystem", left: true, spoil: func(b *broken) {
		b.flip("g@1", 1024, make([]byte, 1024))
	}},
	{name: "xfs-agf", only: "reflink", code: "filesystem", gains: true, spoil: func(b *broken) {
		b.flip("xv", 4096+16, bytes.Repeat([]byte{0x5a}, 64))
	}},
	{name: "xfs-superblock", only: "reflink", code: "filesystem", gains: true, spoil: func(b *broken) {
		b.flip("xv", 0, make([]byte, 512))
	}},
}

func (b *broken) readOnly(ref string, ro bool) {
	b.t.Helper()
	f, err := os.Open(b.data(ref))
	b.must(err)
	defer f.Close()
	b.must(kernel.SubvolSetReadOnly(f, ro))
}

func (b *broken) debugfs(ref, command string) {
	b.t.Helper()
	out, err := exec.Command("debugfs", "-w", "-R", command, b.data(ref)).CombinedOutput()
	if err != nil {
		b.t.Fatalf("debugfs: %v: %s", err, out)
	}
}

// newBroken makes a small pool: golden g of two generations, volumes v (with
// snapshot s) and w, and of images an XFS volume xv.
func newBroken(t *testing.T, e *engine.Engine) *broken {
	t.Helper()
	b := &broken{t: t, e: e, dir: e.Dir(), ids: map[string]string{}}
	src := source(t)
	images := e.Caps().FS[0].IsImage()
	for i := range 2 {
		q := engine.ImportRequest{Name: ref.MustName("g"), Source: src, Update: i > 0}
		if images {
			q.SizeBytes = 64 << 20
		}
		_, err := e.Import(t.Context(), q)
		b.must(err)
	}
	clone(t, e, "g", "v", false)
	clone(t, e, "g", "w", false)
	_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName("s")})
	b.must(err)
	if images {
		_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("x"), Source: src, FS: driver.XFS,
			SizeBytes: 320 << 20})
		b.must(err)
		clone(t, e, "x", "xv", false)
		// has a second superblock
		_, err = e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("big"),
			SizeBytes: 256 << 20})
		b.must(err)
	}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(b.dir, "catalog.db")+"?mode=ro")
	b.must(err)
	defer db.Close()
	rows, err := db.Query(`SELECT id, CASE kind WHEN 'volume' THEN name WHEN 'snapshot' THEN 'v@' || name
		ELSE golden || '@' || generation END FROM objects`)
	b.must(err)
	defer rows.Close()
	for rows.Next() {
		var id, name string
		b.must(rows.Scan(&id, &name))
		b.ids[name] = id
	}
	b.must(rows.Err())
	return b
}

// TestFsckFinds makes each fault in a pool: it is found under its name, a check alone
// changes nothing, a repair repairs it and nothing else, and then nothing is found any
// more. What can happen to each kind of pool happens to one of them, in turn.
func TestFsckFinds(t *testing.T) {
	testfs.NotShort(t, "it does one thing after the other")
	const again = 4 // one in so many faults is checked twice, whichever it is: a second check finds the same
	drawn := faulttest.Draw(t, again)
	turn := faulttest.DrawInside(t, len(poolKinds), again)
	for turnOf, k := range poolKinds {
		t.Run(k.name, func(t *testing.T) {
			e := k.make(t)
			for i, f := range fsckFaults {
				switch {
				case f.only != "" && f.only != k.name:
					continue
				case f.only == "" && (i+turn)%len(poolKinds) != turnOf && !faulttest.Full():
					continue
				}
				t.Run(f.name, func(t *testing.T) {
					b := newBroken(t, e)
					t.Cleanup(func() { emptyPool(t, e) })
					if i == 0 { // all begin with the same
						if r := fsck(t, b.dir, false); len(r.Findings) > 0 {
							t.Fatalf("before anything is broken:\n%s", findings(r))
						}
					}
					before := dump(t, b.dir)
					f.spoil(b)
					wrong := dump(t, b.dir)
					r := fsck(t, b.dir, false)
					at := slices.IndexFunc(r.Findings, func(x check.Finding) bool { return x.Code == f.code })
					if at < 0 {
						t.Fatalf("wanted %s, found\n%s", f.code, findings(r))
					}
					if note := r.Findings[at].Severity == "note"; note != f.note || r.OK != f.note {
						t.Errorf("ok %v: %s", r.OK, findings(r))
					}
					sameDump(t, "only checked", wrong, dump(t, b.dir))
					if i%again == drawn {
						if again := fsck(t, b.dir, false); findings(again) != findings(r) {
							t.Errorf("checked once:\n%sand once more:\n%s", findings(r), findings(again))
						}
					}
					r = fsck(t, b.dir, true)
					if r.OK != !f.left {
						t.Errorf("repaired, ok %v:\n%s", r.OK, findings(r))
					}
					again := fsck(t, b.dir, false)
					if again.OK != !f.left || !f.left && slices.ContainsFunc(again.Findings, func(x check.Finding) bool {
						return x.Severity != "note" || x.Code == f.code && f.note
					}) {
						t.Errorf("after the repair\n%s\nfound again:\n%s", findings(r), findings(again))
					}
					after := dump(t, b.dir)
					for _, l := range before {
						if !slices.Contains(after, l) && f.loses == "" && !f.gains && !f.left {
							t.Errorf("gone: %s", l)
						}
					}
					for _, l := range after {
						if !slices.Contains(before, l) && !f.gains && !f.left {
							t.Errorf("new: %s", l)
						}
					}
					if f.code == "filesystem" && !f.left {
						b.readable(r.Findings[at].Ref)
					}
				})
			}
		})
	}
}

// readable mounts a volume and reads what was imported.
func (b *broken) readable(name string) {
	b.t.Helper()
	i, err := b.e.Mount(b.t.Context(), engine.MountRequest{Volume: ref.MustName(name)})
	b.must(err)
	got, err := os.ReadFile(filepath.Join(i.Mountpoint, "file"))
	if err != nil || string(got) != "content" {
		b.t.Errorf("%s holds %q, %v", name, got, err)
	}
	_, err = b.e.Umount(b.t.Context(), engine.UmountRequest{Volume: ref.MustName(name)})
	b.must(err)
}

// emptyPool makes a pool as it was made, whatever is broken in it.
func emptyPool(t *testing.T, e *engine.Engine) {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(e.Dir(), "catalog.db")+"?_pragma=busy_timeout(5000)")
	must(err)
	defer db.Close()
	for _, table := range []string{"objects", "goldens", "attachments", "tombstones", "marks"} {
		_, err := db.Exec("DELETE FROM " + table)
		must(err)
	}
	_, err = db.Exec("CREATE UNIQUE INDEX IF NOT EXISTS volume_name ON objects(name) WHERE kind = 'volume'")
	must(err)
	for _, n := range objectNames(t, e.Dir()) {
		path := filepath.Join(e.Dir(), "data", "objects", n)
		if strings.HasSuffix(n, ".subvol") {
			dir, err := os.Open(filepath.Dir(path))
			must(err)
			must(kernel.SubvolDestroy(dir, n))
			dir.Close()
			continue
		}
		must(os.RemoveAll(path))
	}
}

// TestFsckOfDamagedCatalog: it is found, and the hint leads to what helps.
func TestFsckOfDamagedCatalog(t *testing.T) {
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: "plain"})
	importTree(t, e, "g", source(t))
	e.Close()
	path := filepath.Join(e.Dir(), "catalog.db")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	page := bytes.Clone(good)
	copy(page[len(page)-8192:], bytes.Repeat([]byte{0xa5}, 8000)) // the last two pages
	for what, content := range map[string][]byte{"not a database": bytes.Repeat([]byte("garbage "), 1000),
		"pages overwritten": page, "empty": nil} {
		t.Run(what, func(t *testing.T) {
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			for _, repair := range []bool{false, true} {
				r := fsck(t, e.Dir(), repair)
				if r.OK || len(r.Findings) == 0 || r.Findings[0].Code != "catalogue" ||
					!strings.Contains(r.Findings[0].Repair.String(), `operation "init" with parameter "rebuild"`) {
					t.Errorf("found %v:\n%s", r.OK, findings(r))
				}
			}
			if _, err := engine.Rebuild(t.Context(), e.Dir(), drivers); err != nil {
				t.Fatal(err)
			}
			if r := fsck(t, e.Dir(), false); !r.OK || len(r.Findings) > 0 {
				t.Errorf("rebuilt:\n%s", findings(r))
			}
		})
	}
}

// TestFsckLeavesWhatIsInUse: a damaged volume that is mounted is found and left
// alone, and repaired when it is not.
func TestFsckLeavesWhatIsInUse(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a pool of images needs root: run the tests as root")
	}
	e := newPool(t, t.TempDir(), engine.InitRequest{SizeBytes: 2 << 30, MinFreePercent: 1})
	b := newBroken(t, e)
	b.debugfs("w", "sif <2> links_count 7") // which the kernel does not see; bitmaps it reads some time after a mount
	_, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("w")})
	b.must(err)
	before := dump(t, b.dir)
	r := fsck(t, b.dir, true)
	if r.OK || len(r.Findings) != 1 || r.Findings[0].Code != "filesystem" ||
		!strings.Contains(r.Findings[0].Failed, "mounted") {
		t.Errorf("found\n%s", findings(r))
	}
	sameDump(t, "mounted", before, dump(t, b.dir))
	_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("w")})
	b.must(err)
	if r := fsck(t, b.dir, true, "v"); !r.OK || r.Checked.Images != 1 {
		t.Errorf("of v alone: %+v\n%s", r.Checked, findings(r))
	}
	if r := fsck(t, b.dir, true, "w"); !r.OK || len(r.Findings) != 1 {
		t.Errorf("unmounted:\n%s", findings(r))
	}
	b.readable("w")
	if _, err := engine.Fsck(t.Context(), b.dir, check.Request{Refs: []ref.Ref{{Name: "nobody"}}}, drivers); !errs.Is(err,
		errs.NotFound) {
		t.Errorf("of a volume that is not there: %v", err)
	}
}

// TestFsckWithoutPrograms: what cannot be checked is not passed over in silence.
func TestFsckWithoutPrograms(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a pool of images needs root: run the tests as root")
	}
	e := newPool(t, t.TempDir(), engine.InitRequest{SizeBytes: 2 << 30, MinFreePercent: 1})
	newBroken(t, e)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := engine.Fsck(ctx, e.Dir(), check.Request{}, drivers); errs.KindOf(err) != errs.Canceled {
		t.Errorf("interrupted: %v", err)
	}
	engine.HideProgram(t, "e2fsck")
	r := fsck(t, e.Dir(), false)
	if r.OK || r.Checked.Images+r.Checked.Shared != 2 || len(r.Findings) != 6 || r.Findings[0].Code != "skipped" ||
		!strings.Contains(r.Findings[0].Repair.String(), "e2fsprogs") {
		t.Errorf("%+v\n%s", r.Checked, findings(r))
	}
}

// beforeBoot changes the text of an identity to one that was made an hour before this boot.
func beforeBoot(t *testing.T, text string) string {
	t.Helper()
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		t.Fatal(err)
	}
	then := time.Now().Add(-time.Duration(up.Nano()) - time.Hour).UTC()
	if !strings.Contains(text, `"at":"19`) {
		text = regexp.MustCompile(`"at":"[^"]*"`).ReplaceAllString(text, `"at":"`+then.Format(time.RFC3339)+`"`)
	}
	return strings.Replace(text, `"boot":"`+kernel.BootID()+`"`, `"boot":"another"`, 1)
}

// TestFsckAfterBoot: what a power loss left half made is a note, and goes with
// a repair as with any command; so does what was being made long ago. What may have been
// committed stays.
func TestFsckAfterBoot(t *testing.T) {
	for _, c := range []struct {
		name, code string
		mode       os.FileMode // of the identity: 0400 says that it was committed
		old, new   string      // change of the identity
		gone       bool
	}{
		{"ephemeral", "object-half", 0o400, `"boot":"`, `"eph":true,"boot":"`, true},
		{"long ago", "object-half", 0o600, `"at":"20`, `"at":"19`, true},
		{"unfinished", "object-unfinished", 0o600, "", "", false},
		{"committed", "object-unknown", 0o400, "", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newPool(t, t.TempDir(), engine.InitRequest{Driver: "plain"})
			b := newBroken(t, e)
			b.sql("UPDATE meta SET value = 'another' WHERE key = 'boot'")
			b.sql("UPDATE meta SET value = '0' WHERE key = 'boot_at'")
			b.sql("DELETE FROM objects WHERE name = 'w'")
			b.meta("w", func(s string) string {
				s = strings.Replace(s, c.old, c.new, 1)
				return beforeBoot(t, s)
			})
			b.must(os.Chmod(b.path("w", ".meta"), c.mode))

			r := fsck(t, b.dir, false)
			if len(r.Findings) != 1 || r.Findings[0].Code != c.code || len(r.Notes) == 0 ||
				r.OK != (c.code != "object-unknown") {
				t.Errorf("notes %q, found\n%s", r.Notes, findings(r))
			}
			if r = fsck(t, b.dir, true); !r.OK || c.gone &&
				(len(r.Findings) > 0 || !strings.Contains(r.Notes[0], "removed 1 incomplete")) {
				t.Errorf("repaired: notes %q, found\n%s", r.Notes, findings(r))
			}
			if _, err := os.Lstat(b.path("w", ".tree")); (err != nil) != c.gone {
				t.Errorf("gone %v, want %v", err, c.gone)
			}
		})
	}
}
