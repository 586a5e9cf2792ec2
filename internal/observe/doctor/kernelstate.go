package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"runtime"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// kernelChecks returns the checks of mounts, loop devices, kernel memory, limits and programs.
func kernelChecks() []check {
	return []check{
		{"pool", "a pool whose catalogue cannot be read", poolCheck},
		{"loop-direct-io", "loop devices whose data is cached twice", loopDirectIO},
		{"loop-leaks", "unused loop devices", loopLeaks},
		{"mount-leaks", "leftover mounts in any mount namespace", mountLeaks},
		{"mount-count", "large mount tables, and their cost", mountCount(mountDefaults)},
		{"slab", "kernel memory held by inodes and file names", slabCheck(slabDefaults)},
		{"limits", "kernel limits that are nearly reached", limitsCheck(0.8)},
		{"programs", "missing programs and kernel features", programsCheck},
		{"clock", "a clock that is wrong or not synchronised", clockCheck},
		{"dirty-memory", "writes that pile up in memory, and swap space that can hang", dirtyCheck(dirtyDefaults)},
		{"stuck", "hung tasks, failed filesystems and device errors", stuckCheck(stuckPause)},
	}
}

// poolCheck reports a pool whose catalogue cannot be read, and so why other checks know nothing about it.
func poolCheck(_ context.Context, q *host, c *Report) error {
	if q.Pool == nil {
		return skip("this host has no pool")
	}

	c.measure(words("pool", "pool", q.Pool.Dir), words("driver", "driver", q.Pool.Driver),
		count("goldens", "goldens", len(q.Pool.Goldens)), count("mounted", "mounted", len(q.Pool.Mounts)))
	err := q.Pool.Trouble
	if err == nil {
		c.Summary = fmt.Sprintf("the catalogue of pool %s is readable", q.Pool.Dir)
		return nil
	}

	// Report the cause without the operation that failed, which the user did not ask for.
	why := err
	if e := (*errs.Error)(nil); errors.As(err, &e) && e.Err != nil {
		why = e.Err
	}

	c.Summary = fmt.Sprintf("the content of the pool is unknown: %v", why)
	f := Finding{
		Code: "pool-unknown", Severity: Warning, Subject: q.Pool.Dir,
		Title: fmt.Sprintf("cannot read the catalogue of pool %s: %v", q.Pool.Dir, why),
		Why:   "Its attachments and mounts cannot be compared with the catalogue, and its goldens were not checked.",
	}

	switch errs.KindOf(err) {
	case errs.Damaged:
		f.Code, f.Severity = "pool-damaged", Critical
		f.Do = []Step{
			step("list what is wrong", q.Pool.command("fsck")),
			step("rebuild the catalogue from the pool, which loses nothing", q.Pool.command("init --rebuild")),
		}
	default:
		f.Severity = Note
		if h := errs.HintIn(err); h != "" {
			f.Do = []Step{{Text: h.Render(q.renderer())}}
		}
	}

	c.find(f)
	return nil
}

// notRoot skips a check that, without root, would report as unused what other users' processes use.
func notRoot(what string) error { return skip("%s needs root: run it as root", what) }

// contained reports whether this process is in a container with a PID namespace of its own, in which the host's
// processes are not visible.
func contained() bool {
	const first = "pid:[4026531836]" // PROC_PID_INIT_INO, the same on all hosts
	ns := readlink("/proc/self/ns/pid")
	return ns != "" && ns != first
}

// hiddenByContainer is the end of a summary: what a container hides from this process; "" outside of containers.
func hiddenByContainer() string {
	if contained() {
		return "; processes outside of this container and their mounts are not visible"
	}
	return ""
}

// blind is the set of processes that could not be examined, by PID. Even root may not examine all of them: in a
// container, those of the host.
type blind map[int]bool

func (b blind) record(pid int, err error) {
	if errors.Is(err, fs.ErrPermission) {
		b[pid] = true
	}
}

// String is the end of a summary; "" if all processes could be examined.
func (b blind) String() string {
	if len(b) == 0 {
		return ""
	}
	if len(b) == 1 {
		for pid := range b {
			return fmt.Sprintf("; pid %d (%s) could not be examined", pid, commandOf(pid))
		}
	}
	return fmt.Sprintf("; %d processes could not be examined", len(b))
}

// namespaces returns the visible mount namespaces, and the end of a summary: which processes could not be examined; ""
// if all could.
func namespaces(ctx context.Context) ([]mount.Namespace, string, error) {
	all, err := mount.Namespaces(ctx)
	switch {
	case err == nil:
		return all, "", nil
	case errs.Is(err, errs.Permission) && len(all) > 0:
		var e *errs.Error
		if errors.As(err, &e) && e.Err != nil {
			return all, "; " + e.Err.Error(), nil
		}
		return all, "; some processes could not be examined", nil
	}

	return nil, "", err
}

// inNamespace names a mount namespace for people, to follow a mount point; "" for that of this process.
func inNamespace(n mount.Namespace) string {
	switch {
	case n.Own:
		return ""
	case len(n.Processes) > 0:
		p := n.Processes[0]
		more := ""
		if n.Living > 1 {
			more = fmt.Sprintf(" and %d more", n.Living-1)
		}
		return fmt.Sprintf(" in mount namespace %d (pid %d, %s%s)", n.ID, p.PID, p.Command, more)
	case len(n.Kept) > 0:
		return fmt.Sprintf(" in mount namespace %d (kept by %s)", n.ID, n.Kept[0])
	}

	return fmt.Sprintf(" in mount namespace %d", n.ID)
}

// commandInside returns the shell command that runs a command in a mount namespace; "" if it cannot be entered by a
// process or a file.
func commandInside(n mount.Namespace, command string) string {
	switch {
	case n.Own:
		return command
	case len(n.Processes) > 0:
		return fmt.Sprintf("nsenter -m -t %d %s", n.Processes[0].PID, command)
	case len(n.Kept) > 0 && strings.HasPrefix(n.Kept[0], "/") && !strings.Contains(n.Kept[0], " "):
		return fmt.Sprintf("nsenter --mount=%s %s", n.Kept[0], command)
	}
	return ""
}

// onThread runs fn on a thread of its own, which ends when fn returns, so that fn may change the thread's namespaces.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			done <- onThread(fn) // the first thread never ends
			runtime.UnlockOSThread()
			return
		}
		done <- fn()
	}()
	return <-done
}

// below reports whether path is dir or lies in it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// real resolves the symbolic links of path. It returns a path that does not exist unchanged.
func real(path string) string {
	if p, err := filepath.EvalSymlinks(path); err == nil {
		return p
	}
	return path
}
