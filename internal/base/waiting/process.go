package waiting

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a process that others wait for.
type Process struct {
	PID     int
	Command string    // its command line, shortened; "" if it cannot be read
	Op      string    // its operation, if known; otherwise "", and Command describes it
	Since   time.Time // when it began Op, or started; zero if unknown
	Stopped bool      // suspended by SIGSTOP or a debugger
}

func (p Process) pid() string { return strconv.Itoa(p.PID) }

// String describes the process for users: "pando gc (pid 12, for 3s, stopped)".
func (p Process) String() string {
	name := p.Op
	if name == "" {
		name = p.Command
	}
	if name == "" {
		name = "a process"
	}

	s := name + " (pid " + p.pid()
	if !p.Since.IsZero() {
		s += fmt.Sprintf(", for %v", time.Since(p.Since).Round(time.Second))
	}
	if p.Stopped {
		s += ", stopped"
	}

	return s + ")"
}

// Format lists processes for users.
func Format(ps []Process) string {
	var out []string
	for _, p := range ps {
		out = append(out, p.String())
	}
	return strings.Join(out, ", ")
}

// commandWords is how many words of a command line are shown: "pando golden import".
const commandWords = 3

// Lookup describes a process from /proc. Fields that cannot be read stay zero, as for a process that has ended.
func Lookup(pid int) Process {
	p := Process{PID: pid}
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	if b, err := os.ReadFile(filepath.Join(dir, "cmdline")); err == nil {
		words := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
		words[0] = filepath.Base(words[0])
		p.Command = strings.Join(words[:min(len(words), commandWords)], " ")
	}

	if b, err := os.ReadFile(filepath.Join(dir, "stat")); err == nil {
		// The name in parentheses may contain any character.
		if _, rest, ok := bytes.Cut(b[bytes.LastIndexByte(b, ')')+1:], []byte(" ")); ok {
			p.Stopped = len(rest) > 0 && (rest[0] == 'T' || rest[0] == 't')
		}
	}

	// The directory in /proc is only as old as the first access to it, so take the start time from stat.
	p.Since = startedAt(dir)
	return p
}

// startedAt returns when a process started, to about a second; zero if unknown.
func startedAt(dir string) time.Time {
	b, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return time.Time{}
	}

	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const startField = 19 // field 22, counted from the state, which is field 3
	if len(fields) <= startField {
		return time.Time{}
	}

	ticks, err := strconv.ParseInt(fields[startField], 10, 64)
	if err != nil {
		return time.Time{}
	}

	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return time.Time{}
	}

	const ticksPerSecond = 100 // USER_HZ, the same on all architectures of Linux that Go knows
	age := time.Duration(now.Nano()) - time.Duration(ticks)*time.Second/ticksPerSecond
	return time.Now().Add(-age)
}

// LockHolders finds the processes, other than this one, that hold a lock of any kind (flock, POSIX, open
// file description) on a byte of the file at path. It inspects all processes, so it is only for waits
// that take long. Processes that it may not inspect are omitted.
func LockHolders(path string, at int64) []Process {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return nil
	}

	pids, _ := filepath.Glob("/proc/[0-9]*")
	var out []Process
	for _, dir := range pids {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		if pid == os.Getpid() {
			continue
		}
		infos, _ := filepath.Glob(filepath.Join(dir, "fdinfo", "*"))
		for _, info := range infos {
			if b, err := os.ReadFile(info); err == nil && tellsLock(b, st.Ino, at) {
				out = append(out, Lookup(pid))
				break
			}
		}
	}

	return out
}

// tellsLock reports whether the content of a file in /proc/PID/fdinfo shows a lock on byte at of a file
// with that inode: "lock:	1: OFDLCK  ADVISORY  WRITE -1 00:2d:131 0 EOF".
func tellsLock(info []byte, ino uint64, at int64) bool {
	for s := bufio.NewScanner(bytes.NewReader(info)); s.Scan(); {
		rest, ok := strings.CutPrefix(s.Text(), "lock:")
		f := strings.Fields(rest)
		if !ok || len(f) != 8 {
			continue
		}

		file := strings.Split(f[5], ":")
		first, err1 := strconv.ParseInt(f[6], 10, 64)
		last, err2 := strconv.ParseInt(f[7], 10, 64)
		if f[7] == "EOF" {
			last, err2 = 1<<63-1, nil
		}
		if file[len(file)-1] == strconv.FormatUint(ino, 10) && err1 == nil && err2 == nil && first <= at && at <= last {
			return true
		}
	}

	return false
}
