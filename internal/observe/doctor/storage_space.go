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
		c.full(m, sf)
		c.inodes(m, sf)
	}

	pools, why := zpools(ctx)
	if len(pools) > 0 {
		if err := c.zpoolSpace(ctx); err != nil {
			why = "the zpools could not be looked at: " + err.Error()
		}
	}

	if err := c.overcommit(ctx, q); err != nil {
		return err
	}

	c.Measured = append(c.Measured, figure("filesystems", "filesystems", Count, int64(looked)),
		figure("zpools", "zpools", Count, int64(len(pools))))
	zfsText := ""
	if len(pools) > 0 {
		zfsText = counted(len(pools), "zpool")
	}

	c.Summary = sentence(counted(looked, "filesystem"), zfsText,
		fmt.Sprintf("full means %d %% or more of what users can have", fullNote), why)
	return nil
}

// full is about the space of a filesystem, counted as df does: without what is
// reserved for root.
func (c *Report) full(m mounted, sf unix.Statfs_t) {
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
		Measured: []Figure{known("used_percent", "full", Percent, percent, percent), figure("used", "used", Bytes, used),
			figure("free", "free for users", Bytes, avail)},
		Why: "Free space is in smaller and smaller pieces: files are written in more extents, and syncs wait longer " +
			"for space to be found. At the end writes fail, and what a database has not synced yet is lost.",
		Do: []Step{{"look what takes it, deleted files that are still open too",
			[]string{"du -xh --max-depth=2 " + word(m.Point) + " | sort -h | tail", "lsof +L1 " + word(m.Point)}}},
	}

	switch m.FSType {
	case "btrfs":
		f.Measured[2].Note = "an estimate of the kernel's: it depends on how what comes is stored"
		f.Why = "btrfs never overwrites in place: it needs free space even to delete. " + f.Why
		f.Do = append(f.Do, Step{"look at what snapshots hold, and delete some",
			[]string{"btrfs filesystem usage " + word(m.Point), "btrfs subvolume list -s " + word(m.Point)}})
	case "tmpfs":
		f.Why = "It is memory. At the end writes fail."
	}

	c.find(f)
}

// inodes is about how many files more a filesystem takes, where that is fixed.
func (c *Report) inodes(m mounted, sf unix.Statfs_t) {
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
		Measured: []Figure{known("inodes_percent", "inodes in use", Percent, percent, percent),
			figure("inodes", "inodes", Count, int64(sf.Files)),
			figure("inodes_free", "free", Count, int64(sf.Ffree))},
		Why: "When none is left no file can be made, however much space is free. Their number was fixed when the " +
			"filesystem was made.",
		Do: []Step{
			{"look where the many files are", []string{"du -x --inodes --max-depth=2 " + word(m.Point) + " | sort -n | tail"}},
			{Text: "give them a filesystem of their own that has more (mkfs.ext4 -i BYTES-PER-INODE) or makes them as needed " +
				"(XFS, btrfs, ZFS)"},
		},
	}

	if m.FSType == "tmpfs" {
		f.Why = "When none is left no file can be made, however much memory is free."
		f.Do[1] = Step{"allow more", []string{"mount -o remount,nr_inodes=NUMBER " + word(m.Point)}}
	}

	c.find(f)
}

// zpoolSpace is about the space of all zpools, and in which pieces it is.
func (c *Report) zpoolSpace(ctx context.Context) error {
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
		measured := []Figure{known("used_percent", "full", Percent, capacity, capacity), figure("used", "used", Bytes, n[2]),
			figure("free", "free", Bytes, free).noted("parity and what ZFS keeps to itself included"),
			known("fragmentation", "fragmentation of the free space", Percent, frag, frag)}
		if s := fullness(capacity); s != "" {
			c.find(Finding{
				Code: "space-zpool", Severity: s, Subject: name, Title: fmt.Sprintf("zpool %s is %.0f %% full", name,
					capacity), Measured: measured,
				Why: "ZFS never overwrites in place. The fuller a pool, the longer each write looks for space and the smaller " +
					"the pieces: syncs and transaction groups slow down long before the end, " +
					"and files that were written then stay in pieces.",
				Do: []Step{{"look what takes it: snapshots, and what Pando keeps",
					[]string{"zfs list -r -o space " + word(name), "zfs list -t snapshot -s used -r " + word(name),
						"pando gc --explain"}},
					{"or give it disks", []string{"zpool add " + word(name) + " DISK"}}},
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
			Measured: append(measured, known("limit", "from where on ZFS avoids a metaslab", Percent, limit, limit)),
			Why: "What is written is put where there is room: in small pieces, each an operation of its own, and parts " +
				"of large blocks as gang blocks.",
			Do: []Step{{Text: "free space: what is freed in one piece is one piece. What is left stays as it is until " +
				"it is written anew, by zfs send to another pool"}},
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
func (c *Report) overcommit(ctx context.Context, q *HostRequest) error {
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
			Title: "the file of Pando's pool may grow to more than there is room for",
			Measured: []Figure{figure("size", "its size", Bytes, st.Size),
				figure("allocated", "it takes now", Bytes, st.Blocks*512), figure("missing", "it may still take", Bytes, missing),
				figure("free", "free where it lies", Bytes, avail)},
			Why: "The pool believes that it has the space. When the filesystem below is full, writes in the pool fail with " +
				"I/O errors, in every volume at once, and its filesystem may go read-only.",
			Do: []Step{
				{"free space where the file lies, or move it to a larger filesystem", []string{"df -h " + word(pool)}},
				{"let the pool give back what it does not use", []string{"fstrim " + word(q.Pool.Data)}},
			},
		})
	}

	for _, t := range on {
		if t.missing <= t.avail || slices.Equal(t.files, []string{pool}) {
			continue
		}

		slices.Sort(t.files)
		c.find(Finding{
			Code: "space-thin", Severity: Note, Subject: t.files[0],
			Title: fmt.Sprintf("%s behind loop devices may grow to more than there is room for (%s%s)",
				counted(len(t.files), "file"), t.files[0], map[bool]string{true: ", ..."}[len(t.files) > 1]),
			Measured: []Figure{figure("files", "files on one filesystem", Count, int64(len(t.files))),
				figure("missing", "they may still take", Bytes,
					t.missing).noted("at least: what they share with others is written anew, too"),
				figure("free", "free where they lie", Bytes, t.avail)},
			Why: "So it is meant with thin volumes and clones, as long as somebody watches the space: when it ends, writes " +
				"fail in all of them at once.",
			Do: []Step{{"watch the space there", []string{"df -h " + word(t.files[0])}}},
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
