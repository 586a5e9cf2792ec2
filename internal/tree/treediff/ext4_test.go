package treediff

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"
)

// benchTrees are two subvolumes of n files with ten changes between them.
func benchTrees(b *testing.B, n int) (x, y *os.File) {
	top := testfs.Btrfs(b, 1<<30)
	f := openDir(b, top)
	if err := kernel.SubvolCreate(f, "a"); err != nil {
		b.Fatal(err)
	}
	grow(b, filepath.Join(top, "a"), n)
	src, err := os.Open(filepath.Join(top, "a"))
	if err != nil {
		b.Fatal(err)
	}
	defer src.Close()
	if err := kernel.SubvolSnapshot(f, "b", src, false); err != nil {
		b.Fatal(err)
	}
	touch(b, filepath.Join(top, "b"))
	return openDir(b, filepath.Join(top, "a")), openDir(b, filepath.Join(top, "b"))
}

// smallExt4 is the beginning of an image that mke2fs made, enough of it for the
// superblock and the descriptors.
func smallExt4(tb testing.TB, args ...string) []byte {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "image")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	if err := os.Truncate(path, 1<<20); err != nil {
		tb.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4",
		append(append([]string{"-q", "-F", "-b", "1024", "-O", "^has_journal"}, args...),
			path)...).CombinedOutput(); err != nil {
		tb.Skipf("SKIPPED: mkfs.ext4: %v: %s", err, out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// TestExt4NotUnderstood: what is dirty, unknown or nonsense is left to the walk.
func TestExt4NotUnderstood(t *testing.T) {
	good := smallExt4(t)
	read := func(b []byte) *ext4Layout {
		l, err := readExt4(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	if read(good) == nil {
		t.Fatal("a fresh ext4 is not understood")
	}
	for name, change := range map[string]func(b []byte){
		"magic":             func(b []byte) { b[1024+0x38]++ },
		"needs recovery":    func(b []byte) { b[1024+0x60] |= 4 },
		"unknown feature":   func(b []byte) { b[1024+0x62] |= 0x80 },
		"orphans":           func(b []byte) { b[1024+0xe8] = 12 },
		"block size":        func(b []byte) { b[1024+0x18] = 40 },
		"more blocks":       func(b []byte) { b[1024+0x6] = 0xff },
		"inode size":        func(b []byte) { b[1024+0x58] = 3 },
		"no inodes a group": func(b []byte) { clear(b[1024+0x28 : 1024+0x2c]) },
		"no blocks a group": func(b []byte) { clear(b[1024+0x20 : 1024+0x24]) },
		"table outside":     func(b []byte) { copy(b[2048+8:], "\xff\xff\xff\x7f") },
	} {
		bad := bytes.Clone(good)
		change(bad)
		if read(bad) != nil {
			t.Errorf("%s: taken for a good ext4", name)
		}
	}
	if read(good[:1500]) != nil || read(nil) != nil {
		t.Error("an image that ends in its superblock is taken for a good one")
	}
}

// FuzzExt4: whatever stands in an image, reading it ends, without a crash.
func FuzzExt4(f *testing.F) {
	for _, args := range []string{"", "-O meta_bg,^resize_inode", "-O ^64bit", "-I 128"} {
		b := smallExt4(f, strings.Fields(args)...)
		f.Add(b[1024:2048], b[2048:4096])
	}
	f.Fuzz(func(t *testing.T, super, descriptors []byte) {
		image := make([]byte, 64<<10)
		copy(image[1024:2048], super)
		copy(image[2048:], descriptors)
		r := bytes.NewReader(image)
		l, err := readExt4(r, int64(len(image)))
		if err != nil || l == nil {
			return
		}
		d := &ImageDelta{ranges: []Range{{0, int64(len(image))}}}
		other := bytes.Clone(image)
		for i := range other {
			other[i] ^= 0xff
		}
		n := uint64(0)
		err = l.changed(t.Context(), l, r, bytes.NewReader(other), d, time.Time{}, func(ino uint64, _ Links) {
			if n++; ino == 0 || ino > uint64(l.inodes) {
				t.Errorf("inode %d of %d", ino, l.inodes)
			}
		})
		if err != nil {
			t.Errorf("a table outside of the image got through: %v", err)
		}
	})
}

// TestImageDelta: what is known to be the same ends where a difference begins.
func TestImageDelta(t *testing.T) {
	d := &ImageDelta{ranges: []Range{{100, 200}, {300, 400}}}
	for _, c := range []struct {
		at, n int64
		same  bool
		bytes int64
	}{{0, 50, true, 50}, {0, 150, true, 100}, {100, 10, false, 10}, {150, 100, false, 50}, {200, 500, true, 100}, {400, 9,
		true, 9}} {
		if same, n := d.SameBlocks(c.at, c.at, c.n); same != c.same || n != c.bytes {
			t.Errorf("%d bytes at %d: %v for %d, wanted %v for %d", c.n, c.at, same, n, c.same, c.bytes)
		}
	}
	if same, _ := d.SameBlocks(0, 1, 1); same {
		t.Error("different addresses are the same")
	}
}
