package zfs_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/driver/drivertest"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/zfs"
)

func TestConformance(t *testing.T) {
	zpool := newZpool(t, 4<<30)
	drivertest.Run(t, drivertest.Target{
		Open:  opener(zpool),
		Dir:   func(t testing.TB) string { return t.TempDir() },
		Names: names,
		Spoil: newSpoiler,
		Slow:  true,
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
