package treewalk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"iter"
	"os"

	"golang.org/x/sys/unix"
)

// Dirent is an entry of a directory, as getdents64(2) gives it.
type Dirent struct {
	Ino  uint64
	Off  int64 // where the next one is, for lseek
	Type uint8 // DT_*; DT_UNKNOWN where the filesystem does not keep it
	Name string
}

// Dirents iterates over what getdents64 put into buf, "." and ".." included.
func Dirents(buf []byte) iter.Seq[Dirent] {
	return func(yield func(Dirent) bool) {
		const header = 19 // u64 ino, s64 off, u16 reclen, u8 type; then the name, NUL
		for len(buf) >= header {
			size := int(binary.NativeEndian.Uint16(buf[16:]))
			if size < header || size > len(buf) {
				return
			}

			raw := buf[header:size]
			if i := bytes.IndexByte(raw, 0); i >= 0 {
				raw = raw[:i]
			}

			e := Dirent{
				Ino:  binary.NativeEndian.Uint64(buf),
				Off:  int64(binary.NativeEndian.Uint64(buf[8:])),
				Type: buf[18],
				Name: string(raw),
			}

			if !yield(e) {
				return
			}

			buf = buf[size:]
		}
	}
}

// ReadDirents reads all entries of the open directory f, but "." and "..", in
// the order of the filesystem. Types are always known: where the filesystem does
// not keep them, each file is asked. Unlike os.File.ReadDir it tells the inode
// numbers, and never stats otherwise. f must be at its beginning. Errors are
// system error numbers.
func ReadDirents(f *os.File) ([]Dirent, error) {
	buf := make([]byte, 32<<10)
	var out []Dirent
	for {
		n, err := unix.Getdents(int(f.Fd()), buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return out, nil
		}

		for e := range Dirents(buf[:n]) {
			if e.Name == "." || e.Name == ".." {
				continue
			}
			if e.Type == unix.DT_UNKNOWN {
				var st unix.Stat_t
				if err := unix.Fstatat(int(f.Fd()), e.Name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
					return nil, err
				}
				e.Type = uint8(st.Mode & unix.S_IFMT >> 12)
			}
			out = append(out, e)
		}
	}
}
