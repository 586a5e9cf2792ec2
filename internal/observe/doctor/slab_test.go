package doctor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"
)

// TestSlabGrows: 200,000 files are that many inodes and names in memory, found by the
// filesystem that they are on; and how much that may be decides.
func TestSlabGrows(t *testing.T) {
	rootOnly(t)
	const files = 100_000
	dir := testfs.XFS(t, 512<<20)
	none := slabThresholds{note: 2, warn: 2}
	before := checkNow(t, slabCheck(none), nil)
	if value(before.Measured, "fs_xfs") < 0 || value(before.Measured, "fs_names of files") <= 0 {
		t.Fatalf("not by filesystem: %+v", before)
	}
	for i := range files {
		if i%1000 == 0 {
			if err := os.Mkdir(filepath.Join(dir, strconv.Itoa(i/1000)), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		f, err := os.Create(filepath.Join(dir, strconv.Itoa(i/1000), strconv.Itoa(i)))
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	after := checkNow(t, slabCheck(none), nil)
	if len(after.Findings) > 0 {
		t.Errorf("%+v", after.Findings)
	}
	// An inode of XFS takes about 1 KB.
	grown := value(after.Measured, "fs_xfs") - value(before.Measured, "fs_xfs")
	if grown < files*512 {
		t.Errorf("the inodes of XFS take %.0f bytes more", grown)
	}
	t.Logf("%d files: %.0f MB more of XFS; %s", files, grown/1e6, after.Summary)
	// The same, just over and just under what is large.
	share := value(after.Measured, "share") / 100
	for _, c := range []struct {
		t    slabThresholds
		want Severity
	}{{slabThresholds{note: share / 4, warn: share / 2}, Warning}, {slabThresholds{note: share / 2, warn: share * 4},
		Note}, {slabThresholds{note: share * 4, warn: share * 8}, ""}} {
		if s, text := checkNow(t, slabCheck(c.t), nil).about("slab-large", ""); s != c.want || c.want != "" &&
			!strings.Contains(text, "fs_xfs") {
			t.Errorf("%+v of %f: %q %s", c.t, share, s, text)
		}
	}
}

// TestSlabSources: what the kernel's own list says, in whichever form there is.
func TestSlabSources(t *testing.T) {
	rootOnly(t)
	listed, err := kernel.SlabCaches()
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("SKIPPED: %v", err)
	}
	if err != nil || len(listed) < 20 {
		t.Fatalf("%d caches, %v", len(listed), err)
	}
	dentry := func(list []kernel.SlabCache) (n int64) {
		for _, k := range list {
			if k.Name == "dentry" {
				n = k.Bytes
			}
		}
		return n
	}
	sys := slabsFromSys("/sys/kernel/slab")
	a, b := dentry(listed), dentry(sys)
	if a <= 0 || b <= 0 || a > 2*b || b > 2*a {
		t.Errorf("names of files take %d bytes by /proc/slabinfo and %d by /sys/kernel/slab", a, b)
	}
	mem, err := kernel.ReadMemory()
	if err != nil || a > mem.Slab || mem.Slab > mem.Total {
		t.Errorf("names alone take %d of %+v, %v", a, mem, err)
	}
	// OpenZFS's list, as it prints it: a cache of its own, and one of the kernel's.
	spl := parseSPL("--------------------- cache ---\n" +
		"name                                    flags      size     alloc slabsize  objsize  total alloc   max  total " +
		"alloc   max  dlock alloc   max\n" +
		"zfs_znode_cache                       0x00100         -   1114112        -     1088      -     -     -      -  " +
		"1024     -      -     -     -\n" +
		"dnode_t                               0x00200   4194304   3145728    65536      896     64    48    64   4096  " +
		"3510  4096      0     0     0\n")
	if len(spl) != 1 || spl[0] != (kernel.SlabCache{Name: "dnode_t", Objects: 3510, Bytes: 4194304}) {
		t.Errorf("%+v", spl)
	}
	for cache, want := range map[string]string{"ext4_inode_cache": "ext4", "xfs_inode": "xfs", "btrfs_inode": "btrfs",
		"ovl_inode": "overlay", "fuse_inode": "fuse", "dentry": "names of " +
			"files", "zfs_znode_cache": "zfs", "kmalloc-64": "", "inode_cache": "others", "jfs_inode_cache": "jfs"} {
		if got := fsOf(cache); got != want {
			t.Errorf("%s is of %q, not %q", cache, got, want)
		}
	}
}
