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
	Own bool   // the caller's namespace

	// Processes live in the namespace, lowest number first. At most 64 are listed; Living counts all.
	// A namespace that only Kept preserves has none.
	Processes []Process
	Living    int

	// Kept lists what else preserves the namespace, for users: paths of its bind mounts, and
	// open descriptors ("fd 3 of pid 77, containerd").
	Kept  []string
	Table []Entry

	// Shared has the IDs of mounts in a peer group: mounts and unmounts below them propagate to
	// other mounts, or come from them.
	Shared map[uint64]bool
}

// Process is a process that lives in a namespace.
type Process struct {
	PID     int
	Command string // as in /proc/PID/comm, made printable
}

// maxProcesses is how many processes of a namespace are listed.
const maxProcesses = 64

// Namespaces finds all mount namespaces in which processes live, or which a bind mount or an open file
// preserves, and reads their mounts, as seen from the root directories of their processes. It inspects
// every process, and its cost grows with the number of mounts. It changes nothing. Changes in the meantime
// may or may not be seen.
//
// With an error it also returns the namespaces found so far. Permission: not all processes may be
// inspected. Canceled: ctx ended.
func Namespaces(ctx context.Context) ([]Namespace, error) {
	self, err := statNode("/proc/self/ns/mnt")
	if err != nil {
		return nil, errs.Wrap("find mount namespaces", "", err)
	}

	f := &namespaceFinder{denials: &search{ctx: ctx}, own: self.ino, found: map[uint64]*Namespace{},
		seen: map[space]struct{}{}, listed: map[uint64]struct{}{}}
	for _, pid := range listNumbers("/proc") {
		if ctx.Err() != nil {
			break
		}
		f.readProcess(pid)
	}

	f.readPins(ctx)

	switch {
	case ctx.Err() != nil:
		return f.sorted(), errs.Wrap("find mount namespaces", "", ctx.Err())
	case f.denials.denied != nil:
		e := errs.New(errs.Permission, "find mount namespaces", "", "not allowed to inspect %s", f.denials.denied)
		if os.Geteuid() != 0 {
			e = e.WithHint("run it as root")
		}
		return f.sorted(), e
	}

	return f.sorted(), nil
}

// namespaceFinder is one run of Namespaces.
type namespaceFinder struct {
	denials *search // only for noteDenied
	own     uint64  // the caller's namespace
	found   map[uint64]*Namespace
	seen    map[space]struct{}  // views of mount tables already read
	listed  map[uint64]struct{} // IDs of mounts already in a table: IDs are unique across namespaces
	pins    []pin
}

// namespace returns the namespace with this ID, which it adds if it is new.
func (f *namespaceFinder) namespace(id uint64) *Namespace {
	n := f.found[id]
	if n == nil {
		n = &Namespace{ID: id, Own: id == f.own, Shared: map[uint64]bool{}}
		f.found[id] = n
	}
	return n
}

// addMounts adds the mounts of a table that n does not have yet.
func (f *namespaceFinder) addMounts(n *Namespace, table []tableEntry) {
	for i, m := range table {
		if _, dup := f.listed[m.id]; dup {
			continue // seen from another root directory
		}
		f.listed[m.id] = struct{}{}
		n.Table = append(n.Table, exported(table[i:i+1])...)
		if len(m.groups) > 0 {
			n.Shared[m.id] = true
		}
	}
}

// addProcess adds the process or thread at base, a directory of /proc, to those that live in n.
func (n *Namespace) addProcess(pid int, base string) {
	n.Living++
	if len(n.Processes) < maxProcesses {
		n.Processes = append(n.Processes, Process{PID: pid, Command: processName(base)})
	}
}

// readProcess adds the namespaces of a process and of its threads, and those that it preserves.
func (f *namespaceFinder) readProcess(pid int) {
	base := "/proc/" + strconv.Itoa(pid)
	ns, err := statNode(base + "/ns/mnt")
	if err != nil {
		f.denials.noteDenied(pid, base, err)
		return
	}

	n := f.namespace(ns.ino)
	n.addProcess(pid, base)
	if err := f.readView(n, pid, base); err != nil {
		f.denials.noteDenied(pid, base, err)
		return
	}

	f.readThreads(ns.ino, pid, base)
	f.readDescriptors(pid, base)
}

// readView reads the mount table as the process at base sees it, unless another process of n had the
// same root directory. After an error, the next process of the namespace is tried.
func (f *namespaceFinder) readView(n *Namespace, pid int, base string) error {
	root, err := statNode(base + "/root")
	if err != nil {
		return err
	}

	key := space{n.ID, root.mount, root.ino}
	if _, dup := f.seen[key]; dup {
		return nil
	}

	table, err := readMountTable(base + "/mountinfo")
	if err != nil {
		return err
	}

	f.seen[key] = struct{}{}
	f.addMounts(n, table)
	for _, m := range table {
		id, ok := namespaceFile(m.root)
		if !ok || m.fstype != "nsfs" {
			continue
		}
		where, path := m.point, m.point
		if !n.Own {
			path = base + "/root" + m.point
			where = fmt.Sprintf("%s (in mount namespace %d, pid %d)", m.point, n.ID, pid)
		}
		f.pins = append(f.pins, pin{path: path, ns: id, by: where})
	}

	return nil
}

// readThreads adds the threads of a process that live in another namespace than the process.
func (f *namespaceFinder) readThreads(own uint64, pid int, base string) {
	for _, tid := range listNumbers(base + "/task") {
		task := base + "/task/" + strconv.Itoa(tid)
		ns, err := statNode(task + "/ns/mnt")
		if err != nil || ns.ino == own {
			continue
		}
		n := f.namespace(ns.ino)
		n.addProcess(pid, task)
		if table, err := readMountTable(task + "/mountinfo"); err == nil && len(n.Table) == 0 {
			f.addMounts(n, table)
		}
	}
}

// readDescriptors records the namespaces that open files of a process preserve.
func (f *namespaceFinder) readDescriptors(pid int, base string) {
	fds, err := os.ReadDir(base + "/fd")
	if err != nil {
		f.denials.noteDenied(pid, base, err)
	}

	for _, fd := range fds {
		to, _ := os.Readlink(base + "/fd/" + fd.Name())
		if id, ok := namespaceFile(to); ok {
			f.pins = append(f.pins, pin{path: base + "/fd/" + fd.Name(), ns: id, pid: pid,
				by: fmt.Sprintf("fd %s of pid %d, %s", fd.Name(), pid, processName(base))})
		}
	}
}

// readPins adds the namespaces that files preserve, and visits those in which no process lives.
func (f *namespaceFinder) readPins(ctx context.Context) {
	for _, p := range f.pins {
		n := f.namespace(p.ns)
		if !slices.Contains(n.Kept, p.by) {
			n.Kept = append(n.Kept, p.by)
		}
		if n.Living == 0 && len(n.Table) == 0 && ctx.Err() == nil {
			table, err := tableOf(p.path)
			f.denials.noteDenied(p.pid, p.path, err)
			f.addMounts(n, table)
		}
	}
}

// sorted returns the namespaces found, the caller's own first.
func (f *namespaceFinder) sorted() []Namespace {
	var out []Namespace
	for _, n := range f.found {
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

	return out
}

// namespaceFile returns the number of the mount namespace that a file name such as "mnt:[4026531832]" stands for.
func namespaceFile(name string) (uint64, bool) {
	n, ok := strings.CutPrefix(name, "mnt:[")
	if !ok {
		return 0, false
	}
	id, err := strconv.ParseUint(strings.TrimSuffix(n, "]"), 10, 64)
	return id, err == nil
}
