package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"

	"golang.org/x/sys/unix"
)

// loopDevice is a loop device that has a file behind it.
type loopDevice struct {
	blockdev.Device
	file    string // path of its file when it was attached
	deleted bool   // the file has been removed since
	bound   *loopdev.Bound
	numbers []uint64 // device numbers of it and its partitions
}

// loopDevices lists the attached loop devices. Without root, bound is nil: only the paths of their files are known.
func loopDevices() ([]loopDevice, error) {
	all, err := blockdev.List()
	if err != nil {
		return nil, errs.Wrap("list block devices", "/sys", err)
	}

	var out []loopDevice
	for _, d := range all {
		if d.Kind != blockdev.Loop {
			continue
		}

		// Find its file.
		l := loopDevice{Device: d, numbers: []uint64{d.Number}}
		l.file, l.deleted = strings.CutSuffix(d.Backing, " (deleted)")
		if n, err := strconv.Atoi(strings.TrimPrefix(d.Name, "loop")); err == nil {
			if b, err := loopdev.Lookup(n); err == nil {
				l.bound = &b
			}
		}

		// Find its partitions.
		for _, p := range all {
			if p.Kind == blockdev.Partition && strings.HasPrefix(p.Name, d.Name+"p") {
				l.numbers = append(l.numbers, p.Number)
			}
		}

		out = append(out, l)
	}

	return out, nil
}

// loopsByNumber maps the device numbers of loop devices and their partitions to the devices.
func loopsByNumber(loops []loopDevice) map[uint64]loopDevice {
	out := map[uint64]loopDevice{}
	for _, l := range loops {
		for _, n := range l.numbers {
			out[n] = l
		}
	}
	return out
}

// openFile opens the file behind the device. It returns fs.ErrNotExist if the file was removed, or if another file has
// its path in this namespace.
func (l loopDevice) openFile(flags int) (*os.File, error) {
	if l.deleted {
		return nil, fs.ErrNotExist
	}

	fd, err := unix.Open(l.file, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY|flags, 0)
	if err != nil {
		return nil, err
	}

	f := os.NewFile(uintptr(fd), l.file)
	st, err := kernel.Stat(fd)
	if err != nil || l.bound != nil && !l.bound.SameFile(&st) {
		f.Close()
		return nil, fs.ErrNotExist
	}

	return f, nil
}

// directAlign returns the smallest logical sector, in bytes, with which a loop device can bypass the page cache of its
// file's filesystem; 0 if it cannot.
func directAlign(f *os.File, l loopDevice) int {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err == nil &&
		st.Mask&unix.STATX_DIOALIGN != 0 {
		return int(st.Dio_offset_align)
	}

	// Linux before 6.1 and some filesystems do not report it: try, and assume the sectors of the device below.
	direct, err := l.openFile(unix.O_DIRECT)
	if err != nil {
		return 0
	}

	direct.Close()
	var s unix.Stat_t
	if unix.Fstat(int(f.Fd()), &s) == nil {
		if d, err := blockdev.Lookup(s.Dev); err == nil {
			return d.LogicalBytes
		}
	}

	return 512
}

// cachedBytes returns how much of a file is in the page cache; false if the kernel does not report it.
func cachedBytes(f *os.File) (int64, bool) {
	var c unix.Cachestat_t
	if err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{}, &c, 0); err != nil { // Linux 6.5
		return 0, false
	}
	return int64(c.Cache) * int64(os.Getpagesize()), true
}

// keepsInMemory reports whether a file is on a filesystem without a disk, which keeps all data in the page cache.
func keepsInMemory(f *os.File) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &st) != nil {
		return false
	}
	return st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC
}

const whyBuffered = "Data read through the device is cached twice, by the filesystem on it and by the filesystem of " +
	"its file, and written data is copied twice. Writes gather in the lower cache until the kernel flushes them all at " +
	"once, so a sync through the device waits for data that is not its own."

// loopDirectIO finds loop devices that use the page cache of their files' filesystems although they need not.
func loopDirectIO(ctx context.Context, q *host, c *Report) error {
	loops, err := loopDevices()
	if err != nil {
		return err
	}

	// Examine each device.
	var n bufferedCounts
	for _, l := range loops {
		if ctx.Err() != nil {
			return errs.Wrap("look at loop devices", "", ctx.Err())
		}
		n.examine(l, c)
	}

	if len(n.readOnly) > 0 {
		c.find(Finding{
			Code: "loop-buffered-readonly", Severity: Note,
			Title: fmt.Sprintf("%s without direct I/O", errs.Plural(len(n.readOnly), "read-only loop device")),
			Measured: []Figure{count("devices", "devices", len(n.readOnly)),
				figure("cached", "of their files in the page cache", Bytes, n.readOnlyCached)},
			Why: "Data read through them is cached twice. They write nothing, so there is no other cost.",
			Do:  []Step{step("if that memory matters", n.readOnly[:min(len(n.readOnly), 20)]...)},
		})
	}

	// Summarise.
	c.measure(count("loops", "loop devices attached", len(loops)),
		count("direct", "with direct I/O", n.direct))
	c.Summary = fmt.Sprintf("%s: %d with direct I/O", errs.Plural(len(loops), "loop device"), n.direct)
	for _, k := range []struct {
		n    int
		what string
	}{{n.memory, "on files in memory"}, {n.cannot, "on filesystems without direct I/O"}, {n.hidden,
		"whose file is not visible here"}} {
		if k.n > 0 {
			c.Summary += fmt.Sprintf(", %d %s", k.n, k.what)
		}
	}

	return nil
}

// bufferedCounts sums up what loopDirectIO has found.
type bufferedCounts struct {
	direct, memory, cannot, hidden int      // devices
	readOnly                       []string // commands, one for each read-only device without direct I/O
	readOnlyCached                 int64    // bytes of their files in the page cache
}

// examine counts one device, and adds a finding to c if it is writable and could use direct I/O.
func (n *bufferedCounts) examine(l loopDevice, c *Report) {
	if l.DirectIO {
		n.direct++
		return
	}

	// Find out whether the file can be read and written without the page cache.
	f, err := l.openFile(0)
	if err != nil {
		n.hidden++
		return
	}

	defer f.Close()
	align := directAlign(f, l)
	switch {
	case keepsInMemory(f):
		n.memory++
		return
	case align == 0:
		n.cannot++
		return
	}

	// Report why it does not use direct I/O.
	inCache := unknown("cached", "of its file in the page cache", Bytes, "the kernel does not report it")
	cached, ok := cachedBytes(f)
	if ok {
		inCache = figure("cached", "of its file in the page cache", Bytes, cached)
	}

	measured := []Figure{words("file", "file", printable(l.file)), figure("size", "size", Bytes, l.SizeBytes), inCache,
		figure("sector", "sector size of the device", Bytes, int64(l.LogicalBytes)),
		figure("needed", "sector size needed for direct I/O", Bytes, int64(align))}
	switch {
	case l.LogicalBytes < align:
		c.find(Finding{
			Code: "loop-sector", Severity: Note, Subject: l.Path(), Measured: measured,
			Title: fmt.Sprintf("%s cannot use direct I/O: its sectors are smaller than those of the disk below its "+
				"file", l.Path()),
			Why: whyBuffered,
			Do: []Step{step("when it is not in use, attach it again with larger sectors, unless its content was made for "+
				"smaller ones (a filesystem with smaller sectors cannot be mounted then)",
				"losetup -d "+l.Path(), fmt.Sprintf("losetup --find --show --direct-io=on --sector-size %d %s", align,
					word(l.file)))},
		})
	case l.ReadOnly:
		n.readOnlyCached += cached
		n.readOnly = append(n.readOnly, "losetup --direct-io=on "+l.Path())
	default:
		c.find(Finding{
			Code: "loop-buffered", Severity: Warning, Subject: l.Path(), Measured: measured,
			Title: fmt.Sprintf("%s does not use direct I/O, although its file's filesystem can", l.Path()),
			Why:   whyBuffered,
			Do: []Step{step("switch to direct I/O, even while it is mounted; and attach it with --direct-io=on in the future",
				"losetup --direct-io=on "+l.Path())},
		})
	}
}

// loopUses returns what uses loop devices, by the names of the devices, and the processes that could not be examined.
func loopUses(ctx context.Context, loops []loopDevice, spaces []mount.Namespace) (map[string][]string, blind, error) {
	u := loopUsers{loops: loops, byNumber: loopsByNumber(loops), uses: map[string][]string{}}
	u.findMounts(spaces)
	u.findDevices()
	if err := u.findZpools(ctx); err != nil {
		return nil, nil, err
	}
	unseen, err := u.findOpenFiles(ctx)
	return u.uses, unseen, errs.Wrap("look for users of loop devices", "", err)
}

// loopUsers collects what uses loop devices.
type loopUsers struct {
	loops    []loopDevice
	byNumber map[uint64]loopDevice
	uses     map[string][]string // by the name of the device, at most 20 of each
}

func (u *loopUsers) add(name, format string, args ...any) {
	if len(u.uses[name]) < 20 {
		u.uses[name] = append(u.uses[name], fmt.Sprintf(format, args...))
	}
}

// named returns the name of the device that a path is of, or one of its partitions; "" if it is of another device.
func (u *loopUsers) named(path string) string {
	name := strings.TrimPrefix(path, "/dev/")
	for _, l := range u.loops {
		if rest, ok := strings.CutPrefix(name, l.Name); ok && (rest == "" || rest[0] == 'p') {
			return l.Name
		}
	}
	return ""
}

// findMounts finds mounted filesystems, even if their mounts are not visible.
func (u *loopUsers) findMounts(spaces []mount.Namespace) {
	for _, n := range spaces {
		for _, m := range n.Table {
			name := u.byNumber[m.Dev].Name
			if name == "" && strings.HasPrefix(m.Source, "/dev/loop") {
				name = u.named(m.Source) // mounts of btrfs have device numbers of their own
			}
			if name != "" {
				u.add(name, "mounted at %s%s", printable(m.Point), inNamespace(n))
			}
		}
	}

	// The kernel lists filesystems in use even if no visible namespace mounts them.
	for _, pattern := range []string{"/sys/fs/*/loop*", "/sys/fs/btrfs/*/devices/loop*"} {
		found, _ := filepath.Glob(pattern) // the patterns are valid
		for _, p := range found {
			if name := u.named(filepath.Base(p)); name != "" && len(u.uses[name]) == 0 {
				u.add(name, "a filesystem that is mounted where it cannot be seen, or held by an open file (%s)", p)
			}
		}
	}
}

// findDevices finds block devices and swap space on loop devices.
func (u *loopUsers) findDevices() {
	for _, l := range u.loops {
		for _, pattern := range []string{"/sys/block/" + l.Name + "/holders/*",
			"/sys/block/" + l.Name + "/" + l.Name + "p*/holders/*"} {
			found, _ := filepath.Glob(pattern)
			for _, h := range found {
				u.add(l.Name, "part of block device %s", filepath.Base(h))
			}
		}
		if name := u.named(l.file); name != "" && strings.HasPrefix(l.file, "/dev/loop") {
			u.add(name, "behind %s", l.Path())
		}
	}

	for _, s := range swaps() {
		if name := u.nameAt(s.path); name != "" {
			u.add(name, "swap space")
		}
	}
}

// nameAt returns the name of the loop device whose block special file is at path; "" if there is none.
func (u *loopUsers) nameAt(path string) string {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return ""
	}
	return u.byNumber[st.Rdev].Name
}

// findZpools finds zpools on loop devices.
func (u *loopUsers) findZpools(ctx context.Context) error {
	if zfs.Available() != nil {
		return nil
	}

	out, err := run.Program(ctx, "zpool", "list", "-vHP")
	if err != nil {
		return err
	}

	for _, f := range strings.Fields(string(out)) {
		if name := u.named(f); name != "" && strings.HasPrefix(f, "/dev/loop") {
			u.add(name, "part of a zpool")
		}
	}

	return nil
}

// findOpenFiles finds processes that have a loop device open. It returns those that could not be examined.
func (u *loopUsers) findOpenFiles(ctx context.Context) (blind, error) {
	unseen := blind{}
	err := eachProcess(ctx, func(pid int, dir string) {
		base := dir + "/fd"
		fds, err := os.ReadDir(base)
		if err != nil {
			unseen.record(pid, err)
			return
		}

		for _, fd := range fds {
			path := filepath.Join(base, fd.Name())
			to, err := os.Readlink(path)
			if err != nil || !strings.HasPrefix(to, "/dev/") {
				continue
			}
			if name := u.nameAt(path); name != "" {
				u.add(name, "open in pid %d (%s)", pid, commandOf(pid))
			}
		}
	})

	return unseen, err
}

// inPool reports whether the device's file lies in the pool, and the name of the volume that is attached by the device;
// "" if it is stray. A pool in trouble has nothing inside.
func (l loopDevice) inPool(p *PoolFacts) (inside bool, name string) {
	if p == nil || p.Trouble != nil {
		return false, ""
	}

	for path, name := range p.Attached {
		if path == l.file || real(path) == l.file {
			return true, name
		}
		var st unix.Stat_t
		if l.bound != nil && unix.Stat(path, &st) == nil && l.bound.SameFile(&st) {
			return true, name
		}
	}

	return below(l.file, real(p.Data)), ""
}

// loopLeaks finds unused loop devices. It looks until two looks in a row agree, because devices come and go between
// reading one list and the next, and programs that list devices have each of them open for a moment.
func loopLeaks(ctx context.Context, q *host, c *Report) error {
	if !isRoot() {
		return notRoot("finding the users of a loop device")
	}

	opened, err := findLoopLeaks(ctx, q, c)
	if err != nil || len(c.Findings) == 0 && !opened {
		return err
	}

	looks := 7 // at most; if no two agree, the findings that the last two have in common count
	for last := c.Findings; ; {
		c.Findings, c.Measured = []Finding{}, []Figure{}
		if _, err := findLoopLeaks(ctx, q, c); err != nil {
			return err
		}
		before, now := last, c.Findings
		c.Findings = slices.DeleteFunc(slices.Clone(now), func(f Finding) bool {
			return !slices.ContainsFunc(before, func(g Finding) bool { return f.Subject == g.Subject && f.Code == g.Code })
		})
		if looks--; looks == 0 || len(c.Findings) == len(now) && len(now) == len(before) {
			return nil
		}
		last = now
	}
}

// findLoopLeaks looks once. opened reports whether some device counts as used only because a process had it open at
// that moment.
func findLoopLeaks(ctx context.Context, q *host, c *Report) (opened bool, err error) {
	loops, err := loopDevices()
	if err != nil {
		return false, err
	}
	if q.looked != nil {
		defer q.looked()
	}

	spaces, missed, err := namespaces(ctx)
	if err != nil {
		return false, err
	}

	uses, unseen, err := loopUses(ctx, loops, spaces)
	if err != nil {
		return false, err
	}

	// Judge each device.
	used := 0
	for _, l := range loops {
		users := uses[l.Name]
		if len(users) > 0 && (!l.deleted || slices.ContainsFunc(users, func(s string) bool {
			return strings.HasPrefix(s, "mounted")
		})) {
			opened = opened || !slices.ContainsFunc(users, func(s string) bool {
				return !strings.HasPrefix(s, "open in")
			})
			used++ // mount-leaks reports stray mounts and those of deleted files
			continue
		}

		if !l.stillAttached() {
			continue
		}

		f, leaked := l.leak(q.Pool)
		if !leaked {
			used++
			continue
		}

		for _, u := range users {
			f.measure(words("used_by", "used by", u))
		}

		c.find(f)
	}

	// Summarise.
	c.measure(count("loops", "loop devices attached", len(loops)),
		count("used", "in use", used),
		count("namespaces", "mount namespaces examined", len(spaces)))
	c.Summary = fmt.Sprintf("%d of %s in use, by the mounts of %s and the open files of all processes%s", used,
		errs.Plural(len(loops), "loop device"), errs.Plural(len(spaces), "mount namespace"), unseen)
	if unseen.String() == "" {
		c.Summary += missed
	}

	c.Summary += hiddenByContainer()
	return opened, nil
}

// stillAttached reports whether the device still has the file that it was listed with.
func (l loopDevice) stillAttached() bool {
	if l.bound == nil {
		return false
	}
	now, err := loopdev.Lookup(l.bound.Index)
	return err == nil && now.Ino == l.bound.Ino && now.Dev == l.bound.Dev
}

// leak returns the finding about a device without users. leaked is false if the device may still be needed: raw volumes
// need not be open all the time, and a container hides users.
func (l loopDevice) leak(p *PoolFacts) (f Finding, leaked bool) {
	f = Finding{Subject: l.Path(), Measured: []Figure{words("file", "file", printable(l.file)),
		figure("size", "size", Bytes, l.SizeBytes)}}
	detach := []string{"losetup -d " + l.Path()}
	inside, volume := l.inPool(p)
	switch {
	case l.deleted:
		f.Code, f.Severity = "loop-deleted", Warning
		f.Title = fmt.Sprintf("%s is attached to a file that has been deleted", l.Path())
		f.Why = "The space of the file is freed only when the device is detached, and no list of files shows it."
		f.Do = []Step{step("copy its content if you need it",
			"dd if="+l.Path()+" of=FILE bs=1M conv=sparse"), step("detach it", detach...)}
	case inside && volume == "":
		f.Code, f.Severity = "loop-lost", Warning
		f.Title = fmt.Sprintf("%s is attached to an image of the pool, but belongs to no volume", l.Path())
		f.Why = "Nothing can attach or destroy the image's object while the device exists."
		f.Do = []Step{step("let Pando clean up and check the pool", p.command("gc"), p.command("fsck")),
			step("if it remains, detach it", detach...)}
		f.allowForWork(p)
	case volume != "" || contained():
		return f, false
	default:
		f.Code, f.Severity = "loop-unused", Note
		f.Title = fmt.Sprintf("%s is attached, but nothing mounts it or has it open", l.Path())
		f.Why = "It may have been forgotten: its file cannot be replaced safely, and deleting the file frees no space."
		f.Do = []Step{step("if it is no longer needed, detach it", detach...)}
	}

	return f, true
}

// swapSpace is a line of /proc/swaps.
type swapSpace struct {
	path string
	size int64 // bytes
	used int64
}

// swaps lists the swap space in use.
func swaps() []swapSpace {
	var out []swapSpace
	for i, line := range strings.Split(readText("/proc/swaps"), "\n") {
		f := strings.Fields(line)
		if i == 0 || len(f) < 4 {
			continue
		}
		size, err1 := strconv.ParseInt(f[2], 10, 64)
		used, err2 := strconv.ParseInt(f[3], 10, 64)
		if errors.Join(err1, err2) == nil {
			out = append(out, swapSpace{mount.Unescape(f[0]), size << 10, used << 10})
		}
	}

	return out
}
