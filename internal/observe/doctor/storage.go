package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// storageChecks returns the checks of filesystems, pools and disks.
func storageChecks() []check {
	return []check{
		{"sync-honoured", "filesystems, pools and programs that report syncs as done without doing them", checkSyncHonoured},
		{"write-cache", "write caches that are never flushed, and disks in memory", checkWriteCache},
		{"alignment", "partitions, pools and filesystems that are not aligned to the blocks of their disks", checkAlignment},
		{"space", "filesystems and pools that are nearly full or overcommitted", checkSpace},
		{"btrfs-metadata", "btrfs filesystems without room for metadata", checkBtrfsMetadata},
		{"btrfs-qgroups", "btrfs quotas with many snapshots", checkBtrfsQgroups},
		{"fragmentation", "goldens with many extents, which make clones slow", checkFragmentation},
		{"dedup", "dedup tables and deduplicating programs", checkDedup},
		{"scrub", "pools and filesystems that are damaged, degraded, being scrubbed or overdue for a scrub", checkScrub},
	}
}

// mounted is a filesystem that is mounted on this host.
type mounted struct {
	mount.Entry
	PID int // of a process that sees it there; 0: this one does
}

// where is its mount point for people.
func (m mounted) where() string {
	if m.PID == 0 {
		return m.Point
	}
	return fmt.Sprintf("%s as process %d sees it", m.Point, m.PID)
}

// command is one of a shell that runs where the mount can be seen.
func (m mounted) command(format string, args ...any) string {
	c := fmt.Sprintf(format, args...)
	if m.PID != 0 {
		c = fmt.Sprintf("nsenter -t %d -m %s", m.PID, c)
	}
	return c
}

// ownFilesystems are the filesystems that this process sees, each once: where all of
// it is mounted rather than a part, and not where something else is mounted over it.
func ownFilesystems() ([]mounted, error) {
	table, err := mount.Table("self")
	if err != nil {
		return nil, err
	}

	top := map[string]uint64{} // the last mount at a place hides those before
	for _, e := range table {
		top[e.Point] = e.ID
	}

	worth := func(e mount.Entry) (n int) {
		if top[e.Point] == e.ID {
			n += 2
		}
		if e.Root == "/" {
			n++
		}
		return n
	}

	var out []mounted
	at := map[string]int{}
	for _, e := range table {
		k := superblock(e)
		i, ok := at[k]
		if !ok {
			at[k] = len(out)
			out = append(out, mounted{Entry: e})
		} else if worth(e) > worth(out[i].Entry) {
			out[i].Entry = e
		}
	}

	return out, nil
}

func superblock(e mount.Entry) string { return fmt.Sprint(e.Dev, " ", e.FSType) }

// hostFilesystems are those of ownFilesystems, and those that only processes in other
// mount namespaces see. unseen is how many processes could not be asked.
func hostFilesystems(ctx context.Context) (out []mounted, unseen int, err error) {
	if out, err = ownFilesystems(); err != nil {
		return nil, 0, err
	}

	known, spaces := map[string]bool{}, map[string]bool{}
	for _, m := range out {
		known[superblock(m.Entry)] = true
	}

	if own, err := os.Readlink("/proc/self/ns/mnt"); err == nil {
		spaces[own] = true
	}

	err = eachProcess(ctx, func(pid int, dir string) {
		space, err := os.Readlink(filepath.Join(dir, "ns/mnt"))
		switch {
		case errors.Is(err, fs.ErrPermission):
			unseen++
			return
		case err != nil || space == "" || spaces[space]:
			return
		}

		table, err := mount.Table(strconv.Itoa(pid))
		if err != nil {
			return // it is gone
		}

		spaces[space] = true
		for _, e := range table {
			if k := superblock(e); !known[k] {
				known[k] = true
				out = append(out, mounted{Entry: e, PID: pid})
			}
		}
	})

	return out, unseen, err
}

// onTop reports whether the filesystem is what can be reached at its mount point now,
// and how full it is.
func (m mounted) onTop() (unix.Statfs_t, bool) {
	var st unix.Stat_t
	var sf unix.Statfs_t
	if unix.Stat(m.Point, &st) != nil || unix.Statfs(m.Point, &sf) != nil {
		return sf, false
	}
	// Each subvolume of btrfs has a number of its own.
	return sf, st.Dev == m.Dev || m.FSType == "btrfs" && int64(sf.Type) == unix.BTRFS_SUPER_MAGIC
}

// zpools are the imported zpools, none on a host without ZFS. why says why they could
// not be looked at on one that has it.
func zpools(ctx context.Context) (pools []string, why string) {
	if _, err := os.Stat("/proc/spl/kstat/zfs"); err != nil {
		return nil, ""
	}
	pools, err := Pools(ctx)
	if err != nil {
		return nil, "the zpools could not be checked: " + err.Error()
	}
	return pools, ""
}

// sentence joins what a summary says; what is empty is left out.
func sentence(parts ...string) string {
	var out []string
	for _, p := range parts {
		if p != "" {
			out = append(out, p)
		}
	}
	return strings.Join(out, "; ")
}

// counted formats a number of things: "1 disk", "2 disks", "2 processes".
func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	if strings.HasSuffix(what, "s") {
		what += "e"
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// onDevices are the types of local filesystems that keep their files on block devices
// and are written to. Others are not asked for anything: a server that is gone
// would keep them waiting.
var onDevices = map[string]bool{
	"ext2": true, "ext3": true, "ext4": true, "xfs": true, "btrfs": true, "f2fs": true, "jfs": true, "reiserfs": true,
	"nilfs2": true, "bcachefs": true, "vfat": true, "exfat": true, "ntfs3": true, "gfs2": true, "ocfs2": true,
}
