package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Requests to a file of a mount namespace for the next and the previous one (Linux 6.12;
// include/uapi/linux/nsfs.h).
const (
	nsMntGetNext = 0x8010b70b // _IOR(0xb7, 11, struct mnt_ns_info)
	nsMntGetPrev = 0x8010b70c
)

// Tables are the mount tables of all mount namespaces that can be seen, read once to ask about
// many volumes.
type Tables struct {
	own      uint64       // our namespace
	ownTable []tableEntry // as this process sees it
	views    []tableView  // of all, also ours
	complete bool
}

// tableView is the table of a namespace, as one process sees it, or a visitor.
type tableView struct {
	ns    uint64
	table []tableEntry
	who   Holder // a process that sees it; zero: nobody in particular
}

// ReadTables reads the mount tables of all mount namespaces that can be seen. Since Linux 6.12
// the kernel lists the namespaces to who is in the host's PID namespace, whoever lives in them; each
// costs some 0.2 ms. Else they are found by their processes, at some 10 µs for each process, and
// those that nobody lives in by their bind mounts. Changes in the meantime may or may not be seen. What cannot be
// looked at is left out: see Complete. Canceled.
func ReadTables(ctx context.Context) (*Tables, error) {
	t, err := newTables()
	if err != nil {
		return nil, err
	}
	if t.complete = t.readListed(ctx); !t.complete {
		t.readLiving(ctx)
	}
	return t, errs.Wrap(opTables, "", ctx.Err())
}

const opTables = "read mount tables"

// newTables has the table of this process.
func newTables() (*Tables, error) {
	self, err := statNode("/proc/self/ns/mnt")
	if err != nil {
		return nil, errs.Wrap(opTables, "/proc/self/ns/mnt", err)
	}
	t := &Tables{own: self.ino}
	if t.ownTable, err = readMountTable("/proc/self/mountinfo"); err != nil {
		return nil, errs.Wrap(opTables, "/proc/self/mountinfo", err)
	}
	t.views = []tableView{{ns: t.own, table: t.ownTable}}
	return t, nil
}

// Complete reports whether no namespace was left out: then a volume that Mounts does not find
// is not mounted anywhere.
func (t *Tables) Complete() bool { return t.complete }

// readListed reads the tables of the namespaces that the kernel lists. It reports whether it
// could, and could read all of them.
func (t *Tables) readListed(ctx context.Context) bool {
	own, err := os.Open("/proc/self/ns/mnt")
	if err != nil {
		return false
	}

	defer own.Close()

	all := true
	for _, request := range []uintptr{nsMntGetNext, nsMntGetPrev} {
		for at := own; ctx.Err() == nil; {
			next, err := adjacentNamespace(at, request)
			if at != own {
				at.Close()
			}
			if errors.Is(err, unix.ENOENT) {
				break // it was the last
			}
			if err != nil {
				return false
			}
			if !t.visit(next) {
				all = false
			}

			at = next
		}
	}

	return all && ctx.Err() == nil
}

// visit reads the table of the namespace that f stands for.
func (t *Tables) visit(f *os.File) bool {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return false
	}
	table, err := tableOf(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return false
	}
	t.views = append(t.views, tableView{ns: st.Ino, table: table})
	return true
}

func adjacentNamespace(of *os.File, request uintptr) (*os.File, error) {
	info := struct {
		size, mounts uint32
		id           uint64
	}{size: 16}
	fd, _, e := unix.Syscall(unix.SYS_IOCTL, of.Fd(), request, uintptr(unsafe.Pointer(&info)))
	if e != 0 {
		return nil, e
	}
	unix.CloseOnExec(int(fd))
	return os.NewFile(fd, "mount namespace"), nil
}

// readLiving reads the tables that processes see in other namespaces, and those of namespaces that
// bind mounts keep, as far as they have not been read. Threads are not looked at one by one.
func (t *Tables) readLiving(ctx context.Context) {
	seen := map[space]bool{}
	listed, known := map[uint64]bool{}, map[uint64]bool{}
	for _, v := range t.views {
		listed[v.ns], known[v.ns] = true, true
	}

	take := func(base string, pid int) {
		ns, err := statNode(base + "/ns/mnt")
		if err != nil || listed[ns.ino] {
			return
		}

		root, err := statNode(base + "/root")
		key := space{ns.ino, root.mount, root.ino}
		if err != nil || seen[key] {
			return
		}

		table, err := readMountTable(base + "/mountinfo")
		if err != nil {
			return // the next process of this namespace will do
		}

		seen[key], known[ns.ino] = true, true
		t.views = append(t.views, tableView{ns: ns.ino, table: table, who: Holder{PID: pid, Command: processName(base)}})
	}

	for _, pid := range listNumbers("/proc") {
		if ctx.Err() != nil {
			return
		}
		take("/proc/"+strconv.Itoa(pid), pid)
	}

	for _, m := range t.ownTable {
		id, ok := namespaceFile(m.root)
		if !ok || m.fstype != "nsfs" || known[id] {
			continue
		}
		if table, err := tableOf(m.point); err == nil {
			known[id] = true
			t.views = append(t.views, tableView{ns: id, table: table})
		}
	}
}

// Mounts finds where a volume is mounted besides q.At and the copies that go with that, and what
// is mounted on it or made of layers in it: of what Holders finds, what mount tables show.
// NotFound: q.Tree is not there. Invalid.
func (t *Tables) Mounts(q Query) ([]Holder, error) {
	if (q.Dev == 0) == (q.Tree == "") {
		return nil, errs.New(errs.Invalid, "find mounts", "", "exactly one of Dev and Tree must be set")
	}

	s := newSearch(context.Background(), q)
	s.ns = t.own
	if err := s.locateVolume(t.ownTable); err != nil {
		return nil, errs.Wrap("find mounts", q.Tree, err)
	}

	for _, v := range t.views {
		s.readTable(v.table, v.ns, v.who, "")
	}

	return append(s.processes, s.others...), nil
}
