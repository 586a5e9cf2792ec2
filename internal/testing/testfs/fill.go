package testfs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Fill takes all the room of a small filesystem by a file in its directory dir, and returns the file's name. It fails
// the test if the filesystem is not full then.
func Fill(t testing.TB, dir string) string {
	t.Helper()
	name := filepath.Join(dir, "fills-the-disk")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	// Write ever smaller blocks, until not even the smallest has room.
	for size := 1 << 20; size >= 512; size /= 2 {
		block := make([]byte, size)
		for err = nil; err == nil; {
			_, err = f.Write(block)
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil && !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	return name
}
