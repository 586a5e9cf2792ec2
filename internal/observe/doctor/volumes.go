package doctor

import (
	"context"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/zfs"
)

const (
	maxPlaces = 4000 // at which the volumes of a group are compared
	minPlaces = 30   // with data, for a conclusion
)

// openVolume is a volume with its open block device.
type openVolume struct {
	Dataset
	dev *os.File
}

// compareVolumes compares volumes of equal block size with each other, at places drawn at random. Reading a volume does
// not change it.
func (c *Copies) compareVolumes(ctx context.Context, datasets []Dataset, deadline time.Time) error {
	groups := map[int64][]openVolume{}
	defer func() {
		for _, g := range groups {
			for _, v := range g {
				v.dev.Close()
			}
		}
	}()

	// Open the volumes, by block size.
	denied, absent := 0, 0
	for _, d := range datasets {
		if d.Type != "volume" || d.Origin != "" || d.blockBytes <= 0 {
			continue
		}
		dev, err := zfs.OpenDevice(d.Name)
		switch {
		case errs.Is(err, errs.Permission):
			denied++
		case err != nil:
			absent++
		default:
			groups[d.blockBytes] = append(groups[d.blockBytes], openVolume{d, dev})
		}
	}

	if denied > 0 {
		c.skip(fmt.Sprintf("%d volumes: reading them needs root", denied))
	}
	if absent > 0 {
		c.skip(fmt.Sprintf("%d volumes without a block device", absent))
	}

	// Compare each group, in equal parts of the time.
	sizes := make([]int64, 0, len(groups))
	for size, g := range groups {
		if len(g) > 1 {
			sizes = append(sizes, size)
		}
	}

	slices.Sort(sizes)
	for i, size := range sizes {
		slice := time.Now().Add(time.Until(deadline) / time.Duration(len(sizes)-i))
		g, err := c.compareGroup(ctx, groups[size], size, slice)
		if err != nil {
			return err
		}
		c.Volumes = append(c.Volumes, g)
	}

	return nil
}

// compareGroup compares volumes whose block size in bytes is block, at random places until the deadline.
func (c *Copies) compareGroup(
	ctx context.Context, volumes []openVolume, block int64, deadline time.Time,
) (VolumeGroup, error) {
	var g VolumeGroup
	longest := int64(0)
	for _, v := range volumes {
		g.Volumes = append(g.Volumes, v.Name)
		g.PresentBytes += v.ReferencedBytes
		longest = max(longest, v.volumeBytes)
	}

	// Count equal blocks by their hashes.
	buf := make([]byte, block)
	seed := maphash.MakeSeed()
	for range maxPlaces {
		if err := ctx.Err(); err != nil {
			return g, errs.Wrap("doctor", "", err)
		}

		if time.Now().After(deadline) {
			break
		}

		at := rand.Int64N(max(longest/block, 1)) * block
		seen := map[uint64]bool{}
		found := 0
		for _, v := range volumes {
			if n, err := v.dev.ReadAt(buf, at); n < len(buf) || err != nil || allZero(buf) {
				continue // beyond the end of the volume, or a hole
			}
			found++
			h := maphash.Bytes(seed, buf)
			if seen[h] {
				g.Equal++
			}
			seen[h] = true
		}

		g.Blocks += found
		if found > 0 {
			g.Places++
		}
	}

	g.explain()
	if g.Places < minPlaces {
		c.skip("volumes with too little data at the places drawn at random")
	}

	return g, nil
}

// explain estimates from the sample how many bytes of the volumes are copies. Places were drawn at random, not blocks,
// because blocks at the same place are not independent.
func (g *VolumeGroup) explain() {
	if g.Places < minPlaces {
		g.Explained = Range{0, g.PresentBytes}
		return
	}
	share := float64(g.Equal) / float64(g.Blocks)
	low, high := wilson(share*float64(g.Places), float64(g.Places))
	g.Explained = Range{int64(low * float64(g.PresentBytes)), int64(high * float64(g.PresentBytes))}
}

// allZero reports whether b holds only zeros.
func allZero(b []byte) bool { return !slices.ContainsFunc(b, func(x byte) bool { return x != 0 }) }
