package extent_test

import (
	"os"
	"testing"

	"pando/internal/linux/extent"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

func address(t *testing.T, f *os.File) string {
	t.Helper()
	a, err := extent.Address(f)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// reflink makes a copy of f that shares all blocks with it.
func reflink(t *testing.T, dir, name string, f *os.File) *os.File {
	t.Helper()
	c := create(t, dir, name)
	if err := kernel.Reflink(c, f); err != nil {
		t.Fatal(err)
	}
	return c
}

// onSharing runs a test on each filesystem whose files can share blocks.
func onSharing(t *testing.T, test func(t *testing.T, dir string)) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) { test(t, mappers[kind](t, 128*mib)) })
	}
}

// TestAddress: only what shares all blocks has the same address.
func TestAddress(t *testing.T) {
	onSharing(t, func(t *testing.T, dir string) {
		a := create(t, dir, "a")
		fill(t, a, 0, mib)
		fill(t, a, 4*mib, mib)
		sync(t, a)
		want := address(t, a)
		if want == "" {
			t.Fatal("a plain file has no address")
		}

		change := map[string]func(f *os.File) error{
			"one block at the beginning": func(f *os.File) error { _, err := f.WriteAt([]byte("x"), 0); return err },
			"one block at the end":       func(f *os.File) error { _, err := f.WriteAt([]byte("x"), 5*mib-1); return err },
			"a hole filled":              func(f *os.File) error { _, err := f.WriteAt([]byte("x"), 2*mib); return err },
			"a hole made": func(f *os.File) error {
				return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4*mib, 4096)
			},
			"a hole preallocated": func(f *os.File) error { return unix.Fallocate(int(f.Fd()), 0, 2*mib, 4096) },
			"longer":              func(f *os.File) error { return f.Truncate(9 * mib) },
			"shorter":             func(f *os.File) error { return f.Truncate(4*mib + 4096) },
		}
		for name, do := range change {
			c := reflink(t, dir, "clone", a)
			if got := address(t, c); got != want {
				t.Errorf("%s: a clone has address %q, its origin %q", name, got, want)
			}
			if err := do(c); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if got := address(t, c); got == want {
				t.Errorf("%s: the same address", name)
			}
			remove(t, dir, c)
		}
		if got := address(t, a); got != want {
			t.Errorf("the origin of changed clones has another address")
		}

		// The same bytes elsewhere are not known to be the same.
		b := create(t, dir, "b")
		fill(t, b, 0, mib)
		fill(t, b, 4*mib, mib)
		sync(t, b)
		if address(t, b) == want {
			t.Error("a copy has the same address")
		}
	})
}

// TestAddressUnknown: what has no address of its own, and what is elsewhere, has none.
func TestAddressUnknown(t *testing.T) {
	onSharing(t, func(t *testing.T, dir string) {
		f := create(t, dir, "unwritten")
		if err := unix.Fallocate(int(f.Fd()), 0, 0, mib); err != nil {
			t.Fatal(err)
		}
		if got := address(t, f); got != "" {
			t.Errorf("unwritten space has address %q", got)
		}
	})
	f := create(t, testfs.Ext4(t, 64*mib), "f")
	fill(t, f, 0, mib)
	if got := address(t, f); got != "" {
		t.Errorf("a file on ext4 has address %q", got)
	}
}
