package testfs

import (
	"context"
	"os"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
)

// Loop attaches a file as a block device until the test ends, which fails if something still holds the device then. If
// size is not 0, the file is created, sparse, or brought to that size. The caller may close the device before.
func Loop(t testing.TB, image string, size int64, o loopdev.Options) *loopdev.Device {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: attaching a loop device needs root: run the tests as root")
	}

	flags := os.O_RDWR
	if o.ReadOnly {
		flags = os.O_RDONLY
	}
	if size != 0 {
		flags |= os.O_CREATE
	}

	f, err := os.OpenFile(image, flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if size != 0 {
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
	}

	d, err := loopdev.Attach(t.Context(), f, o)
	if err != nil {
		t.Fatal(err)
	}

	b, err := loopdev.Lookup(d.Index)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		_ = d.Close()
		if o.KeepOpen {
			_ = b.Clear() // not found if the test has detached it
		}
		if _, err := os.Stat(image); err != nil {
			return
		}
		if free, err := loopdev.WaitDetached(context.Background(), image, 10*time.Second); err != nil || !free {
			t.Errorf("%s is still attached to %s: %v", d.Path, image, err)
		}
	})

	return d
}
