package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// stuckPause is the time without progress after which a task counts as stuck.
const stuckPause = 2 * time.Second

// waiting is a task that cannot be interrupted.
type waiting struct {
	pid, tid int
	switches string // context switches: if they do not change, the task did not run
	kernel   bool   // a thread of the kernel
}

// waitingTasks returns the tasks in state D (uninterruptible sleep), by thread ID. It does not return idle kernel
// threads, which have a state of their own. It reads nothing that waits for a task, as the command line does.
func waitingTasks() map[int]waiting {
	out := map[int]waiting{}
	dirs, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*") // the pattern is valid
	for _, d := range dirs {
		stat := readText(d + "/stat")

		// The command, in parentheses, can contain any character.
		i := strings.LastIndexByte(stat, ')')
		if i < 0 || !strings.HasPrefix(stat[i:], ") D") {
			continue
		}

		parts := strings.Split(d, "/")
		pid, err1 := strconv.Atoi(parts[2])
		tid, err2 := strconv.Atoi(parts[4])
		if errors.Join(err1, err2) != nil {
			continue
		}

		w := waiting{pid: pid, tid: tid}
		if f := strings.Fields(stat[i+1:]); len(f) > 6 { // begins with the state; the seventh field holds flags
			const pfKthread = 0x00200000
			flags, err := strconv.ParseUint(f[6], 10, 64)
			w.kernel = err == nil && flags&pfKthread != 0
		}

		for line := range strings.Lines(readText(d + "/status")) {
			if strings.Contains(line, "ctxt_switches") {
				w.switches += line
			}
		}

		out[tid] = w
	}

	return out
}

// readlink returns the target of a symbolic link; "" if it cannot be read.
func readlink(path string) string {
	to, err := os.Readlink(path)
	if err != nil {
		return ""
	}
	return to
}

// stuckCheck returns a check for tasks that hang for at least pause, for failed filesystems and for errors of devices.
func stuckCheck(pause time.Duration) func(context.Context, *host, *Report) error {
	return func(ctx context.Context, _ *host, c *Report) error {
		first := waitingTasks()
		start := time.Now()

		// Use the pause to check filesystems and the kernel's log.
		if err := failedFilesystems(ctx, c); err != nil {
			return err
		}

		ioErrors(c)

		// Find the tasks that have not run since.
		second := map[int]waiting{}
		if len(first) > 0 {
			select {
			case <-time.After(pause - time.Since(start)):
			case <-ctx.Done():
				return errs.Wrap("watch tasks", "", ctx.Err())
			}
			second = waitingTasks()
		}

		stuck, kernelThreads := 0, 0
		for tid, w := range second {
			if before, ok := first[tid]; !ok || before != w || w.switches == "" {
				continue
			}
			if w.kernel {
				kernelThreads++
				continue
			}
			if stuck++; stuck <= maxNamed {
				c.find(stuckTask(w, pause))
			}
		}

		c.findHungTasks()

		// Summarise.
		c.measure(count("waiting", "uninterruptible tasks at one moment", len(first)),
			count("stuck", fmt.Sprintf("without progress for %s", pause), stuck),
			count("kernel_threads", "and kernel threads", kernelThreads))
		c.Summary = fmt.Sprintf("%s without progress for %s; checked filesystems and the kernel's log",
			errs.Plural(stuck, "task"), pause)
		return nil
	}
}

// findHungTasks reports tasks that the kernel itself has found hanging.
func (c *Report) findHungTasks() {
	n, ok := sysctl("kernel.hung_task_detect_count")
	if !ok {
		return
	}

	f := count("hung", "hung tasks detected by the kernel since the boot", n)
	c.measure(f)
	if n > 0 {
		limit, _ := sysctl("kernel.hung_task_timeout_secs")
		c.find(Finding{Code: "hung-tasks", Severity: Warning,
			Title: fmt.Sprintf("the kernel found a task hanging for more than %d seconds; times since the boot: %d",
				limit, n), Measured: []Figure{f},
			Why: "A disk or a server did not answer for minutes, or a lock was never released.",
			Do:  []Step{step("find out where they hung", "dmesg | grep -A 20 'blocked for more than'")}})
	}
}

// stuckTask returns the finding about a task that hangs: where in the kernel, and on which file if that is known.
func stuckTask(w waiting, pause time.Duration) Finding {
	base := fmt.Sprintf("/proc/%d/task/%d", w.pid, w.tid)
	frames := stackOf(base)
	f := Finding{
		Code: "task-stuck", Severity: Warning, Subject: fmt.Sprintf("pid %d", w.pid),
		Title: fmt.Sprintf("pid %d (%s) has been stuck in the kernel for at least %s", w.pid,
			commandOf(w.pid), pause),
		Measured: []Figure{words("in", "in", strings.Join(frames, " < "))},
		Why:      "It can be neither interrupted nor killed while it waits, and keeps its locks, mounts and devices.",
	}

	// If its system call takes a file descriptor first, find the file: "1 0x3 0x7ffc... ..."
	file := ""
	if call := strings.Fields(readText(base + "/syscall")); len(call) > 1 {
		if fd, err := strconv.ParseUint(strings.TrimPrefix(call[1], "0x"), 16, 31); err == nil {
			file = readlink(fmt.Sprintf("/proc/%d/fd/%d", w.pid, fd))
		}
	}

	if strings.HasPrefix(file, "/") {
		f.measure(words("file", "perhaps on", printable(file)))
	}

	// These functions wait for a frozen filesystem.
	if slices.ContainsFunc(frames, func(frame string) bool {
		return strings.Contains(frame, "percpu_rwsem_wait") || strings.Contains(frame, "sb_start_write") ||
			strings.Contains(frame, "percpu_down_read")
	}) {
		f.Code, f.Title = "filesystem-frozen", f.Title+": its filesystem seems to be frozen"
		target := "MOUNTPOINT"
		if point := mountOf(w.pid, file); point != "" {
			f.Subject, target = point, word(point)
		}
		f.Do = append(f.Do, step("thaw it, unless a snapshot or backup in progress will do so",
			"fsfreeze --unfreeze "+target))
	}

	f.Do = append(f.Do, step("list other waiting tasks, and what they wait for",
		"ps -eo pid,stat,wchan:32,args | awk '$2 ~ /D/'", "dmesg | tail -50"))
	return f
}

// stackOf returns the innermost functions, at most 8, in which a task waits in the kernel, given its directory in
// /proc. Where the stack cannot be read, it returns the innermost only.
func stackOf(dir string) (frames []string) {
	for line := range strings.Lines(readText(dir + "/stack")) {
		// [<0>] percpu_rwsem_wait+0x116/0x140
		_, rest, ok := strings.Cut(line, "] ")
		name, _, _ := strings.Cut(rest, "+")
		if ok && len(frames) < 8 {
			frames = append(frames, strings.TrimSpace(name))
		}
	}

	if len(frames) == 0 {
		frames = append(frames, readText(dir+"/wchan"))
	}

	return frames
}

// mountOf returns the mount point, as a process sees it, of the filesystem that a file is on; "" if it is unknown. It
// does not access the file, because that may hang.
func mountOf(pid int, file string) string {
	if !strings.HasPrefix(file, "/") {
		return ""
	}

	table, err := mount.Table(strconv.Itoa(pid))
	if err != nil {
		return ""
	}

	best := ""
	for _, m := range table {
		if below(file, m.Point) && len(m.Point) >= len(best) {
			best = m.Point
		}
	}

	return best
}

// failedFilesystems finds filesystems that have shut down or become read-only. Check scrub finds those that have only
// counted errors.
func failedFilesystems(ctx context.Context, c *Report) error {
	spaces, _, err := namespaces(ctx)
	if err != nil {
		table, terr := mount.Table("self")
		if terr != nil {
			return errors.Join(err, terr)
		}
		spaces = []mount.Namespace{{Own: true, Table: table}}
	}

	// Examine each filesystem once, at its first mount.
	seen := map[uint64]bool{}
	for _, n := range spaces {
		for _, m := range n.Table {
			if seen[m.Dev] || !strings.HasPrefix(m.Source, "/dev/") {
				continue
			}
			seen[m.Dev] = true
			c.findFailed(ctx, n, m)
		}
	}

	c.measure(count("filesystems", "filesystems on devices", len(seen)))
	return nil
}

// findFailed reports a filesystem that has shut down or become read-only.
func (c *Report) findFailed(ctx context.Context, n mount.Namespace, m mount.Entry) {
	f := Finding{
		Code: "filesystem-shutdown", Severity: Critical, Subject: m.Point,
		Measured: []Figure{words("fs", "filesystem", m.FSType+" of "+printable(m.Source)),
			words("options", "options", m.Options+" / "+m.Super)},
		Do: []Step{step("find out why: the first message is the cause",
			"dmesg | grep -i "+word(filepath.Base(m.Source))), {Text: "unmount it, check it with the " +
			"filesystem's own tool (e2fsck, xfs_repair, btrfs check), check its device, then mount it again"}},
	}

	where := printable(m.Point) + inNamespace(n)
	switch {
	case m.Has("shutdown") || m.Has("emergency_ro"):
		f.Title = fmt.Sprintf("the filesystem at %s has shut itself down after an error", where)
		f.Why = "It accepts no more writes; data that was not on disk yet may be lost."
	case hasOption(m.Super, "ro") && hasOption(m.Options, "rw") && !alwaysReadOnly[m.FSType]:
		f.Code = "filesystem-readonly"
		f.Title = fmt.Sprintf("the filesystem at %s was mounted read-write and has become read-only", where)
		f.Why = "Filesystems become read-only after an error in themselves or in the device below. Nothing can be " +
			"written any more, and data that was not on disk yet may be lost."
	case m.FSType == "xfs" && xfsDown(ctx, n, m):
		f.Title = fmt.Sprintf("the XFS at %s has shut itself down after an error", where)
		f.Why = "Every access fails; data that was not on disk yet may be lost."
	default:
		return
	}

	c.find(f)
}

// alwaysReadOnly holds the filesystem types that nothing can write to.
var alwaysReadOnly = map[string]bool{"squashfs": true, "erofs": true, "iso9660": true, "udf": true, "cramfs": true,
	"romfs": true}

func hasOption(list, opt string) bool { return slices.Contains(strings.Split(list, ","), opt) }

// xfsDown reports whether an XFS has shut down, which its mount options do not show: opening its root directory fails
// with EIO then. It returns false if the open hangs until ctx ends.
func xfsDown(ctx context.Context, n mount.Namespace, m mount.Entry) bool {
	path := m.Point
	if !n.Own {
		if len(n.Processes) == 0 {
			return false
		}
		path = fmt.Sprintf("/proc/%d/root%s", n.Processes[0].PID, m.Point)
	}

	answer := make(chan error, 1)
	go func() {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err == nil {
			unix.Close(fd)
		}
		answer <- err
	}()

	select {
	case err := <-answer:
		return errors.Is(err, unix.EIO)
	case <-ctx.Done():
		return false // stuckCheck reports tasks that hang
	}
}

// ioErrorLine matches "I/O error, dev loop7, sector 0 op 0x0:(READ) flags ...".
var ioErrorLine = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`I/O error, dev ([^, ]+), sector ([0-9]+)(?: op 0x[0-9a-f]+:\(([A-Z_]+)\))?`)
})

// attachedLine matches the kernel's message when a file is attached to a loop device.
var attachedLine = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(loop[0-9]+): detected capacity change from 0 to `)
})

// deviceErrors sums up the errors of one device in the kernel's log.
type deviceErrors struct {
	count int
	last  time.Duration // when the last occurred, since the boot
	line  string        // the last message
}

// readKernelLog returns the errors in the kernel's log by device, as far as the log still has them.
func readKernelLog() (map[string]deviceErrors, error) {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}

	defer unix.Close(fd)
	out := map[string]deviceErrors{}
	buf := make([]byte, 8192)
	for range 1_000_000 {
		n, err := unix.Read(fd, buf)
		if errs.IsAny(err, unix.EPIPE, unix.EINTR) {
			continue // EPIPE: messages were overwritten
		}
		if err != nil || n <= 0 {
			break
		}
		noteRecord(out, string(buf[:n]))
	}

	return out, nil
}

// noteRecord adds a record of the kernel's log, such as "3,437,2047102345,-;text", to out.
func noteRecord(out map[string]deviceErrors, record string) {
	head, text, _ := strings.Cut(record, ";")
	text, _, _ = strings.Cut(text, "\n")
	if m := attachedLine().FindStringSubmatch(text); m != nil {
		delete(out, m[1]) // earlier errors concern another file
		return
	}

	m := ioErrorLine().FindStringSubmatch(text)
	if m == nil {
		return
	}

	e := out[m[1]]
	e.count++
	e.line = printable(text)
	if f := strings.Split(head, ","); len(f) > 2 {
		if us, err := strconv.ParseInt(f[2], 10, 64); err == nil {
			e.last = time.Duration(us) * time.Microsecond
		}
	}

	out[m[1]] = e
}

// recent is the age up to which an I/O error is a warning. Older errors are notes.
const recent = 24 * time.Hour

// ioErrors reports devices that exist and have errors in the kernel's log.
func ioErrors(c *Report) {
	found, err := readKernelLog()
	if err != nil {
		c.measure(unknown("io_errors", "devices with errors in the kernel's log", Count,
			"only root can read it"))
		return
	}

	c.measure(count("io_errors", "devices with errors in the kernel's log", len(found)))
	var up unix.Sysinfo_t
	_ = unix.Sysinfo(&up)
	for _, name := range slices.Sorted(maps.Keys(found)) {
		// Skip devices that were removed, and loop devices that were detached.
		e := found[name]
		if _, err := os.Stat("/sys/class/block/" + name); err != nil {
			continue
		}

		if strings.HasPrefix(name, "loop") && readText("/sys/class/block/"+name+"/loop/backing_file") == "" {
			continue
		}

		age := time.Duration(up.Uptime)*time.Second - e.last
		f := Finding{
			Code: "io-errors", Severity: Note, Subject: "/dev/" + name, Title: fmt.Sprintf("the kernel reported %s of /dev/%s",
				errs.Plural(e.count, "I/O error"), name),
			Measured: []Figure{count("errors", "in the kernel's log", e.count),
				words("last", "the last, "+age.Round(time.Second).String()+" ago", e.line)},
			Why: "Failed reads are lost or late; failed writes are lost, unless a layer above has a second copy.",
			Do:  []Step{step("read the device's own error log", "smartctl -a /dev/"+name)},
		}

		if strings.HasPrefix(name, "loop") {
			f.Do = []Step{step("check whether the file behind it was truncated, or its filesystem is full or has errors",
				"losetup -l /dev/"+name, "dmesg | tail -50")}
		}

		if age < recent {
			f.Severity = Warning
		}

		c.find(f)
	}
}
