package testfs

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/linux/loopdev"

	"golang.org/x/sys/unix"
)

// TestCopyMoment: the copy of a device that somebody writes to has all that was written before something that it has.
func TestCopyMoment(t *testing.T) {
	const first, last, size = 0, 63 << 20, 64 << 20
	image, to := filepath.Join(t.TempDir(), "image"), filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(image, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	dev := Loop(t, image, 0, loopdev.Options{})
	d, err := os.OpenFile(dev.Path, os.O_WRONLY|os.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()

	// Write a number at the beginning, then at the end, until a copy is there that was made in the meantime.
	write := func(n uint64) error {
		b := binary.LittleEndian.AppendUint64(nil, n)
		_, err := d.WriteAt(b, first)
		_, err2 := d.WriteAt(b, last)
		return errors.Join(err, err2)
	}
	if err := write(1); err != nil {
		t.Fatal(err)
	}
	written := make(chan error)
	go func() {
		var err error
		for n := uint64(2); err == nil && !whole(to, size); n++ {
			err = write(n)
		}
		written <- err
	}()
	copyMoment(t, dev.Index, to, image)
	if err := <-written; err != nil {
		t.Fatal(err)
	}

	b, err := os.ReadFile(to)
	if err != nil {
		t.Fatal(err)
	}
	if f, l := binary.LittleEndian.Uint64(b[first:]), binary.LittleEndian.Uint64(b[last:]); f < l {
		t.Errorf("the copy has the %dth write to the end and only the %dth to the beginning, which was before it", l, f)
	}
}

// whole is whether a file of size bytes is there, with all its blocks.
func whole(file string, size int64) bool {
	var st unix.Stat_t
	return unix.Stat(file, &st) == nil && st.Blocks*512 >= size
}
