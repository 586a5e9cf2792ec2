package doctor

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
)

// checkSyncHonoured finds what acknowledges syncs without doing them.
func checkSyncHonoured(ctx context.Context, _ *HostRequest, c *Report) error {
	all, unseen, err := hostFilesystems(ctx)
	if err != nil {
		return err
	}

	c.Measured = append(c.Measured, figure("filesystems", "mounted filesystems looked at", Count, int64(len(all))))
	for _, m := range all {
		c.barrier(m)
		c.volatileOverlay(m)
	}

	c.preload()
	if err := c.liars(ctx); err != nil {
		return err
	}

	pools, why := zpools(ctx)
	if len(pools) > 0 {
		if err := c.syncDisabled(ctx); err != nil {
			why = "the datasets could not be looked at: " + err.Error()
		}
		c.noCacheFlush()
	}

	note := ""
	if unseen > 0 {
		note = fmt.Sprintf("what %s may see elsewhere was not looked at", counted(unseen, "process"))
		if !isRoot() {
			note += ": run this as root"
		}
	}

	c.Summary = sentence(fmt.Sprintf("%s, %s, running programs and what the linker preloads",
		counted(len(all), "mounted filesystem"), counted(len(pools), "zpool")), note, why)
	return nil
}

// barrier is about a filesystem that does not flush the cache of its disk.
func (c *Report) barrier(m mounted) {
	if !onDevices[m.FSType] {
		return
	}

	option := m.DropsSyncs()
	if option == "" {
		return
	}

	f := Finding{
		Code: "sync-nobarrier", Severity: Critical, Subject: m.Point,
		Title: fmt.Sprintf("%s at %s does not flush its disk's cache: what was synced can be lost with the power",
			m.FSType, m.where()),
		Measured: []Figure{words("option", "mount option", option), words("source", "on", m.Source)},
		Why: "fsync() returns before the disk has the data. When the power fails, so may the journal: not only the last " +
			"writes are lost, " +
			"the filesystem itself can be damaged. And benchmarks of syncs measure the cache.",
		Do: []Step{{"let it flush again, and take the option out of /etc/fstab or of what mounts it",
			[]string{m.command("mount -o remount,barrier %s", word(m.Point))}}},
	}

	if d, err := blockdev.Lookup(m.Dev); err == nil && !d.VolatileCache {
		f.Severity = Warning
		f.Title = fmt.Sprintf("%s at %s does not flush its disk's cache; the kernel says that the disk has none that is "+
			"volatile", m.FSType, m.where())
		f.Measured = append(f.Measured, words("write_cache", "write cache of "+d.Name, "write through"))
		f.Why = "While the disk keeps what it has been given, the option gains nothing. When the filesystem is moved to " +
			"another disk, it loses data."
	}

	c.find(f)
}

// volatileOverlay is about an overlay that syncs nothing.
func (c *Report) volatileOverlay(m mounted) {
	if m.FSType != "overlay" || m.DropsSyncs() == "" {
		return
	}

	c.find(Finding{
		Code: "sync-overlay-volatile", Severity: Warning, Subject: m.Point,
		Title:    fmt.Sprintf("the overlay at %s is volatile: syncs in it do nothing", m.where()),
		Measured: []Figure{words("option", "mount option", "volatile")},
		Why: "It is meant for what is thrown away after a crash, such as the build of a container's image: the " +
			"kernel does not mount it again after one. A database must not be in it.",
		Do: []Step{{Text: "if its files must survive a crash, have it mounted without the option volatile; else " +
			"leave it"}},
	})
}

// preload is about what is linked into every program.
func (c *Report) preload() {
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
				Title:    fmt.Sprintf("%s puts %s into every program: no sync of any of them is done", path, lib),
				Measured: []Figure{words("library", "library", lib)},
				Why: "It replaces fsync() and its like by functions that do nothing. Whatever any program on this host has " +
					"synced since can be lost with the power.",
				Do: []Step{{Text: "take the line out of " + path + ", and restart all services"}},
			})
		}
	}
}

// liesAboutSyncs reports whether a library is one of those that make syncs do nothing.
func liesAboutSyncs(path string) bool {
	name := filepath.Base(path)
	for _, l := range []string{"libeatmydata", "eatmydata", "libnosync", "nosync", "libnofsync", "libfsync_noop"} {
		if strings.HasPrefix(name, l) {
			return true
		}
	}
	return false
}

// liars are running programs whose syncs are not done: those with such a library, and
// virtual machines that were told so.
func (c *Report) liars(ctx context.Context) error {
	return eachProcess(ctx, func(pid int, dir string) {
		args, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || len(args) == 0 { // of the kernel
			return
		}

		name := readText(dir, "comm")
		if lib := mappedLiar(filepath.Join(dir, "maps")); lib != "" {
			c.find(Finding{
				Code: "sync-preloaded", Severity: Critical, Subject: fmt.Sprint(pid),
				Title:    fmt.Sprintf("process %d (%s) runs with %s: its syncs do nothing", pid, name, filepath.Base(lib)),
				Measured: []Figure{words("library", "library", lib), words("program", "program", name)},
				Why: "Fine for what is thrown away, such as a test or the build of an image. What anything else has synced " +
					"can be lost with the power.",
				Do: []Step{{Text: "if its data matters, start it again without LD_PRELOAD and without eatmydata before " +
					"its command"}},
			})
		}

		if how := unsafeCache(strings.Split(string(args), "\x00")); how != "" {
			c.find(Finding{
				Code: "sync-vm-unsafe", Severity: Warning, Subject: fmt.Sprint(pid),
				Title:    fmt.Sprintf("the virtual machine of process %d (%s) drops the flushes of its guest", pid, name),
				Measured: []Figure{words("option", "option", how)},
				Why:      "What its guest has synced is only in the memory of this host. Fine for what is thrown away.",
				Do: []Step{{Text: "if its data matters, give the disk cache=none or cache=writeback instead, and start it " +
					"again"}},
			})
		}
	})
}

// mappedLiar is the library in a process's memory that makes its syncs do nothing.
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

// unsafeCache is the argument of QEMU by which it ignores flushes.
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

// syncDisabled is about datasets of all zpools.
func (c *Report) syncDisabled(ctx context.Context) error {
	rows, err := zfs.ZFS.Rows(ctx, 3, "get", "-Hp", "-t", "filesystem,volume", "-o", "name,value,source", "sync")
	if err != nil {
		return err
	}

	c.Measured = append(c.Measured, figure("datasets", "ZFS filesystems and volumes looked at", Count, int64(len(rows))))
	for _, s := range disabledSyncs(rows) {
		c.find(Finding{
			Code: "sync-zfs-disabled", Severity: Critical, Subject: s.dataset,
			Title: fmt.Sprintf("sync=disabled is set on %s: what was synced in the last seconds is lost with the power",
				s.dataset),
			Measured: []Figure{figure("datasets", "datasets that it holds for, with this one", Count, int64(s.datasets)),
				words("source", "set by", s.source)},
			Why: "fsync() returns at once; the data goes to the disks with the next transaction group, 5 seconds later by " +
				"default. The pool itself stays whole, " +
				"but databases lose transactions that they have confirmed. And benchmarks of syncs measure memory.",
			Do: []Step{
				{"let it sync again; if that is too slow, a log device is the remedy, not this",
					[]string{"zfs inherit sync " + word(s.dataset)}},
				{"look what it is now: a parent may have it, too", []string{"zfs get -r sync " + word(s.dataset)}},
			},
		})
	}

	return nil
}

// disabledSync is a dataset that itself has sync=disabled.
type disabledSync struct {
	dataset  string
	source   string // "local", "received", "temporary"
	datasets int    // it and what inherits that
}

// disabledSyncs reads rows of name, value, source.
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

// noCacheFlush is about the parameters of the ZFS module.
func (c *Report) noCacheFlush() {
	for _, p := range []struct{ name, what string }{
		{"zfs_nocacheflush", "flushes no disk at all: after a power failure whole pools can be lost"},
		{"zil_nocacheflush", "does not flush the disks after writes of its log: what was synced can be lost with the power"},
	} {
		path := filepath.Join("/sys/module/zfs/parameters", p.name)
		b, err := os.ReadFile(path)
		value := strings.TrimSpace(string(b))
		if err != nil || value == "0" { // versions differ in which there are
			continue
		}

		c.find(Finding{
			Code: "sync-zfs-nocacheflush", Severity: Critical, Subject: p.name,
			Title:    fmt.Sprintf("the ZFS parameter %s is %s: ZFS %s", p.name, value, p.what),
			Measured: []Figure{words("parameter", p.name, value)},
			Why: "This is safe only if every disk of every pool keeps its cache without power. It holds for all pools " +
				"of this host.",
			Do: []Step{{"turn it off, and take it out of /etc/modprobe.d",
				[]string{"echo 0 > " + path, "grep -r " + p.name + " /etc/modprobe.d"}}},
		})
	}
}
