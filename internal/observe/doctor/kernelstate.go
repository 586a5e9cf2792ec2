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

// kernelChecks look at mounts, loop devices, memory of the kernel, limits, programs.
func kernelChecks() []check {
	return []check{
		{"pool", "a pool whose record cannot be read", poolCheck},
		{"loop-direct-io", "loop devices that cache in memory what their files' filesystem caches too", loopDirectIO},
		{"loop-leaks", "loop devices that nothing uses", loopLeaks},
		{"mount-leaks", "mounts that are left over, in any mount namespace", mountLeaks},
		{"mount-count", "how many mounts there are, and what they cost", mountCount(mountDefaults)},
		{"slab", "memory that the kernel keeps inodes and names of files in", slabCheck(slabDefaults)},
		{"limits", "limits of the kernel that are nearly reached", limitsCheck(0.8)},
		{"programs", "programs and features of the kernel that are missing", programsCheck},
		{"clock", "a clock that is wrong or that nothing keeps right", clockCheck},
		{"dirty-memory", "writes that pile up in memory, and swap where it can hang", dirtyCheck(dirtyDefaults)},
		{"stuck", "tasks that hang, filesystems that gave up, errors of devices", stuckCheck(stuckPause)},
	}
}

// poolCheck says why the rest of the examination does not know the pool.
func poolCheck(_ context.Context, q *HostRequest, c *Report) error {
	if q.Pool == nil {
		return skip("there is no pool on this host")
	}

	c.Measured = append(c.Measured, words("pool", "pool", q.Pool.Dir), words("driver", "driver", q.Pool.Driver),
		figure("goldens", "goldens", Count, int64(len(q.Pool.Goldens))), figure("mounted", "mounted", Count,
			int64(len(q.Pool.Mounts))))
	err := q.Pool.Trouble
	if err == nil {
		c.Summary = fmt.Sprintf("the record of pool %s can be read", q.Pool.Dir)
		return nil
	}

	why := err
	if e := (*errs.Error)(nil); errors.As(err, &e) && e.Err != nil {
		why = e.Err // without what was being done, which people did not ask for
	}

	c.Summary = fmt.Sprintf("what the pool has is not known: %v", why)
	f := Finding{
		Code: "pool-unknown", Severity: Warning, Subject: q.Pool.Dir,
		Title: fmt.Sprintf("what pool %s has cannot be read: %v", q.Pool.Dir, why),
		Why: "What is attached and mounted of it cannot be compared with what should be, and its goldens were not " +
			"looked at.",
	}

	switch errs.KindOf(err) {
	case errs.Damaged:
		f.Code, f.Severity = "pool-damaged", Critical
		f.Do = []Step{
			{"see what is wrong", []string{"pando --pool " + word(q.Pool.Dir) + " fsck"}},
			{"a catalogue that cannot be read is made anew from the pool, which loses nothing",
				[]string{"pando --pool " + word(q.Pool.Dir) + " init --rebuild"}},
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

// notRoot skips a check that would take others' things for unused.
func notRoot(what string) error { return skip("%s needs root: run it as root", what) }

// contained reports whether this is a container with a process namespace of its own,
// from which the host's processes cannot be seen.
func contained() bool {
	const first = "pid:[4026531836]" // PROC_PID_INIT_INO, the same on all hosts
	ns := readlink("/proc/self/ns/pid")
	return ns != "" && ns != first
}

// outside says so, for summaries.
func outside() string {
	if contained() {
		return "; processes outside of this container, and their mounts, cannot be seen"
	}
	return ""
}

// blind says which part of the processes could not be looked at, if any: with root,
// that is those that even root may not (in a container, the host's).
type blind map[int]bool

func (b blind) note(pid int, err error) {
	if errors.Is(err, fs.ErrPermission) {
		b[pid] = true
	}
}

func (b blind) String() string {
	if len(b) == 0 {
		return ""
	}
	if len(b) == 1 {
		for pid := range b {
			return fmt.Sprintf("; pid %d (%s) could not be looked at", pid, commandOf(pid))
		}
	}
	return fmt.Sprintf("; %d processes could not be looked at", len(b))
}

// namespaces finds the mount namespaces, and says in words what could not be seen.
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
		return all, "; some processes could not be looked at", nil
	}

	return nil, "", err
}

// where says for people which namespace it is, "" for our own.
func where(n mount.Namespace) string {
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

// inside is a command that runs in a namespace.
func inside(n mount.Namespace, command string) string {
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

// onThread runs fn on a thread that ends with it, so that fn may change what belongs
// to a thread.
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

// below reports whether path is dir or in it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// real is path without symbolic links, or as it is if it is not there.
func real(path string) string {
	if p, err := filepath.EvalSymlinks(path); err == nil {
		return p
	}
	return path
}

// plural is "1 loop device", "2 loop devices".
func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
