package testfs

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"pando/internal/observe/blockdev"

	"golang.org/x/sys/unix"
)

// copyMoment copies the image of a loop device to a new file, with its holes. It
// copies again until the device is written to by nobody in between: else the copy
// would be of no moment, with a log that is older than what was written after it.
func copyMoment(t testing.TB, loop int, to, image string) {
	t.Helper()
	for start := time.Now(); ; {
		before := loopStat(t, loop)
		if err := copySparse(to, image); err != nil {
			t.Fatal(err)
		}
		after := loopStat(t, loop)
		if after.Writes == before.Writes && after.Discards == before.Discards && after.InFlight == 0 {
			return
		}
		if time.Since(start) > patience {
			t.Fatalf("testfs: loop%d is written to all the time", loop)
		}
		if err := os.Remove(to); err != nil {
			t.Fatal(err)
		}
	}
}

// loopStat is what a loop device has done.
func loopStat(t testing.TB, loop int) blockdev.Stat {
	t.Helper()
	d, err := blockdev.Lookup(unix.Mkdev(7, uint32(loop)))
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// copySparse copies a file with its holes.
func copySparse(to, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()

	st, err := src.Stat()
	if err != nil {
		return err
	}

	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer dst.Close()

	if err := dst.Truncate(st.Size()); err != nil {
		return err
	}

	for off := int64(0); off < st.Size(); {
		start, err := unix.Seek(int(src.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return err
		}

		end, err := unix.Seek(int(src.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}

		if _, err := io.Copy(io.NewOffsetWriter(dst, start), io.NewSectionReader(src, start, end-start)); err != nil {
			return err
		}

		off = end
	}

	return dst.Close()
}
