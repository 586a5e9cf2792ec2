package drivertest

import (
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/driver"
)

// Sealed gives the text of an identity that a test has changed the checksum of what it
// is now; text without a checksum stays as it is.
func Sealed(text string) string {
	body, _, ok := strings.Cut(text, `,"sum":`)
	if !ok {
		return text
	}
	return fmt.Sprintf(`%s,"sum":"%08x"}`, body, crc32.Checksum([]byte(body), crc32.MakeTable(crc32.Castagnoli)))
}

// ReadMeta returns the text of the identity in a file of package objdir, "" if there is none. Like the package, it
// reads the attribute if the content is lost, which nobody has synced where there is one.
func ReadMeta(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	if text := strings.Trim(string(b), "\x00\n"); text != "" {
		return text
	}
	b = make([]byte, driver.MaxIdentityBytes)
	n, _ := unix.Getxattr(path, "trusted.pando.identity", b) // not there: empty
	return string(b[:max(n, 0)])
}

// WriteMeta writes the text of an identity over what there was at path. Whether the
// object is committed stays as it was.
func WriteMeta(path, text string) error {
	mode := os.FileMode(0o600)
	if st, err := os.Lstat(path); err == nil {
		mode = st.Mode().Perm()
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	return os.WriteFile(path, []byte(text+"\n"), mode)
}

// MetaPath is the path of that file, in a pool's data directory.
func MetaPath(data string, id driver.ObjectID) string {
	return filepath.Join(data, "objects", string(id)+".meta")
}
