package doctor

import (
	"context"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"

	"golang.org/x/sys/unix"
)

// pageBytes is the unit in which the page cache of a file is written, and so a loop device without direct I/O.
const pageBytes = 4096

// smallPartition is the size below which the alignment of a partition does not matter: it holds a boot loader or the
// like.
const smallPartition = 8 << 20

// checkAlignment finds partitions, filesystems and zpools whose blocks do not match those of their disks. A disk must
// read a block before it can write a part of it.
func checkAlignment(ctx context.Context, _ *host, c *Report) error {
	devices, err := blockdev.List()
	if err != nil {
		return err
	}

	// Partitions, and devices made of others.
	g := grains{}
	parts := 0
	for _, d := range devices {
		if err := ctx.Err(); err != nil {
			return err
		}

		switch d.Kind {
		case blockdev.Partition:
			parts++
			c.findMisalignedPartition(d, g)
		case blockdev.Mapper, blockdev.RAID:
			// The kernel reports -1 if the alignments of the parts do not fit together.
			if off, ok := readNumber("/sys/dev/block", d.ID(), "alignment_offset"); ok && off != 0 {
				c.find(misaligned(d, fmt.Sprintf("%s is not aligned to the disks it is made of", d.Path()),
					words("alignment_offset", "alignment_offset of the kernel", fmt.Sprint(off))))
			}
		}
	}

	// Filesystems.
	all, err := ownFilesystems()
	if err != nil {
		return err
	}

	looked := 0
	for _, m := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		if c.findSmallBlocks(m, g) {
			looked++
		}
	}

	// Zpools.
	pools, why := zpools(ctx)
	for _, p := range pools {
		if err := c.findSmallAshift(ctx, p, g); err != nil {
			why = fmt.Sprintf("the block sizes of zpool %s: %v", p, err)
		}
	}

	c.measure(count("partitions", "partitions", parts),
		count("filesystems", "filesystems on devices", looked))
	c.Summary = errs.JoinSet("; ", errs.Plural(parts, "partition"), errs.Plural(looked, "filesystem"),
		zpoolText(pools), why)
	return nil
}

// grains remembers the sizes in bytes of the smallest writes for which devices need not read.
type grains map[grainKey]int

type grainKey struct {
	dev     uint64
	through bool
}

// blockBytes returns the size of the largest physical block of d and of the devices below it. The page cache below a
// loop device without direct I/O writes whole pages, which hides the blocks further down from writes to d that lie
// within one page. With through it includes them, for writes that span two pages.
func (g grains) blockBytes(d blockdev.Device, through bool) int {
	k := grainKey{d.Number, through}
	if n, ok := g[k]; ok {
		return n
	}

	n := max(d.PhysicalBytes, d.LogicalBytes, 512)
	g[k] = n // ends the recursion of a device that lies on itself
	switch d.Kind {
	case blockdev.Loop:
		if !through && !d.DirectIO {
			break
		}

		var st unix.Stat_t
		var sf unix.Statfs_t
		if unix.Stat(d.Backing, &st) != nil || unix.Statfs(d.Backing, &sf) != nil {
			break
		}
		if through {
			n = max(n, min(int(sf.Bsize), pageBytes))
		}

		if below, err := blockdev.Lookup(st.Dev); err == nil {
			n = max(n, g.blockBytes(below, through))
		}
	case blockdev.Mapper, blockdev.RAID, blockdev.Partition:
		below, err := d.Below()
		if err != nil {
			break
		}
		for _, x := range below {
			n = max(n, g.blockBytes(x, through))
		}
	}

	g[k] = n
	return n
}

// findMisalignedPartition reports a partition that does not begin at a block of its disk.
func (c *Report) findMisalignedPartition(d blockdev.Device, g grains) {
	grain := g.blockBytes(d, true)
	off := d.StartBytes % int64(grain)
	if off == 0 && d.AlignOffset <= 0 || d.SizeBytes < smallPartition {
		return
	}
	c.find(misaligned(d, fmt.Sprintf("partition %s begins in the middle of a block of its disk", d.Path()),
		figure("start", "begins at", Bytes, d.StartBytes),
		figure("physical", "block size of the disk below", Bytes, int64(grain)),
		figure("off", "offset into a block", Bytes, max(off, int64(d.AlignOffset)))))
}

// misaligned returns the finding about a device whose beginning is not aligned.
func misaligned(d blockdev.Device, title string, measured ...Figure) Finding {
	return Finding{
		Code: "alignment-partition", Severity: Warning, Subject: d.Path(), Title: title, Measured: measured,
		Why: "Each block of a filesystem covers parts of two blocks of the disk, which must read both, change them and " +
			"write both. Small writes cost at least twice as much.",
		Do: []Step{step("copy the data elsewhere, recreate the partition at a multiple of 1 MiB, which is the default of "+
			"current tools, and copy the data back. A partition cannot be moved in place",
			"lsblk -o NAME,START,PHY-SEC,MOUNTPOINTS", "sfdisk -d "+d.Path())},
	}
}

// findSmallBlocks reports a filesystem with blocks, or a log with sectors, smaller than the blocks of its disk. It
// returns false for filesystems that it cannot check.
func (c *Report) findSmallBlocks(m mounted, g grains) bool {
	if m.FSType != "xfs" && !strings.HasPrefix(m.FSType, "ext") {
		return false
	}

	d, err := blockdev.Lookup(m.Dev)
	if err != nil || d.ReadOnly {
		return false
	}

	sf, ok := m.onTop()
	if !ok {
		return false
	}

	grain := g.blockBytes(d, false)
	if int(sf.Bsize) >= grain {
		if m.FSType == "xfs" {
			c.findSmallSectors(m, d, grain)
		}
		return true
	}

	blockOption := "-b "
	if m.FSType == "xfs" {
		blockOption = "-b size="
	}

	c.find(Finding{
		Code: "alignment-filesystem", Severity: Warning, Subject: m.Point,
		Title: fmt.Sprintf("the %s at %s has blocks of %d bytes on a disk with blocks of %d", m.FSType, m.Point, sf.Bsize,
			grain),
		Measured: []Figure{figure("block", "blocks of the filesystem", Bytes, sf.Bsize),
			figure("physical", "blocks of the disk", Bytes, int64(grain)), words("device", "device", d.Path())},
		Why: "To write such a block, the disk must first read the larger block around it.",
		Do: []Step{step("recreate the filesystem with larger blocks, and copy the files back",
			fmt.Sprintf("mkfs.%s %s%d DEVICE", m.FSType, blockOption, grain))},
	})

	return true
}

// findSmallSectors reports an XFS with sectors, in which it writes its log, smaller than grain, the blocks of its disk.
func (c *Report) findSmallSectors(m mounted, d blockdev.Device, grain int) {
	dir, err := os.Open(m.Point)
	if err != nil {
		return
	}

	defer dir.Close()
	sector, err := kernel.XFSSectorBytes(dir)
	if err != nil || sector >= grain {
		return
	}

	c.find(Finding{
		Code: "alignment-xfs-sector", Severity: Note, Subject: m.Point,
		Title: fmt.Sprintf("the XFS at %s writes its log in units of %d bytes to a disk with blocks of %d", m.Point,
			sector, grain),
		Measured: []Figure{figure("sector", "sectors of the XFS", Bytes, int64(sector)),
			figure("physical", "blocks of the disk", Bytes, int64(grain)), words("device", "device", d.Path())},
		Why: "Each sync writes to the log. If a write begins or ends inside a block of the disk, the disk must read that " +
			"block before the sync is done.",
		Do: []Step{step("set the sector size when you recreate it: mkfs.xfs uses the block size of the disk, but cannot see "+
			"it through a file", fmt.Sprintf("mkfs.xfs -s size=%d DEVICE", grain))},
	})
}

// tooSmall matches the note of `zpool status` on a vdev whose blocks are smaller than those of its disk.
var tooSmall = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`block size: ([0-9]+)B configured, ([0-9]+)B native`)
})

// findSmallAshift reports vdevs of a zpool whose blocks are smaller than those of their disks, each once. An error may
// mean that only some vdevs could be checked.
func (c *Report) findSmallAshift(ctx context.Context, pool string, g grains) error {
	vdevs, err := vdevsOf(ctx, pool)
	if err != nil {
		return err
	}

	shifts, err := ashifts(ctx, pool)
	done := map[string]bool{}
	for _, v := range vdevs {
		if v.path == "" || v.class == "cache" || v.class == "spares" || done[v.top] {
			continue
		}

		// Prefer the sizes that zpool reports.
		block, native := 0, 0
		if m := tooSmall().FindStringSubmatch(v.note); m != nil {
			block, _ = strconv.Atoi(m[1])
			native, _ = strconv.Atoi(m[2])
		} else if shift := shifts[filepath.Base(v.top)]; shift > 0 {
			block = 1 << shift
			native = nativeBytes(v.path, g)
		}

		if block == 0 || native <= block {
			continue
		}

		done[v.top] = true
		c.find(Finding{
			Code: "alignment-ashift", Severity: Warning, Subject: pool,
			Title: fmt.Sprintf("zpool %s writes blocks of %d bytes to %s, whose blocks have %d bytes",
				pool, block, v.path, native),
			Measured: []Figure{words("vdev", "vdev", v.top),
				figure("block", "blocks of the vdev (2^ashift)", Bytes, int64(block)),
				figure("physical", "block size of the disk below", Bytes, int64(native))},
			Why: "The disk reads a block before it changes a part of it: small writes, and so syncs, cost several times as " +
				"much. The ashift of a vdev cannot be changed.",
			Do: []Step{
				step("create a pool with a larger ashift on other disks, and send everything there",
					fmt.Sprintf("zpool create -o ashift=%d NEWPOOL DISK", bits.Len(uint(native))-1),
					"zfs snapshot -r "+word(pool)+"@move", "zfs send -R "+word(pool)+"@move | zfs receive -F NEWPOOL/moved"),
				{Text: "when you add or attach a disk, set its ashift with -o ashift=N; otherwise it has that of its vdev"},
			},
		})
	}

	return err
}

// nativeBytes returns the block size below a leaf of a zpool, which is a device or a file; 0 if it is unknown.
func nativeBytes(path string, g grains) int {
	d, err := blockdev.LookupPath(path)
	if err == nil {
		return g.blockBytes(d, true)
	}
	var sf unix.Statfs_t
	if unix.Statfs(path, &sf) != nil {
		return 0
	}
	return min(int(sf.Bsize), pageBytes)
}

// ashifts returns the ashifts of the top-level vdevs of a pool, by the last part of their names. OpenZFS before 2.2
// does not report them, which is an error: `zpool status` marks some vdevs then.
func ashifts(ctx context.Context, pool string) (map[string]int, error) {
	rows, err := zfs.Zpool.Rows(ctx, 2, "get", "-Hp", "-o", "name,value", "ashift", pool, "all-vdevs")
	if err != nil {
		return nil, fmt.Errorf("only the ashifts that `zpool status` flags are known: %w", err)
	}
	out := map[string]int{}
	for _, r := range rows {
		if n, err := strconv.Atoi(r[1]); err == nil {
			out[filepath.Base(r[0])] = n
		}
	}
	return out, nil
}
