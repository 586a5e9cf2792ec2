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
	"time"

	"pando/internal/linux/kernel"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
)

// scrubDays is when a scrub is overdue: distributions do it once a month, and one may
// be missed.
const scrubDays = 60

// checkScrub finds what is damaged, or may be without anybody having looked.
func checkScrub(ctx context.Context, _ *HostRequest, c *Report) error {
	pools, why := zpools(ctx)
	for _, p := range pools {
		if err := c.findZpoolErrors(ctx, p); err != nil {
			why = fmt.Sprintf("zpool %s could not be checked: %v", p, err)
		}
	}

	all, err := btrfsAll()
	if err != nil {
		return err
	}

	rootless := ""
	for _, b := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := c.findBtrfsErrors(b); err != nil {
			rootless = fmt.Sprintf("cannot tell whether the btrfs at %s is being scrubbed: %v", b.subject(), err)
		}
	}

	raids, _ := filepath.Glob("/sys/block/*/md")
	for _, dir := range raids {
		c.findRAIDErrors("/dev/"+filepath.Base(filepath.Dir(dir)), readRAID(dir))
	}

	own, err := ownFilesystems()
	if err != nil {
		return err
	}

	ext4 := 0
	for _, m := range own {
		if m.FSType == "ext4" {
			ext4++
			c.findExt4Errors(m)
		}
	}

	c.Measured = append(c.Measured, figure("zpools", "zpools", Count, int64(len(pools))),
		figure("btrfs", "btrfs filesystems", Count, int64(len(all))),
		figure("raids", "md arrays", Count, int64(len(raids))), figure("ext4", "ext4 filesystems", Count, int64(ext4)))
	c.Summary = sentence(fmt.Sprintf("%s, %s, %s, %s", counted(len(pools), "zpool"), counted(len(all), "btrfs filesystem"),
		counted(len(raids), "md array"), counted(ext4, "ext4 filesystem")), rootless, why)
	return nil
}

// zpoolHealth is about one zpool.
func (c *Report) findZpoolErrors(ctx context.Context, pool string) error {
	// A pool that is suspended may let its programs hang: the kernel says so itself.
	if state, err := zfs.PoolState(pool); err == nil && state == "SUSPENDED" {
		c.find(Finding{
			Code: "scrub-zpool-state", Severity: Critical, Subject: pool, Title: fmt.Sprintf("zpool %s is suspended: writes "+
				"to it hang", pool),
			Measured: []Figure{words("state", "state", state)}, Why: "Too many of its disks do not respond.",
			Do: []Step{{"reconnect the disks, then resume the pool", []string{"dmesg | tail -50", "zpool clear " + word(pool)}}},
		})
		return nil
	}

	s, err := statusOf(ctx, pool)
	if err != nil {
		return err
	}

	look := Step{"show the details", []string{"zpool status -v " + word(pool)}}
	if s.state != "ONLINE" {
		sev, why := Critical, "All of it, or a part, cannot be used."
		if s.state == "DEGRADED" {
			sev, why = Warning, "It works, with less redundancy or none: the failure of another disk may lose data. It is "+
				"also slower."
		}
		f := Finding{Code: "scrub-zpool-state", Severity: sev, Subject: pool,
			Title:    fmt.Sprintf("zpool %s is %s", pool, s.state),
			Measured: []Figure{words("state", "state", s.state), words("status", "zpool says", s.status)}, Why: why,
			Do: []Step{look, {"reconnect the disk or replace it",
				[]string{"zpool online " + word(pool) + " DISK", "zpool replace " + word(pool) + " OLD NEW"}}}}
		c.find(f)
	}

	if s.errors != "" && s.errors != "No known data errors" {
		c.find(Finding{
			Code: "scrub-zpool-data", Severity: Critical, Subject: pool, Title: fmt.Sprintf("zpool %s has lost data", pool),
			Measured: []Figure{words("errors", "errors", s.errors)},
			Why:      "Blocks could not be read back as they were written, and no good copy of them was left.",
			Do: []Step{{"list the affected files, and restore them from a backup", []string{"zpool status -v " + word(pool)}},
				{"then scrub the pool, and clear the errors that are repaired",
					[]string{"zpool scrub -w " + word(pool), "zpool clear " + word(pool)}}},
		})
	}

	for _, v := range s.vdevs {
		if v.errors == [3]int64{} {
			continue
		}
		c.find(Finding{
			Code: "scrub-zpool-errors", Severity: Warning, Subject: v.name, Title: fmt.Sprintf("%s of zpool %s has had errors",
				v.name, pool),
			Measured: []Figure{figure("read", "reads that failed", Count, v.errors[0]),
				figure("write", "writes that failed", Count, v.errors[1]), figure("checksum",
					"blocks with wrong checksums", Count, v.errors[2])},
			Why: "ZFS has repaired what it could. Such a disk, or its cable, often gets worse.",
			Do: []Step{{"check the disk and its cable",
				[]string{"smartctl -a " + v.name, "dmesg | grep -i error | tail"}}, look},
		})
	}

	created, err := creation(ctx, pool)
	if err != nil {
		return err
	}

	c.findOverdueScrub(pool, "zpool "+pool, parseScan(s.scan), created, "zpool scrub "+word(pool),
		"zpool status "+word(pool))
	return nil
}

// creation is when a zpool was made.
func creation(ctx context.Context, pool string) (time.Time, error) {
	rows, err := zfs.ZFS.Rows(ctx, 1, "get", "-Hp", "-o", "value", "creation", pool)
	if err != nil || len(rows) != 1 {
		return time.Time{}, err
	}
	n, err := zfs.Number(rows[0][0])
	return time.Unix(n, 0), err
}

// scan is the last scrub, or what goes on.
type scan struct {
	what string    // "scrub", "resilver"; "" if there was none
	how  string    // "running", "paused", "done", "canceled"
	at   time.Time // it began, if it goes on; it ended, if not
}

// parseScan reads the line "scan:" of zpool status.
func parseScan(s string) scan {
	var out scan
	switch {
	case strings.HasPrefix(s, "scrub"):
		out.what = "scrub"
	case strings.HasPrefix(s, "resilver"):
		out.what = "resilver"
	default:
		return out
	}

	date := ""
	for _, k := range []struct{ word, how string }{{" in progress since ", "running"}, {" paused since ", "paused"},
		{" canceled on ", "canceled"}, {" errors on ", "done"}} {
		if _, after, ok := strings.Cut(s, k.word); ok {
			out.how, date = k.how, after
			break
		}
	}

	const layout = "Mon Jan _2 15:04:05 2006"
	if len(date) >= len(layout) {
		out.at, _ = time.ParseInLocation(layout, date[:len(layout)], time.Local)
	}

	return out
}

// scanned is about a scrub that goes on, or should have been.
func (c *Report) findOverdueScrub(subject, name string, s scan, created time.Time, start, look string) {
	switch s.how {
	case "running", "paused":
		since := unknown("since", "since", Text, "not recorded yet")
		if !s.at.IsZero() {
			since = words("since", "since", s.at.Format(time.DateTime))
		}
		c.find(Finding{
			Code: "scrub-running", Severity: Note, Subject: subject, Title: fmt.Sprintf("a %s of %s is %s", s.what, name, s.how),
			Measured: []Figure{since},
			Why: "It reads all data: syncs and reads are slower until it ends, and measurements made now do not show what " +
				"the pool can do. A resilver must end before the pool is redundant again.",
			Do: []Step{{"monitor its progress", []string{look}}},
		})
		return
	}

	last := s.at
	if s.what != "scrub" || s.how != "done" || last.IsZero() {
		if s.what == "resilver" && s.how == "done" {
			return // it hides when the last scrub was
		}
		last = created
	}

	days := int64(time.Since(last).Hours() / 24)
	if last.IsZero() || days < scrubDays {
		return
	}

	title := fmt.Sprintf("%s was scrubbed %d days ago", name, days)
	if last.Equal(created) {
		title = fmt.Sprintf("%s was created %d days ago and has never been scrubbed completely", name, days)
	}

	c.find(Finding{
		Code: "scrub-overdue", Severity: Note, Subject: subject, Title: title, Measured: []Figure{figure("days", "days since",
			Count, days)},
		Why: "Blocks that are never read can decay unnoticed. A scrub finds them while a good copy exists.",
		Do:  []Step{{"scrub it at a quiet time, and then every month", []string{start}}},
	})
}

// btrfsErrors are the counters of a device, in the words of the kernel.
var btrfsErrors = []struct{ name, label string }{
	{"write_errs", "writes that failed"}, {"read_errs", "reads that failed"}, {"flush_errs", "flushes that failed"},
	{"corruption_errs", "blocks with wrong checksums"}, {"generation_errs",
		"blocks of an older generation than expected"},
}

// btrfsHealth is about one btrfs. The error says why it is not known whether it is
// being scrubbed.
func (c *Report) findBtrfsErrors(b btrfsFS) error {
	infos, err := filepath.Glob(filepath.Join(b.dir, "devinfo/*"))
	if err != nil {
		return err
	}

	at := b.point
	if at == "" {
		at = "MOUNTPOINT"
	}

	at = word(at)
	missing, running := 0, false
	var rootless error
	for _, dir := range infos {
		id := filepath.Base(dir)
		if readText(dir, "missing") == "1" {
			missing++
		}

		var bad []Figure
		counts := map[string]int64{}
		for line := range strings.Lines(readText(dir, "error_stats")) { // since Linux 5.14
			if f := strings.Fields(line); len(f) == 2 {
				counts[f[0]], _ = strconv.ParseInt(f[1], 10, 64)
			}
		}

		for _, e := range btrfsErrors {
			if counts[e.name] > 0 {
				bad = append(bad, figure(e.name, e.label, Count, counts[e.name]))
			}
		}

		if len(bad) > 0 {
			c.find(Finding{
				Code: "scrub-btrfs-errors", Severity: Warning, Subject: b.subject(),
				Title: fmt.Sprintf("device %s of the btrfs at %s has had errors", id, b.subject()), Measured: bad,
				Why: "The counters began when the filesystem was created or they were reset. With one copy of the data, damaged " +
					"blocks are lost; with two, a scrub repairs them.",
				Do: []Step{{"find the device and the affected files",
					[]string{"btrfs device stats " + at, "dmesg | grep -i 'BTRFS.*\\(csum\\|error\\)' | tail"}},
					{"scrub the filesystem, which repairs blocks that have another copy; then reset the counters",
						[]string{"btrfs scrub start -B " + at, "btrfs device stats --reset " + at}}},
			})
		}

		if b.point == "" {
			continue
		}

		n, err := strconv.ParseUint(id, 10, 64)
		if err != nil {
			continue
		}

		is, err := b.scrubbing(n)
		if err != nil {
			rootless = err
		}

		running = running || is
	}

	if missing > 0 {
		c.find(Finding{
			Code: "scrub-btrfs-missing", Severity: Warning, Subject: b.subject(), Title: fmt.Sprintf("the btrfs at %s lacks %s",
				b.subject(), counted(missing, "device")),
			Measured: []Figure{figure("missing", "devices missing", Count, int64(missing))},
			Why:      "It is mounted degraded: the failure of another device loses data, and new data may have only one copy.",
			Do: []Step{{"replace the device, then restore the second copies",
				[]string{"btrfs device usage " + at, "btrfs replace start ID NEWDISK " + at,
					"btrfs balance start -dconvert=raid1,soft -mconvert=raid1,soft " + at}}},
		})
	}

	if op := readText(b.dir, "exclusive_operation"); op != "" && op != "none" {
		c.find(Finding{
			Code: "scrub-btrfs-operation", Severity: Note, Subject: b.subject(), Title: fmt.Sprintf("the btrfs at %s is busy "+
				"with: %s", b.subject(), op),
			Measured: []Figure{words("operation", "operation", op)},
			Why:      "It moves data: syncs, reads and commits are slower until it ends.",
			Do: []Step{{"monitor its progress; you can pause a balance",
				[]string{"btrfs balance status " + at, "btrfs balance pause " + at}}},
		})
	}

	s := scan{what: "scrub"}
	created := b.created()
	last, finished, err := lastScrub(b.uuid)
	switch {
	case running:
		s.how, s.at = "running", last
	case err != nil:
		created = time.Time{} // nobody knows that there was none
	case finished:
		s.how, s.at = "done", last
	}

	c.findOverdueScrub(b.subject(), "the btrfs at "+b.subject(), s, created, "btrfs scrub start "+at,
		"btrfs scrub status "+at)
	return rootless
}

// scrubbing reports whether a device is being scrubbed.
func (b btrfsFS) scrubbing(device uint64) (bool, error) {
	f, err := os.Open(b.point)
	if err != nil {
		return false, err
	}
	defer f.Close()
	return kernel.BtrfsScrubbing(f, device)
}

// created is when the filesystem was made; zero if it does not say.
func (b btrfsFS) created() time.Time {
	f, err := os.Open(b.point)
	if err != nil {
		return time.Time{}
	}
	defer f.Close()
	// Of the top subvolume only it is the time of mkfs.
	if i, err := kernel.SubvolInfoOf(f); err == nil && i.ID == 5 && i.Created.Unix() > 0 {
		return i.Created
	}
	return time.Time{}
}

// scrubStatus is where btrfs-progs write down what they have scrubbed, as root.
const scrubStatus = "/var/lib/btrfs/scrub.status."

// lastScrub is when a device of a btrfs began to be scrubbed last, and whether that
// came to its end; what was cancelled does not count. Zero if nobody wrote one
// down, an error if it cannot be read.
func lastScrub(uuid string) (last time.Time, finished bool, err error) {
	b, err := os.ReadFile(scrubStatus + uuid)
	if errors.Is(err, fs.ErrNotExist) {
		return last, false, nil
	}
	if err != nil {
		return last, false, err
	}

	for line := range strings.Lines(string(b)) {
		values := map[string]string{}
		for p := range strings.SplitSeq(strings.TrimSpace(line), "|") {
			if k, v, ok := strings.Cut(p, ":"); ok {
				values[k] = v
			}
		}
		t, err := strconv.ParseInt(values["t_start"], 10, 64)
		if err != nil || t <= 0 || values["canceled"] == "1" {
			continue
		}
		if at := time.Unix(t, 0); at.After(last) {
			last, finished = at, values["finished"] == "1"
		}
	}

	return last, finished, nil
}

// raid is what md says of an array.
type raid struct {
	level, state, action string // "raid1"; "clean"; "idle", "check", "resync"
	degraded, mismatches int64
}

func readRAID(dir string) raid {
	r := raid{level: readText(dir, "level"), state: readText(dir, "array_state"), action: readText(dir, "sync_action")}
	r.degraded, _ = readNumber(dir, "degraded")
	r.mismatches, _ = readNumber(dir, "mismatch_cnt")
	return r
}

// raidHealth is about an md array.
func (c *Report) findRAIDErrors(device string, r raid) {
	look := Step{"show the details", []string{"mdadm --detail " + device, "cat /proc/mdstat"}}
	if r.degraded > 0 {
		c.find(Finding{
			Code: "scrub-md-degraded", Severity: Warning, Subject: device, Title: fmt.Sprintf("the array %s lacks %s", device,
				counted(int(r.degraded), "disk")),
			Measured: []Figure{words("level", "level", r.level), figure("degraded", "disks missing", Count, r.degraded)},
			Why:      "The failure of another disk loses data.",
			Do:       []Step{look, {"add a replacement disk", []string{"mdadm --manage " + device + " --add DISK"}}},
		})
	}

	if r.action != "" && r.action != "idle" && r.action != "frozen" {
		c.find(Finding{
			Code: "scrub-running", Severity: Note, Subject: device, Title: fmt.Sprintf("the array %s is busy with: %s", device,
				r.action), Measured: []Figure{words("action", "action", r.action)},
			Why: "It reads or writes all data: syncs and reads are slower until it ends.", Do: []Step{look},
		})
	}

	// RAID 1 and 10 count what changes in memory while it is written, too.
	if r.mismatches > 0 && r.level != "raid1" && r.level != "raid10" {
		c.find(Finding{
			Code: "scrub-md-mismatch", Severity: Warning, Subject: device, Title: fmt.Sprintf("the last check of the array "+
				"%s found parity that does not match its data", device),
			Measured: []Figure{words("level", "level", r.level), figure("mismatches", "sectors", Count, r.mismatches)},
			Why: "A write reached only a part of a stripe, or a disk returns wrong data. md cannot tell which blocks " +
				"are right.",
			Do: []Step{look, {"check the files, then rewrite the parity",
				[]string{"echo repair > /sys/block/" + filepath.Base(device) + "/md/sync_action"}}},
		})
	}
}

// ext4Errors is about an ext4 that has noticed damage.
func (c *Report) findExt4Errors(m mounted) {
	d, err := blockdev.Lookup(m.Dev)
	if err != nil {
		return
	}

	dir := filepath.Join("/sys/fs/ext4", filepath.Base(strings.ReplaceAll(d.Name, "/", "!")))
	n, _ := readNumber(dir, "errors_count")
	if n == 0 {
		return
	}

	f := Finding{
		Code: "scrub-ext4-errors", Severity: Warning, Subject: m.Point, Title: fmt.Sprintf("the ext4 at %s has recorded "+
			"errors in its structures", m.Point),
		Measured: []Figure{figure("errors", "errors", Count, n)},
		Why:      "It continues on damaged structures, as its option errors= tells it to. e2fsck resets the counter.",
		Do: []Step{{"find the errors in the log, then unmount the filesystem and check it",
			[]string{"dmesg | grep 'EXT4-fs error' | tail", "e2fsck -f " + d.Path()}}},
	}

	if t, ok := readNumber(dir, "last_error_time"); ok && t > 0 {
		f.Measured = append(f.Measured, words("last", "the last at", time.Unix(t, 0).Format(time.DateTime)))
	}

	if fn := readText(dir, "last_error_func"); fn != "" {
		f.Measured = append(f.Measured, words("function", "in the kernel's", fn))
	}

	c.find(f)
}
