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
	deleted bool   // that has been removed since
	bound   *loopdev.Bound
	numbers []uint64 // of it and its partitions
}

// loopDevices lists those that are attached. Without root nothing is known of the
// files behind them but their names.
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

		l := loopDevice{Device: d, numbers: []uint64{d.Number}}
		l.file, l.deleted = strings.CutSuffix(d.Backing, " (deleted)")
		if n, err := strconv.Atoi(strings.TrimPrefix(d.Name, "loop")); err == nil {
			if b, err := loopdev.Lookup(n); err == nil {
				l.bound = &b
			}
		}

		for _, p := range all {
			if p.Kind == blockdev.Partition && strings.HasPrefix(p.Name, d.Name+"p") {
				l.numbers = append(l.numbers, p.Number)
			}
		}

		out = append(out, l)
	}

	return out, nil
}

// openFile opens the file behind the device, if it can be found by its name.
func (l loopDevice) openFile(flags int) (*os.File, error) {
	if l.deleted {
		return nil, fs.ErrNotExist
	}

	fd, err := unix.Open(l.file, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY|flags, 0)
	if err != nil {
		return nil, err
	}

	f := os.NewFile(uintptr(fd), l.file)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || l.bound != nil && !l.bound.SameFile(&st) {
		f.Close()
		return nil, fs.ErrNotExist // another one has the name here
	}

	return f, nil
}

// directAlign is the smallest logical sector in bytes that a loop device must have
// to bypass the page cache of the file's filesystem; 0: it cannot be bypassed.
func directAlign(f *os.File, l loopDevice) int {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err == nil &&
		st.Mask&unix.STATX_DIOALIGN != 0 {
		return int(st.Dio_offset_align)
	}

	// Before Linux 6.1, and filesystems that do not say.
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

// cachedBytes is how much of a file is in the page cache.
func cachedBytes(f *os.File) (int64, bool) {
	var c unix.Cachestat_t
	if err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{}, &c, 0); err != nil { // Linux 6.5
		return 0, false
	}
	return int64(c.Cache) * int64(os.Getpagesize()), true
}

// keepsInMemory reports whether a file is on a filesystem whose page cache is the
// only place that it has.
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

// loopDirectIO finds loop devices that go through the page cache of their files'
// filesystems although they need not.
func loopDirectIO(ctx context.Context, q *HostRequest, c *Report) error {
	loops, err := loopDevices()
	if err != nil {
		return err
	}

	direct, memory, cannot, hidden, readOnly := 0, 0, 0, 0, 0
	var readOnlyCached int64
	var readOnlySteps []string
	for _, l := range loops {
		if ctx.Err() != nil {
			return errs.Wrap("look at loop devices", "", ctx.Err())
		}

		if l.DirectIO {
			direct++
			continue
		}

		f, err := l.openFile(0)
		if err != nil {
			hidden++
			continue
		}

		align, inMemory := directAlign(f, l), keepsInMemory(f)
		cached, cachedKnown := cachedBytes(f)
		f.Close()
		switch {
		case inMemory:
			memory++
			continue
		case align == 0:
			cannot++
			continue
		}

		inCache := unknown("cached", "of its file in the page cache", Bytes, "the kernel does not report it")
		if cachedKnown {
			inCache = figure("cached", "of its file in the page cache", Bytes, cached)
		}

		measured := []Figure{words("file", "file", printable(l.file)), figure("size", "size", Bytes, l.SizeBytes), inCache,
			figure("sector", "sector size of the device", Bytes, int64(l.LogicalBytes)), figure("needed", "sector size "+
				"needed for direct I/O",
				Bytes, int64(align))}
		switch {
		case l.LogicalBytes < align:
			c.find(Finding{
				Code: "loop-sector", Severity: Note, Subject: l.Path(), Measured: measured,
				Title: fmt.Sprintf("%s cannot use direct I/O: its sectors are smaller than those of the disk below its "+
					"file", l.Path()),
				Why: whyBuffered,
				Do: []Step{{"when it is not in use, attach it again with larger sectors, unless its content was made for " +
					"smaller ones (a filesystem with smaller sectors cannot be mounted then)",
					[]string{"losetup -d " + l.Path(), fmt.Sprintf("losetup --find --show --direct-io=on --sector-size %d %s", align,
						word(l.file))}}},
			})
		case l.ReadOnly:
			readOnly++
			readOnlyCached += cached
			readOnlySteps = append(readOnlySteps, "losetup --direct-io=on "+l.Path())
		default:
			c.find(Finding{
				Code: "loop-buffered", Severity: Warning, Subject: l.Path(), Measured: measured,
				Title: fmt.Sprintf("%s does not use direct I/O, although its file's filesystem can", l.Path()),
				Why:   whyBuffered,
				Do: []Step{{"switch to direct I/O, even while it is mounted; and attach it with --direct-io=on in the future",
					[]string{"losetup --direct-io=on " + l.Path()}}},
			})
		}
	}

	if readOnly > 0 {
		c.find(Finding{
			Code: "loop-buffered-readonly", Severity: Note,
			Title: fmt.Sprintf("%s without direct I/O", plural(readOnly, "read-only loop device")),
			Measured: []Figure{figure("devices", "devices", Count, int64(readOnly)),
				figure("cached", "of their files in the page cache", Bytes, readOnlyCached)},
			Why: "Data read through them is cached twice. They write nothing, so there is no other cost.",
			Do:  []Step{{"if that memory matters", readOnlySteps[:min(len(readOnlySteps), 20)]}},
		})
	}

	c.Measured = append(c.Measured, figure("loops", "loop devices attached", Count, int64(len(loops))),
		figure("direct", "with direct I/O", Count, int64(direct)))
	c.Summary = fmt.Sprintf("%s: %d with direct I/O", plural(len(loops), "loop device"), direct)
	for _, k := range []struct {
		n    int
		what string
	}{{memory, "on files in memory"}, {cannot, "on filesystems without direct I/O"}, {hidden,
		"whose file is not visible here"}} {
		if k.n > 0 {
			c.Summary += fmt.Sprintf(", %d %s", k.n, k.what)
		}
	}

	return nil
}

// loopUses finds what uses loop devices, by their names, and says what could not be
// seen.
func loopUses(ctx context.Context, loops []loopDevice, spaces []mount.Namespace) (map[string][]string, blind, error) {
	uses := map[string][]string{}
	byNumber := map[uint64]string{}
	for _, l := range loops {
		for _, n := range l.numbers {
			byNumber[n] = l.Name
		}
	}

	use := func(name, format string, args ...any) {
		if len(uses[name]) < 20 {
			uses[name] = append(uses[name], fmt.Sprintf(format, args...))
		}
	}

	// Of a path of a device or of a partition: whose it is.
	named := func(path string) string {
		name := strings.TrimPrefix(path, "/dev/")
		for _, l := range loops {
			if rest, ok := strings.CutPrefix(name, l.Name); ok && (rest == "" || rest[0] == 'p') {
				return l.Name
			}
		}
		return ""
	}

	for _, n := range spaces {
		for _, m := range n.Table {
			name := byNumber[m.Dev]
			if name == "" && strings.HasPrefix(m.Source, "/dev/loop") {
				name = named(m.Source) // btrfs: its mounts have numbers of their own
			}
			if name != "" {
				use(name, "mounted at %s%s", printable(m.Point), inNamespace(n))
			}
		}
	}

	// Filesystems that are in use, even if their mounts are not visible.
	for _, pattern := range []string{"/sys/fs/*/loop*", "/sys/fs/btrfs/*/devices/loop*"} {
		found, _ := filepath.Glob(pattern) // the patterns are valid
		for _, p := range found {
			if name := named(filepath.Base(p)); name != "" && len(uses[name]) == 0 {
				use(name, "a filesystem that is mounted where it cannot be seen, or held by an open file (%s)", p)
			}
		}
	}

	for _, l := range loops {
		for _, pattern := range []string{"/sys/block/" + l.Name + "/holders/*",
			"/sys/block/" + l.Name + "/" + l.Name + "p*/holders/*"} {
			found, _ := filepath.Glob(pattern)
			for _, h := range found {
				use(l.Name, "part of block device %s", filepath.Base(h))
			}
		}
		if name := named(l.file); name != "" && strings.HasPrefix(l.file, "/dev/loop") {
			use(name, "behind %s", l.Path())
		}
	}

	for _, s := range swaps() {
		var st unix.Stat_t
		if unix.Stat(s.path, &st) == nil {
			if name := byNumber[st.Rdev]; name != "" && st.Mode&unix.S_IFMT == unix.S_IFBLK {
				use(name, "swap space")
			}
		}
	}

	if zfs.Available() == nil {
		out, err := run.Program(ctx, "zpool", "list", "-vHP")
		if err != nil {
			return nil, nil, err
		}
		for _, f := range strings.Fields(string(out)) {
			if name := named(f); name != "" && strings.HasPrefix(f, "/dev/loop") {
				use(name, "part of a zpool")
			}
		}
	}

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
			var st unix.Stat_t
			if unix.Stat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
				if name := byNumber[st.Rdev]; name != "" {
					use(name, "open in pid %d (%s)", pid, commandOf(pid))
				}
			}
		}
	})

	return uses, unseen, errs.Wrap("look for users of loop devices", "", err)
}

// inPool reports whether the device's file lies in the pool, and what of the pool is
// attached as it should be.
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

// loopLeaks finds unused loop devices. It looks until two looks in a row
// agree: between reading one list and the next, devices come and go, and programs that
// list devices have each of them open for a moment.
func loopLeaks(ctx context.Context, q *HostRequest, c *Report) error {
	if !isRoot() {
		return notRoot("finding the users of a loop device")
	}

	opened, err := findLoopLeaks(ctx, q, c)
	if err != nil || len(c.Findings) == 0 && !opened {
		return err
	}

	looks := 7 // more at most; of a host that is never quiet, what the last two have in common
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

// findLoopLeaks looks once. Opened says that a device counts as used only because some
// process had it open at that moment.
func findLoopLeaks(ctx context.Context, q *HostRequest, c *Report) (opened bool, err error) {
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

	used := 0
	for _, l := range loops {
		inside, volume := l.inPool(q.Pool)
		if len(uses[l.Name]) > 0 && (!l.deleted || slices.ContainsFunc(uses[l.Name], func(s string) bool {
			return strings.HasPrefix(s, "mounted")
		})) {
			opened = opened || !slices.ContainsFunc(uses[l.Name], func(s string) bool {
				return !strings.HasPrefix(s, "open in")
			})
			used++ // of those that are mounted without a file, or of no volume, see mount-leaks
			continue
		}

		if l.bound == nil {
			continue // it went away
		}

		if now, err := loopdev.Lookup(l.bound.Index); err != nil || now.Ino != l.bound.Ino || now.Dev != l.bound.Dev {
			continue
		}

		f := Finding{Subject: l.Path(), Measured: []Figure{words("file", "file", printable(l.file)),
			figure("size", "size", Bytes, l.SizeBytes)}}
		for _, u := range uses[l.Name] {
			f.Measured = append(f.Measured, words("used_by", "used by", u))
		}

		detach := []string{"losetup -d " + l.Path()}
		switch {
		case l.deleted:
			f.Code, f.Severity = "loop-deleted", Warning
			f.Title = fmt.Sprintf("%s is attached to a file that has been deleted", l.Path())
			f.Why = "The space of the file is freed only when the device is detached, and no list of files shows it."
			f.Do = []Step{{"copy its content if you need it",
				[]string{"dd if=" + l.Path() + " of=FILE bs=1M conv=sparse"}}, {"detach it", detach}}
		case inside && volume == "":
			f.Code, f.Severity = "loop-lost", Warning
			f.Title = fmt.Sprintf("%s is attached to an image of the pool, but belongs to no volume", l.Path())
			f.Why = "Nothing can attach or destroy the image's object while the device exists."
			f.Do = []Step{{"let Pando clean up and check the pool",
				[]string{"pando --pool " + word(q.Pool.Dir) + " gc",
					"pando --pool " + word(q.Pool.Dir) + " fsck"}}, {"if it remains, detach it", detach}}
			if q.Pool.Working > 0 {
				f.Severity = Note
				f.Why += fmt.Sprintf(" But commands are working on %s, which it may belong to.", plural(q.Pool.Working, "object"))
			}
		case volume != "":
			used++ // a raw volume need not be open all the time
			continue
		case contained():
			used++ // or whoever uses it is not to be seen
			continue
		default:
			f.Code, f.Severity = "loop-unused", Note
			f.Title = fmt.Sprintf("%s is attached, but nothing mounts it or has it open", l.Path())
			f.Why = "It may have been forgotten: its file cannot be replaced safely, and deleting the file frees no space."
			f.Do = []Step{{"if it is no longer needed, detach it", detach}}
		}

		c.find(f)
	}

	c.Measured = append(c.Measured, figure("loops", "loop devices attached", Count, int64(len(loops))),
		figure("used", "in use", Count, int64(used)),
		figure("namespaces", "mount namespaces examined", Count, int64(len(spaces))))
	c.Summary = fmt.Sprintf("%d of %s in use, by the mounts of %s and the open files of all processes%s", used,
		plural(len(loops), "loop device"), plural(len(spaces), "mount namespace"), unseen)
	if unseen.String() == "" {
		c.Summary += missed
	}

	c.Summary += hiddenByContainer()
	return opened, nil
}

// swapSpace is a line of /proc/swaps.
type swapSpace struct {
	path string
	size int64 // bytes
	used int64
}

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
