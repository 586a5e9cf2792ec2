package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// stuckPause is how long a task must be seen to wait without doing anything.
const stuckPause = 2 * time.Second

// waiting is a task that cannot be interrupted.
type waiting struct {
	pid, tid int
	switches string // how often it ran: the same twice is that it did not
	kernel   bool   // a thread of the kernel
}

// waitingTasks finds the tasks in state D. Threads that merely idle in it do not count.
func waitingTasks() map[int]waiting {
	out := map[int]waiting{}
	dirs, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*") // the pattern is valid
	for _, d := range dirs {
		stat := readText(d + "/stat")

		// The command, in parentheses, may hold anything.
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

		// Nothing is read here that waits for the task, as its command line does.
		w := waiting{pid: pid, tid: tid}
		if f := strings.Fields(stat[i+1:]); len(f) > 6 { // from the state on; the seventh are flags
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

func readlink(path string) string {
	to, err := os.Readlink(path)
	if err != nil {
		return ""
	}
	return to
}

// stuckCheck looks for what hangs or has given up.
func stuckCheck(pause time.Duration) func(context.Context, *HostRequest, *Report) error {
	return func(ctx context.Context, _ *HostRequest, c *Report) error {
		first := waitingTasks()
		start := time.Now()
		if err := failedFilesystems(ctx, c); err != nil {
			return err
		}

		ioErrors(c)

		if len(first) > 0 {
			select {
			case <-time.After(pause - time.Since(start)):
			case <-ctx.Done():
				return errs.Wrap("watch tasks", "", ctx.Err())
			}
		}

		stuck, kernelThreads := 0, 0
		second := map[int]waiting{}
		if len(first) > 0 {
			second = waitingTasks()
		}

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

		if n, ok := sysctl("kernel.hung_task_detect_count"); ok {
			f := figure("hung", "hung tasks detected by the kernel since the boot", Count, n)
			c.Measured = append(c.Measured, f)
			if n > 0 {
				limit, _ := sysctl("kernel.hung_task_timeout_secs")
				c.find(Finding{Code: "hung-tasks", Severity: Warning,
					Title: fmt.Sprintf("the kernel found a task hanging for more than %d seconds; times since the boot: %d",
						limit, n), Measured: []Figure{f},
					Why: "A disk or a server did not answer for minutes, or a lock was never released.", Do: []Step{{"find out " +
						"where they hung", []string{"dmesg | grep -A 20 'blocked for more than'"}}}})
			}
		}

		c.Measured = append(c.Measured, figure("waiting", "uninterruptible tasks at one moment", Count,
			int64(len(first))), figure("stuck", fmt.Sprintf("without progress for %s", pause), Count, int64(stuck)),
			figure("kernel_threads", "and kernel threads", Count, int64(kernelThreads)))
		c.Summary = fmt.Sprintf("%s without progress for %s; checked filesystems and the kernel's log",
			counted(stuck, "task"), pause)
		return nil
	}
}

// stuckTask reports where a task hangs.
func stuckTask(w waiting, pause time.Duration) Finding {
	base := fmt.Sprintf("/proc/%d/task/%d", w.pid, w.tid)
	f := Finding{
		Code: "task-stuck", Severity: Warning, Subject: fmt.Sprintf("pid %d", w.pid),
		Title: fmt.Sprintf("pid %d (%s) has been stuck in the kernel for at least %s", w.pid,
			commandOf(w.pid), pause),
		Measured: []Figure{},
		Why:      "It can be neither interrupted nor killed while it waits, and keeps its locks, mounts and devices.",
	}

	stack := readText(base + "/stack")
	var frames []string
	for line := range strings.Lines(stack) {
		// [<0>] percpu_rwsem_wait+0x116/0x140
		_, rest, ok := strings.Cut(line, "] ")
		name, _, _ := strings.Cut(rest, "+")
		if ok && len(frames) < 8 {
			frames = append(frames, strings.TrimSpace(name))
		}
	}

	if len(frames) == 0 {
		frames = append(frames, readText(base+"/wchan"))
	}

	f.Measured = append(f.Measured, words("in", "in", strings.Join(frames, " < ")))

	// Of a call that takes a file first, which: "1 0x3 0x7ffc... ..."
	file := ""
	if call := strings.Fields(readText(base + "/syscall")); len(call) > 1 {
		if fd, err := strconv.ParseUint(strings.TrimPrefix(call[1], "0x"), 16, 31); err == nil {
			file = readlink(fmt.Sprintf("/proc/%d/fd/%d", w.pid, fd))
		}
	}

	if strings.HasPrefix(file, "/") {
		f.Measured = append(f.Measured, words("file", "perhaps on", printable(file)))
	}

	point := mountOf(w.pid, file)
	for _, frame := range frames {
		if strings.Contains(frame, "percpu_rwsem_wait") || strings.Contains(frame, "sb_start_write") ||
			strings.Contains(frame, "percpu_down_read") {
			f.Code, f.Title = "filesystem-frozen", f.Title+": its filesystem seems to be frozen"
			target := "MOUNTPOINT"
			if point != "" {
				f.Subject, target = point, word(point)
			}
			f.Do = append(f.Do, Step{"thaw it, unless a snapshot or backup in progress will do so",
				[]string{"fsfreeze --unfreeze " + target}})
			break
		}
	}

	f.Do = append(f.Do, Step{"list other waiting tasks, and what they wait for",
		[]string{"ps -eo pid,stat,wchan:32,args | awk '$2 ~ /D/'", "dmesg | tail -50"}})
	return f
}

// mountOf is where a process has the filesystem mounted that a file is on. It does
// not touch the file, which may hang.
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

// failedFilesystems finds filesystems that have shut down or gone over to reading
// only. (Errors that they have merely counted are check scrub's.)
func failedFilesystems(ctx context.Context, c *Report) error {
	spaces, _, err := namespaces(ctx)
	if err != nil {
		table, terr := mount.Table("self")
		if terr != nil {
			return errors.Join(err, terr)
		}
		spaces = []mount.Namespace{{Own: true, Table: table}}
	}

	seen := map[uint64]bool{}
	filesystems := 0
	for _, n := range spaces {
		for _, m := range n.Table {
			if seen[m.Dev] {
				continue
			}
			if !strings.HasPrefix(m.Source, "/dev/") {
				continue
			}

			seen[m.Dev] = true
			filesystems++
			f := Finding{
				Severity: Critical, Subject: m.Point,
				Measured: []Figure{words("fs", "filesystem", m.FSType+" of "+printable(m.Source)),
					words("options", "options", m.Options+" / "+m.Super)},
				Do: []Step{{"find out why: the first message is the cause",
					[]string{"dmesg | grep -i " + word(filepath.Base(m.Source))}}, {Text: "unmount it, check it with the " +
					"filesystem's own tool (e2fsck, xfs_repair, btrfs check), check its device, then mount it again"}},
			}

			switch {
			case m.Has("shutdown") || m.Has("emergency_ro"):
				f.Code, f.Title = "filesystem-shutdown", fmt.Sprintf("the filesystem at %s%s has shut itself down after an error",
					printable(m.Point), inNamespace(n))
				f.Why = "It accepts no more writes; data that was not on disk yet may be lost."
			case hasOption(m.Super, "ro") && hasOption(m.Options, "rw") && !alwaysReadOnly[m.FSType]:
				f.Code, f.Title = "filesystem-readonly", fmt.Sprintf("the filesystem at %s%s was mounted read-write and has "+
					"become read-only", printable(m.Point), inNamespace(n))
				f.Why = "Filesystems become read-only after an error in themselves or in the device below. Nothing can be " +
					"written any more, and data that was not on disk yet may be lost."
			case m.FSType == "xfs" && xfsDown(ctx, n, m):
				f.Code, f.Title = "filesystem-shutdown", fmt.Sprintf("the XFS at %s%s has shut itself down after an error",
					printable(m.Point), inNamespace(n))
				f.Why = "Every access fails; data that was not on disk yet may be lost."
			default:
				continue
			}

			c.find(f)
		}
	}

	c.Measured = append(c.Measured, figure("filesystems", "filesystems on devices", Count, int64(filesystems)))
	return nil
}

// alwaysReadOnly are types of filesystems that cannot be written.
var alwaysReadOnly = map[string]bool{"squashfs": true, "erofs": true, "iso9660": true, "udf": true, "cramfs": true,
	"romfs": true}

func hasOption(list, opt string) bool { return slices.Contains(strings.Split(list, ","), opt) }

// xfsDown reports whether an XFS has shut down: it then does not even open its root
// directory. (Its mount options do not tell.)
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
		return false // it hangs, which the tasks tell
	}
}

// ioErrorLine matches "I/O error, dev loop7, sector 0 op 0x0:(READ) flags ...".
var ioErrorLine = regexp.MustCompile(`I/O error, dev ([^, ]+), sector ([0-9]+)(?: op 0x[0-9a-f]+:\(([A-Z_]+)\))?`)

// attachedLine matches what the kernel says when a loop device gets a file.
var attachedLine = regexp.MustCompile(`^(loop[0-9]+): detected capacity change from 0 to `)

// deviceErrors are what the kernel's log says of one device.
type deviceErrors struct {
	count int
	last  time.Duration // since the boot
	line  string
}

// readKernelLog finds errors of devices in what is left of the kernel's log.
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
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EINTR) {
			continue // EPIPE: messages were overwritten
		}
		if err != nil || n <= 0 {
			break
		}
		noteRecord(out, string(buf[:n]))
	}

	return out, nil
}

// noteRecord takes notice of a record of the kernel's log: "3,437,2047102345,-;text".
func noteRecord(out map[string]deviceErrors, record string) {
	head, text, _ := strings.Cut(record, ";")
	text, _, _ = strings.Cut(text, "\n")
	if m := attachedLine.FindStringSubmatch(text); m != nil {
		delete(out, m[1]) // what was before was about another file
		return
	}

	m := ioErrorLine.FindStringSubmatch(text)
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

// recent is how old an error may be to be more than worth knowing.
const recent = 24 * time.Hour

func ioErrors(c *Report) {
	found, err := readKernelLog()
	if err != nil {
		c.Measured = append(c.Measured, unknown("io_errors", "devices with errors in the kernel's log", Count,
			"only root can read it"))
		return
	}

	c.Measured = append(c.Measured, figure("io_errors", "devices with errors in the kernel's log", Count,
		int64(len(found))))
	var up unix.Sysinfo_t
	_ = unix.Sysinfo(&up)
	names := make([]string, 0, len(found))
	for n := range found {
		names = append(names, n)
	}

	slices.Sort(names)

	for _, name := range names {
		e := found[name]
		if _, err := os.Stat("/sys/class/block/" + name); err != nil {
			continue // it is gone
		}

		if strings.HasPrefix(name, "loop") && readText("/sys/class/block/"+name+"/loop/backing_file") == "" {
			continue // nothing is attached to it any more
		}

		age := time.Duration(up.Uptime)*time.Second - e.last
		f := Finding{
			Code: "io-errors", Severity: Note, Subject: "/dev/" + name, Title: fmt.Sprintf("the kernel reported %s of /dev/%s",
				counted(e.count, "I/O error"), name),
			Measured: []Figure{figure("errors", "in the kernel's log", Count, int64(e.count)),
				words("last", "the last, "+age.Round(time.Second).String()+" ago", e.line)},
			Why: "Failed reads are lost or late; failed writes are lost, unless a layer above has a second copy.",
			Do:  []Step{{"read the device's own error log", []string{"smartctl -a /dev/" + name}}},
		}

		if strings.HasPrefix(name, "loop") {
			f.Do = []Step{{"check whether the file behind it was truncated, or its filesystem is full or has errors",
				[]string{"losetup -l /dev/" + name, "dmesg | tail -50"}}}
		}

		if age < recent {
			f.Severity = Warning
		}

		c.find(f)
	}
}
