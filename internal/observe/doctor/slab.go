package doctor

import (
	"context"
	"fmt"
	"os"
	"pando/internal/linux/kernel"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// fsCaches names the filesystem whose inodes a cache holds, where its name does not.
var fsCaches = map[string]string{
	"xfs_inode": "xfs", "xfs_ili": "xfs", "btrfs_inode": "btrfs", "ovl_inode": "overlay", "fuse_inode": "fuse", "virtiofs_inode": "fuse",
	"shmem_inode_cache": "tmpfs", "nfs_inode_cache": "nfs", "cifs_inode_cache": "cifs", "ceph_inode_info": "ceph", "v9fs_inode_cache": "9p",
	"proc_inode_cache": "proc", "kernfs_node_cache": "sysfs and cgroups", "kernfs_iattrs_cache": "sysfs and cgroups",
	"inode_cache": "others", "dentry": "names of files", "erofs_inode": "erofs", "squashfs_inode_cache": "squashfs",
	"zfs_znode_cache": "zfs", "dnode_t": "zfs", "sa_cache": "zfs", "zfs_znode_hold_cache": "zfs", "bcachefs_inode": "bcachefs",
	"extent_status": "ext4", "ext4_extent_status": "ext4", "btrfs_delayed_node": "btrfs", "f2fs_inode_cache": "f2fs",
}

// fsOf says which filesystem a cache is of; "" if it holds neither inodes nor names.
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

// parseSPL reads /proc/spl/kmem/slab, in which OpenZFS lists its caches. Those that
// are the kernel's have "-" for their size: they are in /proc/slabinfo.
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

// slabsFromSys reads /sys/kernel/slab, where there is no /proc/slabinfo.
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

// readSlabs reads the caches, and says from where.
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

// slabThresholds are shares of memory, 0 to 1.
type slabThresholds struct{ note, warn float64 }

var slabDefaults = slabThresholds{note: 0.1, warn: 0.25}

// slabCheck says how much memory the kernel keeps inodes and names in.
func slabCheck(t slabThresholds) func(context.Context, *HostRequest, *Report) error {
	return func(_ context.Context, _ *HostRequest, c *Report) error {
		mem, err := kernel.ReadMemory()
		if err != nil {
			return skip("/proc/meminfo cannot be read")
		}

		caches, from := readSlabs()
		var sum, objects int64
		bytes, count := map[string]int64{}, map[string]int64{}
		for _, k := range caches {
			if fs := fsOf(k.Name); fs != "" {
				bytes[fs] += k.Bytes
				count[fs] += k.Objects
				sum += k.Bytes
				objects += k.Objects
			}
		}

		by := "inodes and file names"
		if from == "" {
			// Of what can be freed, nearly all is theirs.
			sum, by = mem.SReclaimable, "reclaimable kernel memory, nearly all of it inodes and file names"
		}

		share := float64(sum) / float64(mem.Total)
		measured := []Figure{
			figure("inodes", by, Bytes, sum), percentage("share", "of this host's memory", 100*share),
			figure("slab", "all slab memory", Bytes, mem.Slab), figure("reclaimable", "of it reclaimable",
				Bytes, mem.SReclaimable),
			figure("available", "memory available to programs", Bytes,
				mem.Available).noted("includes most of the reclaimable memory"),
		}

		if from == "" {
			measured[0] = measured[0].noted("only root can see it by filesystem")
		}

		var kinds []string
		for fs := range bytes {
			if bytes[fs] > 0 {
				kinds = append(kinds, fs)
			}
		}

		slices.SortFunc(kinds, func(a, b string) int {
			if bytes[a] != bytes[b] {
				return int(max(min(bytes[b]-bytes[a], 1), -1))
			}
			return strings.Compare(a, b)
		})

		for _, fs := range kinds {
			measured = append(measured, figure("fs_"+fs, fs, Bytes, bytes[fs]).noted(fmt.Sprintf("%d in use", count[fs])))
		}

		c.Measured = measured
		what := "unknown by filesystem"
		if len(kinds) > 0 {
			what = fmt.Sprintf("most of them of %s", kinds[0])
		}

		c.Summary = fmt.Sprintf("%s of %s of memory holds %s: %.1f %%, %s", mib(sum), mib(mem.Total), by, 100*share, what)
		if share < t.note {
			return nil
		}

		f := Finding{
			Code: "slab-large", Severity: Note, Measured: measured,
			Title: fmt.Sprintf("%.0f %% of this host's memory holds inodes and file names", 100*share),
			Why: "The kernel keeps inodes and names until memory runs short, and then frees them bit by bit while programs " +
				"wait. Clones of one golden share blocks on disk, but not this memory: the same tree, walked in a hundred " +
				"clones, is cached a hundred times. The memory is charged to the cgroup that walked it first.",
			Do: []Step{
				{"find the caches that grow", []string{"slabtop -o -s c | head -20"}},
				{
					Text: "unmount idle clones, which frees their inodes and names (`pando umount VOLUME`)",
				},
				{
					"if programs wait for memory (see pressure), make the kernel free it sooner. The default is 100",
					[]string{
						"cat /proc/pressure/memory",
						"sysctl vm.vfs_cache_pressure=" + strconv.FormatInt(2*max(vfsPressure(), 50), 10),
					},
				},
				{
					Text: "run programs that walk whole trees (backup, search, checks) in a cgroup with memory.high, so that they " +
						"fill only their own share",
				},
			},
		}

		if share >= t.warn {
			f.Severity = Warning
		}

		c.find(f)
		return nil
	}
}

func vfsPressure() int64 {
	n, ok := readNumber("/proc/sys/vm/vfs_cache_pressure")
	if !ok {
		return 100
	}
	return n
}

// mib is a size in words for summaries.
func mib(n int64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%.0f GiB", float64(n)/(1<<30))
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
}
