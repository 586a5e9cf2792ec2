package qcow2

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

// Reader reads the disk in an image of version 2 or 3. It trusts nothing in the image. It is for one goroutine.
type Reader struct {
	r     io.ReaderAt
	file  int64 // length of the image
	size  int64 // of the disk
	bits  uint  // of a cluster
	zeros bool  // tables mark clusters that read as zeros (version 3)
	zstd  bool  // of compressed clusters

	l1    []uint64
	table []uint64 // of the second level, the last that was used
	at    uint64   // its offset; 0: none
	buf   []byte   // for a cluster
}

// ErrNotQcow2 says that a file is something else.
var ErrNotQcow2 = errors.New("not a qcow2 image")

// ErrUnsupported says that an image needs something that Reader does not have.
var ErrUnsupported = errors.New("unsupported qcow2 image")

// ErrDamaged says that an image contradicts itself, or is not all there.
var ErrDamaged = errors.New("damaged qcow2 image")

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}

// Limits and bits of the format. QEMU has the same limit for the first level.
const (
	minClusterBits, maxClusterBits = 9, 21

	maxL1Bytes     = 32 << 20
	offsetMask     = 0x00fffffffffffe00
	compressedFlag = 1 << 62
	zeroFlag       = 1

	featureDirty       = 1 << 0 // only the refcounts may be wrong
	featureCompression = 1 << 3 // the header says how clusters are compressed
)

// Open reads the header of an image, which has length bytes. ErrUnsupported (a backing file, encryption, external
// data, extended tables), ErrDamaged, ErrNotQcow2, errors of r.
func Open(r io.ReaderAt, length int64) (*Reader, error) {
	h := make([]byte, headerBytes+8)
	if n, err := r.ReadAt(h, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	} else if n < 4 || string(h[:4]) != "QFI\xfb" {
		return nil, ErrNotQcow2
	} else if n < len(h) {
		return nil, damaged("it ends after %d bytes", n)
	}

	be := binary.BigEndian
	q := &Reader{r: r, file: length, size: int64(be.Uint64(h[24:])), bits: uint(be.Uint32(h[20:]))}
	version := be.Uint32(h[4:])
	switch {
	case version != 2 && version != 3:
		return nil, fmt.Errorf("%w: version %d", ErrUnsupported, version)
	case be.Uint64(h[8:]) != 0:
		return nil, fmt.Errorf("%w: it needs a backing file", ErrUnsupported)
	case be.Uint32(h[32:]) != 0:
		return nil, fmt.Errorf("%w: it is encrypted", ErrUnsupported)
	case q.bits < minClusterBits || q.bits > maxClusterBits:
		return nil, damaged("clusters of 1<<%d bytes", q.bits)
	case q.size <= 0 || q.size > maxBytes:
		return nil, damaged("a disk of %d bytes", q.size)
	}

	if q.zeros = version == 3; q.zeros {
		features, length := be.Uint64(h[72:]), be.Uint32(h[100:])
		if features&^(featureDirty|featureCompression) != 0 {
			return nil, fmt.Errorf("%w: features %#x", ErrUnsupported, features)
		}
		if features&featureCompression != 0 && length > headerBytes {
			if q.zstd = h[headerBytes] == 1; h[headerBytes] > 1 {
				return nil, fmt.Errorf("%w: compression type %d", ErrUnsupported, h[headerBytes])
			}
		}
	}

	return q, q.readL1(be.Uint64(h[40:]), int64(be.Uint32(h[36:])))
}

// readL1 reads the first level of tables.
func (q *Reader) readL1(at uint64, n int64) error {
	need := divUp(divUp(q.size, 1<<q.bits), q.entries())
	if n < need || need*8 > maxL1Bytes {
		return damaged("a table of %d entries for a disk of %d bytes", n, q.size)
	}

	l1, err := q.readTable(at, need)
	q.l1 = l1
	return err
}

// entries is how many clusters a table of the second level is for.
func (q *Reader) entries() int64 { return 1 << (q.bits - 3) }

// readTable reads n pointers.
func (q *Reader) readTable(at uint64, n int64) ([]uint64, error) {
	if at > uint64(q.file) || int64(at)+n*8 > q.file {
		return nil, damaged("a table at byte %d, but the image has %d bytes", at, q.file)
	}

	b := make([]byte, n*8)
	if _, err := q.r.ReadAt(b, int64(at)); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}

	out := make([]uint64, n)
	for i := range out {
		out[i] = binary.BigEndian.Uint64(b[i*8:])
	}
	return out, nil
}

// Size returns the size of the disk, bytes.
func (q *Reader) Size() int64 { return q.size }

// entry returns the pointer to a cluster of the disk; 0 if it reads as zeros.
func (q *Reader) entry(cluster int64) (uint64, error) {
	at := q.l1[cluster/q.entries()] & offsetMask
	if at == 0 {
		return 0, nil
	}

	if at != q.at {
		table, err := q.readTable(at, q.entries())
		if err != nil {
			return 0, err
		}
		q.table, q.at = table, at
	}

	e := q.table[cluster%q.entries()]
	if e&compressedFlag == 0 && (q.zeros && e&zeroFlag != 0 || e&offsetMask == 0) {
		return 0, nil
	}
	return e, nil
}

// readCluster returns a cluster of the disk, which is valid until the next call; nil if it reads as zeros. The last one
// may be shorter.
func (q *Reader) readCluster(cluster int64) ([]byte, error) {
	e, err := q.entry(cluster)
	if err != nil || e == 0 {
		return nil, err
	}

	if q.buf == nil {
		q.buf = make([]byte, 1<<q.bits)
	}

	p := q.buf[:min(1<<q.bits, q.size-cluster<<q.bits)]
	if e&compressedFlag != 0 {
		return p, q.decompress(q.buf, e&^(compressedFlag|copied))
	}

	at := int64(e & offsetMask)
	if at >= q.file {
		return nil, damaged("data at byte %d, but the image has %d bytes", at, q.file)
	}

	n, err := q.r.ReadAt(p, at)
	if errors.Is(err, io.EOF) { // the last cluster of an image may be shorter
		clear(p[n:])
		err = nil
	}
	return p, err
}

// decompress reads a compressed cluster into p.
func (q *Reader) decompress(p []byte, e uint64) error {
	// The upper bits are the number of further sectors that the data touches.
	x := 62 - (q.bits - 8)
	at := int64(e & (1<<x - 1))
	n := (int64(e>>x)+1)*sectorBytes - at%sectorBytes
	if at >= q.file {
		return damaged("data at byte %d, but the image has %d bytes", at, q.file)
	}

	b := make([]byte, min(n, q.file-at))
	if _, err := q.r.ReadAt(b, at); err != nil && !errors.Is(err, io.EOF) {
		return err
	}

	var in io.Reader = flate.NewReader(bytes.NewReader(b))
	if q.zstd {
		z, err := zstd.NewReader(bytes.NewReader(b), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(64<<20))
		if err != nil {
			return err
		}
		defer z.Close()
		in = z
	}

	if _, err := io.ReadFull(in, p); err != nil {
		return damaged("the compressed data at byte %d: %v", at, err)
	}
	return nil
}

// Each calls fn with everything on the disk that may not be zero, in order. fn must not keep data.
func (q *Reader) Each(fn func(off int64, data []byte) error) error {
	for c := range divUp(q.size, 1<<q.bits) {
		p, err := q.readCluster(c)
		if err == nil && p != nil {
			err = fn(c<<q.bits, p)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// DataBytes returns how much of the disk may not be zero.
func (q *Reader) DataBytes() (int64, error) {
	n := int64(0)
	for c := range divUp(q.size, 1<<q.bits) {
		e, err := q.entry(c)
		if err != nil {
			return 0, err
		}
		if e != 0 {
			n += min(1<<q.bits, q.size-c<<q.bits)
		}
	}
	return n, nil
}

// ReadAt implements io.ReaderAt for the disk, but not for several goroutines.
func (q *Reader) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) && off+int64(n) < q.size {
		at := off + int64(n)
		in := at & (1<<q.bits - 1)
		part := p[n:min(int64(len(p)), int64(n)+1<<q.bits-in, q.size-off)]
		b, err := q.readCluster(at >> q.bits)
		if err != nil {
			return n, err
		}
		clear(part)
		if b != nil {
			copy(part, b[in:])
		}
		n += len(part)
	}

	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}
