package diagnose

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Limits of what is read: whoever owns a database, or a container, decides what is there.
const (
	configBytes  = 1 << 20 // longest file of settings, command line or environment
	mostEntries  = 4096    // entries of a directory that are read
	mostRetries  = 16      // tries of a lookup while directories move
	mostIncluded = 100     // files of settings that one database may have
)

// kernelFS are filesystems in which a regular file can wait or act when it is read, such as /proc/kmsg and trace_pipe.
var kernelFS = []int64{unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC,
	unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC, unix.PSTOREFS_MAGIC,
	unix.EFIVARFS_MAGIC, unix.BINFMTFS_MAGIC, unix.SELINUX_MAGIC, unix.SMACK_MAGIC, unix.RDTGROUP_SUPER_MAGIC}

// files looks files up by names that others chose, as the owner of a database or of a container did.
type files struct {
	dir *os.File
	// within is the path of dir if names and links must not lead out of it. Otherwise, as after chroot, dir is / for
	// absolute names and links.
	within string
}

// filesWithin returns the files in a directory of this host.
func filesWithin(dir string) (files, error) {
	f, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	return files{f, dir}, err
}

// hostFiles returns the files of this host.
func hostFiles() (files, error) {
	f, err := os.OpenFile("/", unix.O_PATH|unix.O_DIRECTORY, 0)
	return files{dir: f}, err
}

func (r files) close() {
	if r.dir != nil {
		r.dir.Close()
	}
}

// show returns a path as it is printed.
func (r files) show(path string) string {
	if r.within != "" {
		return filepath.Join(r.within, path)
	}
	return path
}

// find returns an O_PATH descriptor of what a path leads to. That waits for nothing, and touches nothing. The error is
// os.ErrNotExist if nothing is there.
func (r files) find(path string, flags uint64) (*os.File, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC | flags,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	if r.within != "" {
		how.Resolve = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS
	}

	for range mostRetries {
		fd, err := unix.Openat2(int(r.dir.Fd()), path, &how)
		switch {
		case errors.Is(err, unix.EAGAIN):
			continue
		case errors.Is(err, unix.ENOTDIR):
			return nil, os.ErrNotExist
		case errors.Is(err, unix.EXDEV):
			return nil, errors.New("leads out of " + r.within)
		case err != nil:
			return nil, err
		}
		return os.NewFile(uintptr(fd), path), nil
	}
	return nil, unix.EAGAIN
}

// open opens a regular file or a directory (S_IFREG, S_IFDIR) for reading. It opens nothing else, because that could
// wait, or do something. It leaves the time of access as it is if it may.
func (r files) open(path string, wanted uint32) (*os.File, error) {
	at, err := r.find(path, 0)
	if err != nil {
		return nil, err
	}
	defer at.Close()

	// Look what it is before it is really opened.
	var st unix.Stat_t
	var fs unix.Statfs_t
	fd := int(at.Fd())
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, err
	}
	switch {
	case wanted == unix.S_IFREG && st.Mode&unix.S_IFMT != wanted:
		return nil, errors.New("not a regular file")
	case st.Mode&unix.S_IFMT != wanted:
		return nil, errors.New("not a directory")
	case slices.Contains(kernelFS, int64(fs.Type)):
		return nil, errors.New("belongs to the kernel")
	}

	// O_NONBLOCK: do not wait for a program that has a lease on the file.
	const flags = unix.O_NONBLOCK | unix.O_CLOEXEC
	name := "/proc/self/fd/" + strconv.Itoa(fd)
	got, err := unix.Open(name, flags|unix.O_NOATIME, 0)
	if errors.Is(err, unix.EPERM) {
		got, err = unix.Open(name, flags, 0)
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(got), path), nil
}

// is reports whether dir is this directory.
func (r files) is(other os.FileInfo) bool {
	own, err := r.dir.Stat()
	return err == nil && os.SameFile(own, other)
}

// read returns a file that has at most so many bytes.
func (r files) read(path string, most int64) ([]byte, error) {
	f, err := r.open(path, unix.S_IFREG)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAtMost(f, most)
}

// head returns the first bytes of a file; fewer if it is shorter, none if it cannot be read.
func (r files) head(path string, n int64) []byte {
	f, err := r.open(path, unix.S_IFREG)
	if err != nil {
		return nil
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, n))
	return b
}

// exists reports whether there is something of this name, whatever it is.
func (r files) exists(path string) bool {
	f, err := r.find(path, unix.O_NOFOLLOW)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// list returns the paths of what is in a directory and ends in ext, in the order of their names.
func (r files) list(dir, ext string) (out []string, err error) {
	all, err := r.entries(dir)
	for _, e := range all {
		if strings.HasSuffix(e.Name(), ext) && !strings.HasPrefix(e.Name(), ".") {
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	return out, err
}

// entries returns the first entries of a directory, in the order of their names.
func (r files) entries(dir string) ([]os.DirEntry, error) {
	f, err := r.open(dir, unix.S_IFDIR)
	if err != nil {
		return nil, err
	}
	defer f.Close()

	all, err := f.ReadDir(mostEntries)
	if errors.Is(err, io.EOF) { // it is empty
		err = nil
	}
	slices.SortFunc(all, func(a, b os.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return all, err
}

func readAtMost(f io.Reader, most int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(b)) > most {
		err = errors.New("too long")
	}
	return b, err
}

// server is a process. What is read by its directory in /proc is of this process, even if another gets its number.
type server struct {
	pid  int
	proc *os.File
}

// findServer returns the process that works in a data directory and that is accepts, nil if none does.
func findServer(data files, is func(*server) bool) *server {
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, name := range all {
		proc, err := os.OpenFile(name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			continue // it has ended
		}
		s := &server{proc: proc}
		s.pid, _ = strconv.Atoi(filepath.Base(name))
		if is(s) {
			if cwd, err := os.Stat(s.path("cwd")); err == nil && data.is(cwd) {
				return s
			}
		}
		s.close()
	}
	return nil
}

func (s *server) path(name string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(s.proc.Fd())) + "/" + name
}

func (s *server) close() {
	if s != nil {
		s.proc.Close()
	}
}

// strings returns the strings of cmdline or environ.
func (s *server) strings(name string) ([]string, error) {
	f, err := os.Open(s.path(name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := readAtMost(f, configBytes)
	return strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00"), err
}

// files returns the files that the server sees: those of its container, if it runs in one. Without a server, that is
// this host.
func (s *server) files() (files, error) {
	if s == nil {
		return hostFiles()
	}
	f, err := os.OpenFile(s.path("root"), unix.O_PATH|unix.O_DIRECTORY, 0)
	return files{dir: f}, err
}

// locate returns where to look up names in a data directory: as the server does, whose links may lead anywhere in its
// root, or within data, if there is no server or it calls the directory something else.
func (s *server) locate(data, root files) (in files, dir string) {
	if s == nil {
		return data, "."
	}
	cwd, err := os.Readlink(s.path("cwd"))
	if err != nil {
		return data, "."
	}
	f, err := root.find(cwd, unix.O_DIRECTORY)
	if err != nil {
		return data, "."
	}
	defer f.Close()
	if is, err := f.Stat(); err != nil || !data.is(is) {
		return data, "."
	}
	return root, cwd
}

// config is what files of settings say to a server, which may include others: the last word counts.
type config struct {
	root   files            // what absolute names begin at
	wanted []string         // names of the settings to remember
	values map[string]value // by name
	read   int              // number of files
	// unread says which file could not be read, and why. Values from before it are forgotten: it may have others.
	unread string
}

func (c *config) set(name, text, from string) {
	if slices.Contains(c.wanted, name) {
		c.values[name] = value{text, from}
	}
}

// skip forgets what a file may have said otherwise.
func (c *config) skip(file string, why any) {
	c.unread = fmt.Sprintf("%s could not be read: %v", file, why)
	clear(c.values)
}

// file returns the content of a file of settings, "" if there is none.
func (c *config) file(in files, path string, required bool) string {
	c.read++
	if c.read > mostIncluded {
		c.skip(in.show(path), fmt.Sprintf("it is one of more than %d", mostIncluded))
		return ""
	}

	b, err := in.read(path, configBytes)
	if err != nil && (required || !errors.Is(err, os.ErrNotExist)) {
		c.skip(in.show(path), why(err))
	}
	if err != nil {
		return ""
	}
	return string(b)
}

// list returns the files in a directory that end in ext.
func (c *config) list(in files, dir, ext string) []string {
	all, err := in.list(dir, ext)
	if err == nil && len(all) == mostEntries {
		err = errors.New("it has too many files")
	}
	if err != nil {
		c.skip(in.show(dir), why(err))
	}
	return all
}

func why(err error) string {
	if errors.Is(err, os.ErrNotExist) {
		return "it does not exist"
	}
	return err.Error()
}
