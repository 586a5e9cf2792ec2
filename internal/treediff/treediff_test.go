package treediff

import (
	"math/rand/v2"
	"testing"

	"pando/internal/testfs"
)

func rounds(t *testing.T, n int, fn func(t *testing.T, r *rand.Rand, edits int)) {
	s := seed(t)
	for i := range n {
		r := rand.New(rand.NewPCG(s, uint64(i)))
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

// TestRandomSnapshots: subvolumes, by their inodes.
func TestRandomSnapshots(t *testing.T) {
	w := snapshots(t)
	rounds(t, 12, func(t *testing.T, r *rand.Rand, edits int) { property(t, w, edits, r, "walk") })
}

// TestRandomImages: filesystems in images, by their inodes.
func TestRandomImages(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			w := images(t, kind, blockArgs[kind]...)
			rounds(t, 5, func(t *testing.T, r *rand.Rand, edits int) { property(t, w, edits, r, "walk") })
		})
	}
}

// blockArgs make mkfs use the block size of the host's filesystem.
var blockArgs = map[string][]string{"ext4": {"-F", "-b", "4096"}, "xfs": {"-s", "size=4096"}}
