package zfs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pando/internal/driver"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/linux/mount"
	"pando/internal/linux/zfs"
)

// pool is a driver on a dataset of its own.
type pool struct {
	t    *testing.T
	dir  string
	root string
	d    *driverzfs.Driver
}

// newPool lays out a pool in the dataset root, which need not be there.
func newPool(t *testing.T, root string) *pool {
	t.Helper()
	p := &pool{t: t, dir: t.TempDir(), root: root}
	if err := os.Symlink(root, filepath.Join(p.dir, driverzfs.Link)); err != nil {
		t.Fatal(err)
	}
	p.open(true)
	return p
}

func (p *pool) open(create bool) {
	p.t.Helper()
	d, err := driverzfs.Open(p.t.Context(), p.dir, poolID, create)
	if err != nil {
		p.t.Fatal(err)
	}
	p.d = d.(*driverzfs.Driver)
}

func (p *pool) ctx() context.Context { return p.t.Context() }

func (p *pool) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

func identity(kind driver.Kind, fs driver.FS) driver.Identity {
	id := driver.NewID()
	i := driver.Identity{Version: driver.IdentityVersion, Pool: poolID, ID: id, Kind: kind, Name: "n" + string(id[:6]),
		FS:        fs,
		CreatedAt: time.Now().UTC().Truncate(time.Second), BootID: "test-boot"}
	if fs.IsImage() {
		i.SizeBytes = 32 << 20
	}
	return i
}

func (p *pool) create(fs driver.FS) driver.ObjectID {
	p.t.Helper()
	id := identity(driver.Volume, fs)
	p.must(p.d.Create(p.ctx(), id))
	return id.ID
}

func (p *pool) clone(from driver.ObjectID, fs driver.FS) driver.ObjectID {
	p.t.Helper()
	id := identity(driver.Volume, fs)
	p.must(p.d.Clone(p.ctx(), from, id))
	return id.ID
}

func (p *pool) snapshot(from driver.ObjectID, fs driver.FS) driver.ObjectID {
	p.t.Helper()
	id := identity(driver.Snapshot, fs)
	p.must(p.d.Snapshot(p.ctx(), from, id))
	return id.ID
}

func (p *pool) ds(id driver.ObjectID) string { return p.root + "/" + string(id) }

// list is what List yields, by whole and half.
func (p *pool) list() (whole, half []driver.ObjectID) {
	p.t.Helper()
	for o, err := range p.d.List(p.ctx()) {
		p.must(err)
		if o.Err != nil {
			p.t.Errorf("%s: %v", o.ID, o.Err)
		}
		if o.Whole {
			whole = append(whole, o.ID)
		} else {
			half = append(half, o.ID)
		}
	}
	return whole, half
}

// wantExactly checks that the pool holds these objects, whole, and no others.
func (p *pool) wantExactly(what string, ids ...driver.ObjectID) {
	p.t.Helper()
	whole, half := p.list()
	slices.Sort(whole)
	ids = slices.Sorted(slices.Values(ids))
	if !slices.Equal(whole, ids) || len(half) > 0 {
		p.t.Errorf("%s: whole are %q, wanted %q; half are %q", what, whole, ids, half)
	}
}

func (p *pool) names() []string {
	p.t.Helper()
	n, err := names(p.dir)
	p.must(err)
	return n
}

// mounted mounts a native object while fn runs.
func (p *pool) mounted(id driver.ObjectID, fn func(dir string) error) error {
	p.t.Helper()
	a, err := p.d.Attachment(p.ctx(), id)
	if err != nil {
		return err
	}
	dir := filepath.Join(p.t.TempDir(), string(id))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	m, err := mount.Device(a.Type, a.Source, a.Options, a.ReadOnly)
	if err != nil {
		return err
	}
	defer m.Close()
	if _, err := m.MoveTo(dir); err != nil {
		return err
	}
	return errors.Join(fn(dir), m.Close(), mount.Unmount(dir))
}

func (p *pool) write(id driver.ObjectID, name, text string) {
	p.t.Helper()
	p.must(p.mounted(id, func(dir string) error { return os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600) }))
}

func (p *pool) wantFile(id driver.ObjectID, name, want string) {
	p.t.Helper()
	p.must(p.mounted(id, func(dir string) error {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil && string(b) != want {
			err = fmt.Errorf("%s of %s is %.50q, wanted %.50q", name, id, b, want)
		}
		return err
	}))
}

// exists reports whether there is such a dataset or snapshot.
func exists(t testing.TB, name string) bool {
	t.Helper()
	err := zfs.ZFS.Do(context.Background(), "list", name)
	if err != nil && !zfs.Is(err, zfs.Absent) {
		t.Fatal(err)
	}
	return err == nil
}
