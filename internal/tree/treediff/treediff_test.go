package treediff

import (
	"math/rand/v2"
	"testing"

	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

func rounds(t *testing.T, n int, fn func(t *testing.T, r *rand.Rand, edits int)) {
	for i := range n {
		r := faulttest.Rand(t, i)
		fn(t, r, []int{0, 1, 3, 10, 40, 150}[r.IntN(6)])
		if t.Failed() {
			t.Fatalf("in round %d", i)
		}
	}
}

// TestRandomCopies: trees of which nothing is known.
func TestRandomCopies(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs", "ext4", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			w := copies(t, testfs.New(t, kind, 600<<20).Dir())
			rounds(t, 8, func(t *testing.T, r *rand.Rand, edits int) { property(t, w, edits, r, "walk") })
		})
	}
}

// TestRandomSnapshots: subvolumes, by what btrfs says has changed, and by their
// inodes.
func TestRandomSnapshots(t *testing.T) {
	w := snapshots(t)
	rounds(t, 12, func(t *testing.T, r *rand.Rand, edits int) { property(t, w, edits, r, "btrfs") })
	w.hints = nil
	rounds(t, 12, func(t *testing.T, r *rand.Rand, edits int) { property(t, w, edits, r, "walk") })
}

// TestRandomImages: filesystems in images, by their inodes, and by what of the
// images has changed.
func TestRandomImages(t *testing.T) {
	for _, c := range []struct{ name, kind, method string }{
		{"ext4 inodes", "ext4", "walk"}, {"xfs", "xfs", "walk"}, {"ext4", "ext4", "ext4"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := images(t, c.kind, blockArgs[c.kind]...)
			if c.method == "walk" && c.kind == "ext4" {
				w.hints = nil
			}
			rounds(t, 5, func(t *testing.T, r *rand.Rand, edits int) { property(t, w, edits, r, c.method) })
		})
	}
}

// TestRandomExt4Layouts: inode tables are found however mkfs spreads them.
func TestRandomExt4Layouts(t *testing.T) {
	for name, args := range map[string][]string{
		"no flex_bg": {"-O", "^flex_bg,^resize_inode"}, "meta_bg": {"-O", "meta_bg,^resize_inode"},
		"32 bit": {"-O", "^64bit"}, "no checksums": {"-O", "^metadata_csum,^uninit_bg"},
		"many groups": {"-g", "1024", "-O", "meta_bg,^resize_inode"}, "large inodes": {"-I", "1024"}, "small inodes": {"-I",
			"128"},
	} {
		t.Run(name, func(t *testing.T) {
			w := images(t, "ext4", append(args, blockArgs["ext4"]...)...)
			rounds(t, 1, func(t *testing.T, r *rand.Rand, _ int) { property(t, w, 30, r, "ext4") })
		})
	}
}

// blockArgs make mkfs use the block size of the host's filesystem.
var blockArgs = map[string][]string{"ext4": {"-F", "-b", "4096"}, "xfs": {"-s", "size=4096"}}
