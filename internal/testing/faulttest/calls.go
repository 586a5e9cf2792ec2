//go:build linux && (amd64 || arm64)

package faulttest

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A call describes one system call of the table: how to tell whether these
// arguments change state, and what they name.
type call struct {
	name   string
	decode decoder
}

type args [6]uint64

// A decoder reports whether a call with arguments a, about to be made by p,
// counts, and what it is about.
type decoder func(p *caller, a args) (what, bool)

// what a call is about. An empty detail stands for the paths.
type what struct {
	paths  []string
	detail string
}

func (w what) String() string {
	if w.detail != "" {
		return w.detail
	}
	return strings.Join(w.paths, " -> ")
}

// calls is indexed by system call number. A call that is not in it is never
// counted, never killed at and never made to fail, so that the Go runtime's own
// work (futex, mmap, epoll) is out of reach.
//
// The numbers that only some architectures have are in legacyCalls.
var calls = func() (table [512]*call) {
	for nr, c := range commonCalls {
		table[nr] = &c
	}
	for nr, c := range legacyCalls {
		table[nr] = &c
	}
	return table
}()

// Calls returns the names of the system calls that can be steps, sorted. Some
// count only with certain arguments: open needs O_CREAT, O_TRUNC or O_TMPFILE;
// write and its relatives a regular file or block device that is not the
// program's own standard output or error; ioctl a request of MutatingIoctls or
// Options.Ioctls; clone must make a process and not a thread; flock and fcntl
// need Options.Locks.
func Calls() []string {
	var names []string
	for _, c := range calls {
		if c != nil {
			names = append(names, c.name)
		}
	}
	slices.Sort(names)
	return names
}

var commonCalls = map[int]call{
	unix.SYS_OPENAT:  {"openat", openFlags(2, at(0, 1))},
	unix.SYS_OPENAT2: {"openat2", openHow},

	unix.SYS_WRITE:           {"write", written(0)},
	unix.SYS_PWRITE64:        {"pwrite64", written(0)},
	unix.SYS_WRITEV:          {"writev", written(0)},
	unix.SYS_PWRITEV:         {"pwritev", written(0)},
	unix.SYS_PWRITEV2:        {"pwritev2", written(0)},
	unix.SYS_SENDFILE:        {"sendfile", written(0)},
	unix.SYS_SPLICE:          {"splice", written(2)},
	unix.SYS_COPY_FILE_RANGE: {"copy_file_range", written(2)},
	unix.SYS_FTRUNCATE:       {"ftruncate", written(0)},
	unix.SYS_FALLOCATE:       {"fallocate", written(0)},
	unix.SYS_TRUNCATE:        {"truncate", path(0)},

	unix.SYS_FSYNC:           {"fsync", fd(0)},
	unix.SYS_FDATASYNC:       {"fdatasync", fd(0)},
	unix.SYS_SYNCFS:          {"syncfs", fd(0)},
	unix.SYS_SYNC_FILE_RANGE: {"sync_file_range", fd(0)},
	unix.SYS_SYNC:            {"sync", always},
	unix.SYS_MSYNC:           {"msync", always},

	unix.SYS_RENAMEAT2: {"renameat2", both(at(0, 1), at(2, 3))},
	unix.SYS_LINKAT:    {"linkat", both(at(0, 1), at(2, 3))},
	unix.SYS_SYMLINKAT: {"symlinkat", at(1, 2)},
	unix.SYS_UNLINKAT:  {"unlinkat", at(0, 1)},
	unix.SYS_MKDIRAT:   {"mkdirat", at(0, 1)},
	unix.SYS_MKNODAT:   {"mknodat", at(0, 1)},
	unix.SYS_BIND:      {"bind", bind},

	unix.SYS_FCHMOD:        {"fchmod", fd(0)},
	unix.SYS_FCHMODAT:      {"fchmodat", at(0, 1)},
	unix.SYS_FCHMODAT2:     {"fchmodat2", at(0, 1)},
	unix.SYS_FCHOWN:        {"fchown", fd(0)},
	unix.SYS_FCHOWNAT:      {"fchownat", at(0, 1)},
	unix.SYS_UTIMENSAT:     {"utimensat", at(0, 1)},
	unix.SYS_SETXATTR:      {"setxattr", path(0)},
	unix.SYS_LSETXATTR:     {"lsetxattr", path(0)},
	unix.SYS_FSETXATTR:     {"fsetxattr", fd(0)},
	unix.SYS_SETXATTRAT:    {"setxattrat", at(0, 1)},
	unix.SYS_REMOVEXATTR:   {"removexattr", path(0)},
	unix.SYS_LREMOVEXATTR:  {"lremovexattr", path(0)},
	unix.SYS_FREMOVEXATTR:  {"fremovexattr", fd(0)},
	unix.SYS_REMOVEXATTRAT: {"removexattrat", at(0, 1)},
	unix.SYS_FILE_SETATTR:  {"file_setattr", at(0, 1)},

	unix.SYS_IOCTL: {"ioctl", ioctl},
	unix.SYS_FLOCK: {"flock", lock(nil)},
	unix.SYS_FCNTL: {"fcntl", lock([]uint64{unix.F_SETLK, unix.F_SETLKW, unix.F_OFD_SETLK, unix.F_OFD_SETLKW})},

	unix.SYS_MOUNT:          {"mount", both(path(0), path(1))},
	unix.SYS_UMOUNT2:        {"umount2", path(0)},
	unix.SYS_PIVOT_ROOT:     {"pivot_root", both(path(0), path(1))},
	unix.SYS_FSOPEN:         {"fsopen", text(0)},
	unix.SYS_FSCONFIG:       {"fsconfig", fsconfig},
	unix.SYS_FSMOUNT:        {"fsmount", always},
	unix.SYS_MOVE_MOUNT:     {"move_mount", both(at(0, 1), at(2, 3))},
	unix.SYS_OPEN_TREE:      {"open_tree", openTree},
	unix.SYS_OPEN_TREE_ATTR: {"open_tree_attr", openTree},
	unix.SYS_MOUNT_SETATTR:  {"mount_setattr", at(0, 1)},

	unix.SYS_CLONE:    {"clone", cloneFlags(func(_ *caller, a args) uint64 { return a[0] })},
	unix.SYS_CLONE3:   {"clone3", cloneFlags(clone3Flags)},
	unix.SYS_EXECVE:   {"execve", text(0)},
	unix.SYS_EXECVEAT: {"execveat", text(1)},
}

func always(*caller, args) (what, bool) { return what{}, true }

// path: argument i is a path relative to the working directory.
func path(i int) decoder {
	return func(p *caller, a args) (what, bool) {
		return named(p.resolve(unix.AT_FDCWD, p.str(a[i]))), true
	}
}

// at: argument dir is a directory's descriptor, argument i a path under it.
func at(dir, i int) decoder {
	return func(p *caller, a args) (what, bool) {
		return named(p.resolve(int(int32(a[dir])), p.str(a[i]))), true
	}
}

// fd: argument i is a descriptor, of any kind.
func fd(i int) decoder {
	return func(p *caller, a args) (what, bool) {
		return named(p.fdPath(int(int32(a[i])))), true
	}
}

// text: argument i is a string for people; it selects nothing.
func text(i int) decoder {
	return func(p *caller, a args) (what, bool) {
		return what{detail: p.str(a[i])}, true
	}
}

// written: data goes to descriptor i, which counts if it is stored there.
func written(i int) decoder {
	return func(p *caller, a args) (what, bool) {
		n := int(int32(a[i]))
		if n == 1 || n == 2 {
			if p.isProgram {
				return what{}, false
			}
		}
		if !p.isStorage(n) {
			return what{}, false
		}
		return named(p.fdPath(n)), true
	}
}

func both(x, y decoder) decoder {
	return func(p *caller, a args) (what, bool) {
		w, _ := x(p, a)
		v, _ := y(p, a)
		return what{paths: append(w.paths, v.paths...)}, true
	}
}

// named is a call about one file. What is no path (a socket's name, "ext4" as
// the source of a mount) is shown but not matched against prefixes.
func named(name string) what {
	if strings.HasPrefix(name, "/") {
		return what{paths: []string{name}}
	}
	return what{detail: name}
}

const openMutates = unix.O_CREAT | unix.O_TRUNC | unix.O_TMPFILE&^unix.O_DIRECTORY

func openFlags(flags int, name decoder) decoder {
	return func(p *caller, a args) (what, bool) {
		if a[flags]&openMutates == 0 {
			return what{}, false // before anything is read from the program: most opens end here
		}
		return name(p, a)
	}
}

func openHow(p *caller, a args) (what, bool) {
	if p.word(a[2])&openMutates == 0 {
		return what{}, false
	}
	return at(0, 1)(p, a)
}

func fsconfig(_ *caller, a args) (what, bool) {
	const createExclusive = 8 // FSCONFIG_CMD_CREATE_EXCL
	switch a[1] {
	case unix.FSCONFIG_CMD_CREATE, createExclusive:
		return what{detail: "CREATE"}, true
	case unix.FSCONFIG_CMD_RECONFIGURE:
		return what{detail: "RECONFIGURE"}, true
	}
	return what{}, false
}

func openTree(p *caller, a args) (what, bool) {
	if a[2]&unix.OPEN_TREE_CLONE == 0 {
		return what{}, false
	}
	return at(0, 1)(p, a)
}

// lock: taking or dropping a file lock, if that is wanted. cmds are the
// commands in the second argument that do this; nil is any.
func lock(cmds []uint64) decoder {
	return func(p *caller, a args) (what, bool) {
		if !p.opt.Locks || cmds != nil && !slices.Contains(cmds, a[1]) {
			return what{}, false
		}
		return named(p.fdPath(int(int32(a[0])))), true
	}
}

// bind counts for sockets that appear in the file system.
func bind(p *caller, a args) (what, bool) {
	addr := p.bytes(a[1], int(min(a[2], uint64(unsafe.Sizeof(unix.RawSockaddrUnix{})))))
	if len(addr) < 3 || addr[0] != unix.AF_UNIX || addr[1] != 0 || addr[2] == 0 {
		return what{}, false // the family is 16 bits, little-endian on both architectures
	}
	name, _, _ := strings.Cut(string(addr[2:]), "\x00")
	return named(p.resolve(unix.AT_FDCWD, name)), true
}

// cloneFlags: a new process counts, a new thread does not.
func cloneFlags(get func(*caller, args) uint64) decoder {
	return func(p *caller, a args) (what, bool) {
		flags := get(p, a)
		if flags&unix.CLONE_THREAD != 0 {
			return what{}, false
		}
		// Go's os package makes a child of this form, that does nothing, once
		// in a process to learn whether CLONE_PIDFD works.
		const trial = unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_PIDFD
		return what{}, flags != trial
	}
}

func clone3Flags(p *caller, a args) uint64 { return p.word(a[0]) }

// caller gives decoders access to the thread that is about to make a call,
// which stands still in the meantime.
type caller struct {
	tid       int
	isProgram bool // a thread of the traced program itself, not of a process that it started
	opt       *Options
}

func (p *caller) proc(name string) string {
	return "/proc/" + strconv.Itoa(p.tid) + "/" + name
}

// fdPath returns what descriptor n is open on: a path, or a name such as
// "pipe:[123]". A file without a name has " (deleted)" behind it.
func (p *caller) fdPath(n int) string {
	buf := make([]byte, unix.PathMax)
	size, err := unix.Readlink(p.proc("fd/"+strconv.Itoa(n)), buf)
	if err != nil {
		return fmt.Sprintf("fd %d", n)
	}
	return string(buf[:size])
}

// isStorage says whether descriptor n is open on something that keeps what is
// written to it.
func (p *caller) isStorage(n int) bool {
	var st unix.Statx_t

	// DONT_SYNC: a file system that the program itself serves could not answer.
	err := unix.Statx(unix.AT_FDCWD, p.proc("fd/"+strconv.Itoa(n)), unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	if err != nil {
		return false
	}

	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return true
	case unix.S_IFREG:
		return !strings.HasPrefix(p.fdPath(n), "/memfd:")
	}

	return false
}

// resolve makes name, relative to directory descriptor dir, absolute.
// Symbolic links in it stay as they are.
func (p *caller) resolve(dir int, name string) string {
	if filepath.IsAbs(name) {
		return filepath.Clean(name)
	}
	if dir != unix.AT_FDCWD {
		return filepath.Join(p.fdPath(dir), name) // name may be empty: the descriptor itself
	}
	if name == "" {
		return ""
	}

	buf := make([]byte, unix.PathMax)
	size, err := unix.Readlink(p.proc("cwd"), buf)
	if err != nil {
		return name
	}

	return filepath.Join(string(buf[:size]), name)
}

// bytes reads up to n bytes of the program's memory at addr; fewer if the
// memory ends there.
func (p *caller) bytes(addr uint64, n int) []byte {
	if addr == 0 || n == 0 {
		return nil
	}
	buf := make([]byte, n)
	local := []unix.Iovec{{Base: &buf[0], Len: uint64(n)}}
	got, err := unix.ProcessVMReadv(p.tid, local, []unix.RemoteIovec{{Base: uintptr(addr), Len: n}}, 0)
	if err != nil {
		return nil
	}
	return buf[:got]
}

// str reads a NUL-terminated string, up to the length of the longest path.
func (p *caller) str(addr uint64) string {
	const page = 4096 // no page is smaller, so a read up to the end of one needs no other
	var s []byte
	for addr != 0 && len(s) < unix.PathMax {
		b := p.bytes(addr, page-int(addr%page))
		if len(b) == 0 {
			break
		}
		for i, c := range b {
			if c == 0 {
				return string(append(s, b[:i]...))
			}
		}
		s = append(s, b...)
		addr += uint64(len(b))
	}

	return string(s)
}

// word reads 64 bits.
func (p *caller) word(addr uint64) uint64 {
	b := p.bytes(addr, 8)
	if len(b) < 8 {
		return 0
	}
	return *(*uint64)(unsafe.Pointer(&b[0]))
}
