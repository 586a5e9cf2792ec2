package mount

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"
)

// Namespace is a mount namespace, with all mounts in it.
type Namespace struct {
	ID  uint64 // inode number of its file: "mnt:[4026531832]"
	Own bool   // that of the caller
	// Processes live in it, lowest number first; at most 64, Living says how many
	// there are. Of kept ones there are none.
	Processes []Process
	Living    int
	// Kept is what keeps the namespace in being besides: paths of bind mounts of it, and
	// descriptors, for people ("fd 3 of pid 77, containerd").
	Kept  []string
	Table []Entry
	// Shared has the IDs of mounts that are in a peer group: what is mounted and
	// unmounted there is so elsewhere, or the other way round.
	Shared map[uint64]bool
}

// Process is one that lives in a namespace.
type Process struct {
	PID     int
	Command string // as in /proc/PID/comm, made printable
}

// maxProcesses of a namespace are named.
const maxProcesses = 64

// Namespaces finds all mount namespaces that processes live in, or that a bind mount
// or an open file keeps, and reads their mounts: those that the root directories of
// their processes show. It looks at every process, and its cost grows with the
// number of mounts; nothing is changed. What comes and goes in the meantime may or may not
// be seen.
//
// With an error comes what was found until then: Permission (not all processes may
// be looked at), Canceled.
func Namespaces(ctx context.Context) ([]Namespace, error) {
	self, err := statNode("/proc/self/ns/mnt")
	if err != nil {
		return nil, errs.Wrap("find mount namespaces", "", err)
	}

	s := &search{ctx: ctx, nsDev: self.dev, ns: self.ino}
	found := map[uint64]*Namespace{}
	seen := map[space]struct{}{}
	listed := map[uint64]struct{}{} // IDs of mounts: no two namespaces have the same
	take := func(n *Namespace, table []tableEntry) {
		for i, m := range table {
			if _, dup := listed[m.id]; dup {
				continue // seen from another root directory
			}
			listed[m.id] = struct{}{}
			n.Table = append(n.Table, exported(table[i:i+1])...)
			if len(m.groups) > 0 {
				n.Shared[m.id] = true
			}
		}
	}

	get := func(id uint64) *Namespace {
		n := found[id]
		if n == nil {
			n = &Namespace{ID: id, Own: id == self.ino, Shared: map[uint64]bool{}}
			found[id] = n
		}
		return n
	}

	var pins []pin
	for _, pid := range listNumbers("/proc") {
		if ctx.Err() != nil {
			break
		}

		base := "/proc/" + strconv.Itoa(pid)
		ns, err := statNode(base + "/ns/mnt")
		if err != nil {
			s.noteDenied(pid, err)
			continue
		}

		n := get(ns.ino)
		n.Living++
		if len(n.Processes) < maxProcesses {
			n.Processes = append(n.Processes, Process{PID: pid, Command: processName(base)})
		}

		root, err := statNode(base + "/root")
		if err != nil {
			s.noteDenied(pid, err)
			continue
		}

		key := space{ns.ino, root.mount, root.ino}
		if _, dup := seen[key]; !dup {
			table, err := readMountTable(base + "/mountinfo")
			if err != nil {
				s.noteDenied(pid, err)
				continue // the next process of this namespace will do
			}

			seen[key] = struct{}{}
			take(n, table)
			for _, m := range table {
				if id, ok := namespaceFile(m.root); ok && m.fstype == "nsfs" {
					where, path := m.point, m.point
					if ns.ino != self.ino {
						path = base + "/root" + m.point
						where = fmt.Sprintf("%s (in mount namespace %d, pid %d)", m.point, ns.ino, pid)
					}
					pins = append(pins, pin{path: path, ns: id, by: where})
				}
			}
		}

		// Threads may live in a namespace of their own.
		for _, tid := range listNumbers(base + "/task") {
			task := base + "/task/" + strconv.Itoa(tid)
			own, err := statNode(task + "/ns/mnt")
			if err != nil || own.ino == ns.ino {
				continue
			}
			other := get(own.ino)
			other.Living++
			if len(other.Processes) < maxProcesses {
				other.Processes = append(other.Processes, Process{PID: pid, Command: processName(task)})
			}
			if table, err := readMountTable(task + "/mountinfo"); err == nil && len(other.Table) == 0 {
				take(other, table)
			}
		}

		fds, err := os.ReadDir(base + "/fd")
		if err != nil {
			s.noteDenied(pid, err)
		}

		for _, fd := range fds {
			to, _ := os.Readlink(base + "/fd/" + fd.Name())
			if id, ok := namespaceFile(to); ok {
				pins = append(pins, pin{path: base + "/fd/" + fd.Name(), ns: id, pid: pid,
					by: fmt.Sprintf("fd %s of pid %d, %s", fd.Name(), pid, processName(base))})
			}
		}
	}

	for _, p := range pins {
		n := get(p.ns)
		if !slices.Contains(n.Kept, p.by) {
			n.Kept = append(n.Kept, p.by)
		}
		if n.Living == 0 && len(n.Table) == 0 && ctx.Err() == nil {
			table, err := tableOf(p.path)
			s.noteDenied(p.pid, err)
			take(n, table)
		}
	}

	var out []Namespace
	for _, n := range found {
		slices.SortFunc(n.Processes, func(a, b Process) int { return a.PID - b.PID })
		out = append(out, *n)
	}

	slices.SortFunc(out, func(a, b Namespace) int {
		switch {
		case a.Own != b.Own && a.Own, a.Own == b.Own && a.ID < b.ID:
			return -1
		}
		return 1
	})

	switch {
	case ctx.Err() != nil:
		return out, errs.Wrap("find mount namespaces", "", ctx.Err())
	case s.denied != nil:
		e := errs.New(errs.Permission, "find mount namespaces", "", "not allowed to inspect %s", s.denied)
		if os.Geteuid() != 0 {
			e = e.WithHint("run it as root")
		}
		return out, e
	}

	return out, nil
}

// namespaceFile is the number of the mount namespace that a file stands for.
func namespaceFile(name string) (uint64, bool) {
	n, ok := strings.CutPrefix(name, "mnt:[")
	if !ok {
		return 0, false
	}
	id, err := strconv.ParseUint(strings.TrimSuffix(n, "]"), 10, 64)
	return id, err == nil
}
