package mount

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// TreeUsers finds processes that use a file at or below dir, an absolute path
// without symbolic links: as working or root directory, as program, mapped, or
// open. With writing, it finds only processes that have such a file open for writing.
// Of this process, only the working and root directory and the program count.
//
// It compares the paths that the kernel reports, so it misses processes that use another
// path, such as a bind mount of dir or of a directory above it. (Holders with Tree finds
// users of bind mounts of dir.) It returns at most 64 processes, also with the errors
// Permission and Canceled.
func TreeUsers(ctx context.Context, dir string, writing bool) ([]Holder, error) {
	const opFind = "find users"
	var out []Holder
	denied := denials{}
	prefix := strings.TrimSuffix(dir, "/") + "/"
	inside := func(path string) bool { return path == dir || strings.HasPrefix(path, prefix) }
	for _, pid := range listNumbers("/proc") {
		if err := ctx.Err(); err != nil {
			return out, errs.Wrap(opFind, dir, err)
		}

		if len(out) >= maxHolders {
			break
		}

		base := "/proc/" + strconv.Itoa(pid)
		var how []string
		if !writing {
			links, err := linksBelow(base, inside)
			if err != nil {
				denied[pid] = struct{}{}
			}
			how = links
		}

		if pid != os.Getpid() {
			if !writing {
				how = append(how, mappedBelow(base, inside)...)
			}
			how = append(how, openBelow(base, inside, writing)...)
		}

		if len(how) > 0 {
			out = append(out, Holder{PID: pid, Command: processName(base), UID: ownerOf(base), How: how})
		}
	}

	if len(denied) > 0 {
		return out, errs.New(errs.Permission, opFind, dir, "not allowed to inspect %s", denied)
	}

	return out, nil
}

// linksBelow lists which of a process's working directory, root directory and program are inside.
// The error is set if one of them must not be read.
func linksBelow(base string, inside func(string) bool) (how []string, denied error) {
	for _, link := range []string{"cwd", "root", "exe"} {
		to, err := os.Readlink(base + "/" + link)
		if isDenied(base, err) {
			denied = err
		}
		if err == nil && inside(to) {
			how = append(how, link)
		}
	}

	return how, denied
}

// ownerOf returns the user ID of a process, 0 if it has ended.
func ownerOf(base string) int {
	var st unix.Stat_t
	if unix.Stat(base, &st) != nil {
		return 0
	}
	return int(st.Uid)
}

// openBelow lists the open files of a process that are inside.
func openBelow(base string, inside func(string) bool, writing bool) (how []string) {
	for _, n := range listNumbers(base + "/fd") {
		name := strconv.Itoa(n)
		to, err := os.Readlink(base + "/fd/" + name)
		if err != nil || !inside(to) || len(how) >= maxHow {
			continue
		}
		if writing && !openForWriting(base+"/fdinfo/"+name) {
			continue
		}
		how = append(how, "fd "+name+" "+to)
	}

	return how
}

func openForWriting(fdinfo string) bool {
	b, err := os.ReadFile(fdinfo)
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseUint(strings.TrimSpace(v), 8, 64)
			return err == nil && flags&unix.O_ACCMODE != unix.O_RDONLY
		}
	}
	return false
}

// mappedBelow lists the mapped files of a process that are inside.
func mappedBelow(base string, inside func(string) bool) (how []string) {
	f, err := os.Open(base + "/maps")
	if err != nil {
		return nil
	}

	defer f.Close()
	last := ""
	for sc := bufio.NewScanner(f); sc.Scan() && len(how) < maxHow; {
		i := strings.IndexByte(sc.Text(), '/')
		if i < 0 {
			continue
		}
		if path := sc.Text()[i:]; path != last && inside(path) {
			how = append(how, "mmap "+path)
			last = path
		}
	}

	return how
}

// Below lists the mount points below dir in this mount namespace.
func Below(dir string) ([]string, error) {
	table, err := readMountTable("/proc/self/mountinfo")
	if err != nil {
		return nil, errs.Wrap("read mount table", dir, err)
	}
	var out []string
	for _, m := range table {
		if strings.HasPrefix(m.point, strings.TrimSuffix(dir, "/")+"/") {
			out = append(out, m.point)
		}
	}
	return out, nil
}

// Blind finds processes that see the directory dir but not the mount on beside, a sibling of dir,
// because their mount namespace receives no mounts from this one, or because they use another mount
// of the same filesystem. For them, Swap would replace dir with an empty directory. Both paths are
// absolute and have no symbolic links.
func Blind(ctx context.Context, dir, beside string) ([]Holder, error) {
	const opFind = "find mount namespaces"
	old, err := statNode(dir)
	if err != nil {
		return nil, errs.Wrap(opFind, dir, err)
	}

	mounted, err := statNode(beside)
	if err != nil {
		return nil, errs.Wrap(opFind, beside, err)
	}

	own, err := readMountTable("/proc/self/mountinfo")
	if err != nil {
		return nil, errs.Wrap(opFind, dir, err)
	}

	s := &search{q: Query{Tree: dir}}
	if err := s.locateTree(own); err != nil {
		return nil, errs.Wrap(opFind, dir, err)
	}

	var out []Holder
	seen := map[space]bool{}
	for _, pid := range listNumbers("/proc") {
		if err := ctx.Err(); err != nil {
			return out, errs.Wrap(opFind, dir, err)
		}

		base := "/proc/" + strconv.Itoa(pid)
		ns, err := statNode(base + "/ns/mnt")
		if err != nil {
			continue
		}

		root, err := statNode(base + "/root")
		if err != nil || seen[space{ns.ino, root.mount, root.ino}] {
			continue
		}

		table, err := readMountTable(base + "/mountinfo")
		if err != nil {
			continue // it has ended: the next process of this namespace is tried
		}

		seen[space{ns.ino, root.mount, root.ino}] = true
		for _, at := range s.blindPoints(table, base+"/root", old, filepath.Base(beside), mounted) {
			out = append(out, Holder{PID: pid, Command: processName(base), MountNS: ns.ino, Mountpoint: at,
				How: []string{fmt.Sprintf("seen at %s by pid %d (%s)", at, pid, processName(base))}})
		}
	}

	return out, nil
}

// blindPoints returns the paths below root at which the directory old of the tree is visible, but not
// the directory mounted at its sibling beside.
func (s *search) blindPoints(table []tableEntry, root string, old node, beside string, mounted node) (out []string) {
	for _, m := range table {
		rel, err := filepath.Rel(m.root, s.root)
		if m.dev != s.dev || err != nil || rel == "." || rel == ".." || strings.HasPrefix(rel, "../") {
			continue
		}

		at := filepath.Join(m.point, rel)
		if n, err := statNode(root + at); err != nil || n.dev != old.dev || n.ino != old.ino {
			continue // hidden by another mount
		}

		n, err := statNode(root + filepath.Join(filepath.Dir(at), beside))
		if err == nil && n.dev == mounted.dev && n.ino == mounted.ino {
			continue
		}

		out = append(out, at)
	}

	return out
}
