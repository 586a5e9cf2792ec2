package doctor

import (
	"bytes"
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
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// limit is a number of things that the kernel bounds.
type limit struct {
	code, label string
	subject     string // whose: "uid 1000", "pid 77"; "" for the whole host
	used, max   int64
	why         string
	do          []Step
}

// raise returns the steps that raise a setting of the kernel; the first is to look for a leak.
func raise(name string, to int64) []Step {
	return []Step{
		step("first find out which program uses so many: a leak exhausts any limit"),
		step("raise the limit, now and after a reboot", fmt.Sprintf("sysctl -w %s=%d", name, to),
			fmt.Sprintf("echo '%s = %d' > /etc/sysctl.d/90-%s.conf", name, to, strings.ReplaceAll(name, ".", "-"))),
	}
}

// sysctl reads a setting of the kernel; false if this kernel does not have it.
func sysctl(name string) (int64, bool) {
	return readNumber("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
}

// limitsCheck returns a check for limits of which more than share (0 to 1) is in use.
func limitsCheck(share float64) func(context.Context, *host, *Report) error {
	return func(ctx context.Context, q *host, c *Report) error {
		// Collect the limits.
		all := systemLimits()
		per, unseen, err := processLimits(ctx)
		if err != nil {
			return err
		}

		// Report those that are nearly reached.
		all = append(all, per...)
		near, worst := 0, limit{max: 1}
		for _, l := range all {
			if l.max <= 0 {
				continue
			}

			if l.share() > worst.share() {
				worst = l
			}
			if l.subject == "" {
				c.measure(count(l.code, l.label, l.used).noted(fmt.Sprintf("of %d", l.max)))
			}
			if l.share() <= share {
				continue
			}

			if near++; near > maxNamed {
				continue
			}

			c.find(Finding{
				Code: l.code, Severity: Warning, Subject: l.subject, Why: l.why, Do: l.do,
				Title: fmt.Sprintf("%s: %d of %d in use", l.name(), l.used, l.max),
				Measured: []Figure{count("used", "in use", l.used), count("limit", "limit", l.max),
					percentage("share", "share", 100*l.share())},
			})
		}

		if near > maxNamed {
			c.find(Finding{Code: "limit-more", Severity: Warning,
				Title: fmt.Sprintf("%d more limits are nearly reached", near-maxNamed), Why: "Only the first are listed."})
		}

		loopNodes(q, c)
		c.Summary = fmt.Sprintf("checked %d limits; the nearest is %s with %d of %d in use%s", len(all), worst.name(),
			worst.used, worst.max, unseen)
		if !isRoot() {
			c.Summary += "; processes of other users are not visible without root"
		}

		return nil
	}
}

// share returns how much of the limit is in use, 0 to 1.
func (l limit) share() float64 { return float64(l.used) / float64(l.max) }

// name returns the label, and whose limit it is.
func (l limit) name() string {
	if l.subject == "" {
		return l.label
	}
	return l.label + " of " + l.subject
}

// systemLimits returns the limits of the whole host, and those of this mount namespace.
func systemLimits() []limit {
	var out []limit
	add := func(code, label string, used int64, ok bool, setting, why string) {
		if top, known := sysctl(setting); ok && known {
			out = append(out, limit{code: code, label: label, used: used, max: top, why: why, do: raise(setting, 2*top)})
		}
	}

	files := strings.Fields(readText("/proc/sys/fs/file-nr"))
	if len(files) == 3 {
		used, err := strconv.ParseInt(files[0], 10, 64)
		add("limit-files", "open files of the host", used, err == nil, "fs.file-max",
			"When it is reached, only root can open files.")
	}

	aio, ok := sysctl("fs.aio-nr")
	add("limit-aio", "asynchronous I/O requests set up", aio, ok, "fs.aio-max-nr",
		"When it is reached, databases and fio cannot set up asynchronous I/O (EAGAIN), or silently use slower methods.")

	// The fourth field is running/existing tasks.
	if f := strings.Fields(readText("/proc/loadavg")); len(f) > 3 {
		_, n, _ := strings.Cut(f[3], "/")
		tasks, err := strconv.ParseInt(n, 10, 64)
		const why = "When it is reached, no process or thread can be started."
		add("limit-pids", "numbers of processes and threads", tasks, err == nil, "kernel.pid_max", why)
		add("limit-threads", "processes and threads", tasks, err == nil, "kernel.threads-max", why)
	}

	if table, err := mount.Table("self"); err == nil {
		add("limit-mounts", "mounts of this namespace", int64(len(table)), true, "fs.mount-max",
			"When it is reached, nothing can be mounted (ENOSPC), and containers, which copy the mounts, cannot start.")
	}

	return out
}

// inotifyFile is an inotify instance.
type inotifyFile struct {
	pid, fd int
	watches int64
}

// processLimits returns the limits of users and processes, and the processes that could not be examined.
func processLimits(ctx context.Context) ([]limit, blind, error) {
	var out []limit
	unseen := blind{}
	instances := map[int][]inotifyFile{}
	mapCount, _ := sysctl("vm.max_map_count")
	err := eachProcess(ctx, func(pid int, base string) {
		fds, err := os.ReadDir(base + "/fd")
		if err != nil {
			unseen.record(pid, err)
			return
		}

		// The process's own limits.
		who := fmt.Sprintf("pid %d (%s)", pid, commandOf(pid))
		if top := openFilesLimit(base); top > 0 {
			out = append(out, limit{
				code: "limit-open-files", label: "open files", subject: who, used: int64(len(fds)), max: top,
				why: "When it is reached, the process cannot open files or connections any more (EMFILE).",
				do: []Step{step("list its open files, and check whether their number grows",
					fmt.Sprintf("ls -l /proc/%d/fd | tail -20", pid)),
					step("raise the limit of the running process", fmt.Sprintf("prlimit --pid %d --nofile=%d", pid, 2*top))},
			})
		}

		if n := mappings(base); n > 0 && mapCount > 0 {
			out = append(out, limit{
				code: "limit-maps", label: "memory mappings", subject: who, used: n, max: mapCount,
				why: "When it is reached, the process cannot map files or allocate memory any more (ENOMEM), even if memory is " +
					"free.",
				do: raise("vm.max_map_count", 2*mapCount),
			})
		}

		// Its inotify instances, which count towards the limits of its user.
		uid := -1
		for _, fd := range fds {
			if to, err := os.Readlink(filepath.Join(base, "fd", fd.Name())); err != nil || to != "anon_inode:inotify" &&
				to != "inotify" {
				continue
			}
			if uid < 0 {
				uid = uidOf(base)
			}
			n, err := strconv.Atoi(fd.Name())
			if err == nil {
				info := readText(filepath.Join(base, "fdinfo", fd.Name()))
				instances[uid] = append(instances[uid], inotifyFile{pid, n, int64(strings.Count(info, "inotify wd:"))})
			}
		}
	})
	if err != nil {
		return nil, nil, errs.Wrap("look at limits", "", err)
	}

	return append(out, inotifyLimits(instances)...), unseen, nil
}

// inotifyLimits returns the limits of users, whose inotify instances are listed by UID.
func inotifyLimits(instances map[int][]inotifyFile) (out []limit) {
	maxInstances, ok1 := sysctl("fs.inotify.max_user_instances")
	maxWatches, ok2 := sysctl("fs.inotify.max_user_watches")
	for uid, all := range instances {
		all = distinct(all)
		var watches int64
		for _, i := range all {
			watches += i.watches
		}

		who := fmt.Sprintf("uid %d", uid)

		// Compare with both limits.
		find := step("find the processes that have them",
			"find /proc/[0-9]*/fd -lname anon_inode:inotify 2>/dev/null | cut -d/ -f3 | sort | uniq -c | sort -rn | "+
				"head")
		if ok1 {
			out = append(out, limit{code: "limit-inotify-instances", label: "inotify instances", subject: who,
				used: int64(len(all)), max: maxInstances,
				why: "When it is reached, `tail -f`, containers, build tools and editors of this user fail with \"too many open " +
					"files\".",
				do: append([]Step{find}, raise("fs.inotify.max_user_instances", 4*maxInstances)[1:]...)})
		}

		if ok2 {
			out = append(out, limit{code: "limit-inotify-watches", label: "inotify watches", subject: who, used: watches,
				max: maxWatches,
				why: "When it is reached, nothing more can be watched (\"no space left on device\"). A watched clone takes one " +
					"for each directory.",
				do: append([]Step{find}, raise("fs.inotify.max_user_watches", 2*maxWatches)[1:]...)})
		}
	}

	return out
}

// distinct returns each inotify instance once, though processes that inherited it all have it open.
func distinct(all []inotifyFile) []inotifyFile {
	const kcmpFile = 0
	var out []inotifyFile
	byFD := map[int][]inotifyFile{}
	for _, i := range all {
		if !slices.ContainsFunc(byFD[i.fd], func(o inotifyFile) bool {
			order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(o.pid), uintptr(i.pid), kcmpFile, uintptr(o.fd),
				uintptr(i.fd), 0)
			return errno == 0 && order == 0
		}) {
			byFD[i.fd] = append(byFD[i.fd], i)
			out = append(out, i)
		}
	}

	return out
}

// uidOf returns the user of a process, given its directory in /proc; -1 if the process has ended.
func uidOf(base string) int {
	var st unix.Stat_t
	if unix.Stat(base, &st) != nil {
		return -1
	}
	return int(st.Uid)
}

// openFilesLimit returns a process's limit of open files; 0 if it has none, or one below 64, which is so small that it
// must be intended.
func openFilesLimit(base string) int64 {
	for line := range strings.Lines(readText(base + "/limits")) {
		if rest, ok := strings.CutPrefix(line, "Max open files"); ok {
			if f := strings.Fields(rest); len(f) > 1 {
				n, err := strconv.ParseInt(f[0], 10, 64)
				if err == nil && n >= 64 {
					return n
				}
			}
		}
	}
	return 0
}

// mappings counts a process's memory mappings; 0 if they cannot be read. It skips processes that hang, because reading
// their mappings can hang, too.
func mappings(base string) int64 {
	stat := readText(base + "/stat")
	if i := strings.LastIndexByte(stat, ')'); i < 0 || strings.HasPrefix(stat[i:], ") D") {
		return 0
	}

	f, err := os.Open(base + "/maps")
	if err != nil {
		return 0
	}

	defer f.Close()
	var n int64
	buf := make([]byte, 64<<10)
	for {
		k, err := f.Read(buf)
		n += int64(bytes.Count(buf[:k], []byte{'\n'}))
		if err != nil {
			return n
		}
	}
}

// loopNodes finds loop devices without a file in /dev, and reports whether more can be created. A finding is a warning
// if the pool needs loop devices.
func loopNodes(q *host, c *Report) {
	needed := q.Pool != nil && (q.Pool.Loop || q.Pool.Driver == "reflink")
	severity := Note
	if needed {
		severity = Warning
	}

	found, _ := filepath.Glob("/sys/block/loop*")
	c.measure(count("loop_devices", "loop devices", len(found)))
	if n, ok := readNumber("/sys/module/loop/parameters/max_loop"); ok && n > 0 {
		c.measure(count("max_loop", "loop devices created at boot (max_loop)", n).noted("more are created on demand"))
	}

	if len(found) == 0 {
		return // check programs reports a kernel without loop devices
	}

	// Compare the kernel's devices with the files in /dev.
	const why = "The kernel has the device, but programs cannot find its file. This is common in containers that do " +
		"not share the host's /dev."
	if _, err := os.Stat("/dev/loop-control"); errors.Is(err, fs.ErrNotExist) {
		c.find(Finding{Code: "loop-control-missing", Severity: severity,
			Title: "/dev/loop-control is missing: no loop device can be created", Why: why,
			Do: []Step{step("create it; in a container, share the host's /dev", "mknod -m 660 /dev/loop-control c 10 "+
				"237")}})
	}

	var missing, commands []string
	for _, d := range found {
		node := "/dev/" + filepath.Base(d)
		if _, err := os.Stat(node); errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, node)
			commands = append(commands, fmt.Sprintf("mknod -m 660 %s b %s", node,
				strings.ReplaceAll(readText(d+"/dev"), ":", " ")))
		}
	}

	if len(missing) > 0 {
		c.find(Finding{Code: "loop-nodes-missing", Severity: severity, Why: why,
			Title:    fmt.Sprintf("%s have no file in /dev, e.g. %s", errs.Plural(len(missing), "loop device"), missing[0]),
			Measured: []Figure{count("missing", "missing", len(missing))},
			Do: []Step{step("create them; in a container, share the host's /dev",
				commands[:min(len(commands), maxNamed)]...)}})
	}
}
