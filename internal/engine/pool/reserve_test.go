package pool

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestReserve: the reserve is real blocks, is given back piece by piece, and is taken again
// when there is room.
func TestReserve(t *testing.T) {
	p := &Pool{Dir: testfs.Ext4(t, 128<<20)}
	path := filepath.Join(p.Dir, reserveName)
	free := func() int64 {
		t.Helper()
		var st unix.Statfs_t
		if err := unix.Statfs(p.Dir, &st); err != nil {
			t.Fatal(err)
		}
		return int64(st.Bavail) * st.Bsize
	}
	size := func() int64 {
		t.Helper()
		st, err := os.Stat(path)
		if err != nil {
			return 0
		}
		return st.Size()
	}
	start := free()
	if err := p.MakeReserve(); err != nil || start-free() < reserveBytes {
		t.Errorf("it takes %d bytes, %v", start-free(), err)
	}
	if !p.SpendReserve(1<<20) || size() != reserveBytes-(1<<20) {
		t.Errorf("%d bytes are left", size())
	}

	// The last piece, and then there is none.
	for n := 1; n < reserveBytes>>20; n++ {
		if !p.SpendReserve(1 << 20) {
			t.Errorf("there is no piece %d", n)
		}
	}
	if p.SpendReserve(1<<20) || size() != 0 || free() < start {
		t.Errorf("%d bytes are left, %d of %d are free", size(), free(), start)
	}
	if err := p.MakeReserve(); err != nil || size() != reserveBytes {
		t.Errorf("%d bytes after it was made again, %v", size(), err)
	}

	// Without room it stays away, and that is no error.
	for p.SpendReserve(1 << 20) {
		continue
	}
	filler := filepath.Join(p.Dir, "filler")
	f, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, free()-reserveBytes); err != nil {
		t.Fatal(err)
	}
	if err := p.MakeReserve(); err != nil || size() != 0 {
		t.Errorf("%d bytes without room, %v", size(), err)
	}
}
