package preset

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/waiting"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// CheckUnused refuses a directory whose owner runs. path is where it is, for mounts below it; "": nowhere. It changes
// nothing, but holds a shared lock on each file that the owner would lock, for a moment. InUse names the process, if it
// can be seen from here.
func (r *Rules) CheckUnused(op, ref string, root *os.File, path string) error {
	for _, pattern := range r.locked {
		if err := eachMatch(root, pattern, func(m match) error { return r.checkUnlocked(op, ref, m) }); err != nil {
			return err
		}
	}

	if !r.unmounted || path == "" {
		return nil
	}

	below, err := mount.Below(path)
	if err != nil || len(below) == 0 {
		return err
	}

	return errs.New(errs.InUse, op, ref, "%s is mounted below it: something that %s has started may still run", below[0],
		r.owner).
		WithHint("stop it, then run `umount %s` if that is still mounted", errs.ShellWord(below[0]))
}

// checkUnlocked returns InUse if a process keeps a file locked.
func (r *Rules) checkUnlocked(op, ref string, m match) error {
	f, err := openIn(m.dir, m.name, 0)
	if errs.IsAny(err, unix.ELOOP, unix.ENOENT, unix.ENXIO) {
		return nil // not a file that could be locked
	}
	if err != nil {
		return errs.Wrap(op, m.rel, err)
	}

	defer f.Close() // and the lock ends
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return errs.Wrap(op, m.rel, err)
	}

	who := fmt.Sprintf("%s, or another program that cannot be seen from here", r.owner)
	hint := errs.Messagef("stop %s, then try again", r.owner)
	if p, ok := lockHolder(f); ok {
		name, _, _ := strings.Cut(p.Command, " ")
		who = fmt.Sprintf("%s (pid %d)", cmp.Or(name, r.owner), p.PID)
		hint = errs.Messagef("stop it with `kill %d`, wait until it has ended, then try again", p.PID)
	}
	return errs.New(errs.InUse, op, ref, "%s is running on it, and keeps %s locked", who, m.rel).WithHint("%s", hint)
}

// lockHolder finds a process that has a file open with a lock on it. It compares device and inode: clones of a golden
// have files with equal inode numbers.
func lockHolder(f *os.File) (waiting.Process, bool) {
	var want, st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &want) != nil {
		return waiting.Process{}, false
	}

	files, _ := filepath.Glob("/proc/[0-9]*/fd/[0-9]*")
	for _, file := range files {
		if unix.Stat(file, &st) != nil || st.Ino != want.Ino || st.Dev != want.Dev {
			continue
		}

		pid, _ := strconv.Atoi(strings.Split(file, "/")[2])
		info, err := os.ReadFile(strings.Replace(file, "/fd/", "/fdinfo/", 1))
		if err == nil && pid != os.Getpid() && bytes.Contains(info, []byte("\nlock:")) {
			return waiting.Lookup(pid), true
		}
	}

	return waiting.Process{}, false
}
