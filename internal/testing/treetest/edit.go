package treetest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
)

// Editor makes random changes to a tree.
type Editor struct {
	T   testing.TB
	R   *rand.Rand
	Dir string // of the tree

	clock int64

	flagged bool // something may be immutable or append-only
}

// unlock makes everything changeable, and returns what was not, by inode number.
func (e *Editor) unlock() map[uint64]uint32 {
	if !e.flagged {
		return nil
	}

	locked := map[uint64]uint32{}
	dirs, files := e.paths()
	for _, p := range append(dirs, files...) {
		var st unix.Stat_t
		e.must(unix.Lstat(e.abs(p), &st))
		f, err := kernel.OpenForFlags(unix.AT_FDCWD, e.abs(p))
		if err == unix.EOPNOTSUPP {
			continue
		}
		e.must(err)
		if flags := kernel.UnprotectFile(f); flags != 0 {
			locked[st.Ino] = flags
		}
		unix.Close(f)
	}

	return locked
}

// lock takes back what unlock did. A new file may have the number of one that is gone.
func (e *Editor) lock(locked map[uint64]uint32) {
	if len(locked) == 0 {
		return
	}

	dirs, files := e.paths()
	for _, p := range append(dirs, files...) {
		var st unix.Stat_t
		e.must(unix.Lstat(e.abs(p), &st))
		f, err := kernel.OpenForFlags(unix.AT_FDCWD, e.abs(p))
		if err == unix.EOPNOTSUPP {
			continue
		}
		e.must(err)
		e.must(kernel.Protect(f, locked[st.Ino]))
		unix.Close(f)
	}
}

func (e *Editor) must(err error) {
	e.T.Helper()
	if err != nil {
		e.T.Fatal(err)
	}
}

// paths lists what is in the tree, relative: directories ("" is the root), and all else.
func (e *Editor) paths() (dirs, files []string) {
	e.must(filepath.WalkDir(e.Dir, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}

		rel, _ := filepath.Rel(e.Dir, p)
		if rel == "." {
			rel = ""
		}
		if rel == "lost+found" {
			return filepath.SkipDir
		}

		if d.IsDir() {
			dirs = append(dirs, rel)
		} else {
			files = append(files, rel)
		}

		return nil
	}))

	sort.Strings(dirs)
	sort.Strings(files)
	return dirs, files
}

func (e *Editor) abs(rel string) string { return filepath.Join(e.Dir, rel) }

func (e *Editor) pick(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return s[e.R.IntN(len(s))]
}

func (e *Editor) bytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(e.R.Uint32())
	}
	return b
}

// name is a new name in dir, or one that is taken.
func (e *Editor) name(dirs []string) string {
	names := []string{"a", "b", "c", "d", "new\nline", "\xff\xfe", "x y", "back\\slash"}
	n := names[e.R.IntN(len(names))]
	if e.R.IntN(2) == 0 {
		n = fmt.Sprintf("n%d", e.R.IntN(40))
	}
	return filepath.Join(e.pick(dirs), n)
}

func (e *Editor) regular(files []string) string {
	for range 20 {
		f := e.pick(files)
		if st, err := os.Lstat(e.abs(f)); err == nil && st.Mode().IsRegular() {
			return f
		}
	}
	return ""
}

func (e *Editor) file(p string) {
	if _, err := os.Lstat(p); err == nil {
		return
	}
	sizes := []int{0, 1, 100, 4096, 5000, 70000, 200000}
	e.must(os.WriteFile(p, e.bytes(sizes[e.R.IntN(len(sizes))]), 0o644))
}

// Fill makes a tree in an empty directory.
func (e *Editor) Fill() {
	for range 12 {
		dirs, _ := e.paths()
		e.must(os.MkdirAll(e.abs(e.name(dirs)), 0o755))
	}

	for range 40 {
		dirs, _ := e.paths()
		p := e.abs(e.name(dirs))
		if _, err := os.Lstat(p); err == nil {
			continue
		}
		e.file(p)
	}

	for range 60 {
		e.Edit()
	}
}

// Edit makes one change, if what it has chosen can be done, whatever forbids it. What
// is immutable or append-only is so afterwards, if it is still there.
func (e *Editor) Edit() {
	locked := e.unlock()
	e.change()
	e.lock(locked)
}

func (e *Editor) change() {
	dirs, files := e.paths()
	file, any := e.abs(e.regular(files)), e.abs(e.pick(files))
	dir := e.pick(dirs)
	if e.R.IntN(4) == 0 || len(files) == 0 {
		any = e.abs(dir)
	}

	hasFile := file != e.Dir
	switch n := e.R.IntN(26); {
	case n >= 24:
		// Not immutable or append-only: random operations on such files are refused.
		flags := []uint32{0, NoDump, NoAtime, NoDump | NoAtime}[e.R.IntN(4)]
		if st, err := os.Lstat(any); err == nil && (st.IsDir() || st.Mode().IsRegular()) {
			// In an overlay, a file may have other flags that the filesystem of the upper layer does not support.
			if err := SetFlags(any, flags); err != unix.EOPNOTSUPP {
				e.must(err)
			}
			e.flagged = true
		}
	case n == 0 && hasFile: // in place
		f, err := os.OpenFile(file, os.O_RDWR, 0)
		e.must(err)
		st, _ := f.Stat()
		_, err = f.WriteAt(e.bytes(1+e.R.IntN(6000)), e.R.Int64N(st.Size()+1))
		e.must(err)
		e.must(f.Close())
	case n == 1 && hasFile:
		st, err := os.Stat(file)
		e.must(err)
		e.must(os.Truncate(file, e.R.Int64N(st.Size()+20000)))
	case n == 2 && hasFile: // the same bytes again
		b, err := os.ReadFile(file)
		e.must(err)
		e.must(os.WriteFile(file, b, 0o644))
	case n == 3 && hasFile: // as editors save
		e.must(os.WriteFile(file+".tmp", e.bytes(e.R.IntN(9000)), 0o600))
		e.must(os.Rename(file+".tmp", file))
	case n == 4:
		if st, err := os.Lstat(any); err == nil && st.Mode()&os.ModeSymlink == 0 {
			e.must(unix.Chmod(any, uint32(0o700|e.R.IntN(0o10000))))
		}
	case n == 5:
		var st unix.Stat_t
		e.must(unix.Lstat(any, &st))
		e.must(os.Lchown(any, e.R.IntN(3)*1000, e.R.IntN(3)*1000))
		if st.Mode&unix.S_IFMT == unix.S_IFREG { // which may have lost setuid by that
			e.must(unix.Chmod(any, st.Mode&0o7777))
		}
	case n == 6 && hasFile:
		e.must(unix.Setxattr(file, fmt.Sprintf("user.%d", e.R.IntN(3)), e.bytes(e.R.IntN(50)), 0))
	case n == 7 && hasFile:
		_ = unix.Removexattr(file, fmt.Sprintf("user.%d", e.R.IntN(3)))
	case n == 8:
		e.clock++
		at := time.Unix(1600000000+e.clock, 12345)
		e.must(unix.UtimesNanoAt(unix.AT_FDCWD, any, []unix.Timespec{unix.NsecToTimespec(at.UnixNano()),
			unix.NsecToTimespec(at.UnixNano())}, unix.AT_SYMLINK_NOFOLLOW))
	case n <= 10:
		e.file(e.abs(e.name(dirs)))
	case n == 11:
		_ = os.Mkdir(e.abs(e.name(dirs)), 0o750)
	case n == 12:
		_ = os.Symlink(fmt.Sprint("to", e.R.IntN(9)), e.abs(e.name(dirs)))
	case n == 13:
		p := e.abs(e.name(dirs))
		if unix.Mknod(p, []uint32{unix.S_IFIFO, unix.S_IFSOCK, unix.S_IFCHR}[e.R.IntN(3)]|0o640, int(unix.Mkdev(1,
			uint32(e.R.IntN(4))))) == nil {
			e.must(unix.Chmod(p, 0o640))
		}
	case n == 14 && len(files) > 0:
		_ = os.Link(e.abs(e.pick(files)), e.abs(e.name(dirs)))
	case n <= 16 && len(files) > 0:
		e.must(os.Remove(e.abs(e.pick(files))))
	case n == 17 && dir != "" && len(dirs) > 6:
		e.must(os.RemoveAll(e.abs(dir)))
	case n <= 19:
		_ = os.Rename(any, e.abs(e.name(dirs))) // into itself and the like fail
	case n == 20 && len(files) > 0:
		_ = unix.Renameat2(unix.AT_FDCWD, any, unix.AT_FDCWD, e.abs(e.pick(files)), unix.RENAME_EXCHANGE)
	case n == 21 && hasFile: // file becomes directory
		e.must(os.Remove(file))
		e.must(os.Mkdir(file, 0o711))
		e.file(filepath.Join(file, "in"))
	case n == 22 && dir != "" && len(dirs) > 6: // gone and made again
		e.must(os.RemoveAll(e.abs(dir)))
		e.must(os.Mkdir(e.abs(dir), 0o755))
		e.file(filepath.Join(e.abs(dir), "a"))
	case n == 23 && hasFile:
		f, err := os.OpenFile(file, os.O_RDWR, 0)
		e.must(err)
		st, _ := f.Stat()
		if st.Size() > 8192 {
			_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE,
				4096*e.R.Int64N(st.Size()/4096), 4096*(1+e.R.Int64N(4)))
		}
		e.must(f.Close())
	}
}
