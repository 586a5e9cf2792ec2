package replicate

import (
	"bufio"
	"cmp"
	"container/heap"
	"encoding/binary"
	"errors"
	"io"
	"iter"
	"os"
	"slices"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// expected is what a page, a stream or a manifest expects of a frame: its place, and the content of a part of it. It
// does not name the point, because many points expect the same.
type expected struct {
	segment uint32 // place in verifier.segments
	index   uint32
	offset  uint32
	stored  uint32
	packed  uint32 // twice the length of the content, plus the codec
	within  uint32 // offset of the part
	length  uint32 // of the part; 0: no part in particular
	sum     repo.Sum
}

const expectedBytes = 7*4 + repo.SumBytes

func (x expected) compare(y expected) int {
	return cmp.Or(
		cmp.Compare(x.segment, y.segment), cmp.Compare(x.index, y.index), cmp.Compare(x.within, y.within),
		cmp.Compare(x.length, y.length), cmp.Compare(x.offset, y.offset), cmp.Compare(x.stored, y.stored),
		cmp.Compare(x.packed, y.packed), slices.Compare(x.sum[:], y.sum[:]))
}

// matchesFrame reports whether a frame has the expected place and length.
func (x expected) matchesFrame(f repo.Frame) bool {
	return x.index == f.Index && x.offset == f.Offset && x.stored == f.Stored && x.packed == f.Plain<<1|uint32(f.Codec)
}

// appendTo appends the encoding of x, which has expectedBytes bytes.
func (x expected) appendTo(b []byte) []byte {
	for _, n := range [...]uint32{x.segment, x.index, x.offset, x.stored, x.packed, x.within, x.length} {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	return append(b, x.sum[:]...)
}

func decodeExpected(b []byte) (x expected) {
	for i, n := range [...]*uint32{&x.segment, &x.index, &x.offset, &x.stored, &x.packed, &x.within, &x.length} {
		*n = binary.LittleEndian.Uint32(b[4*i:])
	}
	copy(x.sum[:], b[7*4:])
	return x
}

// expectedInMemory is the number of expectations that are kept in memory, some 22 MiB.
const expectedInMemory = 512 << 10

// expectations collects expectations, each once, and returns them in order of segments. Those that do not fit into
// memory are written to an unnamed file, in sorted runs, which are merged in the end. Adding is safe for concurrent
// use.
type expectations struct {
	dir   string // for the file
	limit int    // number of expectations in memory

	mu     sync.Mutex
	memory []expected
	file   *os.File
	runs   []int64 // where each ends in file, in bytes
}

// addExpected adds expectations.
func (e *expectations) addExpected(all []expected) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(all) > 0 {
		n := min(len(all), max(e.limit-len(e.memory), 1))
		e.memory, all = append(e.memory, all[:n]...), all[n:]
		if len(e.memory) < e.limit {
			continue
		}
		e.sort()
		if len(e.memory) > e.limit/2 { // otherwise most were duplicates
			if err := e.spill(); err != nil {
				return err
			}
		}
	}

	return nil
}

// sort sorts the expectations in memory, and drops duplicates. The caller holds the lock.
func (e *expectations) sort() {
	slices.SortFunc(e.memory, expected.compare)
	e.memory = slices.Compact(e.memory)
}

// spill appends the sorted expectations in memory to the file. The caller holds the lock.
func (e *expectations) spill() error {
	if e.file == nil {
		f, err := os.CreateTemp(e.dir, ".verify-*")
		if err != nil {
			return errs.New(errs.KindOf(err), opVerify, "", "cannot create a temporary file: %w", err)
		}
		e.file = f
		if err := os.Remove(f.Name()); err != nil {
			return errs.Wrap(opVerify, "", err)
		}
	}

	w := bufio.NewWriterSize(io.NewOffsetWriter(e.file, e.spilledBytes()), runBuffer)
	var b [expectedBytes]byte
	for _, x := range e.memory {
		if _, err := w.Write(x.appendTo(b[:0])); err != nil {
			return errs.Wrap(opVerify, "", err)
		}
	}

	if err := w.Flush(); err != nil {
		return errs.Wrap(opVerify, "", err)
	}

	e.runs = append(e.runs, e.spilledBytes()+int64(len(e.memory))*expectedBytes)
	e.memory = e.memory[:0]
	return nil
}

// spilledBytes returns the length of the file in bytes.
func (e *expectations) spilledBytes() int64 {
	if len(e.runs) == 0 {
		return 0
	}
	return e.runs[len(e.runs)-1]
}

// close closes the file, which removes it.
func (e *expectations) close() {
	if e.file != nil {
		_ = e.file.Close()
	}
}

// runBuffer is the memory for each run while they are merged, in bytes.
const runBuffer = 64 << 10

// sorted yields the expectations, each once, in order of segment, frame and part. Nothing may be added after that. An
// error ends it.
func (e *expectations) sorted() iter.Seq2[expected, error] {
	return func(yield func(expected, error) bool) {
		e.sort()
		var merge cursors
		if len(e.memory) > 0 {
			merge = append(merge, &cursor{memory: e.memory})
		}

		// Each run has a cursor.
		begin := int64(0)
		for _, end := range e.runs {
			merge = append(merge, &cursor{r: bufio.NewReaderSize(io.NewSectionReader(e.file, begin, end-begin), runBuffer)})
			begin = end
		}

		for _, c := range merge {
			if err := c.advance(); err != nil {
				yield(expected{}, errs.Wrap(opVerify, "", err))
				return
			}
		}

		// Merge the runs, and skip duplicates.
		heap.Init(&merge)
		var last expected
		for first := true; len(merge) > 0; {
			c := merge[0]
			if x := c.at; first || x != last {
				if !yield(x, nil) {
					return
				}
				last, first = x, false
			}

			switch err := c.advance(); {
			case errors.Is(err, io.EOF):
				heap.Pop(&merge)
			case err != nil:
				yield(expected{}, errs.Wrap(opVerify, "", err))
				return
			default:
				heap.Fix(&merge, 0)
			}
		}
	}
}

// cursor is a place in a sorted run, in memory or in the file.
type cursor struct {
	at     expected
	memory []expected
	r      *bufio.Reader
}

// advance moves to the next expectation. It returns io.EOF at the end.
func (c *cursor) advance() error {
	if c.r == nil {
		if len(c.memory) == 0 {
			return io.EOF
		}
		c.at, c.memory = c.memory[0], c.memory[1:]
		return nil
	}

	var b [expectedBytes]byte
	if _, err := io.ReadFull(c.r, b[:]); err != nil {
		return err
	}

	c.at = decodeExpected(b[:])
	return nil
}

// cursors is a heap with the least one first.
type cursors []*cursor

func (c cursors) Len() int           { return len(c) }
func (c cursors) Less(i, j int) bool { return c[i].at.compare(c[j].at) < 0 }
func (c cursors) Swap(i, j int)      { c[i], c[j] = c[j], c[i] }
func (c *cursors) Push(x any)        { *c = append(*c, x.(*cursor)) }
func (c *cursors) Pop() any {
	last := (*c)[len(*c)-1]
	*c = (*c)[:len(*c)-1]
	return last
}
