package zfs_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"pando/internal/driver"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/linux/zfs"
	"pando/internal/testing/testfs"
)

const poolID = "test-pool"

var count atomic.Int64

// newZpool makes a zpool on a device of size bytes.
func newZpool(t testing.TB, size int64) string {
	t.Helper()
	return testfs.ZFS(t, size)
}

// opener opens the driver in directories, for each of which it makes the link to a
// dataset of its own in a zpool.
func opener(zpool string) driver.Opener {
	return func(ctx context.Context, dir, id string, create bool) (driver.Driver, error) {
		if create {
			err := os.Symlink(fmt.Sprintf("%s/p%d", zpool, count.Add(1)), filepath.Join(dir, driverzfs.Link))
			if err != nil && !errors.Is(err, fs.ErrExist) {
				return nil, err
			}
		}
		return driverzfs.Open(ctx, dir, id, create)
	}
}

// names lists everything in a pool: datasets, snapshots, and files of the driver.
func names(dir string) ([]string, error) {
	root, err := os.Readlink(filepath.Join(dir, driverzfs.Link))
	if err != nil {
		return nil, err
	}
	rows, err := zfs.ZFS.Rows(context.Background(), 1, "list", "-Hp", "-r", "-t", "all", "-o", "name", root)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, r := range rows {
		if r[0] != root {
			out = append(out, strings.TrimPrefix(r[0], root))
		}
	}
	err = filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && e.Name() == "origins" {
			return fs.SkipDir // a cache
		}
		if err == nil && !e.IsDir() && e.Name() != driverzfs.Link && e.Name() != "space" && e.Name() != "devices" {
			out = append(out, p)
		}
		return err
	})
	return out, err
}

// zdo runs a zfs command that must succeed.
func zdo(t testing.TB, args ...string) {
	t.Helper()
	if err := zfs.ZFS.Do(context.Background(), args...); err != nil {
		t.Fatalf("zfs %q: %v", args, err)
	}
}
