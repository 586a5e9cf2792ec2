package btrfsstream

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

// halfRandom is content that compresses in part, and not the same everywhere.
func halfRandom(n int) []byte {
	r := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, n)
	for i := 0; i < n; {
		run := min(1+r.IntN(300), n-i)
		switch r.IntN(4) {
		case 0: // zeros
		case 1: // random
			for j := range run {
				b[i+j] = byte(r.Uint32())
			}
		default: // from before, at any distance
			if i > 0 {
				from := r.IntN(i)
				for j := range run {
					b[i+j] = b[from+j]
				}
			}
		}
		i += run
	}
	return b
}

// sent is the stream of a read-only subvolume, as the kernel writes it.
func sent(t *testing.T, f *os.File, o kernel.BtrfsSendOptions) []byte {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	done := make(chan error, 1)
	go func() {
		// The kernel needs an end that waits.
		if err := unix.SetNonblock(int(w.Fd()), false); err != nil {
			done <- err
			return
		}
		err := kernel.BtrfsSend(f, o, w)
		w.Close()
		done <- err
	}()
	b, err := io.ReadAll(r)
	must(t, err)
	must(t, <-done)
	r.Close()
	return b
}

// TestCompressed sends compressed files to where they cannot lie so: to another
// kind of filesystem, which must decompress them.
func TestCompressed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a filesystem of its own needs root")
	}
	dir := testfs.Btrfs(t, 512<<20)
	top := open(t, dir)
	for _, how := range []string{"zlib", "lzo", "zstd"} {
		t.Run(how, func(t *testing.T) {
			must(t, kernel.SubvolCreate(top, how))
			tree := filepath.Join(dir, how)
			must(t, unix.Setxattr(tree, "btrfs.compression", []byte(how), 0))
			for _, n := range []int{1, 100, 4095, 4096, 4097, 100_000, 128 << 10, 128<<10 + 1, 3<<20 + 777} {
				must(t, os.WriteFile(filepath.Join(tree, fmt.Sprint("half", n)), halfRandom(n), 0o644))
				must(t, os.WriteFile(filepath.Join(tree, fmt.Sprint("text", n)), bytes.Repeat([]byte("all the same "), n/13+1)[:n],
					0o644))
			}
			f := open(t, tree)
			must(t, kernel.BtrfsSync(f))
			// Elsewhere there is no such attribute. Files have it from their directory.
			must(t, filepath.WalkDir(tree, func(p string, _ os.DirEntry, err error) error {
				return errors.Join(err, unix.Removexattr(p, "btrfs.compression"))
			}))
			must(t, kernel.SubvolSetReadOnly(f, true))
			b := sent(t, f, kernel.BtrfsSendOptions{Version: 2})
			s, err := NewReader(bytes.NewReader(b))
			must(t, err)
			begin, err := s.Begin()
			must(t, err)
			commands := map[string]int{}
			for {
				c, err := s.next()
				must(t, err)
				commands[c.name()]++
				if c.typ == cmdEnd {
					break
				}
			}
			if commands["encoded_write"] < 20 {
				t.Fatalf("the stream has the commands %v: this test sends nothing compressed", commands)
			}
			to := testfs.Tmpfs(t, 64<<20)
			s, err = NewReader(bytes.NewReader(b))
			must(t, err)
			_, err = s.Begin()
			must(t, err)
			root := open(t, to)
			must(t, Apply(t.Context(), s, begin, root, nil))
			treetest.Compare(t, tree, to, treetest.Holes|treetest.Xattrs)
		})
	}
}
