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
// open; with writing, only those that have one open for writing. This process
// counts with its working directory only. It goes by the paths that the kernel
// tells, so it does not see who came there by another path, such as a bind mount
// of dir or of a directory above it (for the first, see Holders with Tree). At
// most 64. Permission and Canceled come with what was found until then.
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
		own := pid == os.Getpid()
		h := Holder{PID: pid, Command: processName(base)}
		if !writing {
			for _, link := range []string{"cwd", "root", "exe"} {
				to, err := os.Readlink(base + "/" + link)
				if os.IsPermission(err) {
					denied[pid] = struct{}{}
				}
				if err == nil && inside(to) {
					h.How = append(h.How, link)
				}
			}
			if !own {
				h.How = append(h.How, mappedBelow(base, inside)...)
			}
		}

		if !own {
			h.How = append(h.How, openBelow(base, inside, writing)...)
		}
		if len(h.How) == 0 {
			continue
		}

		var st unix.Stat_t
		if unix.Stat(base, &st) == nil {
			h.UID = int(st.Uid)
		}

		out = append(out, h)
	}

	if len(denied) > 0 {
		return out, errs.New(errs.Permission, opFind, dir, "not allowed to inspect %s", denied)
	}

	return out, nil
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

// Below lists what is mounted below dir in this mount namespace.
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

// Blind finds who sees the directory dir but not the mount on the directory
// beside it, in another mount namespace that does not take over mounts or
// through another mount of the same filesystem: for them, Swap would put an
// empty directory there. Both paths are absolute, without symbolic links.
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
			continue // it has ended: the next one of this namespace will do
		}

		seen[space{ns.ino, root.mount, root.ino}] = true
		for _, m := range table {
			rel, err := filepath.Rel(m.root, s.root)
			if m.dev != s.dev || err != nil || rel == "." || rel == ".." || strings.HasPrefix(rel, "../") {
				continue
			}

			at := filepath.Join(m.point, rel)
			if n, err := statNode(base + "/root" + at); err != nil || n.dev != old.dev || n.ino != old.ino {
				continue // hidden by another mount
			}

			n, err := statNode(base + "/root" + filepath.Join(filepath.Dir(at), filepath.Base(beside)))
			if err == nil && n.dev == mounted.dev && n.ino == mounted.ino {
				continue
			}

			out = append(out, Holder{PID: pid, Command: processName(base), MountNS: ns.ino, Mountpoint: at,
				How: []string{fmt.Sprintf("seen at %s by pid %d (%s)", at, pid, processName(base))}})
		}
	}

	return out, nil
}
