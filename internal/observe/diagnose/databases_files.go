package diagnose

import (
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// configBytes is the longest file of settings that is read.
const configBytes = 1 << 20

// mostEntries limits how many entries of a directory are looked at.
const mostEntries = 4096

// serverRoot finds files where a server does, which may run in a container. Whoever owns the files decides what their
// names lead to: only regular files and directories are opened, and nothing that waits or does something when opened.
type serverRoot struct {
	dir *os.File // what is / for the server; nil: this host's
}

// rootOf returns the root of a process. If it has ended, or may not be looked at, that is this host's.
func rootOf(pid int) serverRoot {
	if pid <= 0 {
		return serverRoot{}
	}
	dir, err := os.OpenFile("/proc/"+strconv.Itoa(pid)+"/root", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return serverRoot{}
	}
	return serverRoot{dir}
}

func (r serverRoot) close() {
	if r.dir != nil {
		r.dir.Close()
	}
}

// open opens a file of the type wanted (S_IFREG, S_IFDIR); nil if there is none.
func (r serverRoot) open(path string, wanted uint32) *os.File {
	at, how := unix.AT_FDCWD, unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC}
	if r.dir != nil {
		at, how.Resolve = int(r.dir.Fd()), unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_MAGICLINKS
	}
	fd, err := unix.Openat2(at, path, &how)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)

	// Look what it is before it is really opened.
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != wanted {
		return nil
	}
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return nil
	}
	return f
}

// read returns the first bytes of a file, nil if there is none.
func (r serverRoot) read(path string, most int64) []byte {
	f := r.open(path, unix.S_IFREG)
	if f == nil {
		return nil
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, most))
	return b
}

// list returns the paths of what is in a directory and ends in ext, in the order of their names.
func (r serverRoot) list(dir, ext string) (out []string) {
	for _, e := range r.entries(dir) {
		if strings.HasSuffix(e.Name(), ext) && !strings.HasPrefix(e.Name(), ".") {
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	return out
}

// entries returns what is in a directory, in the order of the names.
func (r serverRoot) entries(dir string) []os.DirEntry {
	f := r.open(dir, unix.S_IFDIR)
	if f == nil {
		return nil
	}
	defer f.Close()
	all, _ := f.ReadDir(mostEntries)
	sortByName(all)
	return all
}

// commandLine returns the arguments of a process.
func commandLine(pid int) []string {
	return strings.Split(strings.TrimSuffix(slurp("/proc/"+strconv.Itoa(pid)+"/cmdline"), "\x00"), "\x00")
}

// printable replaces what could control a terminal: whoever owns a database chooses names and values.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
