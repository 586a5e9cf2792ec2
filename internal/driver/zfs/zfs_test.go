package zfs_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/linux/zfs"
)

// TestNoZFS runs where there is none: opening says what to do.
func TestNoZFS(t *testing.T) {
	if _, err := os.Stat("/proc/spl/kstat/zfs"); err == nil {
		t.Skip("does not apply: this kernel has ZFS")
	}
	dir := t.TempDir()
	if err := os.Symlink("tank/pando", filepath.Join(dir, driverzfs.Link)); err != nil {
		t.Fatal(err)
	}
	for _, create := range []bool{false, true} {
		if _, err := driverzfs.Open(t.Context(), dir, poolID, create); !errs.Is(err, errs.Unsupported) ||
			errs.HintOf(err) == "" {
			t.Errorf("create %v: %v (hint %q)", create, err, errs.HintOf(err))
		}
	}
}

// TestOpen is about what init finds.
func TestOpen(t *testing.T) {
	zpool := newZpool(t, 1<<30)
	open := func(root string, create bool) (driver.Driver, error) {
		dir := t.TempDir()
		if err := os.Symlink(root, filepath.Join(dir, driverzfs.Link)); err != nil {
			t.Fatal(err)
		}
		return driverzfs.Open(t.Context(), dir, poolID, create)
	}
	for root, kind := range map[string]errs.Kind{
		zpool:                       errs.Invalid,
		"-r/x":                      errs.Invalid,
		zpool + "/a@b":              errs.Invalid,
		zpool + "/no/such":          errs.NotFound,
		"nosuchpool/pando":          errs.IO,
		zpool + "/x/../y":           errs.Invalid,
		zpool + "/" + "with\nbreak": errs.Invalid,
	} {
		if _, err := open(root, true); !errs.Is(err, kind) || errs.HintOf(err) == "" {
			t.Errorf("%q: %v of kind %q with hint %q, wanted %q", root, err, errs.KindOf(err), errs.HintOf(err), kind)
		}
	}
	if _, err := open("nosuchpool/pando", false); !errs.Is(err, errs.IO) ||
		!strings.Contains(errs.HintOf(err), "zpool import nosuchpool") {
		t.Errorf("not imported: %v (hint %q)", err, errs.HintOf(err))
	}
	before := zfs.Runs()
	if _, err := open(zpool+"/unseen", false); err != nil || zfs.Runs() != before {
		t.Errorf("opening without create: %v, and %d programs", err, zfs.Runs()-before)
	}

	// What is not empty is not taken; what is, is given back.
	zdo(t, "create", zpool+"/full")
	zdo(t, "create", zpool+"/full/inside")
	if _, err := open(zpool+"/full", true); !errs.Is(err, errs.Exists) {
		t.Errorf("not empty: %v", err)
	}
	zdo(t, "create", "-o", "atime=on", zpool+"/given")
	d, err := open(zpool+"/given", true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := driverzfs.Open(t.Context(), linkTo(t, zpool+"/given"), "another-pool", true); !errs.Is(err, errs.Exists) {
		t.Errorf("another pool's: %v", err)
	}
	if err := d.(driver.Unmaker).Unmake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !exists(t, zpool+"/given") {
		t.Error("a dataset that was there before is gone")
	}
	rows, err := zfs.ZFS.Rows(t.Context(), 2, "get", "-Hp", "-s", "local", "-o", "property,value", "all", zpool+"/given")
	if err != nil || len(rows) != 1 || rows[0][0] != "canmount" || rows[0][1] != "on" {
		t.Errorf("properties are left: %q, %v", rows, err)
	}

	// Interrupted after the dataset was made: the same pool goes on.
	p := newPool(t, zpool+"/pando")
	p.open(true)
	rows, err = zfs.ZFS.Rows(t.Context(), 2, "get", "-Hp", "-o", "property,value",
		"mountpoint,canmount,dedup,atime,compression,volmode,snapdev,acltype,xattr,pando:pool,pando:made", p.root)
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, r := range rows {
		got += r[0] + "=" + r[1] + " "
	}
	got = strings.Replace(got, "xattr=on", "xattr=sa", 1) // what "on" means since 2.3
	if want := "mountpoint=legacy canmount=noauto dedup=off atime=off compression=on volmode=none snapdev=hidden " +
		"acltype=posix xattr=sa pando:pool=test-pool pando:made=on "; got != want {
		t.Errorf("properties\n%s, wanted\n%s", got, want)
	}
	if n := p.names(); len(n) > 0 {
		t.Errorf("LEAK: %q", n)
	}

	// Space, also from the note.
	s, err := p.d.Space(t.Context(), false)
	if err != nil || s.FreeBytes < 500<<20 || s.TotalBytes != s.FreeBytes+s.UsedBytes {
		t.Errorf("%+v, %v", s, err)
	}
	if busy, err := p.d.Reclaiming(t.Context()); busy || err != nil {
		t.Errorf("%v, %v", busy, err)
	}
}

func linkTo(t *testing.T, root string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Symlink(root, filepath.Join(dir, driverzfs.Link)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestNotImported: with its zpool away, nothing counts as absent.
func TestNotImported(t *testing.T) {
	newZpool(t, 64<<20) // or the test does not apply
	// In a file, which is there also while the zpool is not.
	zpool, file := "pandofile", filepath.Join(t.TempDir(), "vdev")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 256<<20); err != nil {
		t.Fatal(err)
	}
	if err := zfs.Zpool.Do(t.Context(), "create", "-o", "cachefile=none", "-O", "mountpoint=none", zpool,
		file); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := zfs.Zpool.Do(context.Background(), "destroy", zpool); err != nil {
			t.Errorf("LEAK: %v", err)
		}
	})
	p := newPool(t, zpool+"/pando")
	vol := p.create(driver.Native)
	p.open(false)
	if err := zfs.Zpool.Do(t.Context(), "export", zpool); err != nil {
		t.Fatal(err)
	}
	check := func(what string, create bool) {
		t.Helper()
		all := map[string]error{
			"destroy":    p.d.Destroy(p.ctx(), vol),
			"attachment": func() error { _, err := p.d.Attachment(p.ctx(), vol); return err }(),
			"list": func() error {
				for _, err := range p.d.List(p.ctx()) {
					return err
				}
				return nil
			}(),
			"usages": func() error { _, err := p.d.Usages(p.ctx()); return err }(),
			"clone":  p.d.Clone(p.ctx(), vol, identity(driver.Volume, driver.Native)),
		}
		if create {
			all["create"] = p.d.Create(p.ctx(), identity(driver.Volume, driver.Native))
		}
		for name, err := range all {
			if err == nil || errs.Is(err, errs.NotFound) || errs.HintOf(err) == "" {
				t.Errorf("%s: %s says %v of kind %q (hint %q)", what, name, err, errs.KindOf(err), errs.HintOf(err))
			}
		}
	}
	check("exported", true)
	if err := zfs.Zpool.Do(t.Context(), "import", "-d", file, zpool); err != nil {
		t.Fatal(err)
	}
	zdo(t, "rename", p.root, p.root+"moved")
	check("renamed", true)
	zdo(t, "create", p.root)
	check("another in its place", false) // it does not look
	zdo(t, "destroy", p.root)
	zdo(t, "rename", p.root+"moved", p.root)
	p.wantExactly("back", vol)
}

// TestEncryption: a clone stays under its origin's key, so what has another key than
// the pool is refused; a flat copy has the pool's.
func TestEncryption(t *testing.T) {
	zpool := newZpool(t, 512<<20)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(strings.Repeat("k", 32)), 0o600); err != nil {
		t.Fatal(err)
	}
	encrypted := []string{"-o", "encryption=on", "-o", "keyformat=raw", "-o", "keylocation=file://" + key}
	zdo(t, append(append([]string{"create"}, encrypted...), zpool+"/enc")...)
	p := newPool(t, zpool+"/enc/pando")
	vol := p.create(driver.Native)
	p.write(vol, "a", "secret")
	snap := p.snapshot(vol, driver.Native)
	clone := p.clone(snap, driver.Native)
	p.wantFile(clone, "a", "secret")

	// Somebody gives one volume a key of its own.
	own := p.create(driver.Native)
	p.write(own, "a", "theirs")
	zdo(t, append(append([]string{"change-key"}, encrypted[2:]...), p.ds(own))...)
	p.open(false)
	for what, fn := range map[string]func(driver.Identity) error{
		"clone":    func(id driver.Identity) error { return p.d.Clone(p.ctx(), own, id) },
		"snapshot": func(id driver.Identity) error { return p.d.Snapshot(p.ctx(), own, id) },
	} {
		before := p.names()
		err := fn(identity(driver.Volume, driver.Native))
		if !errs.Is(err, errs.Permission) || !strings.Contains(errs.HintOf(err), "zfs change-key -i") {
			t.Errorf("%s across keys: %v (hint %q)", what, err, errs.HintOf(err))
		}
		if after := p.names(); len(after) != len(before) {
			t.Errorf("LEAK: %s across keys: %q, before %q", what, after, before)
		}
	}
	for _, from := range []driver.ObjectID{own, snap} {
		id := identity(driver.Volume, driver.Native)
		p.must(p.d.Flatten(p.ctx(), from, id, nil))
		rows, err := zfs.ZFS.Rows(t.Context(), 1, "get", "-Hp", "-o", "value", "encryptionroot,origin", p.ds(id.ID))
		if err != nil || rows[0][0] != zpool+"/enc" || rows[1][0] != "-" {
			t.Errorf("a flat copy: %q, %v", rows, err)
		}
		p.wantFile(id.ID, "a", map[driver.ObjectID]string{own: "theirs", snap: "secret"}[from])
	}
	// With the key away, what needs it says so.
	zdo(t, "unload-key", p.ds(own))
	if err := p.d.Flatten(p.ctx(), own, identity(driver.Volume, driver.Native), nil); !errs.Is(err, errs.Permission) ||
		!strings.Contains(errs.HintOf(err), "zfs load-key") {
		t.Errorf("flatten without the key: %v (hint %q)", err, errs.HintOf(err))
	}
	p.must(p.d.Destroy(p.ctx(), own))
}

// TestFlatten: a flat copy is tied to nothing, of volumes and snapshots, trees and
// zvols, and a killed one leaves what Destroy removes.
func TestFlatten(t *testing.T) {
	p := newPool(t, newZpool(t, 1<<30)+"/flat")
	for _, fs := range []driver.FS{driver.Native, driver.None} {
		vol := p.create(fs)
		if fs == driver.Native {
			p.write(vol, "a", strings.Repeat("content", 100_000))
		}
		snap := p.snapshot(vol, fs)
		cost, err := p.d.FlattenCost(p.ctx(), snap)
		if err != nil || cost < 1 {
			t.Errorf("cost %d, %v", cost, err)
		}
		for _, from := range []driver.ObjectID{vol, snap} {
			id := identity(driver.Volume, fs)
			id.SizeBytes *= 2
			var last, total int64
			p.must(p.d.Flatten(p.ctx(), from, id, func(done, all int64) {
				if done < last || done > all {
					t.Errorf("progress from %d to %d of %d", last, done, all)
				}
				last, total = done, all
			}))
			if last != total || total == 0 {
				t.Errorf("progress ended at %d of %d", last, total)
			}
			if got := p.identity(id.ID); got.SizeBytes != id.SizeBytes {
				t.Errorf("identity %+v", got)
			}
			p.must(p.d.Destroy(p.ctx(), id.ID))
		}
		ctx, cancel := context.WithCancel(p.ctx())
		before := p.names()
		err = p.d.Flatten(ctx, snap, identity(driver.Volume, fs), func(done, all int64) { cancel() })
		cancel()
		if err != nil && !errs.Is(err, errs.Canceled) {
			t.Errorf("canceled: %v", err)
		} else if after := p.names(); err != nil && len(after) != len(before) {
			t.Errorf("LEAK: canceled: %q, before %q", after, before)
		}
	}
}

// TestLinks: a link in /dev/zvol that names another zvol's device is not believed.
func TestLinks(t *testing.T) {
	p := newPool(t, newZpool(t, 512<<20)+"/links")
	a, b := p.create(driver.None), p.create(driver.None)
	fa, err := p.d.Activate(p.ctx(), a)
	p.must(err)
	defer fa.Close()
	// As if left behind: b's link names a's device.
	link := zfs.Device(p.ds(b))
	if err := os.Symlink(fa.Name(), link); err != nil {
		t.Fatal(err)
	}
	if f, err := zfs.OpenDevice(p.ds(b)); !errs.Is(err, errs.NotFound) {
		t.Errorf("a wrong link was believed: %v, %v", f, err)
	}
	if active, err := p.d.Active(p.ctx()); err != nil || len(active) != 1 || active[0] != a {
		t.Errorf("active %q, %v", active, err)
	}
	fb, err := p.d.Activate(p.ctx(), b)
	p.must(err)
	if fb.Name() == fa.Name() {
		t.Errorf("%s is both", fb.Name())
	}
	fb.Close()
	p.must(p.d.Deactivate(p.ctx(), b))
	_ = os.Remove(link)
	// Open, but not exclusively: it stays all the same.
	if err := p.d.Deactivate(p.ctx(), a); !errs.Is(err, errs.InUse) {
		t.Errorf("deactivating what is open: %v", err)
	}
	if f, err := p.d.Activate(p.ctx(), a); err != nil {
		t.Error(err)
	} else {
		f.Close()
	}
	fa.Close()
	p.must(p.d.Deactivate(p.ctx(), a))
	if _, err := p.d.Activate(p.ctx(), driver.NewID()); !errs.Is(err, errs.NotFound) {
		t.Errorf("activating what is not there: %v", err)
	}
	p.must(p.d.Deactivate(p.ctx(), driver.NewID()))
}

// TestActivateRace: some take a device away while others want it; who has it open
// keeps it.
func TestActivateRace(t *testing.T) {
	p := newPool(t, newZpool(t, 512<<20)+"/race")
	id := p.create(driver.None)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 3 {
				if i%2 == 0 {
					f, err := p.d.Activate(p.ctx(), id)
					if err != nil {
						t.Errorf("activate: %v", err)
						return
					}
					if _, err := f.ReadAt(make([]byte, 512), 0); err != nil {
						t.Errorf("a device that was open is gone: %v", err)
					}
					f.Close()
				} else if err := p.d.Deactivate(p.ctx(), id); err != nil && !errs.Is(err, errs.InUse) {
					t.Errorf("deactivate: %v", err)
				}
			}
		})
	}
	wg.Wait()
	p.must(p.d.Deactivate(p.ctx(), id))
}

// TestCosts counts programs: they are what operations cost.
func TestCosts(t *testing.T) {
	p := newPool(t, newZpool(t, 1<<30)+"/costs")
	programs := func(what string, want int64, fn func() error) {
		t.Helper()
		before, start := zfs.Runs(), time.Now()
		if err := fn(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		got, took := zfs.Runs()-before, time.Since(start)
		t.Logf("%-40s %d programs, %v", what, got, took.Round(time.Millisecond))
		if got != want {
			t.Errorf("%s ran %d programs, wanted %d", what, got, want)
		}
	}
	for _, fs := range []driver.FS{driver.Native, driver.None} {
		vol := p.create(fs)
		snap := p.snapshot(vol, fs)
		bare := p.root + "/bare" + string(fs)
		programs("bare zfs clone", 1, func() error {
			return zfs.ZFS.Do(t.Context(), "clone", p.ds(snap)+"@"+string(snap), bare)
		})
		programs("bare zfs destroy", 1, func() error { return zfs.ZFS.Do(t.Context(), "destroy", bare) })
		p.open(false)
		first := identity(driver.Volume, fs)
		first.Sector = 512
		programs(string(fs)+": first clone by a new process", 2, func() error { return p.d.Clone(t.Context(), snap, first) })
		id := identity(driver.Volume, fs)
		id.Soon, id.Sector = true, 512
		p.open(false)
		again := identity(driver.Volume, fs)
		again.Sector = 512
		programs(string(fs)+": again by a new process", 1, func() error { return p.d.Clone(t.Context(), snap, again) })
		p.must(p.d.Destroy(t.Context(), again.ID))
		p.open(false)
		p.must(p.d.Clone(t.Context(), snap, id))
		programs(string(fs)+": attachment", 0, func() error { _, err := p.d.Attachment(t.Context(), id.ID); return err })
		if fs.IsImage() {
			programs(string(fs)+": activate", 0, func() error {
				f, err := p.d.Activate(t.Context(), id.ID)
				if err == nil {
					f.Close()
				}
				return err
			})
			programs(string(fs)+": deactivate", 1, func() error { return p.d.Deactivate(t.Context(), id.ID) })
		}
		second := identity(driver.Volume, fs)
		second.Sector = 512
		programs(string(fs)+": second clone", 1, func() error { return p.d.Clone(t.Context(), snap, second) })
		programs(string(fs)+": destroy", 1, func() error { return p.d.Destroy(t.Context(), id.ID) })
		programs("list", 1, func() error {
			for _, err := range p.d.List(t.Context()) {
				if err != nil {
					return err
				}
			}
			return nil
		})
		p.must(p.d.Destroy(t.Context(), snap))
		if left, err := filepath.Glob(filepath.Join(p.dir, "origins", "*")); err != nil || len(left) > 0 {
			t.Errorf("LEAK: %q, %v", left, err)
		}
		programs("usages", 1, func() error { _, err := p.d.Usages(t.Context()); return err })
	}

	// Times, for people: the middle of some. Nothing hangs on them.
	for _, fs := range []driver.FS{driver.Native, driver.None} {
		snap := p.snapshot(p.create(fs), fs)
		at := p.ds(snap) + "@" + string(snap)
		n := 0
		for _, c := range []struct {
			what string
			run  func() error
		}{
			{"bare zfs clone", func() error { return zfs.ZFS.Do(t.Context(), "clone", at, fmt.Sprint(p.root, "/bare", fs, n)) }},
			{"bare zfs clone -o a property", func() error {
				return zfs.ZFS.Do(t.Context(), "clone", "-o", "some:thing=x", at, fmt.Sprint(p.root, "/bare", fs, n))
			}},
			{"clone by a new process", func() error {
				p.open(false)
				id := identity(driver.Volume, fs)
				id.Sector = 512
				return p.d.Clone(t.Context(), snap, id)
			}},
			{"clone", func() error { return p.d.Clone(t.Context(), snap, identity(driver.Volume, fs)) }},
		} {
			var times []time.Duration
			for range 7 {
				n++
				start := time.Now()
				p.must(c.run())
				times = append(times, time.Since(start).Round(time.Millisecond))
			}
			slices.Sort(times)
			t.Logf("%-6s %-30s %v (%v to %v)", fs, c.what, times[len(times)/2], times[0], times[len(times)-1])
		}
	}
}

// TestEphemeralSync: an ephemeral volume has syncs disabled, and no other object, whatever it is made from.
func TestEphemeralSync(t *testing.T) {
	p := newPool(t, newZpool(t, 1<<30)+"/eph")
	check := func(what string, id driver.ObjectID, want string) {
		t.Helper()
		rows, err := zfs.ZFS.Rows(t.Context(), 1, "get", "-Hp", "-o", "value", "sync", p.ds(id))
		if err != nil || len(rows) != 1 || rows[0][0] != want {
			t.Errorf("%s: sync is %q, wanted %s, %v", what, rows, want, err)
		}
	}

	for _, fs := range []driver.FS{driver.Native, driver.None, driver.Ext4} {
		made := identity(driver.Volume, fs)
		made.Ephemeral = true
		p.must(p.d.Create(p.ctx(), made))
		check("created", made.ID, "disabled")

		golden := p.snapshot(p.create(fs), fs)
		eph := identity(driver.Volume, fs)
		eph.Ephemeral = true
		p.must(p.d.Clone(p.ctx(), golden, eph))
		check("cloned", eph.ID, "disabled")

		// Copies of it.
		snap := identity(driver.Snapshot, fs)
		snap.Ephemeral = true
		p.must(p.d.Snapshot(p.ctx(), eph.ID, snap))
		check("snapshot", snap.ID, "standard")
		for _, from := range []driver.ObjectID{eph.ID, snap.ID} {
			fork, flat := identity(driver.Volume, fs), identity(driver.Volume, fs)
			p.must(p.d.Clone(p.ctx(), from, fork))
			check("fork", fork.ID, "standard")
			p.must(p.d.Flatten(p.ctx(), from, flat, nil))
			check("flattened", flat.ID, "standard")
		}

		// A draft becomes an ephemeral volume, another one a generation.
		for kind, want := range map[driver.Kind]string{driver.Volume: "disabled", driver.Generation: "standard"} {
			id := identity(driver.Scratch, fs)
			id.Ephemeral = true
			p.must(p.d.Clone(p.ctx(), golden, id))
			check("draft", id.ID, "standard")
			id.Kind, id.Ephemeral = kind, kind == driver.Volume
			p.must(p.d.SetIdentity(p.ctx(), id))
			check(string(kind), id.ID, want)
		}
	}
}
