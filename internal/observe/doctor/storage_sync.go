package doctor

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
)

// checkSyncHonoured finds filesystems, programs and zpools that report syncs as done without doing them.
func checkSyncHonoured(ctx context.Context, q *host, c *Report) error {
	// Filesystems.
	all, unseen, err := hostFilesystems(ctx)
	if err != nil {
		return err
	}

	c.measure(count("filesystems", "mounted filesystems checked", len(all)))
	exempt := q.Pool.ephemeralDevices(all)
	for _, m := range all {
		if !exempt[m.Dev] {
			c.findDroppedBarriers(m)
		}
		c.findVolatileOverlay(m)
	}

	// Programs.
	c.findPreloads()
	if err := c.findUnsafePrograms(ctx); err != nil {
		return err
	}

	// ZFS.
	pools, why := zpools(ctx)
	if len(pools) > 0 {
		if err := c.findDisabledSyncs(ctx, q.Pool); err != nil {
			why = "the datasets could not be checked: " + err.Error()
		}
		c.findNoCacheFlush()
	}

	note := ""
	if unseen > 0 {
		note = fmt.Sprintf("filesystems visible only to %s were not checked", errs.Plural(unseen, "process"))
		if !isRoot() {
			note += ": run this as root"
		}
	}

	mine := ""
	if q.Pool != nil && len(q.Pool.Ephemeral) > 0 {
		mine = errs.Plural(len(q.Pool.Ephemeral), "ephemeral volume") + " of pando may drop syncs by design"
	}

	c.Summary = errs.JoinSet("; ", fmt.Sprintf("%s, %s, running programs and preloaded libraries",
		errs.Plural(len(all), "mounted filesystem"), errs.Plural(len(pools), "zpool")), mine, note, why)
	return nil
}

// ephemeralDevices returns the devices of the ephemeral volumes that are mounted.
func (p *PoolFacts) ephemeralDevices(all []mounted) map[uint64]bool {
	if p == nil {
		return nil
	}

	points := map[string]bool{}
	for _, point := range p.Ephemeral {
		points[point] = point != ""
	}

	devices := map[uint64]bool{}
	for _, m := range all {
		if m.PID == 0 && points[m.Point] {
			devices[m.Dev] = true
		}
	}

	return devices
}

// isEphemeral reports whether a dataset is that of an ephemeral volume.
func (p *PoolFacts) isEphemeral(dataset string) bool {
	if p == nil {
		return false
	}
	_, is := p.Ephemeral[path.Base(dataset)]
	return is
}

// findDroppedBarriers reports a filesystem that does not flush the cache of its disk.
func (c *Report) findDroppedBarriers(m mounted) {
	if !onDevices[m.FSType] {
		return
	}

	option := m.DropsSyncs()
	if option == "" {
		return
	}

	f := Finding{
		Code: "sync-nobarrier", Severity: Critical, Subject: m.Point,
		Title: fmt.Sprintf("%s at %s does not flush its disk's cache: a power failure can lose synced data",
			m.FSType, m.where()),
		Measured: []Figure{words("option", "mount option", option), words("source", "on", m.Source)},
		Why: "fsync() returns before the data is on disk, and so does the journal: a power failure can not only lose the " +
			"last writes, but damage the filesystem itself. Benchmarks of syncs measure the cache.",
		Do: []Step{step("enable flushes, and remove the option from /etc/fstab or from the service that mounts it",
			m.command("mount -o remount,barrier %s", word(m.Point)))},
	}

	// Without a volatile cache, nothing is lost yet.
	if d, err := blockdev.Lookup(m.Dev); err == nil && !d.VolatileCache {
		f.Severity = Warning
		f.Title = fmt.Sprintf("%s at %s does not flush its disk's cache, which is not volatile according to the "+
			"kernel", m.FSType, m.where())
		f.measure(words("write_cache", "write cache of "+d.Name, "write through"))
		f.Why = "While the cache of this disk survives a power failure, the option gains nothing. After a move to another " +
			"disk, it loses data."
	}

	c.find(f)
}

// findVolatileOverlay reports an overlay that drops syncs.
func (c *Report) findVolatileOverlay(m mounted) {
	if m.FSType != "overlay" || m.DropsSyncs() == "" {
		return
	}

	c.find(Finding{
		Code: "sync-overlay-volatile", Severity: Warning, Subject: m.Point,
		Title:    fmt.Sprintf("the overlay at %s is volatile: syncs in it do nothing", m.where()),
		Measured: []Figure{words("option", "mount option", "volatile")},
		Why: "Volatile overlays are meant for data that is discarded after a crash, such as builds of container images: " +
			"the kernel does not mount them again. Keep no database in one.",
		Do: []Step{{Text: "if its files must survive a crash, mount it without the option volatile; otherwise leave it"}},
	})
}

// findPreloads reports libraries that disable syncs and are loaded into every program.
func (c *Report) findPreloads() {
	const path = "/etc/ld.so.preload"
	b, err := os.ReadFile(path)
	if err != nil {
		return // most hosts have none
	}

	for line := range strings.Lines(string(b)) {
		line, _, _ = strings.Cut(line, "#")
		for _, lib := range strings.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune(" \t\n:", r) }) {
			if !liesAboutSyncs(lib) {
				continue
			}
			c.find(Finding{
				Code: "sync-preload", Severity: Critical, Subject: lib,
				Title:    fmt.Sprintf("%s loads %s into every program, which disables all syncs", path, lib),
				Measured: []Figure{words("library", "library", lib)},
				Why: "It replaces fsync() and similar functions with ones that do nothing. Everything that programs on this " +
					"host have synced since then can be lost in a power failure.",
				Do: []Step{{Text: "remove the line from " + path + ", and restart all services"}},
			})
		}
	}
}

// liesAboutSyncs reports whether a library is known to make syncs do nothing.
func liesAboutSyncs(path string) bool {
	name := filepath.Base(path)
	for _, l := range []string{"libeatmydata", "eatmydata", "libnosync", "nosync", "libnofsync", "libfsync_noop"} {
		if strings.HasPrefix(name, l) {
			return true
		}
	}
	return false
}

// findUnsafePrograms reports running programs whose syncs do nothing: those with a library that disables syncs, and
// virtual machines that are set to drop flushes.
func (c *Report) findUnsafePrograms(ctx context.Context) error {
	return eachProcess(ctx, func(pid int, dir string) {
		args, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || len(args) == 0 { // a kernel thread has no arguments
			return
		}

		name := readText(dir, "comm")
		if lib := mappedLiar(filepath.Join(dir, "maps")); lib != "" {
			c.find(Finding{
				Code: "sync-preloaded", Severity: Critical, Subject: fmt.Sprint(pid),
				Title:    fmt.Sprintf("process %d (%s) runs with %s: its syncs do nothing", pid, name, filepath.Base(lib)),
				Measured: []Figure{words("library", "library", lib), words("program", "program", name)},
				Why: "This is fine for disposable data, such as tests and builds of images. Everything else that it has synced " +
					"can be lost in a power failure.",
				Do: []Step{{Text: "if its data matters, restart it without LD_PRELOAD and without eatmydata in front of its " +
					"command"}},
			})
		}

		if how := unsafeCache(strings.Split(string(args), "\x00")); how != "" {
			c.find(Finding{
				Code: "sync-vm-unsafe", Severity: Warning, Subject: fmt.Sprint(pid),
				Title:    fmt.Sprintf("the virtual machine of process %d (%s) drops the flushes of its guest", pid, name),
				Measured: []Figure{words("option", "option", how)},
				Why:      "Data synced by the guest is only in the memory of this host. This is fine for disposable data.",
				Do:       []Step{{Text: "if its data matters, set cache=none or cache=writeback for the disk, and restart it"}},
			})
		}
	})
}

// mappedLiar returns the library in a process's memory that makes its syncs do nothing, given its file maps; "" if
// there is none.
func mappedLiar(maps string) string {
	f, err := os.Open(maps)
	if err != nil {
		return ""
	}

	defer f.Close()
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		if i := strings.IndexByte(s.Text(), '/'); i >= 0 && liesAboutSyncs(s.Text()[i:]) {
			return s.Text()[i:]
		}
	}

	return ""
}

// unsafeCache returns the argument by which QEMU is set to ignore flushes; "" if there is none.
func unsafeCache(args []string) string {
	if len(args) == 0 || !strings.Contains(filepath.Base(args[0]), "qemu") && filepath.Base(args[0]) != "kvm" {
		return ""
	}

	for _, a := range args[1:] {
		plain := strings.ReplaceAll(a, " ", "")
		for _, bad := range []string{"cache=unsafe", "cache.no-flush=on", `"no-flush":true`} {
			if strings.Contains(plain, bad) {
				return bad
			}
		}
	}

	return ""
}

// findDisabledSyncs reports datasets with sync=disabled in all zpools.
func (c *Report) findDisabledSyncs(ctx context.Context, p *PoolFacts) error {
	rows, err := zfs.ZFS.Rows(ctx, 3, "get", "-Hp", "-t", "filesystem,volume", "-o", "name,value,source", "sync")
	if err != nil {
		return err
	}

	c.measure(count("datasets", "ZFS filesystems and volumes checked", len(rows)))
	for _, s := range disabledSyncs(rows) {
		if p.isEphemeral(s.dataset) {
			continue
		}
		c.find(Finding{
			Code: "sync-zfs-disabled", Severity: Critical, Subject: s.dataset,
			Title: fmt.Sprintf("sync=disabled is set on %s: a power failure loses the data synced in the last seconds",
				s.dataset),
			Measured: []Figure{count("datasets", "datasets affected, including this one", s.datasets),
				words("source", "set by", s.source)},
			Why: "fsync() returns at once; the data reaches the disks with the next transaction group, by default up to 5 " +
				"seconds later. The pool itself stays consistent, but databases lose transactions that they have confirmed, and " +
				"benchmarks of syncs measure memory.",
			Do: []Step{
				step("enable syncs again; if that is too slow, add a log device instead",
					"zfs inherit sync "+word(s.dataset)),
				step("check the new value: a parent may disable syncs, too", "zfs get -r sync "+word(s.dataset)),
			},
		})
	}

	return nil
}

// disabledSync is a dataset with sync=disabled as a setting of its own.
type disabledSync struct {
	dataset  string
	source   string // "local", "received", "temporary"
	datasets int    // this one and those that inherit the setting
}

// disabledSyncs parses rows of name, value and source.
func disabledSyncs(rows [][]string) (out []disabledSync) {
	at := map[string]int{}
	for _, r := range rows {
		from, inherited := strings.CutPrefix(r[2], "inherited from ")
		if r[1] != "disabled" {
			continue
		}
		if !inherited {
			from = r[0]
		}

		i, ok := at[from]
		if !ok {
			i = len(out)
			at[from] = i
			out = append(out, disabledSync{dataset: from, source: "local"})
		}

		if !inherited {
			out[i].source = r[2]
		}

		out[i].datasets++
	}

	return out
}

// findNoCacheFlush reports parameters of the ZFS module that disable flushes.
func (c *Report) findNoCacheFlush() {
	for _, p := range []struct{ name, what string }{
		{"zfs_nocacheflush", "never flushes disks: a power failure can destroy whole pools"},
		{"zil_nocacheflush", "does not flush disks after writing its log: a power failure can lose synced data"},
	} {
		path := filepath.Join("/sys/module/zfs/parameters", p.name)
		b, err := os.ReadFile(path)
		value := strings.TrimSpace(string(b))
		if err != nil || value == "0" { // not every version has both
			continue
		}

		c.find(Finding{
			Code: "sync-zfs-nocacheflush", Severity: Critical, Subject: p.name,
			Title:    fmt.Sprintf("the ZFS parameter %s is %s: ZFS %s", p.name, value, p.what),
			Measured: []Figure{words("parameter", p.name, value)},
			Why: "This is safe only if the cache of every disk of every pool survives a power failure. It applies to all " +
				"pools of this host.",
			Do: []Step{step("turn it off, and remove it from /etc/modprobe.d",
				"echo 0 > "+path, "grep -r "+p.name+" /etc/modprobe.d")},
		})
	}
}
