package treecopy

import (
	"bufio"
	"bytes"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"pando/internal/base/errs"
)

// Format is the format of a file, judged by its content.
type Format string

const (
	Unknown    Format = "unknown" // none of the others, possibly a disk image
	Tar        Format = "tar"
	TarGzip    Format = "tar.gz"
	TarZstd    Format = "tar.zst"
	EmptyTar   Format = "empty tar"  // a few zero blocks: the end marker of a tar without entries, or a blank disk
	Compressed Format = "compressed" // compressed, but not a tar in gzip or zstd: Untar refuses it
)

// IsTar reports whether Untar accepts the format.
func (f Format) IsTar() bool { return f == Tar || f == TarGzip || f == TarZstd || f == EmptyTar }

// SniffLen is how many bytes Sniff needs, unless the file is shorter.
// That is enough for a whole block of zstd.
const SniffLen = 256 << 10

const tarBlock = 512

// Sniff returns the format of a file that begins with prefix.
func Sniff(prefix []byte) Format {
	if isTarHeader(prefix) {
		return Tar
	}

	// tar pads an archive to a multiple of its blocking factor, 10 KiB by
	// default, so a file of SniffLen or more is more likely a disk.
	if n := len(prefix); n > 0 && n < SniffLen && n%tarBlock == 0 && allZero(prefix) {
		return EmptyTar
	}

	m := Compression(prefix)
	if m == "" {
		return Unknown
	}

	d, err := newDecoder(bufio.NewReader(bytes.NewReader(prefix)), true)
	if err != nil {
		return Compressed
	}

	defer d.Close()

	block := make([]byte, tarBlock)
	if _, err := io.ReadFull(d, block); err != nil || !isTarHeader(block) && !(allZero(block) && endsInZeros(d)) {
		return Compressed
	}

	if m == "gzip" {
		return TarGzip
	}

	return TarZstd
}

// endsInZeros reports whether r contains only zeros, and fewer than SniffLen.
// A tar without entries ends like that. Images of disks often begin with more zeros.
func endsInZeros(r io.Reader) bool {
	b, err := io.ReadAll(io.LimitReader(r, SniffLen))
	return err == nil && len(b) < SniffLen && allZero(b)
}

// SniffFile is Sniff for a file. It does not change the file's offset.
func SniffFile(f io.ReaderAt) (Format, error) {
	buf := make([]byte, SniffLen)
	n, err := f.ReadAt(buf, 0)
	if err != nil && err != io.EOF {
		return Unknown, errs.Wrap(op, "", err)
	}
	return Sniff(buf[:n]), nil
}

// Compression returns the compression of a file that begins with prefix: "gzip",
// "zstd", "xz", "lzip", "lz4", "bzip2", or "" if there is none.
func Compression(prefix []byte) string {
	for _, m := range []struct{ bytes, name string }{
		{"\x1f\x8b\x08", "gzip"},
		{"\x28\xb5\x2f\xfd", "zstd"},
		{"\xfd7zXZ\x00", "xz"},
		{"LZIP\x01", "lzip"},
		{"\x04\x22\x4d\x18", "lz4"},
	} {
		if bytes.HasPrefix(prefix, []byte(m.bytes)) {
			return m.name
		}
	}

	if len(prefix) >= 10 && string(prefix[:3]) == "BZh" && string(prefix[4:10]) == "\x31\x41\x59\x26\x53\x59" {
		return "bzip2"
	}
	if len(prefix) >= 4 && prefix[0]&0xf0 == 0x50 && string(prefix[1:4]) == "\x2a\x4d\x18" {
		return "zstd" // a skippable frame
	}

	return ""
}

// isTarHeader reports whether p begins with a block that has a valid checksum of
// a tar header, which is the same in all formats of tar.
func isTarHeader(p []byte) bool {
	if len(p) < tarBlock {
		return false
	}

	p = p[:tarBlock]
	field := bytes.Trim(p[148:156], " \x00")
	if len(field) == 0 {
		return false
	}

	var want int64
	for _, c := range field {
		if c < '0' || c > '7' {
			return false
		}
		want = want<<3 | int64(c-'0')
	}

	var unsigned, signed int64
	for i, c := range p {
		if i >= 148 && i < 156 {
			c = ' '
		}
		unsigned += int64(c)
		signed += int64(int8(c))
	}

	return (want == unsigned || want == signed) && unsigned != 8*' '
}

func allZero(p []byte) bool {
	for len(p) > len(zeros) {
		if !bytes.Equal(p[:len(zeros)], zeros[:]) {
			return false
		}
		p = p[len(zeros):]
	}
	return bytes.Equal(p, zeros[:len(p)])
}

var zeros [4096]byte

// newDecoder returns a reader of the decompressed r. It returns errors of r, io.EOF and
// errors of the data. sync means without goroutines.
func newDecoder(r *bufio.Reader, sync bool) (io.ReadCloser, error) {
	head, err := r.Peek(16)
	if err != nil && err != io.EOF {
		return nil, err
	}

	switch m := Compression(head); m {
	case "":
		return io.NopCloser(r), nil
	case "gzip":
		z, err := gzip.NewReader(r)
		if err != nil {
			return nil, err
		}
		z.Multistream(false)
		return &gunzip{z, r}, nil
	case "zstd":
		opts := []zstd.DOption{
			zstd.WithDecoderMaxWindow(128 << 20), // the window of zstd's highest level without --long
			zstd.WithDecoderLowmem(true),
		}
		if sync {
			opts = append(opts, zstd.WithDecoderConcurrency(1))
		}
		z, err := zstd.NewReader(r, opts...)
		if err != nil {
			return nil, err
		}
		return &unzstd{z.IOReadCloser(), false}, nil
	default:
		return nil, errs.New(errs.Invalid, op, "", "the archive is compressed with %s", m).
			WithHint("decompress it first: Pando reads plain, gzip and zstd archives")
	}
}

// gunzip reads gzip members. Like gzip(1), it ignores anything else after them.
type gunzip struct {
	z *gzip.Reader
	r *bufio.Reader
}

func (g *gunzip) Read(p []byte) (int, error) {
	for {
		n, err := g.z.Read(p)
		if n > 0 && err == io.EOF {
			err = nil
		}
		if n > 0 || err != io.EOF {
			return n, err
		}

		head, err := g.r.Peek(3)
		if err != nil && err != io.EOF {
			return 0, err
		}
		if Compression(head) != "gzip" {
			return 0, io.EOF
		}

		if err := g.z.Reset(g.r); err != nil {
			return 0, err
		}

		g.z.Multistream(false)
	}
}

func (g *gunzip) Close() error { return g.z.Close() }

// unzstd ignores garbage after the last frame.
type unzstd struct {
	io.ReadCloser
	some bool
}

func (u *unzstd) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	u.some = u.some || n > 0
	if u.some && errors.Is(err, zstd.ErrMagicMismatch) {
		err = io.EOF
	}
	return n, err
}
