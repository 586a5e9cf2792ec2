package objdir_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/drivertest"
	"pando/internal/driver/objdir"
	"pando/internal/testing/testfs"
)

const (
	pool = "pool0000000000000000000000"
	ext  = ".img"
)

func open(t *testing.T, dir string) *objdir.Dir {
	t.Helper()
	d, err := objdir.Open(dir, pool, ext, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func volume(name string) driver.Identity {
	return driver.Identity{
		ID: driver.NewID(), Kind: driver.Volume, Name: name, FS: driver.Ext4, SizeBytes: 1 << 30,
		CreatedAt: time.Date(2026, 3, 4, 5, 6, 7, 8, time.UTC), BootID: "boot",
	}
}

// put makes a whole object.
func put(t *testing.T, d *objdir.Dir, id driver.Identity) {
	t.Helper()
	if err := os.WriteFile(d.Data(id.ID), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Put(id, objdir.InMemory); err != nil {
		t.Fatal(err)
	}
}

// written is what the identity reads back as.
func metaPath(d *objdir.Dir, id driver.ObjectID) string {
	return filepath.Join(d.Path(), string(id)+".meta")
}

func metaText(t *testing.T, d *objdir.Dir, id driver.ObjectID) string {
	t.Helper()
	b, err := os.ReadFile(metaPath(d, id))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func written(id driver.Identity) driver.Identity {
	id.Version, id.Pool = driver.IdentityVersion, pool
	return id
}

func list(t *testing.T, d *objdir.Dir) map[driver.ObjectID]driver.Object {
	t.Helper()
	out := map[driver.ObjectID]driver.Object{}
	for o, err := range d.List(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := out[o.ID]; twice {
			t.Errorf("%s was listed twice", o.ID)
		}
		out[o.ID] = o
	}
	return out
}

func wantKind(t *testing.T, err error, kind errs.Kind) {
	t.Helper()
	if got := errs.KindOf(err); got != kind {
		t.Errorf("error %v is of kind %q, want %q", err, got, kind)
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	_, err := objdir.Open(dir, pool, ext, false)
	wantKind(t, err, errs.NotFound)
	d := open(t, dir)
	open(t, dir) // idempotent
	if d.Path() != filepath.Join(dir, "objects") || d.Data("x") != filepath.Join(dir, "objects", "x.img") {
		t.Errorf("%s, %s", d.Path(), d.Data("x"))
	}
	if st, err := os.Stat(d.Path()); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	_, err = objdir.Open(filepath.Join(dir, "missing"), pool, ext, true)
	wantKind(t, err, errs.NotFound)
	file := t.TempDir()
	if err := os.WriteFile(filepath.Join(file, "objects"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, create := range []bool{false, true} {
		if _, err := objdir.Open(file, pool, ext, create); err == nil {
			t.Error("a file was opened as a directory")
		}
	}
}

func TestPutGetReplaceRemove(t *testing.T) {
	d := open(t, t.TempDir())
	id := volume("web")
	_, err := d.Get(id.ID)
	wantKind(t, err, errs.NotFound)
	wantKind(t, d.Replace(id), errs.NotFound)
	if err := d.Remove(id.ID); err != nil {
		t.Errorf("removing what is not there: %v", err)
	}

	put(t, d, id)
	if got, err := d.Get(id.ID); err != nil || !reflect.DeepEqual(got, written(id)) {
		t.Errorf("%+v, %v", got, err)
	}
	wantKind(t, d.Put(id, objdir.InMemory), errs.Exists)

	id.Name, id.SizeBytes = "renamed", 2<<30
	if err := d.Replace(id); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Get(id.ID); err != nil || !reflect.DeepEqual(got, written(id)) {
		t.Errorf("%+v, %v", got, err)
	}
	if o := list(t, d); len(o) != 1 || !o[id.ID].Whole || !reflect.DeepEqual(o[id.ID].Identity, written(id)) ||
		o[id.ID].Err != nil {
		t.Errorf("%+v", o)
	}

	for range 2 {
		if err := d.Remove(id.ID); err != nil {
			t.Fatal(err)
		}
	}
	_, err = d.Get(id.ID)
	wantKind(t, err, errs.NotFound)
	if _, err := os.Stat(d.Data(id.ID)); err != nil {
		t.Errorf("Remove took the data: %v", err)
	}
	if err := d.Put(id, objdir.InMemory); err != nil {
		t.Errorf("after Remove: %v", err)
	}
	if err := d.Sync(); err != nil {
		t.Error(err)
	}
}

// What a killed Replace left neither hides the identity nor survives Remove.
func TestLeftoverOfReplace(t *testing.T) {
	d := open(t, t.TempDir())
	id := volume("web")
	put(t, d, id)
	left := filepath.Join(d.Path(), string(id.ID)+".meta.new")
	if err := os.Symlink("{}", left); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Get(id.ID); err != nil || got.Name != "web" {
		t.Errorf("%+v, %v", got, err)
	}
	if o := list(t, d); len(o) != 1 || !o[id.ID].Whole {
		t.Errorf("%+v", o)
	}
	id.Name = "new"
	if err := d.Replace(id); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Get(id.ID); err != nil || got.Name != "new" {
		t.Errorf("%+v, %v", got, err)
	}
	if err := os.Symlink("{}", left); err != nil {
		t.Errorf("Replace left it: %v", err)
	}
	if err := errors.Join(os.Remove(d.Data(id.ID)), d.Remove(id.ID)); err != nil {
		t.Fatal(err)
	}
	if o := list(t, d); len(o) != 0 {
		t.Errorf("%+v", o)
	}
}

// Replace is atomic: who reads in the meantime sees the old or the new one.
func TestReplaceIsAtomic(t *testing.T) {
	d := open(t, t.TempDir())
	id := volume("0")
	put(t, d, id)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := d.Get(id.ID); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for i := range 150 {
		id.Name = strings.Repeat("n", i%100+1)
		if err := d.Replace(id); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	wg.Wait()
}

func TestListBroken(t *testing.T) {
	d := open(t, t.TempDir())
	touch := func(name string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(d.Path(), name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	whole, dataOnly, metaOnly, tmpOnly, newOnly, damaged := volume("whole"), driver.NewID(), volume("x"), driver.NewID(),
		driver.NewID(), driver.NewID()
	put(t, d, whole)
	touch(string(whole.ID) + ".img.tmp") // belongs to it
	touch(string(dataOnly) + ".img")
	if err := d.Put(metaOnly, objdir.InMemory); err != nil {
		t.Fatal(err)
	}
	touch(string(tmpOnly) + ".img.tmp")
	if err := os.Symlink("{}", filepath.Join(d.Path(), string(newOnly)+".meta.new")); err != nil {
		t.Fatal(err)
	}
	touch(string(damaged) + ".img")
	if err := os.WriteFile(metaPath(d, damaged), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	// Not Pando's: left alone and left out.
	someID := string(driver.NewID())
	for _, name := range []string{
		"lost+found", ".meta", ".img", "README", "x.img", someID, someID + ".", someID + ".imgs", someID + ".raw", someID +
			".meta2",
		someID + "0.img", someID + ".meta.old", strings.ToUpper(someID) + ".img", someID[:25] + "-.img", someID[:25] +
			"z.meta", "." + someID + ".img",
	} {
		touch(name)
	}
	got := list(t, d)
	if len(got) != 6 {
		t.Errorf("%d objects, want 6: %+v", len(got), got)
	}
	for id, o := range got {
		switch id {
		case whole.ID:
			if !o.Whole || o.Err != nil || o.Identity.Name != "whole" {
				t.Errorf("whole: %+v", o)
			}
		case damaged:
			if o.Whole || !errs.Is(o.Err, errs.Damaged) || o.Identity != (driver.Identity{}) {
				t.Errorf("damaged: %+v", o)
			}
		case dataOnly, metaOnly.ID, tmpOnly, newOnly:
			if o.Whole || o.Err != nil || o.Identity != (driver.Identity{}) {
				t.Errorf("half: %+v", o)
			}
		default:
			t.Errorf("unknown: %+v", o)
		}
	}
}

// What cannot be looked at must not be taken for garbage, which is destroyed.
func TestListDoesNotTakeFailuresForGarbage(t *testing.T) {
	dir := t.TempDir()
	// With this extension the name of the data, but not that of the identity,
	// is too long for the filesystem.
	d, err := objdir.Open(dir, pool, "."+strings.Repeat("x", 250), true)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	id := volume("web")
	if err := d.Put(id, objdir.InMemory); err != nil {
		t.Fatal(err)
	}
	o := list(t, d)[id.ID]
	if o.Whole || o.Err == nil || o.Identity != (driver.Identity{}) {
		t.Errorf("%+v, want an error", o)
	}
}

func TestListMany(t *testing.T) {
	d := open(t, t.TempDir())
	const n = 2500 // over one reading of the directory
	want := map[driver.ObjectID]string{}
	for i := range n {
		id := volume(fmt.Sprint(i))
		put(t, d, id)
		want[id.ID] = id.Name
	}
	got := list(t, d)
	if len(got) != n {
		t.Errorf("%d objects, want %d", len(got), n)
	}
	for id, o := range got {
		if !o.Whole || o.Identity.Name != want[id] {
			t.Fatalf("%+v", o)
		}
	}
	seen := 0
	for range d.List(t.Context()) {
		if seen++; seen == 3 {
			break
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	seen = 0
	var last error
	for _, err := range d.List(ctx) {
		if seen++; seen == 3 {
			cancel()
		}
		last = err
	}
	if seen != 4 || !errs.Is(last, errs.Canceled) {
		t.Errorf("canceled after 3 of %d objects, %d seen, %v", n, seen, last)
	}
	if err := os.RemoveAll(d.Path()); err != nil {
		t.Fatal(err)
	}
	for _, err := range d.List(t.Context()) {
		wantKind(t, err, errs.NotFound)
	}
}

func TestDamagedIdentities(t *testing.T) {
	good := func(id driver.ObjectID, change func(*driver.Identity)) string {
		// As Put writes it, then changed by text.
		d := open(t, t.TempDir())
		v := volume("web")
		v.ID = id
		if change != nil {
			change(&v)
		}
		if err := d.Put(v, objdir.InMemory); err != nil {
			t.Fatal(err)
		}
		return strings.TrimSuffix(metaText(t, d, id), "\n")
	}
	swap := func(old, new string) func(string) string {
		return func(s string) string {
			if !strings.Contains(s, old) {
				t.Fatalf("%s is not in %s", old, s)
			}
			return drivertest.Sealed(strings.Replace(s, old, new, 1))
		}
	}
	for _, c := range []struct {
		name   string
		change func(string) string
		kind   errs.Kind
	}{
		{"unchanged", func(s string) string { return s }, ""},
		{"unknown field", swap(`"fs":`, `"color":"red","fs":`), ""}, // a later Pando of the same format may add some
		{"cut", func(s string) string { return s[:len(s)-1] }, errs.Damaged},
		{"half", func(s string) string { return s[:len(s)/2] }, errs.Damaged},
		{"more behind it", func(s string) string { return s + "{}" }, errs.Damaged},
		{"not JSON", func(string) string { return "/etc/passwd" }, errs.Damaged},
		{"null", func(string) string { return "null" }, errs.Damaged},
		{"empty object", func(string) string { return "{}" }, errs.Damaged},
		{"array", func(s string) string { return "[" + s + "]" }, errs.Damaged},
		{"no version", swap(`"v":1,`, ``), errs.Damaged},
		{"version 0", swap(`"v":1,`, `"v":0,`), errs.Damaged},
		{"negative version", swap(`"v":1,`, `"v":-1,`), errs.Damaged},
		{"version as text", swap(`"v":1,`, `"v":"1",`), errs.Damaged},
		{"version with a fraction", swap(`"v":1,`, `"v":1.5,`), errs.Damaged},
		{"too new", swap(`"v":1,`, `"v":2,`), errs.TooNew},
		{"another byte", func(s string) string { return strings.Replace(s, "web", "wec", 1) }, errs.Damaged},
		{"without its checksum", func(s string) string { return s[:len(s)-len(`,"sum":"01234567"}`)] + "}" }, errs.Damaged},
		{"too new, of another shape", func(string) string {
			return `{"v":7,"kind":["any","thing"],"size":"huge"}`
		}, errs.TooNew},
		{"another pool", swap(pool, "pool1111111111111111111111"), errs.Damaged},
		{"no pool", swap(pool, ""), errs.Damaged},
		{"unknown kind", swap(`"volume"`, `"hologram"`), errs.Damaged},
		{"unknown filesystem", swap(`"ext4"`, `"ext5"`), errs.Damaged},
		{"negative size", swap(`"size":1073741824`, `"size":-1`), errs.Damaged},
		{"size as text", swap(`"size":1073741824`, `"size":"1G"`), errs.Damaged},
		{"size over 63 bits", swap(`"size":1073741824`, `"size":9223372036854775808`), errs.Damaged},
		{"negative generation", swap(`"fs":`, `"gen":-1,"fs":`), errs.Damaged},
		{"path for a volume", swap(`"fs":`, `"vol":"../../etc","fs":`), errs.Damaged},
		{"path for a lower layer", swap(`"fs":`, `"lower":"../../etc","fs":`), errs.Damaged},
		{"path for an origin", swap(`"fs":`, `"origin_id":"../../etc","fs":`), errs.Damaged},
		{"no date", swap(`"at":"2026-03-04T05:06:07.000000008Z"`, `"at":"yesterday"`), errs.Damaged},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, t.TempDir())
			id := driver.NewID()
			if err := os.WriteFile(d.Data(id), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(metaPath(d, id), []byte(c.change(good(id, nil))), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := d.Get(id)
			wantKind(t, err, c.kind)
			o := list(t, d)[id]
			if o.Whole != (c.kind == "") || errs.KindOf(o.Err) != c.kind {
				t.Errorf("listed as %+v", o)
			}
			if c.kind == errs.TooNew {
				if errs.HintOf(err) != "upgrade pando" {
					t.Errorf("hint %q", errs.HintOf(err))
				}
				// What a newer Pando wrote is not overwritten.
				wantKind(t, d.Replace(written(driver.Identity{ID: id, Kind: driver.Volume, FS: driver.Ext4})), errs.TooNew)
			}
			if c.kind == errs.Damaged {
				v := volume("repaired")
				v.ID = id
				if err := d.Replace(v); err != nil {
					t.Errorf("repairing: %v", err)
				}
			}
			if err := d.Remove(id); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("of another object", func(t *testing.T) {
		d := open(t, t.TempDir())
		id, other := driver.NewID(), driver.NewID()
		if err := os.WriteFile(metaPath(d, id), []byte(good(other, nil)), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := d.Get(id)
		wantKind(t, err, errs.Damaged)
	})
	for name, mk := range map[string]func(string) error{
		"long file": func(p string) error { return os.WriteFile(p, []byte(strings.Repeat(" ", 8193)), 0o600) },
		"pipe":      func(p string) error { return syscall.Mkfifo(p, 0o600) },
		"directory": func(p string) error { return os.Mkdir(p, 0o700) },
	} {
		t.Run("a "+name, func(t *testing.T) {
			d := open(t, t.TempDir())
			id := driver.NewID()
			if err := mk(filepath.Join(d.Path(), string(id)+".meta")); err != nil {
				t.Fatal(err)
			}
			_, err := d.Get(id)
			wantKind(t, err, errs.Damaged)
		})
	}
}

// Nothing is written that would be read as damaged.
func TestPutRefusesWhatGetWould(t *testing.T) {
	d := open(t, t.TempDir())
	for name, change := range map[string]func(*driver.Identity){
		"no ID":           func(i *driver.Identity) { i.ID = "" },
		"path for an ID":  func(i *driver.Identity) { i.ID = "../../../../../../../../etc" },
		"no kind":         func(i *driver.Identity) { i.Kind = "" },
		"no filesystem":   func(i *driver.Identity) { i.FS = "" },
		"negative size":   func(i *driver.Identity) { i.SizeBytes = -1 },
		"odd volume":      func(i *driver.Identity) { i.Volume = "x" },
		"odd origin":      func(i *driver.Identity) { i.OriginID = "x" },
		"not UTF-8":       func(i *driver.Identity) { i.Name = "\xff" },
		"impossible date": func(i *driver.Identity) { i.CreatedAt = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) },
	} {
		id := volume("web")
		change(&id)
		if err := d.Put(id, objdir.InMemory); err == nil {
			t.Errorf("%s: written", name)
		}
	}
	if o := list(t, d); len(o) != 0 {
		t.Errorf("%+v", o)
	}
}

// largest is an identity with everything in it as long as it can be.
func largest() driver.Identity {
	name := strings.Repeat("N", 128) // ref.MaxNameBytes
	far := time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.FixedZone("far", -12*3600))
	return driver.Identity{
		ID: driver.NewID(), Kind: driver.Generation, Name: name, Golden: name, Generation: 1<<63 - 1,
		Volume: driver.NewID(), FS: driver.Native, SizeBytes: 1<<63 - 1,
		Origin: name + "@" + name, OriginID: driver.NewID(), CreatedAt: far, ExpiresAt: far, Ephemeral: true,
		BootID: "01234567-89ab-cdef-0123-456789abcdef",
	}
}

func TestSizeLimit(t *testing.T) {
	for kind, mk := range map[string]func(testing.TB, int64) string{
		"xfs": testfs.XFS, "btrfs": testfs.Btrfs, "ext4": testfs.Ext4, "tmpfs": testfs.Tmpfs,
	} {
		t.Run(kind, func(t *testing.T) {
			d := open(t, mk(t, 16<<20))
			id := largest()
			put(t, d, id)
			if got, err := d.Get(id.ID); err != nil || got.Name != id.Name || got.Origin != id.Origin ||
				!got.CreatedAt.Equal(id.CreatedAt) {
				t.Errorf("%+v, %v", got, err)
			}
			// As long as fits, to the byte.
			full := largest()
			full.Name += strings.Repeat("x", driver.MaxIdentityBytes+1-len(metaText(t, d, id.ID)))
			put(t, d, full)
			if got, err := d.Get(full.ID); err != nil || got.Name != full.Name {
				t.Errorf("%+v, %v", got, err)
			}
			full.ID = driver.NewID()
			full.Name += "x"
			wantKind(t, d.Put(full, objdir.InMemory), errs.Invalid)
			d.Close()
		})
	}
}

// What was synced is there after a power cut, the old identity or the new one.
func TestPowerCut(t *testing.T) {
	for _, name := range []string{"xfs", "xfs, by its log", "btrfs", "ext4"} {
		t.Run(name, func(t *testing.T) {
			kind, _, logs := strings.Cut(name, ",")
			fs := testfs.New(t, kind, 64<<20)
			open := func(t *testing.T, dir string) *objdir.Dir {
				d := open(t, dir)
				if logs {
					d.Logs()
				}
				return d
			}
			d := open(t, fs.Dir())
			id := volume("old")
			if err := os.WriteFile(d.Data(id.ID), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := d.Put(id, objdir.OnDisk); err != nil {
				t.Fatal(err)
			}
			d.Close()
			d = open(t, fs.Cut())
			if got, err := d.Get(id.ID); err != nil || got.Name != "old" {
				t.Errorf("after Put: %+v, %v", got, err)
			}
			id.Name = "new"
			if err := d.Replace(id); err != nil {
				t.Fatal(err)
			}
			d.Close()
			d = open(t, fs.Cut())
			if got, err := d.Get(id.ID); err != nil || got.Name != "new" {
				t.Errorf("after Replace: %+v, %v", got, err)
			}
			d.Close()
		})
	}
}

func TestIDs(t *testing.T) {
	seen := map[driver.ObjectID]bool{}
	for range 1000 {
		id := driver.NewID()
		if seen[id] || !driver.ValidID(string(id)) || len(id) != driver.IDLength {
			t.Fatalf("%q", id)
		}
		seen[id] = true
	}
	good := string(driver.NewID())
	for _, bad := range []string{"", good[1:], good + "0", strings.ToUpper("a" + good[1:]), good[1:] + "w", good[1:] + "/",
		good[1:] + "\xff"} {
		if driver.ValidID(bad) {
			t.Errorf("%q is valid", bad)
		}
	}
	if fs := []driver.FS{driver.Ext4, driver.XFS, driver.None}; slices.ContainsFunc(fs, func(f driver.FS) bool {
		return !f.IsImage()
	}) || driver.Native.IsImage() {
		t.Error("IsImage")
	}
}

// What a newer Pando has written beside what this one knows stays when an identity is
// replaced, and so does the note that the object is committed.
func TestReplaceKeeps(t *testing.T) {
	d := open(t, t.TempDir())
	id := volume("web")
	id.Keep = 3 // is not lost among the fields that this version does not know
	put(t, d, id)
	text := strings.Replace(metaText(t, d, id.ID), `"fs":`, `"tags":{"b":1,"a":[2]},"color":"red","fs":`, 1)
	if err := os.WriteFile(metaPath(d, id.ID), []byte(drivertest.Sealed(text)), 0o600); err != nil {
		t.Fatal(err)
	}
	if is, err := d.Committed(id.ID); is || err != nil {
		t.Errorf("committed %v, %v before it was", is, err)
	}
	for range 2 {
		if err := d.Commit(id.ID); err != nil {
			t.Fatal(err)
		}
	}
	id.Name, id.Keep = "new", 4
	if err := errors.Join(d.Replace(id), d.Force(id)); err != nil {
		t.Fatal(err)
	}
	got, err := d.Get(id.ID)
	if err != nil || got.Name != "new" || got.Keep != 4 || got.Extra != `"color":"red","tags":{"b":1,"a":[2]}` {
		t.Errorf("%+v, %v", got, err)
	}
	if is, err := d.Committed(id.ID); !is || err != nil {
		t.Errorf("committed %v, %v", is, err)
	}
	if o := list(t, d)[id.ID]; !o.Committed || !o.Whole {
		t.Errorf("%+v", o)
	}
	wantKind(t, d.Commit(driver.NewID()), errs.NotFound)
}

// A power loss can leave the name without the content: that is no identity.
func TestEmptyIdentity(t *testing.T) {
	d := open(t, t.TempDir())
	id := driver.NewID()
	if err := errors.Join(os.WriteFile(metaPath(d, id), nil, 0o600), os.WriteFile(d.Data(id), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	_, err := d.Get(id)
	wantKind(t, err, errs.NotFound)
	if o := list(t, d)[id]; o.Whole || o.Err != nil {
		t.Errorf("%+v", o)
	}
}

// Where the log is what makes identities durable, either of the two copies will do, and
// what is damaged is not what it seems to be.
func TestLoggedIdentity(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"whole":          func(string) error { return nil },
		"content lost":   func(path string) error { return os.Truncate(path, 0) },
		"content other":  func(path string) error { return os.WriteFile(path, []byte("nonsense"), 0o600) },
		"attribute lost": func(path string) error { return syscall.Removexattr(path, "trusted.pando.identity") },
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t, testfs.XFS(t, 320<<20))
			d.Logs()
			id := volume("web")
			put(t, d, id)
			if err := spoil(metaPath(d, id.ID)); err != nil {
				t.Fatal(err)
			}
			if got, err := d.Get(id.ID); err != nil || got.Name != "web" {
				t.Errorf("%+v, %v", got, err)
			}
			d.Close()
		})
	}
}
