package doctor

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/observe/blockdev"
)

// Limits for the metadata of a btrfs that cannot allocate more chunks: in percent of the chunks in use, including the
// kernel's reserve for operations that must not fail, such as deletions, and in bytes left. On two small filesystems no
// file could be created any more with 4 MiB left.
const (
	metadataNote          = 75
	metadataWarning       = 85
	metadataWarningBytes  = 16 << 20
	metadataCritical      = 95
	metadataCriticalBytes = 8 << 20
)

// Numbers of subvolumes with quotas: when a shared extent changes, the kernel finds all subvolumes that share it.
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

// subject returns the name of the filesystem in findings.
func (b btrfsFS) subject() string { return cmp.Or(b.point, b.uuid) }

// mountPoint returns the mount point as a word of a shell command.
func (b btrfsFS) mountPoint() string { return word(cmp.Or(b.point, "MOUNTPOINT")) }

// btrfsAll returns all btrfs that this kernel has mounted, in any namespace.
func btrfsAll() ([]btrfsFS, error) {
	dirs, err := filepath.Glob("/sys/fs/btrfs/*/allocation")
	if err != nil {
		return nil, err
	}

	all, err := ownFilesystems()
	if err != nil {
		return nil, err
	}

	// Find a mount point of each by its devices.
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

// eachBtrfs runs a check on each mounted btrfs, and summarises.
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

	c.measure(count("btrfs", "btrfs filesystems", len(all)))
	c.Summary = errs.Plural(len(all), "btrfs filesystem")
	return nil
}

// checkBtrfsMetadata finds btrfs that will soon fail with "no space" although df shows free space.
func checkBtrfsMetadata(ctx context.Context, _ *host, c *Report) error {
	return c.eachBtrfs(ctx, c.findFullMetadata)
}

// btrfsSpace is the space of a btrfs, in bytes. Values of chunks are logical, without copies.
type btrfsSpace struct {
	metadata, used, reserve int64 // metadata chunks: their size, in use, and reserved for operations that must not fail
	data, dataUsed          int64 // data chunks
	unallocated             int64 // of the devices, in no chunk
	nextChunk               int64 // that one more metadata chunk takes of unallocated
}

// left returns the bytes for new metadata.
func (s btrfsSpace) left() int64 { return max(s.metadata-s.used-s.reserve, 0) }

// percent returns how much of the metadata chunks is in use.
func (s btrfsSpace) percent() float64 { return 100 * float64(s.used+s.reserve) / float64(s.metadata) }

// space reads the space of a btrfs. ok is false if its metadata has no chunks of its own, or if the sizes of its
// devices are unknown.
func (b btrfsFS) space() (s btrfsSpace, ok bool) {
	number := func(parts ...string) int64 {
		n, _ := readNumber(append([]string{b.dir, "allocation"}, parts...)...)
		return n
	}
	s.metadata = number("metadata/total_bytes")
	if s.metadata == 0 {
		return s, false // data and metadata share chunks: how full the filesystem is says all
	}

	s.reserve = number("global_rsv_size")
	s.used = number("metadata/bytes_used") + number("metadata/bytes_pinned") + number("metadata/bytes_reserved")
	s.data, s.dataUsed = number("data/total_bytes"), number("data/bytes_used")

	// A chunk has chunk_size, or a tenth of a small filesystem, and copies of metadata take as much again.
	onDisk, dataOnDisk := number("metadata/disk_total"), number("data/disk_total")
	s.unallocated, ok = b.unallocated(onDisk + dataOnDisk + number("system/disk_total"))
	size := s.unallocated + onDisk + dataOnDisk
	s.nextChunk = max(onDisk/s.metadata, 1) * min(number("metadata/chunk_size"), size/10)
	return s, ok
}

// severity judges how full the metadata is; "" if that is no problem.
func (s btrfsSpace) severity() Severity {
	percent, left := s.percent(), s.left()
	switch {
	case s.unallocated >= s.nextChunk:
		return "" // the kernel allocates another chunk when it needs one
	case percent >= metadataCritical || left <= metadataCriticalBytes:
		return Critical
	case percent >= metadataWarning || left <= metadataWarningBytes:
		return Warning
	case percent >= metadataNote:
		return Note
	}
	return ""
}

// findFullMetadata reports a btrfs whose metadata is nearly full and cannot grow.
func (c *Report) findFullMetadata(b btrfsFS) {
	s, ok := b.space()
	if !ok || s.severity() == "" {
		return
	}

	f := Finding{
		Code: "btrfs-metadata-full", Severity: s.severity(), Subject: b.subject(),
		Title: fmt.Sprintf("the metadata of the btrfs at %s is nearly full and cannot grow",
			b.subject()),
		Measured: []Figure{
			percentage("metadata_percent", "metadata chunks in use", s.percent()).noted("includes the kernel's reserve"),
			figure("metadata", "metadata chunks hold", Bytes, s.metadata),
			figure("metadata_used", "used", Bytes, s.used),
			figure("reserve", "reserve for operations that must not fail", Bytes, s.reserve),
			figure("left", "left for new metadata", Bytes, s.left()),
			figure("unallocated", "not in any chunk", Bytes,
				s.unallocated).noted(fmt.Sprintf("one more chunk takes %s", sizeText(s.nextChunk))),
			figure("data", "data chunks hold", Bytes, s.data),
			figure("data_free", "free in them", Bytes, s.data-s.dataUsed),
		},
		Why: "btrfs allocates space in chunks, for data or for metadata, and metadata cannot use free space in data " +
			"chunks. When it is full, writes fail with \"no space\" while df shows free space, snapshots and even deletions " +
			"fail, and the filesystem may become read-only.",
	}

	at := b.mountPoint()
	f.Do = []Step{
		step("free nearly empty data chunks. This moves their data: begin with few, and raise the number until space is "+
			"freed", "btrfs balance start -dusage=5 "+at, "btrfs balance start -dusage=20 "+at,
			"btrfs filesystem usage "+at),
		step("delete snapshots and small files; if that fails, add a disk for the time of the balance",
			"btrfs device add DISK "+at, "btrfs balance start -dusage=20 "+at, "btrfs device remove DISK "+at),
	}

	if s.data-s.dataUsed < s.data/20 {
		f.Do = append(f.Do[1:2:2],
			Step{Text: "data chunks are full, too, so a balance frees nothing: add a disk or delete data"})
	}

	c.find(f)
}

// unallocated returns the bytes of the devices that are in no chunk, given how many are in chunks. ok is false if the
// sizes of the devices are unknown.
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

// unallocatedOf asks the filesystem, which may use less than the whole of its devices.
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
func checkBtrfsQgroups(ctx context.Context, _ *host, c *Report) error {
	return c.eachBtrfs(ctx, c.findManyQgroups)
}

// findManyQgroups reports a btrfs that counts quotas for many subvolumes.
func (c *Report) findManyQgroups(b btrfsFS) {
	dir := filepath.Join(b.dir, "qgroups")
	if readText(dir, "enabled") != "1" {
		return
	}

	mode := readText(dir, "mode") // since Linux 6.7
	if mode == "squota" {
		return // simple quotas count an extent for its first writer, and search nothing
	}

	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}

	// Each subvolume has a group of level 0.
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
		Measured: []Figure{count("subvolumes", "subvolumes and snapshots with a quota group", n),
			words("mode", "mode", mode)},
		Why: "For each extent that changes owners, the kernel finds all subvolumes that share it: at each commit, and for " +
			"a whole tree at once when a snapshot is deleted. Commits, and so syncs, then take seconds; more snapshots make " +
			"them longer.",
		Do: []Step{{Text: "turn quotas off, unless you need the figures; Pando does not need them",
			Commands: []string{"btrfs quota disable " + word(b.subject())}}},
	}

	if mode != "" {
		f.Do = append(f.Do, step("or use simple quotas, which need no such search (Linux 6.7, btrfs-progs 6.7)",
			"btrfs quota disable "+word(b.subject()), "btrfs quota enable --simple "+word(b.subject())))
	}

	if readText(dir, "inconsistent") == "1" {
		f.measure(words("inconsistent", "figures", "out of date: a rescan is needed or running"))
	}

	c.find(f)
}
