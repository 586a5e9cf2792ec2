package fsprobe

import (
	"bytes"
	"errors"
	"io"
	"iter"
	"math/rand/v2"
	"os"
	"testing"
)

// spansOf yields these ranges.
func spansOf(spans ...Span) iter.Seq2[Span, error] {
	return func(yield func(Span, error) bool) {
		for _, s := range spans {
			if !yield(s, nil) {
				return
			}
		}
	}
}

// patched is an image in which some bytes are others.
type patched struct {
	io.ReaderAt
	bytes map[int64]byte
}

func (p patched) ReadAt(b []byte, off int64) (int, error) {
	n, err := p.ReaderAt.ReadAt(b, off)
	for at, x := range p.bytes {
		if at >= off && at < off+int64(n) {
			b[at-off] = x
		}
	}
	return n, err
}

var bookkeepingImages = []struct {
	name string
	size int64
	mkfs []string
	own  int64 // a byte that the filesystem changes by itself, other than a checksum
}{
	{"ext4", 256 << 20, []string{"mkfs.ext4", "-q", "-b", "4096", "-O", "^metadata_csum"}, extOffset + 48},
	{
		"ext4 with a journal in many extents", 8 << 30,
		[]string{"mkfs.ext4", "-q", "-b", "4096", "-O", "^metadata_csum", "-J", "size=1024"}, extOffset + 48,
	},
	{"xfs", 320 << 20, []string{"mkfs.xfs", "-q"}, 240},
}

// TestOnlyBookkeeping: bytes that a filesystem changes by itself, and its log, are no change; each other byte of what
// differs is one, and so is more than anybody would compare.
func TestOnlyBookkeeping(t *testing.T) {
	for _, c := range bookkeepingImages {
		t.Run(c.name, func(t *testing.T) {
			f := image(t, c.size, c.mkfs[0], c.mkfs[1:]...)
			own, err := ownFieldsOf(f, c.size)
			if err != nil || own == nil {
				t.Fatalf("the filesystem is not understood: %v", err)
			}
			logged := int64(0)
			for _, l := range own.log {
				logged += l.To - l.From
			}
			if c.name != "xfs" && c.size >= 8<<30 && logged != 1<<30 {
				t.Fatalf("the log has %d bytes in %d pieces", logged, len(own.log))
			}

			log := own.log[len(own.log)-1]
			same := func(changed iter.Seq2[Span, error], at ...int64) bool {
				t.Helper()
				p := patched{f, map[int64]byte{}}
				for _, off := range at {
					b, err := readAt(f, off, 1)
					if err != nil {
						t.Fatal(err)
					}
					p.bytes[off] = ^b[0]
				}
				ok, err := OnlyBookkeeping(f, p, c.size, changed)
				if err != nil {
					t.Fatal(err)
				}
				return ok
			}

			if !same(spansOf(Span{0, 4096}, Span{log.To - 8192, log.To}), log.To-5000) {
				t.Error("a byte in the log counts as a change")
			}
			if c.name != "xfs" && !same(spansOf(Span{0, 4096}), c.own) { // XFS has a checksum over it
				t.Error("a time in the superblock counts as a change")
			}
			if !same(spansOf(Span{64 << 10, 128 << 10})) {
				t.Error("what was written again as it was counts as a change")
			}
			if same(spansOf(Span{64 << 10, 128 << 10}), 100<<10) {
				t.Error("a byte outside of the log does not count as a change")
			}
			if log.To < c.size && same(spansOf(Span{log.To - 4096, log.To + 4096}), log.To) {
				t.Error("the byte behind the log does not count as a change")
			}
			if same(spansOf(Span{64 << 10, 64<<10 + maxBookkeeping + 4096})) {
				t.Error("more was compared than may be")
			}
			broken := func(yield func(Span, error) bool) { yield(Span{}, os.ErrClosed) }
			if _, err := OnlyBookkeeping(f, f, c.size, broken); !errors.Is(err, os.ErrClosed) {
				t.Errorf("the error of the ranges: %v", err)
			}
			if c.name == "xfs" {
				return
			}
			p := patched{f, map[int64]byte{extOffset + 96: byteAt(t, f, extOffset+96) | extIncompatReplay}}
			if ok, _ := OnlyBookkeeping(p, p, c.size, spansOf(Span{0, 4096})); ok {
				t.Error("an ext4 whose journal has to be replayed was understood")
			}
		})
	}
}

func byteAt(t *testing.T, f *os.File, off int64) byte {
	t.Helper()
	b, err := readAt(f, off, 1)
	if err != nil {
		t.Fatal(err)
	}
	return b[0]
}

// TestOnlyBookkeepingOfNonsense: damaged images are read in bounds, and never taken for the same if a byte outside of
// the superblock and any log that they could have differs.
func TestOnlyBookkeepingOfNonsense(t *testing.T) {
	for _, c := range bookkeepingImages {
		f := image(t, c.size, c.mkfs[0], c.mkfs[1:]...)
		head, err := readAt(f, 0, 8<<20)
		if err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(1, 2))
		for range 200 {
			b := bytes.Clone(head)
			for range 1 + r.IntN(4) {
				at := r.IntN(4096)
				if r.IntN(2) == 0 {
					at = r.IntN(len(b))
				}
				b[at] = byte(r.Uint32())
			}
			short := bytes.NewReader(b[:r.IntN(len(b))])
			if _, err := OnlyBookkeeping(short, short, c.size, spansOf(Span{0, 1 << 20})); err != nil {
				t.Fatal(err)
			}
			whole := bytes.NewReader(b)
			if _, err := OnlyBookkeeping(whole, whole, c.size, spansOf(Span{0, 1 << 20})); err != nil {
				t.Fatal(err)
			}
		}
	}
}
