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

// Tables holds the mount tables of all visible mount namespaces. It is read once, to answer
// questions about many volumes.
type Tables struct {
	own      uint64       // our namespace
	ownTable []tableEntry // as this process sees it
	views    []tableView  // of all namespaces, including ours
	complete bool
}

// tableView is the table of a namespace, as one of its processes or a visitor sees it.
type tableView struct {
	ns    uint64
	table []tableEntry
	who   Holder // the process that sees it; zero for a visitor
}

// ReadTables reads the mount tables of all visible mount namespaces. Since Linux 6.12 the kernel
// lists all namespaces to processes in the host's PID namespace; each costs some 0.2 ms. On other
// kernels it finds namespaces through their processes, at some 10 µs a process, and namespaces
// without processes through their bind mounts. Changes in the meantime may or may not be seen.
// Namespaces that it cannot inspect are left out: see Complete. Canceled.
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

// newTables returns Tables with only the table of this process.
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

// Complete reports whether no namespace was left out. If so, a volume that Mounts does not find
// is not mounted anywhere.
func (t *Tables) Complete() bool { return t.complete }

// readListed reads the tables of the namespaces that the kernel lists. It reports whether the
// kernel lists them and every table was read.
func (t *Tables) readListed(ctx context.Context) bool {
	all := true
	listed := forOtherNamespaces(ctx, func(f *os.File, _ uint64) bool {
		all = t.visit(f) && all
		return true
	})
	return listed && all
}

// forOtherNamespaces calls fn with the file and the ID of each mount namespace but our own, until it returns false. It
// reports whether the kernel lists namespaces, and fn saw them all.
func forOtherNamespaces(ctx context.Context, fn func(f *os.File, id uint64) bool) bool {
	own, err := os.Open("/proc/self/ns/mnt")
	if err != nil {
		return false
	}

	defer own.Close()

	for _, request := range []uintptr{nsMntGetNext, nsMntGetPrev} {
		at := own
		for ctx.Err() == nil {
			next, id, err := adjacentNamespace(at, request)
			if at != own {
				at.Close()
			}
			if errors.Is(err, unix.ENOENT) {
				break // no more in this direction
			}
			if err != nil {
				return false
			}

			if !fn(next, id) {
				next.Close()
				return false
			}

			at = next
		}
	}

	return ctx.Err() == nil
}

// visit reads the table of the namespace whose file is f.
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

// adjacentNamespace opens the next or previous mount namespace, as request says, and tells its ID. ENOENT: there is
// none.
func adjacentNamespace(of *os.File, request uintptr) (*os.File, uint64, error) {
	info := struct {
		size, mounts uint32
		id           uint64
	}{size: 16}
	fd, _, e := unix.Syscall(unix.SYS_IOCTL, of.Fd(), request, uintptr(unsafe.Pointer(&info)))
	if e != 0 {
		return nil, 0, e
	}
	unix.CloseOnExec(int(fd))
	return os.NewFile(fd, "mount namespace"), info.id, nil
}

// readLiving reads the tables that processes see in other namespaces, and the tables of namespaces that
// bind mounts preserve, unless they have been read already. It does not inspect single threads.
func (t *Tables) readLiving(ctx context.Context) {
	seen := map[space]bool{}
	listed, known := map[uint64]bool{}, map[uint64]bool{}
	for _, v := range t.views {
		listed[v.ns], known[v.ns] = true, true
	}

	addView := func(base string, pid int) {
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
			return // the next process of this namespace is tried
		}

		seen[key], known[ns.ino] = true, true
		t.views = append(t.views, tableView{ns: ns.ino, table: table, who: Holder{PID: pid, Command: processName(base)}})
	}

	for _, pid := range listNumbers("/proc") {
		if ctx.Err() != nil {
			return
		}
		addView("/proc/"+strconv.Itoa(pid), pid)
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

// Mounts returns the holders of a volume that mount tables show: mounts of it other than the one at q.At
// and its propagated copies, mounts on it, and overlays with layers in it. Holders also finds the rest.
// NotFound: q.Tree does not exist. Invalid: not exactly one of q.Dev and q.Tree is set.
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

// OverlayDevice returns the st_dev of a mounted overlay with this name, 0 if there is none.
func (t *Tables) OverlayDevice(name string) uint64 {
	for _, v := range t.views {
		for _, m := range v.table {
			if n, _ := SplitOverlaySource(m.source); m.fstype == "overlay" && n == name {
				return m.dev
			}
		}
	}
	return 0
}
