package zfs_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/driver/drivertest"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/linux/zfs"
	"pando/internal/testing/testfs"
)

// dirOn is a directory of the driver whose dataset is in a zpool of its own.
func dirOn(t testing.TB, z *testfs.Zpool) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Symlink(z.Name()+"/p", filepath.Join(dir, driverzfs.Link)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// power is a zpool whose power can be cut.
type power struct {
	*testfs.Zpool
	dir string
}

func (p power) Dir() string { return p.dir }

// Cut implements drivertest.Power. The directory is not on the zpool, and stays.
func (p power) Cut() string { p.Zpool.Cut(); return p.dir }

// fill takes all that is left of the zpool, as a reservation of a dataset that has
// nothing to do with the pool.
func fill(dir string) (func() error, error) {
	root, err := os.Readlink(filepath.Join(dir, driverzfs.Link))
	if err != nil {
		return nil, err
	}
	ctx, filler := context.Background(), zfs.ParentOf(root)+"/filler"
	if err := zfs.ZFS.Do(ctx, "create", "-o", "mountpoint=none", filler); err != nil {
		return nil, err
	}
	// To the last KiB: what is reserved needs some room itself.
	for size := int64(256 << 20); size >= 16<<10; {
		rows, err := zfs.ZFS.Rows(ctx, 1, "get", "-Hp", "-o", "value", "reservation", filler)
		if err != nil {
			return nil, err
		}
		have, err := zfs.Number(rows[0][0])
		if err != nil {
			return nil, err
		}
		if zfs.ZFS.Do(ctx, "set", fmt.Sprintf("reservation=%d", have+size), filler) != nil {
			size /= 2
		}
	}
	return func() error { return zfs.ZFS.Do(ctx, "destroy", filler) }, nil
}

func TestConformance(t *testing.T) {
	zpool := newZpool(t, 4<<30)
	drivertest.Run(t, drivertest.Target{
		Open:  opener(zpool),
		Dir:   func(t testing.TB) string { return t.TempDir() },
		Names: names,
		Spoil: newSpoiler,
		Slow:  true,
		Small: func(t testing.TB) string { return dirOn(t, testfs.NewZpool(t, 256<<20)) },
		Fill:  fill,
		Power: func(t testing.TB) drivertest.Power {
			z := testfs.NewZpool(t, 512<<20)
			z.Quiet()
			return power{z, dirOn(t, z)}
		},
		Free: func(dir string) (int64, error) {
			root, err := os.Readlink(filepath.Join(dir, driverzfs.Link))
			if err != nil {
				return 0, err
			}
			rows, err := zfs.ZFS.Rows(context.Background(), 1, "get", "-Hp", "-o", "value", "available", root)
			if err != nil {
				return 0, err
			}
			return zfs.Number(rows[0][0])
		},
	})
}
