package doctor

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"

	"golang.org/x/sys/unix"
)

// Limits in percent of the space available to users. From 80 % on, pools that never overwrite in place search longer
// for free space and fragment it more; at 98 %, a day's writes or one snapshot that is kept can fill the rest.
const (
	fullNote     = 80
	fullWarning  = 90
	fullCritical = 98
)

// fragmentationLimit returns the fragmentation, in percent, from which this ZFS prefers another metaslab: its
// parameter, or 70, the value in versions that do not show it.
func fragmentationLimit() int64 {
	if n, ok := readNumber("/sys/module/zfs/parameters/zfs_metaslab_fragmentation_threshold"); ok && n > 0 {
		return n
	}
	return 70
}

// fullness returns the severity of a use of so many percent; "" if there is nothing to report.
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

// checkSpace finds filesystems and zpools that are nearly full, and files that may grow into more space than there is.
func checkSpace(ctx context.Context, q *host, c *Report) error {
	all, err := ownFilesystems()
	if err != nil {
		return err
	}

	// Filesystems, except those of ZFS, which share the space of their pool, and those below 1 MiB: a tmpfs of a few pages
	// is a marker.
	looked := 0
	for _, m := range all {
		if err := ctx.Err(); err != nil {
			return err
		}

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

	// Zpools, and files that grow.
	pools, why := zpools(ctx)
	if len(pools) > 0 {
		if err := c.findFullZpools(ctx); err != nil {
			why = "the zpools could not be checked: " + err.Error()
		}
	}

	if err := c.findOvercommit(ctx, q); err != nil {
		return err
	}

	c.measure(count("filesystems", "filesystems", looked),
		count("zpools", "zpools", len(pools)))
	c.Summary = errs.JoinSet("; ", errs.Plural(looked, "filesystem"), zpoolText(pools),
		fmt.Sprintf("full means that at least %d %% of the space available to users is taken", fullNote), why)
	return nil
}

// findFullFilesystem reports a filesystem that is nearly full, counted as df does: without the reserve for root.
func (c *Report) findFullFilesystem(m mounted, sf unix.Statfs_t) {
	size := int64(sf.Bsize)
	if sf.Frsize > 0 {
		size = int64(sf.Frsize)
	}

	// Judge as df does.
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
		Do: []Step{step("find what takes the space, including deleted files that are still open",
			"du -xh --max-depth=2 "+word(m.Point)+" | sort -h | tail", "lsof +L1 "+word(m.Point))},
	}

	// Add what is special about some types.
	switch m.FSType {
	case "btrfs":
		f.Measured[2].Note = "estimated by the kernel: it depends on how new data is stored"
		f.Why = "btrfs never overwrites in place: it needs free space even to delete. " + f.Why
		f.Do = append(f.Do, step("check the space held by snapshots, and delete some",
			"btrfs filesystem usage "+word(m.Point), "btrfs subvolume list -s "+word(m.Point)))
	case "tmpfs":
		f.Why = "It takes memory. When it is full, writes fail."
	}

	c.find(f)
}

// findFewInodes reports a filesystem with a fixed number of inodes that has few left.
func (c *Report) findFewInodes(m mounted, sf unix.Statfs_t) {
	if sf.Files == 0 || !strings.HasPrefix(m.FSType, "ext") && m.FSType != "tmpfs" && m.FSType != "f2fs" {
		return // others create inodes as needed, in the space that findFullFilesystem judges
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
			count("inodes", "inodes", sf.Files),
			count("inodes_free", "free", sf.Ffree)},
		Why: "When none is left, no file can be created, however much space is free. Their number was fixed when the " +
			"filesystem was created.",
		Do: []Step{
			step("find the directories with the most files", "du -x --inodes --max-depth=2 "+word(m.Point)+" | sort "+
				"-n | tail"),
			{Text: "move the files to a filesystem with more inodes (mkfs.ext4 -i BYTES-PER-INODE), or one that creates them " +
				"as needed (XFS, btrfs, ZFS)"},
		},
	}

	if m.FSType == "tmpfs" {
		f.Why = "When none is left, no file can be created, however much memory is free."
		f.Do[1] = step("raise the limit", "mount -o remount,nr_inodes=NUMBER "+word(m.Point))
	}

	c.find(f)
}

// findFullZpools reports zpools that are nearly full, or whose free space is fragmented.
func (c *Report) findFullZpools(ctx context.Context) error {
	rows, err := zfs.Zpool.Rows(ctx, 6, "list", "-Hp", "-o", "name,size,allocated,free,capacity,fragmentation")
	if err != nil {
		return err
	}

	limit := float64(fragmentationLimit())
	for _, r := range rows {
		var n [6]int64
		for i := 1; i < 6; i++ {
			n[i], _ = strconv.ParseInt(strings.TrimSuffix(r[i], "%"), 10, 64) // "-", which is unknown, becomes 0
		}

		// How full it is.
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
				Do: []Step{step("find what takes the space: snapshots, and objects that Pando keeps",
					"zfs list -r -o space "+word(name), "zfs list -t snapshot -s used -r "+word(name),
					"pando gc --explain"),
					step("or add disks", "zpool add "+word(name)+" DISK")},
			})
		}

		// In which pieces its free space is.
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

// thin is a filesystem with sparse files behind loop devices.
type thin struct {
	avail   int64 // bytes free for users
	missing int64 // bytes that the files may still allocate
	files   []string
}

// findOvercommit reports files behind loop devices that may grow beyond the free space of their filesystems.
func (c *Report) findOvercommit(ctx context.Context, q *host) error {
	pool := poolFile(ctx, q)
	devices, err := blockdev.List()
	if err != nil {
		return err
	}

	// Add up, for each filesystem, the space that its sparse files may still allocate.
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
		if d.Backing == pool && missing > avail {
			c.find(overcommittedPool(q.Pool, pool, &st, avail))
		}
	}

	// The pool's file alone is reported above.
	for _, t := range on {
		if t.missing > t.avail && !slices.Equal(t.files, []string{pool}) {
			c.find(t.overcommitted())
		}
	}

	return ctx.Err()
}

// overcommittedPool returns the finding about the file of a pool that may grow beyond avail, the free bytes below.
func overcommittedPool(p *PoolFacts, file string, st *unix.Stat_t, avail int64) Finding {
	allocated := st.Blocks * 512
	return Finding{
		Code: "space-pool-file", Severity: Warning, Subject: file,
		Title: "the file of the pool may grow beyond the free space",
		Measured: []Figure{figure("size", "its size", Bytes, st.Size), figure("allocated", "allocated now", Bytes, allocated),
			figure("missing", "may still be allocated", Bytes, st.Size-allocated),
			figure("free", "free space below", Bytes, avail)},
		Why: "When the filesystem below is full, writes in the pool fail with I/O errors, in all volumes at once, and " +
			"its filesystem may become read-only.",
		Do: []Step{
			step("free space on the filesystem of the file, or move the file to a larger one", "df -h "+word(file)),
			step("return the unused space of the pool", "fstrim "+word(p.Data)),
		},
	}
}

// overcommitted returns the finding about a filesystem whose files may grow beyond its free space.
func (t *thin) overcommitted() Finding {
	slices.Sort(t.files)
	named := t.files[0]
	if len(t.files) > 1 {
		named += ", ..."
	}

	return Finding{
		Code: "space-thin", Severity: Note, Subject: t.files[0],
		Title: fmt.Sprintf("%s behind loop devices may grow beyond the free space (%s)",
			errs.Plural(len(t.files), "file"), named),
		Measured: []Figure{count("files", "files on one filesystem", len(t.files)),
			figure("missing", "may still be allocated", Bytes,
				t.missing).noted("at least: writes to shared blocks take space, too"),
			figure("free", "free space below", Bytes, t.avail)},
		Why: "This is normal for thin volumes and clones if the space is monitored: when it runs out, writes fail in all " +
			"of them at once.",
		Do: []Step{step("monitor the free space", "df -h "+word(t.files[0]))},
	}
}

// poolFile returns the file that Pando's pool lies in; "" if it is not loop-backed.
func poolFile(ctx context.Context, q *host) string {
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
