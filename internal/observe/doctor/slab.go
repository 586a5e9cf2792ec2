package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"pando/internal/linux/kernel"
)

// fsCaches names the filesystem whose inodes a cache holds, where its name does not.
var fsCaches = map[string]string{
	"xfs_inode": "xfs", "xfs_ili": "xfs", "btrfs_inode": "btrfs", "ovl_inode": "overlay", "fuse_inode": "fuse",
	"virtiofs_inode": "fuse", "shmem_inode_cache": "tmpfs", "nfs_inode_cache": "nfs", "cifs_inode_cache": "cifs",
	"ceph_inode_info": "ceph", "v9fs_inode_cache": "9p", "proc_inode_cache": "proc",
	"kernfs_node_cache": "sysfs and cgroups", "kernfs_iattrs_cache": "sysfs and cgroups", "inode_cache": "others",
	"dentry": "names of files", "erofs_inode": "erofs", "squashfs_inode_cache": "squashfs", "zfs_znode_cache": "zfs",
	"dnode_t": "zfs", "sa_cache": "zfs", "zfs_znode_hold_cache": "zfs", "bcachefs_inode": "bcachefs",
	"extent_status": "ext4", "ext4_extent_status": "ext4", "btrfs_delayed_node": "btrfs", "f2fs_inode_cache": "f2fs",
}

// fsOf returns the filesystem whose inodes or names a cache holds; "" if it holds something else.
func fsOf(cache string) string {
	if fs := fsCaches[cache]; fs != "" {
		return fs
	}
	for _, suffix := range []string{"_inode_cache", "_inode_info", "_inode"} {
		if fs, ok := strings.CutSuffix(cache, suffix); ok && fs != "" {
			return fs
		}
	}
	return ""
}

// parseSPL reads /proc/spl/kmem/slab, in which OpenZFS lists its caches. Caches that it has the kernel keep have "-"
// for their size: they are in /proc/slabinfo.
func parseSPL(text string) []kernel.SlabCache {
	var out []kernel.SlabCache
	for line := range strings.Lines(text) {
		// name flags size alloc slabsize objsize total alloc max total alloc max ...
		f := strings.Fields(line)
		if len(f) < 12 || !strings.HasPrefix(f[1], "0x") || f[2] == "-" {
			continue
		}
		size, err1 := strconv.ParseInt(f[2], 10, 64)
		objects, err2 := strconv.ParseInt(f[10], 10, 64)
		if err1 == nil && err2 == nil {
			out = append(out, kernel.SlabCache{Name: f[0], Objects: objects, Bytes: size})
		}
	}

	return out
}

// slabsFromSys reads /sys/kernel/slab, for hosts without a readable /proc/slabinfo.
func slabsFromSys(root string) []kernel.SlabCache {
	var out []kernel.SlabCache
	dirs, _ := filepath.Glob(filepath.Join(root, "*")) // the pattern is valid
	for _, d := range dirs {
		if fsOf(filepath.Base(d)) == "" {
			continue
		}
		slabs, ok1 := readNumber(filepath.Join(d, "slabs"))
		order, ok2 := readNumber(filepath.Join(d, "order"))
		objects, ok3 := readNumber(filepath.Join(d, "objects"))
		if ok1 && ok2 && ok3 && order >= 0 && order < 20 {
			out = append(out, kernel.SlabCache{Name: filepath.Base(d), Objects: objects,
				Bytes: slabs << order * int64(os.Getpagesize())})
		}
	}

	return out
}

// readSlabs reads the caches. It also returns the files that it has read; "" if it could read none.
func readSlabs() ([]kernel.SlabCache, string) {
	var out []kernel.SlabCache
	from := ""
	if listed, err := kernel.SlabCaches(); err == nil && len(listed) > 0 {
		out, from = listed, "/proc/slabinfo"
	}

	if from == "" {
		if out = slabsFromSys("/sys/kernel/slab"); len(out) > 0 {
			from = "/sys/kernel/slab"
		}
	}

	if spl := parseSPL(readText("/proc/spl/kmem/slab")); len(spl) > 0 {
		out, from = append(out, spl...), strings.TrimPrefix(from+" and /proc/spl/kmem/slab", " and ")
	}

	return out, from
}

// slabThresholds are the shares of memory, 0 to 1, from which slabCheck reports a note or a warning.
type slabThresholds struct{ note, warn float64 }

var slabDefaults = slabThresholds{note: 0.1, warn: 0.25}

// slabUsage is the memory that holds inodes and names of files, in bytes and objects, by filesystem.
type slabUsage struct {
	sum            int64
	bytes, objects map[string]int64
	kinds          []string // filesystems, those with most bytes first
}

// sumSlabs adds up the caches that hold inodes or names.
func sumSlabs(caches []kernel.SlabCache) slabUsage {
	u := slabUsage{bytes: map[string]int64{}, objects: map[string]int64{}}
	for _, k := range caches {
		if fs := fsOf(k.Name); fs != "" && k.Bytes > 0 {
			u.bytes[fs] += k.Bytes
			u.objects[fs] += k.Objects
			u.sum += k.Bytes
		}
	}

	u.kinds = slices.SortedFunc(maps.Keys(u.bytes), func(a, b string) int {
		return cmp.Or(cmp.Compare(u.bytes[b], u.bytes[a]), strings.Compare(a, b))
	})
	return u
}

// slabCheck returns a check of the kernel memory that holds inodes and names of files.
func slabCheck(t slabThresholds) func(context.Context, *host, *Report) error {
	return func(_ context.Context, _ *host, c *Report) error {
		mem, err := kernel.ReadMemory()
		if err != nil || mem.Total == 0 {
			return skip("/proc/meminfo cannot be read")
		}

		// Measure. Nearly all reclaimable slab memory holds inodes and names.
		caches, from := readSlabs()
		usage := sumSlabs(caches)
		sum, by, note := usage.sum, "inodes and file names", ""
		if from == "" {
			sum, by = mem.SReclaimable, "reclaimable kernel memory, nearly all of it inodes and file names"
			note = "only root can see it by filesystem"
		}

		share := float64(sum) / float64(mem.Total)
		c.Measured = []Figure{
			figure("inodes", by, Bytes, sum).noted(note), percentage("share", "of this host's memory", 100*share),
			figure("slab", "all slab memory", Bytes, mem.Slab),
			figure("reclaimable", "of it reclaimable", Bytes, mem.SReclaimable),
			figure("available", "memory available to programs", Bytes,
				mem.Available).noted("includes most of the reclaimable memory"),
		}

		for _, fs := range usage.kinds {
			c.measure(figure("fs_"+fs, fs, Bytes, usage.bytes[fs]).noted(fmt.Sprintf("%d in use", usage.objects[fs])))
		}

		// Summarise and judge.
		what := "unknown by filesystem"
		if len(usage.kinds) > 0 {
			what = fmt.Sprintf("most of them of %s", usage.kinds[0])
		}

		c.Summary = fmt.Sprintf("%s of %s of memory holds %s: %.1f %%, %s", sizeText(sum), sizeText(mem.Total), by, 100*share,
			what)
		switch {
		case share >= t.note && share >= t.warn:
			c.find(largeSlab(Warning, share, c.Measured))
		case share >= t.note:
			c.find(largeSlab(Note, share, c.Measured))
		}

		return nil
	}
}

// largeSlab returns the finding that a share of the memory, 0 to 1, holds inodes and names.
func largeSlab(s Severity, share float64, measured []Figure) Finding {
	return Finding{
		Code: "slab-large", Severity: s, Measured: measured,
		Title: fmt.Sprintf("%.0f %% of this host's memory holds inodes and file names", 100*share),
		Why: "The kernel keeps inodes and names until memory runs short, and then frees them bit by bit while programs " +
			"wait. Clones of one golden share blocks on disk, but not this memory: the same tree, walked in a hundred " +
			"clones, is cached a hundred times. The memory is charged to the cgroup that walked it first.",
		Do: []Step{
			step("find the caches that grow", "slabtop -o -s c | head -20"),
			{Text: "unmount idle clones, which frees their inodes and names (`pando umount VOLUME`)"},
			step("if programs wait for memory (see pressure), make the kernel free it sooner. The default is 100",
				"cat /proc/pressure/memory",
				"sysctl vm.vfs_cache_pressure="+strconv.FormatInt(2*max(vfsPressure(), 50), 10)),
			{Text: "run programs that walk whole trees (backup, search, checks) in a cgroup with memory.high, so that they " +
				"fill only their own share"},
		},
	}
}

// vfsPressure returns vm.vfs_cache_pressure, or its default.
func vfsPressure() int64 {
	n, ok := readNumber("/proc/sys/vm/vfs_cache_pressure")
	if !ok {
		return 100
	}
	return n
}

// sizeText formats a number of bytes for summaries and titles.
func sizeText(n int64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%.0f GiB", float64(n)/(1<<30))
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
}
