package btrfsstream

import (
	"bytes"
	"compress/zlib"
	"errors"
	"fmt"
	"io"

	"pando/internal/linux/kernel"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// Compression methods: BTRFS_ENCODED_IO_COMPRESSION_*.
const (
	compressionNone   = 0
	compressionZlib   = 1
	compressionZstd   = 2
	compressionLZO4K  = 3 // LZO with sectors of 2^12 bytes; each further number doubles the sector
	compressionLZO64K = 7
)

var zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}

// maxUnencoded is the size in bytes of the largest extent that btrfs compresses.
const maxUnencoded = 128 << 10

// encodedWrite writes compressed data unchanged if the filesystem accepts it, and decompresses it
// otherwise.
func (t *tree) encodedWrite(c *command) error {
	// Read and check the command.
	off, data := c.offset(attrFileOffset), c.bytes(attrData)
	e := kernel.BtrfsEncoded{
		FileLen: c.u64(attrUnencodedFile), UnencodedLen: c.u64(attrUnencodedLen), UnencodedOffset: c.u64(attrUnencodedOffset),
	}
	if c.have&(1<<attrCompression) != 0 {
		e.Compression = c.u32(attrCompression)
	}
	if c.have&(1<<attrEncryption) != 0 {
		e.Encryption = c.u32(attrEncryption)
	}

	f, err := t.file(c)
	if err != nil {
		return err
	}
	if e.Encryption != 0 {
		return unknown("the stream has encrypted files")
	}

	if e.UnencodedLen > maxUnencoded || len(data) > maxUnencoded || e.FileLen > e.UnencodedLen ||
		e.UnencodedOffset > e.UnencodedLen-e.FileLen {
		return damaged("compressed data with impossible lengths")
	}

	// Write the compressed data.
	if !t.noEncoded {
		err := kernel.BtrfsEncodedWrite(f, off, e, data)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.ENOTTY):
			t.noEncoded = true
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSPC):
			// The filesystem has sectors of another size, does not compress this file, or has
			// no contiguous space.
		default:
			return err
		}
	}

	// Decompress it and write the plain data.
	plain, err := t.decoder.decode(data, e.Compression, int(e.UnencodedLen))
	if err != nil {
		return err
	}

	_, err = f.WriteAt(plain[e.UnencodedOffset:e.UnencodedOffset+e.FileLen], off)
	return err
}

// decoder decompresses data. It reuses its buffers.
type decoder struct {
	zstd *zstd.Decoder
	out  []byte
}

func (d *decoder) close() {
	if d.zstd != nil {
		d.zstd.Close()
	}
}

// decode decompresses data to n bytes, which are valid until the next call. It fills up
// shorter results with zeros, as the kernel does.
func (d *decoder) decode(data []byte, compression uint32, n int) ([]byte, error) {
	if cap(d.out) < maxUnencoded {
		d.out = make([]byte, maxUnencoded)
	}

	out := d.out[:n]
	clear(out)
	var err error
	switch {
	case compression == compressionNone:
		copy(out, data)
	case compression == compressionZlib:
		var z io.ReadCloser
		if z, err = zlib.NewReader(bytes.NewReader(data)); err == nil {
			err = fill(z, out)
		}
	case compression == compressionZstd:
		if d.zstd == nil {
			if d.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
				zstd.WithDecoderMaxWindow(8<<20)); err != nil {
				return nil, fmt.Errorf("zstd: %w", err)
			}
		}
		if err = d.zstd.Reset(bytes.NewReader(data)); err == nil {
			// The data is padded to whole sectors.
			if err = fill(d.zstd, out); errors.Is(err, zstd.ErrMagicMismatch) && bytes.HasPrefix(data, zstdMagic) {
				err = nil
			}
		}
	case compression >= compressionLZO4K && compression <= compressionLZO64K:
		err = decodeLZO(out, data, 4096<<(compression-compressionLZO4K))
	default:
		return nil, unknown("the stream has data compressed in a way that is not known: %d", compression)
	}
	if err != nil {
		return nil, damaged("compressed data: %w", err)
	}

	return out, nil
}

// fill reads until out is full or r ends.
func fill(r io.Reader, out []byte) error {
	for len(out) > 0 {
		n, err := r.Read(out)
		out = out[n:]
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}
