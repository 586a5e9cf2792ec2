package treewalk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"iter"
	"os"

	"golang.org/x/sys/unix"
)

// Dirent is an entry of a directory, as getdents64(2) returns it.
type Dirent struct {
	Ino  uint64
	Off  int64 // position of the next entry, for lseek
	Type uint8 // DT_*; DT_UNKNOWN if the filesystem does not store types
	Name string
}

// Dirents iterates over the entries that getdents64 wrote to buf, including "." and "..".
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

// ReadDirents returns all entries of the open directory f except "." and "..", in
// the order of the filesystem. Types are always known: if the filesystem does
// not store them, it stats each file. Unlike os.File.ReadDir, it returns inode
// numbers and does not stat other files. f must be at its beginning. Errors are
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
