package btrfs_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/drivertest"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

func TestConformance(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  btrfs.Open,
		Dir:   func(t testing.TB) string { return testfs.Btrfs(t, 2<<30) },
		Small: func(t testing.TB) string { return testfs.Btrfs(t, 128<<20) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "btrfs", 256<<20) },
	})
}

// pool opens a pool in dir.
func pool(t *testing.T, dir string) *btrfs.Driver {
	t.Helper()
	d, err := btrfs.Open(t.Context(), dir, "pool", true)
	if err != nil {
		t.Fatal(err)
	}
	b := d.(*btrfs.Driver)
	t.Cleanup(func() { b.Close() })
	return b
}

func identity(kind driver.Kind) driver.Identity {
	return driver.Identity{ID: driver.NewID(), Kind: kind, Name: "web", FS: driver.Native, CreatedAt: time.Now()}
}

func create(t *testing.T, d *btrfs.Driver) (driver.ObjectID, string) {
	t.Helper()
	id := identity(driver.Volume)
	if err := d.Create(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	return id.ID, treeOf(t, d, id.ID)
}

func treeOf(t *testing.T, d *btrfs.Driver, id driver.ObjectID) string {
	t.Helper()
	a, err := d.Attachment(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return a.Tree
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// subvol makes a subvolume at path, as a user inside a volume does.
func subvol(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := kernel.SubvolCreate(dir, filepath.Base(path)); err != nil {
		t.Fatal(err)
	}
}

func setReadOnly(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := kernel.SubvolSetReadOnly(f, true); err != nil {
		t.Fatal(err)
	}
}

// count returns how many subvolumes are in the filesystem, those inside others
// included.
func count(t *testing.T, dir string) int {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var rec func(id uint64) int
	rec = func(id uint64) int {
		children, err := kernel.SubvolChildren(f, id)
		if err != nil {
			t.Fatal(err)
		}
		n := len(children)
		for _, c := range children {
			n += rec(c.ID)
		}
		return n
	}
	info, err := kernel.SubvolInfoOf(f)
	if err != nil {
		t.Fatal(err)
	}
	return rec(info.ID)
}

// nested makes a volume with many subvolumes inside, as a container engine
// does, and returns what is in its files.
func nested(t *testing.T, d *btrfs.Driver) (driver.ObjectID, map[string]string) {
	t.Helper()
	vol, tree := create(t, d)
	want := map[string]string{}
	add := func(name string) {
		write(t, filepath.Join(tree, name), []byte(name))
		want[name] = name
	}
	add("file")
	for i := range 150 { // more than one answer of the kernel's holds
		sv := fmt.Sprintf("docker/btrfs/subvolumes/%064d", i)
		subvol(t, filepath.Join(tree, sv))
		add(sv + "/etc/layer")
	}
	subvol(t, filepath.Join(tree, "top"))
	add("top/file")
	subvol(t, filepath.Join(tree, "top/a/b/middle"))
	add("top/a/b/middle/file")
	subvol(t, filepath.Join(tree, "top/a/b/middle/bottom"))
	add("top/a/b/middle/bottom/file")
	setReadOnly(t, filepath.Join(tree, "top/a/b/middle/bottom"))
	setReadOnly(t, filepath.Join(tree, "top/a/b/middle"))
	return vol, want
}

// wantFiles checks the files of a tree, all of them.
func wantFiles(t *testing.T, tree string, want map[string]string) {
	t.Helper()
	found := 0
	err := filepath.WalkDir(tree, func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		found++
		rel, err := filepath.Rel(tree, p)
		if err != nil {
			return err
		}
		if b, err := os.ReadFile(p); err != nil || string(b) != want[rel] {
			t.Errorf("%s: %q, %v; want %q", rel, b, err, want[rel])
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found != len(want) {
		t.Errorf("%d files, want %d", found, len(want))
	}
}

func readOnly(t *testing.T, path string) bool {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := kernel.SubvolInfoOf(f)
	if err != nil {
		t.Fatal(err)
	}
	return info.ReadOnly
}

// TestNested clones, snapshots, measures and destroys a volume in which a user
// made subvolumes.
func TestNested(t *testing.T) {
	dir := testfs.Btrfs(t, 512<<20)
	d := pool(t, dir)
	vol, want := nested(t, d)
	each := count(t, dir)
	if each != 154 {
		t.Fatalf("%d subvolumes, want 154: the test does not make what it says", each)
	}

	clone := identity(driver.Volume)
	if err := d.Clone(t.Context(), vol, clone); err != nil {
		t.Fatal(err)
	}
	snap := identity(driver.Snapshot)
	if err := d.Snapshot(t.Context(), vol, snap); err != nil {
		t.Fatal(err)
	}
	again := identity(driver.Volume)
	if err := d.Clone(t.Context(), snap.ID, again); err != nil {
		t.Fatal(err)
	}
	if n := count(t, dir); n != 4*each {
		t.Errorf("%d subvolumes in the volume and three copies, want %d", n, 4*each)
	}
	for _, id := range []driver.ObjectID{vol, clone.ID, snap.ID, again.ID} {
		tree := treeOf(t, d, id)
		wantFiles(t, tree, want)
		if got, want := readOnly(t, tree), id == snap.ID; got != want {
			t.Errorf("read-only is %v of object %s, want %v", got, id, want)
		}
		if readOnly(t, filepath.Join(tree, "top")) || !readOnly(t, filepath.Join(tree, "top/a/b/middle")) ||
			!readOnly(t, filepath.Join(tree, "top/a/b/middle/bottom")) {
			t.Error("subvolumes inside are not as writable as they were")
		}
	}

	// What lies in subvolumes inside counts.
	big := make([]byte, 1<<20)
	write(t, filepath.Join(treeOf(t, d, clone.ID), "top/big"), big)
	u, err := d.Usage(t.Context(), clone.ID)
	if err != nil {
		t.Fatal(err)
	}
	if u.ExclusiveBytes != 1<<20 {
		t.Errorf("usage after writing 1 MiB to a subvolume inside a clone: %+v", u)
	}
	if _, err := os.Stat(filepath.Join(treeOf(t, d, vol), "top/big")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("writing to a subvolume inside a clone shows in the origin")
	}

	for i, id := range []driver.ObjectID{vol, snap.ID, again.ID, clone.ID} {
		for range 2 {
			if err := d.Destroy(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		if n := count(t, dir); n != (3-i)*each {
			t.Errorf("%d subvolumes after destroying %d of 4, want %d", n, i+1, (3-i)*each)
		}
	}
}

// TestNestedDurable cuts the power after a clone with subvolumes inside.
func TestNestedDurable(t *testing.T) {
	power := testfs.New(t, "btrfs", 512<<20)
	d := pool(t, power.Dir())
	vol, want := nested(t, d)
	clone := identity(driver.Volume)
	if err := d.Clone(t.Context(), vol, clone); err != nil {
		t.Fatal(err)
	}
	d.Close()
	d = pool(t, power.Cut())
	wantFiles(t, treeOf(t, d, clone.ID), want)
}

// TestNestedFailure checks that half a clone of nested subvolumes is removed.
func TestNestedFailure(t *testing.T) {
	dir := testfs.Btrfs(t, 256<<20)
	d := pool(t, dir)
	vol, want := nested(t, d)
	before := count(t, dir)
	long := identity(driver.Volume)
	long.Name = strings.Repeat("x", 10_000) // is found out when everything has been copied
	if err := d.Clone(t.Context(), vol, long); !errs.Is(err, errs.Invalid) {
		t.Errorf("clone with an identity that is too long: %v", err)
	}
	if n := count(t, dir); n != before {
		t.Errorf("%d subvolumes after a clone that failed, want %d", n, before)
	}
	wantFiles(t, treeOf(t, d, vol), want)
}

// TestFailureLeavesNothing makes the kernel refuse a snapshot after the identity
// has been written.
func TestFailureLeavesNothing(t *testing.T) {
	dir := testfs.Btrfs(t, 128<<20)
	d := pool(t, dir)
	vol, tree := create(t, d)
	other := testfs.Btrfs(t, 128<<20)
	subvol(t, filepath.Join(other, "elsewhere"))
	// A snapshot cannot be on another filesystem than its origin.
	if err := errors.Join(os.Remove(tree), os.Symlink(filepath.Join(other, "elsewhere"), tree)); err != nil {
		t.Fatal(err)
	}
	if err := d.Clone(t.Context(), vol, identity(driver.Volume)); !errs.Is(err, errs.Unsupported) ||
		!errors.Is(err, unix.EXDEV) {
		t.Errorf("clone to another filesystem: %v", err)
	}
	for o, err := range d.List(t.Context()) {
		if err != nil || o.ID != vol {
			t.Errorf("List yields %+v, %v after a clone that failed", o, err)
		}
	}
	if err := os.Remove(tree); err != nil {
		t.Fatal(err)
	}
}

// TestOneCommit checks what cloning asks of the device: the flushes of a single
// commit, however much is in the volume.
func TestOneCommit(t *testing.T) {
	fs := testfs.New(t, "btrfs", 512<<20)
	d := pool(t, fs.Dir())
	vol, tree := create(t, d)
	for i := range 1000 {
		write(t, filepath.Join(tree, fmt.Sprintf("d%d/f%d", i%10, i)), make([]byte, 5000))
	}
	if err := d.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	const clones = 10
	before := fs.Flushes()
	for range clones {
		if err := d.Clone(t.Context(), vol, identity(driver.Volume)); err != nil {
			t.Fatal(err)
		}
	}
	// A commit flushes before and after it writes the superblock.
	if n := fs.Flushes() - before; n < clones || n > 2*clones+2 {
		t.Errorf("%d clones made %d flushes, want 2 each", clones, n)
	}
	before = fs.Flushes()
	eph := identity(driver.Scratch)
	eph.Ephemeral = true
	if err := d.Create(t.Context(), eph); err != nil {
		t.Fatal(err)
	}
	if err := d.Destroy(t.Context(), eph.ID); err != nil {
		t.Fatal(err)
	}
	if n := fs.Flushes() - before; n != 0 {
		t.Errorf("making an ephemeral volume and destroying it made %d flushes, want none", n)
	}
}

// TestSmallFilesShared checks that a fresh clone of small files, which btrfs
// keeps in its metadata, takes nothing.
func TestSmallFilesShared(t *testing.T) {
	d := pool(t, testfs.Btrfs(t, 256<<20))
	vol, tree := create(t, d)
	for i := range 100 {
		write(t, filepath.Join(tree, fmt.Sprint("f", i)), make([]byte, 1000))
	}
	clone := identity(driver.Volume)
	if err := d.Clone(t.Context(), vol, clone); err != nil {
		t.Fatal(err)
	}
	u, err := d.Usage(t.Context(), clone.ID)
	if err != nil {
		t.Fatal(err)
	}
	if u.ExclusiveBytes != 0 || u.SharedBytes < 100*1000 {
		t.Errorf("usage of a fresh clone of small files: %+v", u)
	}
	time.Sleep(20 * time.Millisecond) // times of files have the resolution of a clock tick
	write(t, filepath.Join(treeOf(t, d, clone.ID), "f7"), make([]byte, 1001))
	if u, err = d.Usage(t.Context(), clone.ID); err != nil {
		t.Fatal(err)
	}
	if u.ExclusiveBytes < 1001 || u.ExclusiveBytes > 4096 {
		t.Errorf("usage after one small file changed: %+v", u)
	}
}

// TestReadOnly checks that the kernel itself protects snapshots.
func TestReadOnly(t *testing.T) {
	d := pool(t, testfs.Btrfs(t, 128<<20))
	vol, tree := create(t, d)
	write(t, filepath.Join(tree, "f"), []byte("x"))
	snap := identity(driver.Snapshot)
	if err := d.Snapshot(t.Context(), vol, snap); err != nil {
		t.Fatal(err)
	}
	gen := identity(driver.Scratch)
	if err := d.Clone(t.Context(), vol, gen); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(treeOf(t, d, gen.ID), "f"), []byte("x")) // a scratch clone is writable
	gen.Kind = driver.Generation
	if err := d.SetIdentity(t.Context(), gen); err != nil {
		t.Fatal(err)
	}
	for _, id := range []driver.ObjectID{snap.ID, gen.ID} {
		err := os.WriteFile(filepath.Join(treeOf(t, d, id), "f"), []byte("y"), 0o644)
		if !errors.Is(err, unix.EROFS) {
			t.Errorf("writing to an immutable object: %v", err)
		}
		if err := d.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
}

// TestUnsupported opens a pool where there is no btrfs.
func TestUnsupported(t *testing.T) {
	dir := testfs.Tmpfs(t, 1<<20)
	_, err := btrfs.Open(t.Context(), dir, "pool", true)
	if !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
		t.Errorf("error %v with hint %q, want unsupported and a hint", err, errs.HintOf(err))
	}
	if names, _ := os.ReadDir(dir); len(names) != 0 {
		t.Errorf("it left %v", names)
	}
	if err := os.Mkdir(filepath.Join(dir, "objects"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := btrfs.Open(t.Context(), dir, "pool", false); !errs.Is(err, errs.Unsupported) {
		t.Errorf("opening what another driver laid out: %v", err)
	}
}

// TestProbe checks that probing leaves nothing, and removes what a process that
// died while probing left.
func TestProbe(t *testing.T) {
	dir := testfs.Btrfs(t, 128<<20)
	for range 2 {
		if err := btrfs.Probe(dir); err != nil {
			t.Fatal(err)
		}
		if n := count(t, dir); n != 0 {
			t.Errorf("probing left %d subvolumes", n)
		}
		subvol(t, filepath.Join(dir, ".pando-probe"))
	}
	if err := btrfs.Probe(filepath.Join(dir, "nowhere")); !errs.Is(err, errs.NotFound) {
		t.Errorf("probing where nothing is: %v", err)
	}
}

func BenchmarkClone(b *testing.B) {
	dir := testfs.Btrfs(b, 2<<30)
	d, err := btrfs.Open(b.Context(), dir, "pool", true)
	if err != nil {
		b.Fatal(err)
	}
	defer d.(*btrfs.Driver).Close()
	vol := identity(driver.Volume)
	if err := d.Create(b.Context(), vol); err != nil {
		b.Fatal(err)
	}
	b.Run("clone", func(b *testing.B) {
		for b.Loop() {
			if err := d.Clone(b.Context(), vol.ID, identity(driver.Volume)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("destroy", func(b *testing.B) {
		var ids []driver.ObjectID
		for o, err := range d.List(b.Context()) {
			if err != nil {
				b.Fatal(err)
			}
			if o.ID != vol.ID {
				ids = append(ids, o.ID)
			}
		}
		n := 0
		for b.Loop() {
			if n == len(ids) {
				b.Skip("nothing left to destroy")
			}
			if err := d.Destroy(b.Context(), ids[n]); err != nil {
				b.Fatal(err)
			}
			n++
		}
	})
	b.Run("create", func(b *testing.B) {
		for b.Loop() {
			if err := d.Create(b.Context(), identity(driver.Volume)); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestImmutable clones and destroys a volume whose root, and a directory with a
// subvolume inside, are immutable or append-only.
func TestImmutable(t *testing.T) {
	dir := testfs.Btrfs(t, 256<<20)
	d := pool(t, dir)
	vol, tree := create(t, d)
	want := map[string]string{"file": "file", "grows/in/file": "grows/in/file"}
	subvol(t, filepath.Join(tree, "grows/in"))
	for name, content := range want {
		write(t, filepath.Join(tree, name), []byte(content))
	}
	flags := map[string]uint32{"file": kernel.FlagAppend, "grows/in": kernel.FlagImmutable, "grows": kernel.FlagAppend,
		"": kernel.FlagImmutable}
	for _, name := range []string{"file", "grows/in", "grows", ""} {
		f, err := os.Open(filepath.Join(tree, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := kernel.Protect(int(f.Fd()), flags[name]); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	clone, snap := identity(driver.Volume), identity(driver.Snapshot)
	if err := errors.Join(d.Clone(t.Context(), vol, clone), d.Snapshot(t.Context(), vol, snap)); err != nil {
		t.Fatal(err)
	}
	for _, id := range []driver.ObjectID{clone.ID, snap.ID} {
		wantFiles(t, treeOf(t, d, id), want)
		for name, flag := range flags {
			f, err := os.Open(filepath.Join(treeOf(t, d, id), name))
			if err != nil {
				t.Fatal(err)
			}
			if have, err := kernel.GetFlags(int(f.Fd())); err != nil || have&flag == 0 {
				t.Errorf("%q of object %s has flags %#x, %v; want %#x", name, id, have, err, flag)
			}
			f.Close()
		}
	}
	for _, id := range []driver.ObjectID{clone.ID, snap.ID, vol} {
		if err := d.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	if n := count(t, dir); n != 0 {
		t.Errorf("%d subvolumes are left", n)
	}
}
