package reflink_test

import (
	"context"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver/drivertest"
	"pando/internal/driver/reflink"
	"pando/internal/testing/testfs"
)

func TestConformanceXFS(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  reflink.Open,
		Dir:   func(t testing.TB) string { return testfs.XFS(t, 3<<30) },
		Small: func(t testing.TB) string { return testfs.XFS(t, 320<<20) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "xfs", 512<<20) },
	})
}

func TestConformanceBtrfs(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  reflink.Open,
		Dir:   func(t testing.TB) string { return testfs.Btrfs(t, 3<<30) },
		Small: func(t testing.TB) string { return testfs.Btrfs(t, 320<<20) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "btrfs", 512<<20) },
	})
}

// A filesystem that cannot share blocks is found by trying, and refused.
func TestOpenRefusesWhatCannotShare(t *testing.T) {
	for _, dir := range []string{testfs.Ext4(t, 64<<20), testfs.Tmpfs(t, 16<<20)} {
		_, err := reflink.Open(context.Background(), dir, "pool", true)
		if errs.KindOf(err) != errs.Unsupported || errs.HintOf(err) == "" {
			t.Errorf("%s: %v (hint %q), wanted Unsupported with a hint", filepath.Base(dir), err, errs.HintOf(err))
		}
	}
}
