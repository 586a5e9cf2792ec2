package btrfs_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"pando/internal/driver"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

// randomTree changes a tree at random. What cannot be done, such as removing a
// directory with something inside, is left out.
type randomTree struct {
	r    *rand.Rand
	root string
}

// pick is a path of something that is there; kind chooses: 'd' a directory, 'f' a
// regular file, 'a' anything but the root.
func (t randomTree) pick(kind byte) string {
	var all []string
	_ = filepath.WalkDir(t.root, func(p string, e os.DirEntry, err error) error {
		if err == nil && (kind == 'd' && e.IsDir() || kind == 'f' && e.Type().IsRegular() || kind == 'a' && p != t.root) {
			all = append(all, p)
		}
		return err
	})
	if len(all) == 0 {
		return filepath.Join(t.root, "nothing")
	}
	slices.Sort(all)
	return all[t.r.IntN(len(all))]
}

// name is a new or an old one, in some directory: few names, so that they are used
// again for something else.
func (t randomTree) name() string {
	return filepath.Join(t.pick('d'), "n"+strconv.Itoa(t.r.IntN(12)))
}

func (t randomTree) bytes() []byte {
	b := make([]byte, 1+t.r.IntN(1<<(1+t.r.IntN(17))))
	for i := range b {
		b[i] = byte(t.r.Uint32() >> 9)
	}
	return b
}

func (t randomTree) withFile(fn func(f *os.File)) {
	if f, err := os.OpenFile(t.pick('f'), os.O_RDWR, 0); err == nil {
		defer f.Close()
		fn(f)
	}
}

func (t randomTree) step() {
	switch t.r.IntN(24) {
	case 0, 1, 2:
		_ = os.Mkdir(t.name(), os.FileMode(t.r.IntN(0o1000)))
	case 3, 4, 5:
		// Not blocking, as it may be a pipe.
		if f, err := os.OpenFile(t.name(), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NONBLOCK, 0o644); err == nil {
			_, _ = f.Write(t.bytes())
			f.Close()
		}
	case 6, 7, 8, 9:
		_ = os.Rename(t.pick('a'), t.name())
	case 10:
		_ = unix.Renameat2(unix.AT_FDCWD, t.pick('a'), unix.AT_FDCWD, t.pick('a'), unix.RENAME_EXCHANGE)
	case 11:
		_ = os.Remove(t.pick('a'))
	case 12:
		if t.r.IntN(4) == 0 {
			_ = os.RemoveAll(t.pick('a'))
		}
	case 13:
		_ = os.Link(t.pick('f'), t.name())
	case 14:
		_ = os.Symlink(strconv.Itoa(t.r.Int()), t.name())
	case 15:
		_ = unix.Mkfifo(t.name(), 0o600)
	case 16, 17:
		t.withFile(func(f *os.File) { _, _ = f.WriteAt(t.bytes(), int64(t.r.IntN(300_000))) })
	case 18:
		_ = os.Truncate(t.pick('f'), int64(t.r.IntN(400_000)))
	case 19: // part of a file into another
		t.withFile(func(src *os.File) {
			t.withFile(func(dst *os.File) {
				n := int64(1+t.r.IntN(8)) * 4096
				_ = unix.IoctlFileCloneRange(int(dst.Fd()),
					&unix.FileCloneRange{Src_fd: int64(src.Fd()), Src_offset: uint64(t.r.IntN(4)) * 4096, Src_length: uint64(n),
						Dest_offset: uint64(t.r.IntN(16)) * 4096})
			})
		})
	case 20:
		t.withFile(func(f *os.File) {
			modes := []uint32{unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE, unix.FALLOC_FL_ZERO_RANGE, 0,
				unix.FALLOC_FL_KEEP_SIZE}
			_ = unix.Fallocate(int(f.Fd()), modes[t.r.IntN(len(modes))], int64(t.r.IntN(100_000)), int64(1+t.r.IntN(100_000)))
		})
	case 21:
		_ = os.Lchown(t.pick('a'), t.r.IntN(3), t.r.IntN(3))
		_ = unix.Fchmodat(unix.AT_FDCWD, t.pick('f'), uint32(t.r.IntN(0o10000)), 0)
	case 22:
		_ = unix.Lsetxattr(t.pick('a'), "trusted.n"+strconv.Itoa(t.r.IntN(3)), t.bytes()[:1], 0)
	case 23:
		_ = unix.Lremovexattr(t.pick('a'), "trusted.n"+strconv.Itoa(t.r.IntN(3)))
	}
}

// TestStreamRandom sends increments of a tree that changes at random: each to one
// pool, from there to another, and every few at once to a third.
func TestStreamRandom(t *testing.T) {
	a, b, c, d := pool(t, testfs.Btrfs(t, 512<<20)), pool(t, testfs.Btrfs(t, 512<<20)), pool(t,
		testfs.Btrfs(t, 512<<20)), pool(t, testfs.Btrfs(t, 512<<20))
	vol, root := create(t, a)
	tree := randomTree{faulttest.Rand(t), root}
	var as, bs, cs []driver.ObjectID
	var ds driver.ObjectID
	last := 0
	for i := range 12 {
		for range 10 + tree.r.IntN(120) {
			tree.step()
		}
		as = append(as, snapshot(t, a, vol))
		var ab, bb, cb driver.ObjectID
		if i > 0 {
			ab, bb, cb = as[i-1], bs[i-1], cs[i-1]
		}
		bs = append(bs, receive(t, b, bb, send(t, a, as[i], ab)))
		cs = append(cs, receive(t, c, cb, send(t, b, bs[i], bb)))
		want := treeOf(t, a, as[i])
		// Holes may become zeros.
		treetest.Compare(t, want, treeOf(t, b, bs[i]), treetest.Holes|treetest.Atime)
		treetest.Compare(t, want, treeOf(t, c, cs[i]), treetest.Holes|treetest.Atime)
		if i%4 == 0 {
			base := driver.ObjectID("")
			if i > 0 {
				base = as[last]
			}
			ds = receive(t, d, ds, send(t, a, as[i], base))
			treetest.Compare(t, want, treeOf(t, d, ds), treetest.Holes|treetest.Atime)
			last = i
		}
		if t.Failed() {
			t.Fatalf("after step %d", i)
		}
	}
	fingerprint, err := treetest.Fingerprint(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(fmt.Sprint(len(fingerprint), " files in the end"))
}
