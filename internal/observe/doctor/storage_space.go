package doctor

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"

	"golang.org/x/sys/unix"
)

// How full is how bad, in percent of what users can have. From 80 % on pools that
// never overwrite in place look longer for free space and leave more of it in
// pieces; at 98 % a day's writes, or one snapshot that is kept, are the end.
const (
	fullNote     = 80
	fullWarning  = 90
	fullCritical = 98
)

// fragmentationLimit is the fragmentation, in percent, from which on this ZFS leaves a
// metaslab for another: its own number, or that of those that do not show it.
func fragmentationLimit() int64 {
	if n, ok := readNumber("/sys/module/zfs/parameters/zfs_metaslab_fragmentation_threshold"); ok && n > 0 {
		return n
	}
	return 70
}

// fullness is the severity of so many percent, "" if it is none.
func fullness(percent float64) Severity {
	switch {
	case percent >= fullCritical:
		return Critical
	case percent >= fullWarning:
		return Warning
	case percent >= fullNote:
		return Note
	}
	return ""
}

// checkSpace finds what is nearly full, and what will be.
func checkSpace(ctx context.Context, q *HostRequest, c *Report) error {
	all, err := ownFilesystems()
	if err != nil {
		return err
	}

	looked := 0
	for _, m := range all {
		if err := ctx.Err(); err != nil {
			return err
		}

		// Of ZFS the pool is looked at; a tmpfs of a few pages is somebody's marker.
		if !onDevices[m.FSType] && m.FSType != "tmpfs" || strings.HasPrefix(m.Options, "ro") ||
			strings.HasPrefix(m.Super, "ro") {
			continue
		}

		sf, ok := m.onTop()
		if !ok || sf.Blocks*uint64(sf.Bsize) < 1<<20 {
			continue
		}

		looked++
		c.findFullFilesystem(m, sf)
		c.findFewInodes(m, sf)
	}

	pools, why := zpools(ctx)
	if len(pools) > 0 {
		if err := c.findFullZpools(ctx); err != nil {
			why = "the zpools could not be checked: " + err.Error()
		}
	}

	if err := c.findOvercommit(ctx, q); err != nil {
		return err
	}

	c.Measured = append(c.Measured, figure("filesystems", "filesystems", Count, int64(looked)),
		figure("zpools", "zpools", Count, int64(len(pools))))
	zfsText := ""
	if len(pools) > 0 {
		zfsText = counted(len(pools), "zpool")
	}

	c.Summary = sentence(counted(looked, "filesystem"), zfsText,
		fmt.Sprintf("full means that at least %d %% of the space available to users is taken", fullNote), why)
	return nil
}

// full is about the space of a filesystem, counted as df does: without what is
// reserved for root.
func (c *Report) findFullFilesystem(m mounted, sf unix.Statfs_t) {
	size := int64(sf.Bsize)
	if sf.Frsize > 0 {
		size = int64(sf.Frsize)
	}

	used, avail := int64(sf.Blocks-sf.Bfree)*size, int64(sf.Bavail)*size
	if used+avail <= 0 {
		return
	}

	percent := 100 * float64(used) / float64(used+avail)
	s := fullness(percent)
	if s == "" {
		return
	}

	f := Finding{
		Code: "space-full", Severity: s, Subject: m.Point,
		Title: fmt.Sprintf("the %s at %s is %.0f %% full", m.FSType, m.Point, percent),
		Measured: []Figure{percentage("used_percent", "full", percent), figure("used", "used", Bytes, used),
			figure("free", "free for users", Bytes, avail)},
		Why: "Free space is in ever smaller pieces: files are written in more extents, and syncs wait longer for space. " +
			"When it is full, writes fail, and databases lose data that they have not synced yet.",
		Do: []Step{{"find what takes the space, including deleted files that are still open",
			[]string{"du -xh --max-depth=2 " + word(m.Point) + " | sort -h | tail", "lsof +L1 " + word(m.Point)}}},
	}

	switch m.FSType {
	case "btrfs":
		f.Measured[2].Note = "estimated by the kernel: it depends on how new data is stored"
		f.Why = "btrfs never overwrites in place: it needs free space even to delete. " + f.Why
		f.Do = append(f.Do, Step{"check the space held by snapshots, and delete some",
			[]string{"btrfs filesystem usage " + word(m.Point), "btrfs subvolume list -s " + word(m.Point)}})
	case "tmpfs":
		f.Why = "It takes memory. When it is full, writes fail."
	}

	c.find(f)
}

// inodes is about how many files more a filesystem takes, where that is fixed.
func (c *Report) findFewInodes(m mounted, sf unix.Statfs_t) {
	if sf.Files == 0 || !strings.HasPrefix(m.FSType, "ext") && m.FSType != "tmpfs" && m.FSType != "f2fs" {
		return // the others make inodes as they need them, of the space that full is about
	}

	percent := 100 * float64(sf.Files-sf.Ffree) / float64(sf.Files)
	s := fullness(percent)
	if s == "" {
		return
	}

	f := Finding{
		Code: "space-inodes", Severity: s, Subject: m.Point,
		Title: fmt.Sprintf("the %s at %s has used %.0f %% of its inodes", m.FSType, m.Point, percent),
		Measured: []Figure{percentage("inodes_percent", "inodes in use", percent),
			figure("inodes", "inodes", Count, int64(sf.Files)),
			figure("inodes_free", "free", Count, int64(sf.Ffree))},
		Why: "When none is left, no file can be created, however much space is free. Their number was fixed when the " +
			"filesystem was created.",
		Do: []Step{
			{"find the directories with the most files", []string{"du -x --inodes --max-depth=2 " + word(m.Point) + " | sort " +
				"-n | tail"}},
			{Text: "move the files to a filesystem with more inodes (mkfs.ext4 -i BYTES-PER-INODE), or one that creates them " +
				"as needed (XFS, btrfs, ZFS)"},
		},
	}

	if m.FSType == "tmpfs" {
		f.Why = "When none is left, no file can be created, however much memory is free."
		f.Do[1] = Step{"raise the limit", []string{"mount -o remount,nr_inodes=NUMBER " + word(m.Point)}}
	}

	c.find(f)
}

// zpoolSpace is about the space of all zpools, and in which pieces it is.
func (c *Report) findFullZpools(ctx context.Context) error {
	rows, err := zfs.Zpool.Rows(ctx, 6, "list", "-Hp", "-o", "name,size,allocated,free,capacity,fragmentation")
	if err != nil {
		return err
	}

	limit := float64(fragmentationLimit())
	for _, r := range rows {
		var n [6]int64
		for i := 1; i < 6; i++ {
			n[i], _ = strconv.ParseInt(strings.TrimSuffix(r[i], "%"), 10, 64) // "-": not known
		}

		name, free, capacity, frag := r[0], n[3], float64(n[4]), float64(n[5])
		measured := []Figure{percentage("used_percent", "full", capacity), figure("used", "used", Bytes, n[2]),
			figure("free", "free", Bytes, free).noted("includes parity and the reserve of ZFS"),
			percentage("fragmentation", "fragmentation of the free space", frag)}
		if s := fullness(capacity); s != "" {
			c.find(Finding{
				Code: "space-zpool", Severity: s, Subject: name, Title: fmt.Sprintf("zpool %s is %.0f %% full", name,
					capacity), Measured: measured,
				Why: "ZFS never overwrites in place. In a full pool each write searches longer for space and gets smaller " +
					"pieces: syncs and transaction groups slow down long before the pool is full, and files written then stay " +
					"fragmented.",
				Do: []Step{{"find what takes the space: snapshots, and objects that Pando keeps",
					[]string{"zfs list -r -o space " + word(name), "zfs list -t snapshot -s used -r " + word(name),
						"pando gc --explain"}},
					{"or add disks", []string{"zpool add " + word(name) + " DISK"}}},
			})
		}

		var s Severity
		switch {
		case frag >= limit:
			s = Warning
		case frag >= limit*2/3:
			s = Note
		default:
			continue
		}

		c.find(Finding{
			Code: "space-zpool-fragmented", Severity: s, Subject: name, Title: fmt.Sprintf("the free space of zpool %s is in "+
				"small pieces (%.0f %%)", name, frag),
			Measured: append(measured, percentage("limit", "ZFS avoids metaslabs from", limit)),
			Why: "Data is written in small pieces, each with an operation of its own, and large blocks are split into gang " +
				"blocks.",
			Do: []Step{{Text: "free some space. Existing data stays fragmented until it is written again, with zfs send to " +
				"another pool"}},
		})
	}

	return nil
}

// thin is a filesystem on which files have been promised more than they have.
type thin struct {
	avail   int64 // free for users
	missing int64 // that files behind loop devices may still take
	files   []string
}

// overcommit is about files behind loop devices that may grow into more space than
// there is.
func (c *Report) findOvercommit(ctx context.Context, q *HostRequest) error {
	pool := poolFile(ctx, q)
	devices, err := blockdev.List()
	if err != nil {
		return err
	}

	on := map[uint64]*thin{}
	seen := map[[2]uint64]bool{}
	for _, d := range devices {
		if d.Kind != blockdev.Loop || d.ReadOnly {
			continue
		}

		var st unix.Stat_t
		var sf unix.Statfs_t
		if unix.Stat(d.Backing, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || unix.Statfs(d.Backing, &sf) != nil ||
			seen[[2]uint64{st.Dev, st.Ino}] {
			continue
		}

		seen[[2]uint64{st.Dev, st.Ino}] = true
		missing, avail := st.Size-st.Blocks*512, int64(sf.Bavail)*int64(sf.Bsize)
		if missing <= 0 {
			continue
		}

		t := on[st.Dev]
		if t == nil {
			t = &thin{}
			on[st.Dev] = t
		}

		t.avail, t.missing, t.files = avail, t.missing+missing, append(t.files, d.Backing)
		if d.Backing != pool || missing <= avail {
			continue
		}

		c.find(Finding{
			Code: "space-pool-file", Severity: Warning, Subject: pool,
			Title: "the file of the pool may grow beyond the free space",
			Measured: []Figure{figure("size", "its size", Bytes, st.Size),
				figure("allocated", "allocated now", Bytes, st.Blocks*512), figure("missing", "may still be "+
					"allocated", Bytes, missing),
				figure("free", "free space below", Bytes, avail)},
			Why: "When the filesystem below is full, writes in the pool fail with I/O errors, in all volumes at once, and " +
				"its filesystem may become read-only.",
			Do: []Step{
				{"free space on the filesystem of the file, or move the file to a larger one", []string{"df -h " + word(pool)}},
				{"return the unused space of the pool", []string{"fstrim " + word(q.Pool.Data)}},
			},
		})
	}

	for _, t := range on {
		if t.missing <= t.avail || slices.Equal(t.files, []string{pool}) {
			continue
		}

		slices.Sort(t.files)
		named := t.files[0]
		if len(t.files) > 1 {
			named += ", ..."
		}

		c.find(Finding{
			Code: "space-thin", Severity: Note, Subject: t.files[0],
			Title: fmt.Sprintf("%s behind loop devices may grow beyond the free space (%s)",
				counted(len(t.files), "file"), named),
			Measured: []Figure{figure("files", "files on one filesystem", Count, int64(len(t.files))),
				figure("missing", "may still be allocated", Bytes,
					t.missing).noted("at least: writes to shared blocks take space, too"),
				figure("free", "free space below", Bytes, t.avail)},
			Why: "This is normal for thin volumes and clones if the space is monitored: when it runs out, writes fail in all " +
				"of them at once.",
			Do: []Step{{"monitor the free space", []string{"df -h " + word(t.files[0])}}},
		})
	}

	return ctx.Err()
}

// poolFile is the file that Pando's pool lies in, "" if it lies in none.
func poolFile(ctx context.Context, q *HostRequest) string {
	if q.Pool == nil || !q.Pool.Loop {
		return ""
	}

	s, err := stack.Of(ctx, q.Pool.Data)
	if err != nil {
		return ""
	}

	for _, l := range s.Layers {
		if l.Device != nil && l.Device.Kind == blockdev.Loop {
			if _, err := os.Stat(l.Device.Backing); err == nil {
				return l.Device.Backing
			}
		}
	}

	return ""
}
