package mount

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// tableEntry is a line of a mount table (/proc/PID/mountinfo).
type tableEntry struct {
	id, parent  uint64
	dev         uint64
	root, point string
	groups      map[string]struct{} // numbers of the peer groups from which umounts propagate to it
	peers       string              // number of its own peer group, "" if it has none
	options     string              // of the mount
	fstype      string
	source      string
	super       string // options of the filesystem
}

// readMountTable reads a mount table. It skips lines that it cannot parse: Pando did not make those mounts.
func readMountTable(path string) ([]tableEntry, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseMountTable(f)
}

// parseMountTable is our own because procfs and moby/sys/mountinfo fail as a whole on one line that they do not
// understand, or that is longer than 64 KiB.
func parseMountTable(r io.Reader) ([]tableEntry, error) {
	var out []tableEntry
	br := bufio.NewReader(r)
	for {
		line, err := br.ReadString('\n') // of any length, because overlays list all their layers
		if m, ok := parseMountLine(strings.TrimSuffix(line, "\n")); ok {
			out = append(out, m)
		}
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, err
		}
	}
}

// parseMountLine parses a line such as
//
//	36 35 98:0 /root /mount/point rw,noatime shared:7 master:1 - ext3 /dev/x rw,errors=continue
func parseMountLine(line string) (tableEntry, bool) {
	f := strings.Split(line, " ")
	if len(f) < 7 {
		return tableEntry{}, false
	}

	id, err1 := strconv.ParseUint(f[0], 10, 64)
	parent, err2 := strconv.ParseUint(f[1], 10, 64)
	dev, ok := parseDev(f[2], 10)
	if err1 != nil || err2 != nil || !ok {
		return tableEntry{}, false
	}

	m := tableEntry{id: id, parent: parent, dev: dev, root: Unescape(f[3]), point: Unescape(f[4]), options: f[5]}
	rest := f[6:]
	for len(rest) > 0 && rest[0] != "-" {
		if tag, n, ok := strings.Cut(rest[0], ":"); ok && (tag == "shared" || tag == "master") {
			if m.groups == nil {
				m.groups = map[string]struct{}{}
			}
			m.groups[n] = struct{}{}
			if tag == "shared" {
				m.peers = n
			}
		}
		rest = rest[1:]
	}

	if len(rest) >= 4 {
		m.fstype, m.source, m.super = rest[1], Unescape(rest[2]), Unescape(rest[3])
	}

	return m, true
}

// parseDev parses "major:minor".
func parseDev(s string, base int) (uint64, bool) {
	a, b, ok := strings.Cut(s, ":")
	major, err1 := strconv.ParseUint(a, base, 32)
	minor, err2 := strconv.ParseUint(b, base, 32)
	return unix.Mkdev(uint32(major), uint32(minor)), ok && err1 == nil && err2 == nil
}

// Unescape undoes the octal escapes of the kernel's tables: "\040" is a space.
func Unescape(s string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}

	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}

	return b.String()
}

// readSpace reads the mount table that a process or thread sees, unless an earlier one
// had the same view.
func (s *search) readSpace(base string, pid int) {
	ns, err := statNode(base + "/ns/mnt")
	if err != nil {
		s.noteDenied(pid, base, err)
		return
	}

	root, err := statNode(base + "/root")
	if err != nil {
		s.noteDenied(pid, base, err)
		return
	}

	key := space{ns.ino, root.mount, root.ino}
	if _, dup := s.spaces[key]; dup {
		return
	}

	table, err := readMountTable(base + "/mountinfo")
	if err != nil {
		s.noteDenied(pid, base, err)
		return // the next process of this namespace is tried
	}

	s.spaces[key] = struct{}{}
	s.known[ns.ino] = struct{}{}
	s.readTable(table, ns.ino, Holder{PID: pid, Command: processName(base)}, "")
}

// readTable adds the mounts of the volume in one mount namespace, and those that depend
// on them. who is a process that lives there, or zero; without a process, by says what
// preserves the namespace.
func (s *search) readTable(table []tableEntry, ns uint64, who Holder, by string) {
	where := ""
	switch {
	case ns == s.ns:
		who = Holder{}
	case who.PID != 0:
		where = fmt.Sprintf(" in mount namespace %d (pid %d, %s)", ns, who.PID, who.Command)
	case by == "":
		where = fmt.Sprintf(" in mount namespace %d", ns)
	default:
		where = fmt.Sprintf(" in mount namespace %d (kept by %s)", ns, by)
	}

	who.MountNS = ns
	s.addDependents(table, who, where, s.addVolumeMounts(table, who, where))
}

// addVolumeMounts adds the mounts of the volume in a table, and returns where the volume is or was mounted.
func (s *search) addVolumeMounts(table []tableEntry, who Holder, where string) (points []string) {
	if s.q.At != "" {
		points = append(points, s.q.At)
	}

	for _, m := range table {
		if !s.isMountOf(m) {
			continue
		}

		points = append(points, m.point)
		if _, dup := s.mounts[m.id]; dup {
			continue // seen from another root directory
		}

		s.mounts[m.id] = struct{}{}
		if m.id == s.at || s.at != 0 && who.MountNS != s.ns && s.follows(m) {
			continue // it is unmounted together with the one at s.at
		}

		h := who
		h.Mountpoint = m.point
		h.How = []string{"mounted at " + m.point + where}
		s.addHolder(h)
	}

	return points
}

// addDependents adds mounts on the volume's mounts, and overlays with layers below points. It also records
// bind mounts of other mount namespaces, to be visited later.
func (s *search) addDependents(table []tableEntry, who Holder, where string, points []string) {
	for _, m := range table {
		_, on := s.mounts[m.parent]
		_, self := s.mounts[m.id]
		if on && !self {
			h := who
			h.Mountpoint = m.point
			h.How = []string{"mount at " + m.point + " below it" + where}
			s.addHolder(h)
		}

		if dir := layerIn(m, points); dir != "" && !on {
			h := who
			h.Mountpoint = m.point
			h.How = []string{"overlay at " + m.point + " with layers in " + dir + where}
			s.addHolder(h)
		}

		if id, ok := namespaceFile(m.root); ok && m.fstype == "nsfs" && who.MountNS == s.ns {
			s.pins = append(s.pins, pin{path: m.point, ns: id})
		}
	}
}

// follows reports whether m is a propagated copy of the mount at s.at.
func (s *search) follows(m tableEntry) bool {
	_, ok := m.groups[s.group]
	return ok && s.group != ""
}

// layerIn returns the first directory of the overlay m that lies below one of
// points, "" if none does. An overlay keeps the filesystems of its layers busy
// even after they are unmounted.
func layerIn(m tableEntry, points []string) string {
	if m.fstype != "overlay" {
		return ""
	}

	for o := range strings.SplitSeq(m.super, ",") {
		k, v, _ := strings.Cut(o, "=")
		switch k {
		case "lowerdir", "lowerdir+", "datadir+", "upperdir":
			for dir := range strings.SplitSeq(v, ":") {
				for _, p := range points {
					if dir == p || strings.HasPrefix(dir, strings.TrimSuffix(p, "/")+"/") {
						return dir
					}
				}
			}
		}
	}

	return ""
}

// pin is a file that preserves a mount namespace, even if no process lives there: a bind mount
// of the namespace, or a descriptor.
type pin struct {
	path string
	ns   uint64
	pid  int    // the process that has the descriptor; 0 for a bind mount
	by   string // description for users; only Namespaces sets it
}

// readPins reads the mount tables of namespaces in which no process lives.
func (s *search) readPins() {
	for _, p := range s.pins {
		if _, dup := s.known[p.ns]; dup {
			continue
		}

		by := p.path
		if p.pid != 0 {
			to, _ := os.Readlink(p.path)
			if !strings.HasPrefix(to, "mnt:[") {
				continue
			}
			by = fmt.Sprintf("pid %d, %s", p.pid, processName("/proc/"+strconv.Itoa(p.pid)))
		}

		table, err := tableOf(p.path)
		s.noteDenied(p.pid, p.path, err)
		if err == nil {
			s.known[p.ns] = struct{}{}
			s.readTable(table, p.ns, Holder{}, by)
		}
	}
}

// tableOf reads the mount table of the mount namespace whose file is path, by entering the
// namespace. For files of other kinds of namespaces it returns nothing.
func tableOf(path string) (table []tableEntry, err error) {
	ns, err := os.Open(path)
	if err != nil {
		return nil, err
	}

	defer ns.Close()

	proc, err := os.Open("/proc") // the other namespace may have no /proc
	if err != nil {
		return nil, err
	}

	defer proc.Close()

	err = onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}

		// Return to the own namespace at the end: the thread outlives this function, and would keep
		// the other namespace and all its mounts busy.
		home, err := os.Open("/proc/thread-self/ns/mnt")
		if err != nil {
			return err
		}

		defer home.Close()

		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
			return err
		}

		table, err = readThisTable(proc)
		return errors.Join(err, unix.Setns(int(home.Fd()), unix.CLONE_NEWNS))
	})
	if errors.Is(err, unix.EINVAL) {
		err = nil // not a mount namespace
	}

	return table, err
}

// readThisTable reads the mount table that this thread sees. proc is an open /proc.
func readThisTable(proc *os.File) ([]tableEntry, error) {
	fd, err := unix.Openat(int(proc.Fd()), "thread-self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "mountinfo")
	defer f.Close()
	return parseMountTable(f)
}
