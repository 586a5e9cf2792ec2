package treecopy

import (
	"bufio"
	"context"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"

	"pando/internal/base/errs"
)

const hintTruncated = "the archive is incomplete: download or create it again"

// stream decompresses an archive. A goroutine reads and decompresses a few buffers
// ahead of the reader. Errors are *errs.Error or io.EOF.
type stream struct {
	ctx    context.Context
	chunks chan chunk
	free   chan []byte
	quit   chan struct{}

	cur    chunk // the rest of the current chunk
	buf    []byte
	offset int64 // bytes read from the stream so far

	// zeroHeader is set if the last read since mark was one block of zeros.
	zeroHeader bool
}

type chunk struct {
	data []byte
	err  error // after data
}

// newStream starts reading r. close stops that, but does not wait for a running call of r.Read.
func newStream(ctx context.Context, r io.Reader) *stream {
	const ahead = 4
	s := &stream{
		ctx:    ctx,
		chunks: make(chan chunk, ahead),
		free:   make(chan []byte, ahead+2),
		quit:   make(chan struct{}),
	}

	for range ahead + 2 {
		s.free <- nil
	}

	go s.readArchive(r)
	return s
}

func (s *stream) close() { close(s.quit) }

// readArchive reads and decompresses r until it ends or s is closed.
func (s *stream) readArchive(r io.Reader) {
	src := &source{r: r}
	z, err := newDecoder(bufio.NewReaderSize(src, 128<<10), false)
	if err == nil {
		defer z.Close()
	}

	for {
		var c chunk
		if err == nil {
			var buf []byte
			select {
			case buf = <-s.free:
			case <-s.quit:
				return
			}

			if buf == nil {
				buf = make([]byte, 256<<10)
			}

			buf = buf[:cap(buf)]
			n := 0
			for n < len(buf) && err == nil {
				var m int
				m, err = z.Read(buf[n:])
				n += m
			}

			c.data = buf[:n]
		}

		c.err = src.explain(err)
		select {
		case s.chunks <- c:
		case <-s.quit:
			return
		}
		if c.err != nil {
			return
		}
	}
}

// source remembers the error of a reader, to distinguish it from an error of
// the data.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

func (s *source) explain(err error) error {
	var e *errs.Error
	switch {
	case err == nil, err == io.EOF:
		return err
	case s.err != nil:
		e = errs.New(errs.KindOf(s.err), op, "", "reading the archive: %w", s.err)
		if e.Kind == errs.Internal {
			e.Kind = errs.IO
		}
	case errors.As(err, &e):
	case errors.Is(err, io.ErrUnexpectedEOF):
		e = errs.New(errs.Damaged, op, "", "the compressed archive is truncated").WithHint(hintTruncated)
	case errs.IsAny(err, zstd.ErrWindowSizeExceeded, zstd.ErrDecoderSizeExceeded):
		e = errs.New(errs.Unsupported, op, "", "the compressed archive needs too much memory: %w", err).
			WithHint("compress it without `--long`, or decompress it first")
	default:
		e = errs.New(errs.Damaged, op, "", "the compressed archive is corrupt: %w", err).WithHint(hintTruncated)
	}

	return e
}

// nextChunk makes sure that there is a current chunk with data or an error.
func (s *stream) nextChunk() {
	for len(s.cur.data) == 0 && s.cur.err == nil {
		if s.buf != nil {
			s.free <- s.buf
			s.buf = nil
		}
		select {
		case s.cur = <-s.chunks:
			s.buf = s.cur.data
		case <-s.ctx.Done():
			s.cur.err = errs.Wrap(op, "", s.ctx.Err())
		}
	}
}

// peek returns the first bytes of the stream, at least a tar block unless the stream is
// shorter.
func (s *stream) peek() ([]byte, error) {
	s.nextChunk()
	if len(s.cur.data) < tarBlock && s.cur.err != io.EOF {
		return nil, s.cur.err
	}
	return s.cur.data, nil
}

// mark begins the search for the end marker of a tar: see zeroHeader.
func (s *stream) mark() { s.zeroHeader = false }

// Read fills p, unless the stream ends.
func (s *stream) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		s.nextChunk()
		m := copy(p[n:], s.cur.data)
		s.cur.data = s.cur.data[m:]
		n += m
		if m == 0 && s.cur.err != nil {
			break
		}
	}

	s.offset += int64(n)
	if n > 0 {
		s.zeroHeader = len(p) == tarBlock && n == tarBlock && allZero(p)
		return n, nil
	}

	if len(p) == 0 {
		return 0, nil
	}

	return 0, s.cur.err
}
