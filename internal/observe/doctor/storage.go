package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"pando/internal/base/errs"
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
		{"heat", "disks that are so hot that they slow down", checkHeat},
		{"scrub", "pools and filesystems that are damaged, degraded, being scrubbed or overdue for a scrub", checkScrub},
	}
}

// mounted is a filesystem that is mounted on this host.
type mounted struct {
	mount.Entry
	PID int // of a process that sees the mount; 0 if this process does
}

// where returns the mount point for people.
func (m mounted) where() string {
	if m.PID == 0 {
		return m.Point
	}
	return fmt.Sprintf("%s as process %d sees it", m.Point, m.PID)
}

// command formats a shell command that runs in the mount namespace of the mount.
func (m mounted) command(format string, args ...any) string {
	c := fmt.Sprintf(format, args...)
	if m.PID != 0 {
		c = fmt.Sprintf("nsenter -t %d -m %s", m.PID, c)
	}
	return c
}

// ownFilesystems returns the filesystems that this process sees, each once. Of several mounts it prefers one that
// nothing else is mounted over, and then one of the whole filesystem.
func ownFilesystems() ([]mounted, error) {
	table, err := mount.Table("self")
	if err != nil {
		return nil, err
	}

	// The last mount at a mount point covers the earlier ones.
	top := map[string]uint64{}
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

	// Choose a mount of each filesystem.
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

// superblock returns a key that mounts of the same filesystem share.
func superblock(e mount.Entry) string { return fmt.Sprint(e.Dev, " ", e.FSType) }

// hostFilesystems returns the filesystems of ownFilesystems, and those that only processes in other mount namespaces
// see. unseen is the number of processes that could not be examined.
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

	// Read the mount table of each other namespace once.
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
			return // the process has ended
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

// onTop returns how full the filesystem is; false if its mount point now leads to another filesystem, or nowhere.
func (m mounted) onTop() (unix.Statfs_t, bool) {
	var st unix.Stat_t
	var sf unix.Statfs_t
	if unix.Stat(m.Point, &st) != nil || unix.Statfs(m.Point, &sf) != nil {
		return sf, false
	}
	// Each subvolume of a btrfs has a device number of its own.
	return sf, st.Dev == m.Dev || m.FSType == "btrfs" && int64(sf.Type) == unix.BTRFS_SUPER_MAGIC
}

// zpools returns the imported zpools, none on a host without ZFS. why is set if the host has ZFS but they could not be
// listed.
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

// zpoolText counts zpools for a summary; "" if there are none.
func zpoolText(pools []string) string {
	if len(pools) == 0 {
		return ""
	}
	return errs.Plural(len(pools), "zpool")
}

// onDevices holds the types of writable local filesystems that keep their files on block devices. Checks do not access
// other types, because they would hang if a server does not answer.
var onDevices = map[string]bool{
	"ext2": true, "ext3": true, "ext4": true, "xfs": true, "btrfs": true, "f2fs": true, "jfs": true, "reiserfs": true,
	"nilfs2": true, "bcachefs": true, "vfat": true, "exfat": true, "ntfs3": true, "gfs2": true, "ocfs2": true,
}
