package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"pando/internal/linux/kernel"
	"pando/internal/observe/blockdev"
)

// Of btrfs' metadata, in percent of its chunks when no more can be made, includes the kernel's reserve, which is for
// what must not fail, such as deleting. And in bytes
// that are left: on two small ones no file could be made any more when it was 4 MiB.
const (
	metadataNote          = 75
	metadataWarning       = 85
	metadataWarningBytes  = 16 << 20
	metadataCritical      = 95
	metadataCriticalBytes = 8 << 20
)

// Subvolumes with quotas counted for each: whoever changes a shared extent makes
// the kernel walk to all that share it.
const (
	qgroupsNote    = 16
	qgroupsWarning = 100
)

// btrfsFS is a mounted btrfs.
type btrfsFS struct {
	uuid  string
	dir   string // in sysfs
	point string // one of its mount points that this process sees; "" if there is none
}

// subject is what findings call it.
func (b btrfsFS) subject() string {
	if b.point != "" {
		return b.point
	}
	return b.uuid
}

// btrfsAll are all mounted btrfs of this kernel.
func btrfsAll() ([]btrfsFS, error) {
	dirs, err := filepath.Glob("/sys/fs/btrfs/*/allocation")
	if err != nil {
		return nil, err
	}

	all, err := ownFilesystems()
	if err != nil {
		return nil, err
	}

	var out []btrfsFS
	for _, d := range dirs {
		b := btrfsFS{dir: filepath.Dir(d)}
		b.uuid = filepath.Base(b.dir)
		for _, m := range all {
			if m.FSType != "btrfs" {
				continue
			}
			dev, err := blockdev.LookupPath(m.Source)
			if err != nil {
				continue
			}
			if _, err := os.Lstat(filepath.Join(b.dir, "devices", dev.Name)); err == nil {
				b.point = m.Point
			}
		}

		out = append(out, b)
	}

	return out, nil
}

// eachBtrfs does a check of each mounted btrfs.
func (c *Report) eachBtrfs(ctx context.Context, one func(btrfsFS)) error {
	all, err := btrfsAll()
	if err != nil {
		return err
	}

	if len(all) == 0 {
		c.Summary = "no btrfs is mounted"
		return nil
	}

	for _, b := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		one(b)
	}

	c.Measured = append(c.Measured, figure("btrfs", "btrfs filesystems", Count, int64(len(all))))
	c.Summary = counted(len(all), "btrfs filesystem")
	return nil
}

// checkBtrfsMetadata finds btrfs that will say that they are full while df shows room.
func checkBtrfsMetadata(ctx context.Context, _ *HostRequest, c *Report) error {
	return c.eachBtrfs(ctx, c.findFullMetadata)
}

// metadata is about one.
func (c *Report) findFullMetadata(b btrfsFS) {
	number := func(parts ...string) int64 {
		n, _ := readNumber(append([]string{b.dir, "allocation"}, parts...)...)
		return n
	}
	total, onDisk := number("metadata/total_bytes"), number("metadata/disk_total")
	if total == 0 {
		return // data and metadata in the same chunks: how full it is says all
	}

	reserve := number("global_rsv_size")
	used := number("metadata/bytes_used") + number("metadata/bytes_pinned") + number("metadata/bytes_reserved")
	unallocated, ok := b.unallocated(onDisk + number("data/disk_total") + number("system/disk_total"))
	copies := max(onDisk/total, 1)

	// A chunk is chunk_size, or a tenth of a small filesystem.
	size := unallocated + onDisk + number("data/disk_total")
	chunk := min(number("metadata/chunk_size"), size/10)
	if !ok || unallocated >= copies*chunk {
		return // it takes another chunk when it needs one
	}

	percent := 100 * float64(used+reserve) / float64(total)
	left := max(total-used-reserve, 0)
	s := Severity("")
	switch {
	case percent >= metadataCritical || left <= metadataCriticalBytes:
		s = Critical
	case percent >= metadataWarning || left <= metadataWarningBytes:
		s = Warning
	case percent >= metadataNote:
		s = Note
	default:
		return
	}

	data, dataUsed := number("data/total_bytes"), number("data/bytes_used")
	f := Finding{
		Code: "btrfs-metadata-full", Severity: s, Subject: b.subject(),
		Title: fmt.Sprintf("the metadata of the btrfs at %s is nearly full and cannot grow",
			b.subject()),
		Measured: []Figure{
			known("metadata_percent", "metadata chunks in use", Percent, percent,
				percent).noted("includes the kernel's reserve"),
			figure("metadata", "metadata chunks hold", Bytes, total),
			figure("metadata_used", "used", Bytes, used),
			figure("reserve", "reserve for operations that must not fail", Bytes, reserve),
			figure("left", "left for new metadata", Bytes, left),
			figure("unallocated", "not in any chunk", Bytes,
				unallocated).noted(fmt.Sprintf("one more chunk takes %s", sizeText(copies*chunk))),
			figure("data", "data chunks hold", Bytes, data),
			figure("data_free", "free in them", Bytes, data-dataUsed),
		},
		Why: "btrfs allocates space in chunks, for data or for metadata, and metadata cannot use free space in data " +
			"chunks. When it is full, writes fail with \"no space\" while df shows free space, snapshots and even deletions " +
			"fail, and the filesystem may become read-only.",
	}

	at := b.point
	if at == "" {
		at = "MOUNTPOINT"
	}

	at = word(at)
	f.Do = []Step{
		{"free nearly empty data chunks. This moves their data: begin with few, and raise the number until space is " +
			"freed", []string{"btrfs balance start -dusage=5 " + at, "btrfs balance start -dusage=20 " + at,
			"btrfs filesystem usage " + at}},
		{"delete snapshots and small files; if that fails, add a disk for the time of the balance",
			[]string{"btrfs device add DISK " + at, "btrfs balance start -dusage=20 " + at, "btrfs device remove DISK " + at}},
	}

	if data-dataUsed < data/20 {
		f.Do = append(f.Do[1:2:2],
			Step{Text: "data chunks are full, too, so a balance frees nothing: add a disk or delete data"})
	}

	c.find(f)
}

// unallocated is what is in no chunk, given what chunks take of the devices. ok is
// false if the devices' sizes are not known.
func (b btrfsFS) unallocated(inChunks int64) (n int64, ok bool) {
	if b.point != "" {
		if n, ok := b.unallocatedOf(); ok {
			return n, true
		}
	}

	devs, err := filepath.Glob(filepath.Join(b.dir, "devices/*/size"))
	if err != nil || len(devs) == 0 {
		return 0, false
	}

	for _, d := range devs {
		sectors, ok := readNumber(d)
		if !ok {
			return 0, false
		}
		n += sectors * 512
	}

	return max(n-inChunks, 0), true
}

// unallocatedOf asks the filesystem, which may use less than its devices have.
func (b btrfsFS) unallocatedOf() (n int64, ok bool) {
	f, err := os.Open(b.point)
	if err != nil {
		return 0, false
	}

	defer f.Close()
	ids, err := os.ReadDir(filepath.Join(b.dir, "devinfo"))
	if err != nil || len(ids) == 0 {
		return 0, false
	}

	for _, id := range ids {
		i, err := strconv.ParseUint(id.Name(), 10, 64)
		if err != nil {
			return 0, false
		}
		total, allocated, err := kernel.BtrfsDeviceBytes(f, i)
		if err != nil {
			return 0, false
		}
		n += total - allocated
	}

	return n, true
}

// checkBtrfsQgroups finds btrfs with quotas and many subvolumes.
func checkBtrfsQgroups(ctx context.Context, _ *HostRequest, c *Report) error {
	return c.eachBtrfs(ctx, c.findManyQgroups)
}

// qgroups is about one.
func (c *Report) findManyQgroups(b btrfsFS) {
	dir := filepath.Join(b.dir, "qgroups")
	if readText(dir, "enabled") != "1" {
		return
	}

	mode := readText(dir, "mode") // since Linux 6.7
	if mode == "squota" {
		return // it counts for whoever wrote an extent first, and walks nowhere
	}

	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}

	// A group of level 0 for each subvolume.
	n := len(slices.DeleteFunc(entries, func(e os.DirEntry) bool { return !strings.HasPrefix(e.Name(), "0_") }))
	s := Note
	switch {
	case n >= qgroupsWarning:
		s = Warning
	case n < qgroupsNote:
		return
	}

	f := Finding{
		Code: "btrfs-qgroups-many", Severity: s, Subject: b.subject(),
		Title: fmt.Sprintf("the btrfs at %s counts quotas for %d subvolumes", b.subject(), n),
		Measured: []Figure{figure("subvolumes", "subvolumes and snapshots with a quota group", Count, int64(n)),
			words("mode", "mode", mode)},
		Why: "For each extent that changes owners, the kernel finds all subvolumes that share it: at each commit, and for " +
			"a whole tree at once when a snapshot is deleted. Commits, and so syncs, then take seconds; more snapshots make " +
			"them longer.",
		Do: []Step{{Text: "turn quotas off, unless you need the figures; Pando does not need them",
			Commands: []string{"btrfs quota disable " + word(b.subject())}}},
	}

	if mode != "" {
		f.Do = append(f.Do, Step{"or use simple quotas, which need no such search (Linux 6.7, btrfs-progs 6.7)",
			[]string{"btrfs quota disable " + word(b.subject()), "btrfs quota enable --simple " + word(b.subject())}})
	}

	if readText(dir, "inconsistent") == "1" {
		f.Measured = append(f.Measured, words("inconsistent", "figures", "out of date: a rescan is needed or running"))
	}

	c.find(f)
}
