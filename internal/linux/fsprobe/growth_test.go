package fsprobe_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"pando/internal/linux/fsprobe"
)

// TestGrowth: the limits are those of the formats. resize2fs 1.47 accepts them, where there was room to try.
func TestGrowth(t *testing.T) {
	for name, c := range map[string]struct {
		mkfs  []string
		limit int64 // 0: not checked by a program
	}{
		"ext4":        {[]string{"mkfs.ext4", "-q", "-F", "-b", "4096"}, 64<<40 - 128<<20},
		"ext4 32 bit": {[]string{"mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^64bit,^metadata_csum"}, 16<<40 - 4096},
		"small ext4":  {[]string{"mkfs.ext4", "-q", "-F", "-b", "4096", "-T", "small"}, 16<<40 - 128<<20},
		"xfs":         {[]string{"mkfs.xfs", "-q", "-f"}, 2 << 40},
	} {
		t.Run(name, func(t *testing.T) {
			image := filepath.Join(t.TempDir(), "image")
			f, err := os.Create(image)
			if err == nil {
				err = f.Truncate(512 << 20)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if out, err := exec.Command(c.mkfs[0], append(c.mkfs[1:], image)...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			g, err := fsprobe.ReadGrowth(f)
			if err != nil || g.Bytes != 512<<20 || g.LimitBytes != c.limit {
				t.Errorf("%+v, wanted a limit of %d; %v", g, c.limit, err)
			}
		})
	}
}

// TestGrowthCost: the largest size for some room costs that at most, and a group more costs more.
func TestGrowthCost(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		g := fsprobe.NewGrowth(kind)
		for _, room := range []int64{0, 64 << 20, 65 << 20, 1 << 30} {
			n := g.Largest(1<<50, room)
			if n > 0 && g.Cost(n) > room || g.Cost(n+128<<20) <= room {
				t.Errorf("%s: %d bytes in room for %d cost %d, and more %d", kind, n, room, g.Cost(n), g.Cost(n+128<<20))
			}
		}
	}
	if g := fsprobe.NewGrowth(""); g.Cost(1<<50) != 0 || g.Largest(1<<50, 0) != 1<<50 {
		t.Errorf("%+v", g)
	}
}
