package doctor

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// readText reads a small file of procfs or sysfs, without the line break at its end. It returns "" if the file cannot
// be read.
func readText(parts ...string) string {
	b, err := os.ReadFile(filepath.Join(parts...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// readNumber reads a file that begins with a number.
func readNumber(parts ...string) (int64, bool) {
	f := strings.Fields(readText(parts...))
	if len(f) == 0 {
		return 0, false
	}
	n, err := strconv.ParseInt(f[0], 10, 64)
	return n, err == nil
}

// eachProcess calls fn for each process of this PID namespace, the lowest first, with its directory in /proc. It ends
// with ctx.
func eachProcess(ctx context.Context, fn func(pid int, dir string)) error {
	dir, err := os.Open("/proc")
	if err != nil {
		return err
	}

	names, err := dir.Readdirnames(-1)
	dir.Close()
	if err != nil {
		return err
	}

	var pids []int
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil {
			pids = append(pids, pid)
		}
	}

	slices.Sort(pids)

	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return err
		}
		fn(pid, "/proc/"+strconv.Itoa(pid))
	}

	return nil
}

// commandOf returns the name of a process, made printable, because processes choose it.
func commandOf(pid int) string {
	return printable(readText("/proc", strconv.Itoa(pid), "comm"))
}

// printable replaces characters that could upset a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0xfffd {
			return '?'
		}
		return r
	}, s)
}

// isRoot reports whether this process may examine all others, as far as that can be known.
func isRoot() bool { return os.Geteuid() == 0 }
