package kernel_test

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// TestResident counts the pages of a file that was written, and of one that was dropped from the page cache.
func TestResident(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := int64(os.Getpagesize())
	check := func(want int64) {
		t.Helper()
		if got, err := kernel.Resident(f); err != nil || got != want {
			t.Errorf("%d bytes resident, %v; want %d", got, err, want)
		}
	}

	check(0)
	if _, err := f.Write(make([]byte, 2*page+1)); err != nil {
		t.Fatal(err)
	}
	check(3 * page)

	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if st.Type == unix.TMPFS_MAGIC {
		return // whose pages are the file
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	check(0)
}
