package mount

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"

	"golang.org/x/sys/unix"
)

// Holder is something that keeps a volume's mount, or the device under it, busy: a
// process, or (with PID 0) a mount, a swap file, a block device.
type Holder struct {
	PID     int    // of a process that holds it, or lives in the namespace that does; 0 if there is none
	Command string // of the process, as in /proc/PID/comm
	UID     int    // of the process

	// How describes what it holds, for users. Of a process: "cwd", "root", "exe",
	// "fd 3 /path", "mmap /path". Else one phrase: "mount at /x/y below it",
	// "mounted at /x in mount namespace 4026532617 (pid 77, containerd)",
	// "swap file /x", "loop device /dev/loop7 on /x", "block device dm-0".
	How []string

	MountNS    uint64 // of the process or the mount; 0 if unknown
	Mountpoint string // where the volume is mounted in MountNS; only of mounts
}

// Query selects the volume whose holders to find. Exactly one of Dev and Tree must be set.
type Query struct {
	// Dev is the st_dev of the volume's own filesystem, which for ext4 and
	// XFS is the number of the block device under it: holders of that device
	// are found as well, even if it is not mounted anywhere.
	Dev uint64

	// Tree is the directory whose bind mounts (see the function Tree) to find:
	// the original, not the place where it is mounted.
	Tree string

	// At is the mount point of the volume in this mount namespace, now or
	// before. The caller knows about a mount that is still there, so it and its
	// propagated copies are not reported.
	At string
}

const (
	maxHolders = 64  // more would not help the user
	maxHow     = 100 // of one process
)

// Holders finds what holds a volume, for the error that reports it as busy. It inspects
// every process and reads the mount table of every mount namespace, so it is for errors
// only. It stops after 64 holders. Changes while it runs may or may not be seen.
//
// With an error it also returns the holders found so far. Permission: not all processes
// may be inspected, so there may be more. Canceled: ctx ended. NotFound: Tree does not
// exist. Invalid: not exactly one of Dev and Tree is set.
func Holders(ctx context.Context, q Query) ([]Holder, error) {
	if (q.Dev == 0) == (q.Tree == "") {
		return nil, errs.New(errs.Invalid, "find holders", "", "exactly one of Dev and Tree must be set")
	}

	s := newSearch(ctx, q)
	if err := s.prepare(); err != nil {
		return nil, errs.Wrap("find holders", q.Tree, err)
	}

	// A process that hangs in the kernel can block those that inspect it, and no
	// context ends that, so the search may be abandoned.
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.searchAll()
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}

	s.mu.Lock()
	defer s.mu.Unlock()

	s.closed = true
	out := append(s.processes, s.others...)
	if len(out) > maxHolders {
		out = append(s.processes[:max(0, maxHolders-len(s.others))], s.others...)
		out = out[:min(len(out), maxHolders)]
	}

	switch {
	case ctx.Err() != nil:
		return out, errs.Wrap("find holders", "", ctx.Err())
	case s.denied != nil:
		e := errs.New(errs.Permission, "find holders", "", "not allowed to inspect %s", s.denied)
		if os.Geteuid() != 0 {
			e = e.WithHint("run it as root")
		}
		return out, e
	}

	return out, nil
}

// search is one run of Holders. One goroutine works on it; mu guards the fields that
// Holders reads when it abandons the search.
type search struct {
	q   Query
	ctx context.Context

	dev   uint64 // st_dev in mount tables: for btrfs it differs from that of stat(2)
	root  string // of the tree in its filesystem; "" for a whole filesystem
	at    uint64 // mount ID of the mount at q.At, 0 if there is none
	group string // peer group of that mount, to which umounts propagate; "" if none
	ns    uint64 // our mount namespace
	nsDev uint64 // st_dev of namespace files

	mounts map[uint64]struct{} // IDs of the volume's mounts, in any namespace
	spaces map[space]struct{}  // views of mount tables already read
	known  map[uint64]struct{} // mount namespaces already read
	pins   []pin

	mu        sync.Mutex
	closed    bool
	denied    denials
	processes []Holder
	others    []Holder
}

func newSearch(ctx context.Context, q Query) *search {
	return &search{q: q, ctx: ctx, dev: q.Dev, mounts: map[uint64]struct{}{}, spaces: map[space]struct{}{},
		known: map[uint64]struct{}{}}
}

// space is one view of a mount table: a process sees only mounts below its root directory.
type space struct{ ns, rootMount, rootIno uint64 }

// node identifies the file at a path.
type node struct {
	dev, rdev, ino, mount uint64
	block                 bool
}

// statNode identifies the file at path. It follows links, including those of /proc, which
// lead to files that have no name in this mount namespace.
func statNode(path string) (node, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC,
		unix.STATX_TYPE|unix.STATX_INO|unix.STATX_MNT_ID, &st)
	if err != nil {
		return node{}, err
	}

	n := node{
		dev:   unix.Mkdev(st.Dev_major, st.Dev_minor),
		rdev:  unix.Mkdev(st.Rdev_major, st.Rdev_minor),
		ino:   st.Ino,
		block: st.Mode&unix.S_IFMT == unix.S_IFBLK,
	}

	if st.Mask&unix.STATX_MNT_ID != 0 { // Linux 5.8
		n.mount = st.Mnt_id
	}

	return n, nil
}

// isVolume reports whether n is on the volume, or is the volume's block device.
func (s *search) isVolume(n node) bool {
	if s.q.Tree != "" {
		_, ok := s.mounts[n.mount]
		return ok
	}
	return n.dev == s.q.Dev || n.block && n.rdev == s.q.Dev
}

// prepare locates the volume, for Holders.
func (s *search) prepare() error {
	self, err := statNode("/proc/self/ns/mnt")
	if err != nil {
		return fmt.Errorf("stat /proc/self/ns/mnt: %w", err)
	}
	s.ns, s.nsDev = self.ino, self.dev
	own, err := readMountTable("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	return s.locateVolume(own)
}

// locateVolume finds out how mount tables identify the volume and its mount at q.At. own is the table of
// this process.
func (s *search) locateVolume(own []tableEntry) error {
	if s.q.Tree != "" {
		if err := s.locateTree(own); err != nil {
			return err
		}
	}

	if s.q.At != "" {
		if m, err := kernel.MountAt(unix.AT_FDCWD, s.q.At); err == nil && m.Root {
			if n, err := statNode(s.q.At); err == nil {
				s.at = n.mount
			}
		}
	}

	for _, m := range own {
		if m.id == s.at && !s.isMountOf(m) {
			s.at = 0 // something else is mounted there now
		} else if m.id == s.at {
			s.group = m.peers
		}
	}

	return nil
}

// locateTree finds out how mount tables identify the tree: by the device of its filesystem
// and the path in it.
func (s *search) locateTree(own []tableEntry) error {
	path, err := filepath.EvalSymlinks(s.q.Tree)
	if err != nil {
		return err
	}

	if path, err = filepath.Abs(path); err != nil {
		return err
	}

	n, err := statNode(path)
	if err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}

	for _, m := range own {
		if m.id != n.mount {
			continue
		}
		rel, err := filepath.Rel(m.point, path)
		if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
			return fmt.Errorf("%s is not below its mount point %s", path, m.point)
		}
		s.dev, s.root = m.dev, filepath.Join(m.root, rel)
		return nil
	}

	return fmt.Errorf("the mount of %s is not in the mount table", path)
}

// isMountOf reports whether m is a mount of the volume or of a part of it.
func (s *search) isMountOf(m tableEntry) bool {
	if m.dev != s.dev {
		return false
	}
	root := strings.TrimSuffix(m.root, "//deleted")
	return s.root == "" || s.root == "/" || root == s.root || strings.HasPrefix(root, s.root+"/")
}

// searchAll searches mount tables first, because the other steps need the IDs of the volume's mounts.
func (s *search) searchAll() {
	s.readSpace("/proc/self", os.Getpid())
	pids := listNumbers("/proc")
	if !slices.Contains(pids, 1) {
		s.noteDenied(0, "/proc", fs.ErrPermission) // /proc is mounted with hidepid
	}

	for _, pid := range pids {
		if s.isOver() {
			return
		}
		base := "/proc/" + strconv.Itoa(pid)
		s.readSpace(base, pid)
		for _, tid := range listNumbers(base + "/task") {
			if tid != pid {
				s.readSpace(base+"/task/"+strconv.Itoa(tid), pid)
			}
		}
	}

	for _, pid := range pids {
		if s.isOver() {
			return
		}
		s.readProcess(pid)
	}

	if !s.isOver() {
		s.readPins()
		s.readSwaps()
		s.readDevices()
	}
}

// isOver reports whether to end the search.
func (s *search) isOver() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed || s.ctx.Err() != nil || len(s.processes) >= maxHolders
}

// noteDenied records that a process, or with 0 an unknown one, may not be inspected, if err says so of base, as
// isDenied finds out. Other errors are ignored.
func (s *search) noteDenied(pid int, base string, err error) {
	if !isDenied(base, err) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.denied == nil {
		s.denied = denials{}
	}
	s.denied[pid] = struct{}{}
}

// isDenied reports whether err says that what is at base in /proc, the directory of a process or thread, may not be
// inspected. Of a process that has just ended the kernel says EACCES, too (fs/proc/base.c, proc_pid_get_link), but then
// base is gone.
func isDenied(base string, err error) bool {
	if !errors.Is(err, fs.ErrPermission) {
		return false
	}
	_, err = os.Lstat(base)
	return !errors.Is(err, fs.ErrNotExist)
}

// denials are the processes that may not be inspected.
type denials map[int]struct{}

func (d denials) String() string {
	if _, unknown := d[0]; !unknown && len(d) == 1 {
		for pid := range d {
			return fmt.Sprintf("pid %d (%s)", pid, processName("/proc/"+strconv.Itoa(pid)))
		}
	}
	return "all processes"
}

func (s *search) addHolder(h Holder) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	if h.PID != 0 && h.Mountpoint == "" {
		s.processes = append(s.processes, h)
	} else if len(s.others) < maxHolders {
		s.others = append(s.others, h)
	}
}

// listNumbers lists the entries of a directory that are numbers.
func listNumbers(dir string) []int {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}

	defer f.Close()
	names, _ := f.Readdirnames(-1)
	var out []int
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil {
			out = append(out, n)
		}
	}

	return out
}

// readProcess adds what one process holds.
func (s *search) readProcess(pid int) {
	base := "/proc/" + strconv.Itoa(pid)
	var how []string
	exe := ""

	// Check its directories and its program.
	for _, link := range []string{"cwd", "root", "exe"} {
		n, err := statNode(base + "/" + link)
		if err != nil {
			s.noteDenied(pid, base, err)
		} else if s.isVolume(n) {
			how = append(how, link)
			if link == "exe" {
				exe, _ = os.Readlink(base + "/exe")
			}
		}
	}

	// Check the directories of its threads, which may differ.
	if len(how) == 0 {
		for _, tid := range listNumbers(base + "/task") {
			for _, link := range []string{"cwd", "root"} {
				n, err := statNode(base + "/task/" + strconv.Itoa(tid) + "/" + link)
				if err == nil && tid != pid && s.isVolume(n) {
					how = append(how, fmt.Sprintf("%s of thread %d", link, tid))
				}
			}
		}
	}

	// Check its open and mapped files.
	how = append(how, s.readFiles(base, pid)...)
	how = append(how, s.readMaps(base, pid, exe)...)
	if len(how) == 0 {
		return
	}

	h := Holder{PID: pid, Command: processName(base), UID: ownerOf(base), How: how[:min(len(how), maxHow)]}
	if n, err := statNode(base + "/ns/mnt"); err == nil {
		h.MountNS = n.ino
	}

	s.addHolder(h)
}

// readFiles returns the open files of a process that are on the volume.
func (s *search) readFiles(base string, pid int) (how []string) {
	f, err := os.Open(base + "/fd")
	if err != nil {
		s.noteDenied(pid, base, err)
		return nil
	}

	defer f.Close()

	names, err := f.Readdirnames(-1)
	s.noteDenied(pid, base, err)

	for _, name := range names {
		n, err := statNode(base + "/fd/" + name)
		if err != nil {
			s.noteDenied(pid, base, err)
			continue
		}
		if n.dev == s.nsDev {
			s.pins = append(s.pins, pin{path: base + "/fd/" + name, ns: n.ino, pid: pid})
		}
		if s.isVolume(n) && len(how) < maxHow {
			to, _ := os.Readlink(base + "/fd/" + name)
			how = append(how, "fd "+name+" "+to)
		}
	}

	return how
}

// readMaps returns the mapped files of a process that are on the volume.
func (s *search) readMaps(base string, pid int, exe string) (how []string) {
	f, err := os.Open(base + "/maps")
	if err != nil {
		s.noteDenied(pid, base, err)
		return nil
	}

	defer f.Close()

	seen := map[string]struct{}{exe: {}}
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		// address perms offset major:minor inode path
		fields := strings.Fields(sc.Text())
		if len(fields) < 6 || !strings.HasPrefix(fields[5], "/") {
			continue
		}

		if dev, ok := parseDev(fields[3], 16); !ok || dev != s.dev {
			continue
		}

		path := sc.Text()[strings.IndexByte(sc.Text(), '/'):]
		if _, dup := seen[path]; dup {
			continue
		}

		if s.q.Tree != "" {
			// The names in map_files are the same addresses without leading zeros.
			from, to, _ := strings.Cut(fields[0], "-")
			n, err := statNode(base + "/map_files/" + strings.TrimLeft(from, "0") + "-" + strings.TrimLeft(to, "0"))
			s.noteDenied(pid, base, err)
			if err != nil || !s.isVolume(n) {
				continue
			}
		}

		seen[path] = struct{}{}
		how = append(how, "mmap "+path)
		if len(how) >= maxHow {
			break
		}
	}

	s.noteDenied(pid, base, sc.Err())
	return how
}

// readSwaps adds swap files on the volume.
func (s *search) readSwaps() {
	b, err := os.ReadFile("/proc/swaps")
	if err != nil {
		s.noteDenied(0, "/proc", err)
		return
	}

	for line := range strings.Lines(string(b)) {
		name, _, _ := strings.Cut(line, " ")
		path := Unescape(name)
		if n, err := statNode(path); err == nil && s.isVolume(n) {
			s.addHolder(Holder{How: []string{"swap file " + path}})
		}
	}
}

// readDevices adds loop devices of files on the volume, and block devices stacked on its
// device.
func (s *search) readDevices() {
	files, _ := loopdev.Files()
	for _, f := range files {
		if dev := loopdev.DevicePath(f.Index); s.hasBehind(dev, f.Path) {
			s.addHolder(Holder{How: []string{"loop device " + dev + " on " + f.Path}})
		}
	}

	if s.q.Tree == "" {
		dir := fmt.Sprintf("/sys/dev/block/%d:%d/holders", unix.Major(s.dev), unix.Minor(s.dev))
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			s.addHolder(Holder{How: []string{"block device " + e.Name()}})
		}
	}
}

// hasBehind reports whether a loop device is attached to a file of the volume.
func (s *search) hasBehind(dev, path string) bool {
	if s.q.Tree != "" {
		// The device does not record through which mount its file was opened.
		n, err := statNode(path)
		return err == nil && s.isVolume(n)
	}

	f, err := os.Open(dev)
	if err != nil {
		s.noteDenied(0, "/proc", err)
		return false
	}

	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	return err == nil && (info.Device == s.dev || info.Rdevice == s.dev)
}

// processName returns the name of a process, made printable, because processes choose it.
func processName(base string) string {
	b, _ := os.ReadFile(base + "/comm")
	return printable(strings.TrimSuffix(string(b), "\n"))
}
