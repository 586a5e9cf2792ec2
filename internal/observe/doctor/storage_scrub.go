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

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
)

// scrubDays is the age from which a scrub is overdue. Distributions scrub once a month, and one scrub may be missed.
const scrubDays = 60

// checkScrub finds zpools, filesystems and arrays that are damaged, degraded, being scrubbed, or overdue for a scrub.
func checkScrub(ctx context.Context, _ *host, c *Report) error {
	// ZFS.
	pools, why := zpools(ctx)
	for _, p := range pools {
		if err := c.findZpoolErrors(ctx, p); err != nil {
			why = fmt.Sprintf("zpool %s could not be checked: %v", p, err)
		}
	}

	// btrfs.
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

	// md arrays.
	raids, _ := filepath.Glob("/sys/block/*/md")
	for _, dir := range raids {
		c.findRAIDErrors("/dev/"+filepath.Base(filepath.Dir(dir)), readRAID(dir))
	}

	// ext4.
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

	c.measure(count("zpools", "zpools", len(pools)),
		count("btrfs", "btrfs filesystems", len(all)),
		count("raids", "md arrays", len(raids)), count("ext4", "ext4 filesystems", ext4))
	c.Summary = errs.JoinSet("; ", fmt.Sprintf("%s, %s, %s, %s", errs.Plural(len(pools), "zpool"),
		errs.Plural(len(all), "btrfs filesystem"), errs.Plural(len(raids), "md array"),
		errs.Plural(ext4, "ext4 filesystem")), rootless, why)
	return nil
}

// findZpoolErrors reports the state and the errors of a zpool, and an overdue scrub.
func (c *Report) findZpoolErrors(ctx context.Context, pool string) error {
	// Commands on a suspended pool can hang, so ask the kernel.
	if state, err := zfs.PoolState(pool); err == nil && state == "SUSPENDED" {
		c.find(Finding{
			Code: "scrub-zpool-state", Severity: Critical, Subject: pool, Title: fmt.Sprintf("zpool %s is suspended: writes "+
				"to it hang", pool),
			Measured: []Figure{words("state", "state", state)}, Why: "Too many of its disks do not respond.",
			Do: []Step{step("reconnect the disks, then resume the pool", "dmesg | tail -50", "zpool clear "+word(pool))},
		})
		return nil
	}

	s, err := statusOf(ctx, pool)
	if err != nil {
		return err
	}

	c.reportZpoolStatus(pool, s)

	created, err := creation(ctx, pool)
	if err != nil {
		return err
	}

	c.findOverdueScrub(pool, "zpool "+pool, parseScan(s.scan), created, "zpool scrub "+word(pool),
		"zpool status "+word(pool))
	return nil
}

// reportZpoolStatus reports what `zpool status` says is wrong with a pool.
func (c *Report) reportZpoolStatus(pool string, s *poolStatus) {
	// Its state.
	look := step("show the details", "zpool status -v "+word(pool))
	if s.state != "ONLINE" {
		sev, why := Critical, "All of it, or a part, cannot be used."
		if s.state == "DEGRADED" {
			sev, why = Warning, "It works, with less redundancy or none: the failure of another disk may lose data. It is "+
				"also slower."
		}

		c.find(Finding{Code: "scrub-zpool-state", Severity: sev, Subject: pool,
			Title:    fmt.Sprintf("zpool %s is %s", pool, s.state),
			Measured: []Figure{words("state", "state", s.state), words("status", "zpool says", s.status)}, Why: why,
			Do: []Step{look, step("reconnect the disk or replace it",
				"zpool online "+word(pool)+" DISK", "zpool replace "+word(pool)+" OLD NEW")}})
	}

	// Lost data.
	if s.errors != "" && s.errors != "No known data errors" {
		c.find(Finding{
			Code: "scrub-zpool-data", Severity: Critical, Subject: pool, Title: fmt.Sprintf("zpool %s has lost data", pool),
			Measured: []Figure{words("errors", "errors", s.errors)},
			Why:      "Blocks could not be read back as they were written, and no good copy of them was left.",
			Do: []Step{step("list the affected files, and restore them from a backup", "zpool status -v "+word(pool)),
				step("then scrub the pool, and clear the errors that are repaired",
					"zpool scrub -w "+word(pool), "zpool clear "+word(pool))},
		})
	}

	// Errors of its disks.
	for _, v := range s.vdevs {
		if v.errors == [3]int64{} {
			continue
		}
		c.find(Finding{
			Code: "scrub-zpool-errors", Severity: Warning, Subject: v.name, Title: fmt.Sprintf("%s of zpool %s has had errors",
				v.name, pool),
			Measured: []Figure{count("read", "reads that failed", v.errors[0]),
				count("write", "writes that failed", v.errors[1]), count("checksum",
					"blocks with wrong checksums", v.errors[2])},
			Why: "ZFS has repaired what it could. Such a disk, or its cable, often gets worse.",
			Do: []Step{step("check the disk and its cable",
				"smartctl -a "+v.name, "dmesg | grep -i error | tail"), look},
		})
	}
}

// creation returns when a zpool was created.
func creation(ctx context.Context, pool string) (time.Time, error) {
	rows, err := zfs.ZFS.Rows(ctx, 1, "get", "-Hp", "-o", "value", "creation", pool)
	if err != nil || len(rows) != 1 {
		return time.Time{}, err
	}
	n, err := zfs.Number(rows[0][0])
	return time.Unix(n, 0), err
}

// scan is the last scrub or resilver of a pool.
type scan struct {
	what string    // "scrub", "resilver"; "" if there was none
	how  string    // "running", "paused", "done", "canceled"
	at   time.Time // it began, if it is running or paused; otherwise it ended
}

// parseScan parses the line "scan:" of `zpool status`.
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

// findOverdueScrub reports a scrub that is running, or overdue. created is when the pool or filesystem was created; if
// it is zero and there was no scrub, none is overdue. start and look are commands.
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
			Do: []Step{step("monitor its progress", look)},
		})
		return
	}

	// If no scrub has finished, count from the creation.
	last := s.at
	if s.what != "scrub" || s.how != "done" || last.IsZero() {
		if s.what == "resilver" && s.how == "done" {
			return // zpool reports only the resilver, and hides the last scrub
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
		Code: "scrub-overdue", Severity: Note, Subject: subject, Title: title,
		Measured: []Figure{count("days", "days since", days)},
		Why:      "Blocks that are never read can decay unnoticed. A scrub finds them while a good copy exists.",
		Do:       []Step{step("scrub it at a quiet time, and then every month", start)},
	})
}

// btrfsErrors are the error counters of a device, as the kernel names them.
var btrfsErrors = []struct{ name, label string }{
	{"write_errs", "writes that failed"}, {"read_errs", "reads that failed"}, {"flush_errs", "flushes that failed"},
	{"corruption_errs", "blocks with wrong checksums"}, {"generation_errs",
		"blocks of an older generation than expected"},
}

// findBtrfsErrors reports devices of a btrfs that are missing or had errors, operations that slow it down, and an
// overdue scrub. An error means that it could not find out whether the btrfs is being scrubbed.
func (c *Report) findBtrfsErrors(b btrfsFS) error {
	infos, err := filepath.Glob(filepath.Join(b.dir, "devinfo/*"))
	if err != nil {
		return err
	}

	// Its devices.
	missing, running := 0, false
	var rootless error
	for _, dir := range infos {
		id := filepath.Base(dir)
		if readText(dir, "missing") == "1" {
			missing++
		}

		c.findDeviceErrors(b, id, readText(dir, "error_stats")) // since Linux 5.14
		n, err := strconv.ParseUint(id, 10, 64)
		if b.point == "" || err != nil {
			continue
		}

		is, err := b.scrubbing(n)
		if err != nil {
			rootless = err
		}

		running = running || is
	}

	at := b.mountPoint()
	if missing > 0 {
		c.find(Finding{
			Code: "scrub-btrfs-missing", Severity: Warning, Subject: b.subject(), Title: fmt.Sprintf("the btrfs at %s lacks %s",
				b.subject(), errs.Plural(missing, "device")),
			Measured: []Figure{count("missing", "devices missing", missing)},
			Why:      "It is mounted degraded: the failure of another device loses data, and new data may have only one copy.",
			Do: []Step{step("replace the device, then restore the second copies",
				"btrfs device usage "+at, "btrfs replace start ID NEWDISK "+at,
				"btrfs balance start -dconvert=raid1,soft -mconvert=raid1,soft "+at)},
		})
	}

	// Operations.
	if op := readText(b.dir, "exclusive_operation"); op != "" && op != "none" {
		c.find(Finding{
			Code: "scrub-btrfs-operation", Severity: Note, Subject: b.subject(), Title: fmt.Sprintf("the btrfs at %s is busy "+
				"with: %s", b.subject(), op),
			Measured: []Figure{words("operation", "operation", op)},
			Why:      "It moves data: syncs, reads and commits are slower until it ends.",
			Do: []Step{step("monitor its progress; you can pause a balance",
				"btrfs balance status "+at, "btrfs balance pause "+at)},
		})
	}

	c.findBtrfsScrub(b, running)
	return rootless
}

// findBtrfsScrub reports a scrub of a btrfs that is running, or overdue.
func (c *Report) findBtrfsScrub(b btrfsFS, running bool) {
	s := scan{what: "scrub"}
	created := b.created()
	last, finished, err := lastScrub(b.uuid)
	switch {
	case running:
		s.how, s.at = "running", last
	case err != nil:
		created = time.Time{} // there may have been a scrub
	case finished:
		s.how, s.at = "done", last
	}

	at := b.mountPoint()
	c.findOverdueScrub(b.subject(), "the btrfs at "+b.subject(), s, created, "btrfs scrub start "+at,
		"btrfs scrub status "+at)
}

// findDeviceErrors reports the error counters of a device of a btrfs, given the text of its error_stats.
func (c *Report) findDeviceErrors(b btrfsFS, id, stats string) {
	counts := map[string]int64{}
	for line := range strings.Lines(stats) {
		if f := strings.Fields(line); len(f) == 2 {
			counts[f[0]], _ = strconv.ParseInt(f[1], 10, 64)
		}
	}

	var bad []Figure
	for _, e := range btrfsErrors {
		if counts[e.name] > 0 {
			bad = append(bad, count(e.name, e.label, counts[e.name]))
		}
	}

	if len(bad) == 0 {
		return
	}

	// Report them.
	at := b.mountPoint()
	c.find(Finding{
		Code: "scrub-btrfs-errors", Severity: Warning, Subject: b.subject(),
		Title: fmt.Sprintf("device %s of the btrfs at %s has had errors", id, b.subject()), Measured: bad,
		Why: "The counters began when the filesystem was created or they were reset. With one copy of the data, damaged " +
			"blocks are lost; with two, a scrub repairs them.",
		Do: []Step{step("find the device and the affected files",
			"btrfs device stats "+at, "dmesg | grep -i 'BTRFS.*\\(csum\\|error\\)' | tail"),
			step("scrub the filesystem, which repairs blocks that have another copy; then reset the counters",
				"btrfs scrub start -B "+at, "btrfs device stats --reset "+at)},
	})
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

// created returns when the filesystem was created; zero if that is unknown.
func (b btrfsFS) created() time.Time {
	f, err := os.Open(b.point)
	if err != nil {
		return time.Time{}
	}
	defer f.Close()
	// Only the top-level subvolume was created with the filesystem.
	if i, err := kernel.SubvolInfoOf(f); err == nil && i.ID == 5 && i.Created.Unix() > 0 {
		return i.Created
	}
	return time.Time{}
}

// scrubStatus is the prefix of the files in which btrfs-progs record scrubs. Only root can read them.
const scrubStatus = "/var/lib/btrfs/scrub.status."

// lastScrub returns when the last scrub of a device of a btrfs began, and whether it finished; cancelled scrubs do not
// count. It returns zero if no scrub was recorded, and an error if the records cannot be read.
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

// raid is the state of an md array.
type raid struct {
	level, state, action string // "raid1"; "clean"; "idle", "check", "resync"
	degraded, mismatches int64
}

// readRAID reads the state of an array from its directory in sysfs.
func readRAID(dir string) raid {
	r := raid{level: readText(dir, "level"), state: readText(dir, "array_state"), action: readText(dir, "sync_action")}
	r.degraded, _ = readNumber(dir, "degraded")
	r.mismatches, _ = readNumber(dir, "mismatch_cnt")
	return r
}

// findRAIDErrors reports an md array that is degraded, busy or damaged.
func (c *Report) findRAIDErrors(device string, r raid) {
	look := step("show the details", "mdadm --detail "+device, "cat /proc/mdstat")
	if r.degraded > 0 {
		c.find(Finding{
			Code: "scrub-md-degraded", Severity: Warning, Subject: device, Title: fmt.Sprintf("the array %s lacks %s", device,
				errs.Plural(int(r.degraded), "disk")),
			Measured: []Figure{words("level", "level", r.level), count("degraded", "disks missing", r.degraded)},
			Why:      "The failure of another disk loses data.",
			Do:       []Step{look, step("add a replacement disk", "mdadm --manage "+device+" --add DISK")},
		})
	}

	if r.action != "" && r.action != "idle" && r.action != "frozen" {
		c.find(Finding{
			Code: "scrub-running", Severity: Note, Subject: device, Title: fmt.Sprintf("the array %s is busy with: %s", device,
				r.action), Measured: []Figure{words("action", "action", r.action)},
			Why: "It reads or writes all data: syncs and reads are slower until it ends.", Do: []Step{look},
		})
	}

	// RAID 1 and 10 also count blocks that changed in memory while they were written, so their count means nothing.
	if r.mismatches > 0 && r.level != "raid1" && r.level != "raid10" {
		c.find(Finding{
			Code: "scrub-md-mismatch", Severity: Warning, Subject: device, Title: fmt.Sprintf("the last check of the array "+
				"%s found parity that does not match its data", device),
			Measured: []Figure{words("level", "level", r.level), count("mismatches", "sectors", r.mismatches)},
			Why: "A write reached only a part of a stripe, or a disk returns wrong data. md cannot tell which blocks " +
				"are right.",
			Do: []Step{look, step("check the files, then rewrite the parity",
				"echo repair > /sys/block/"+filepath.Base(device)+"/md/sync_action")},
		})
	}
}

// findExt4Errors reports an ext4 that has recorded errors in its structures.
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
		Measured: []Figure{count("errors", "errors", n)},
		Why:      "It continues on damaged structures, as its option errors= tells it to. e2fsck resets the counter.",
		Do: []Step{step("find the errors in the log, then unmount the filesystem and check it",
			"dmesg | grep 'EXT4-fs error' | tail", "e2fsck -f "+d.Path())},
	}

	// Add the last error.
	if t, ok := readNumber(dir, "last_error_time"); ok && t > 0 {
		f.measure(words("last", "the last at", time.Unix(t, 0).Format(time.DateTime)))
	}

	if fn := readText(dir, "last_error_func"); fn != "" {
		f.measure(words("function", "in the kernel's", fn))
	}

	c.find(f)
}
