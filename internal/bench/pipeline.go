package bench

import (
	"bufio"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"runtime"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
)

// pipelineChunk is how much the bare pipeline compresses at once.
const pipelineChunk = 512 << 10

func pipelineSeal(key [32]byte) (cipher.AEAD, error) {
	b, err := aes.NewCipher(key[:])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(b)
}

// inOrder calls make with the numbers from 0 to n-1, as many at once as there are
// processors, and use with what came of each, in order.
func inOrder(ctx context.Context, n int64, work func(i int64) ([]byte, error), use func([]byte) error) error {
	workers := runtime.GOMAXPROCS(0)
	g, ctx := errgroup.WithContext(ctx)
	out := make(chan chan []byte, 2*workers)
	g.Go(func() error {
		defer close(out)
		var inner errgroup.Group
		inner.SetLimit(workers)
		for i := range n {
			c := make(chan []byte, 1)
			select {
			case out <- c:
			case <-ctx.Done():
				return errors.Join(ctx.Err(), inner.Wait())
			}

			inner.Go(func() error {
				defer close(c)
				b, err := work(i)
				if err == nil {
					c <- b
				}
				return err
			})
		}

		return inner.Wait()
	})

	g.Go(func() error {
		for c := range out {
			select {
			case b, ok := <-c:
				if !ok {
					return nil // its maker has the error
				}
				if err := use(b); err != nil {
					return err
				}
			case <-ctx.Done():
				return ctx.Err()
			}
		}

		return nil
	})

	return g.Wait()
}

// sealFile compresses and encrypts length bytes of a file from offset into another,
// durably. The pieces of a file have different numbers.
func sealFile(ctx context.Context, path string, offset, length int64, to string, key [32]byte, number int) error {
	src, err := os.Open(path)
	if err != nil {
		return err
	}

	defer src.Close()

	seal, err := pipelineSeal(key)
	if err != nil {
		return err
	}

	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault),
		zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)))
	if err != nil {
		return err
	}

	defer enc.Close()

	dst, err := os.Create(to)
	if err != nil {
		return err
	}

	chunks := (length + pipelineChunk - 1) / pipelineChunk
	err = inOrder(ctx, chunks, func(i int64) ([]byte, error) {
		b := make([]byte, min(pipelineChunk, length-i*pipelineChunk))
		if _, err := src.ReadAt(b, offset+i*pipelineChunk); err != nil {
			return nil, err
		}
		out := make([]byte, 4, 4+len(b)/4)
		out = seal.Seal(out, pipelineNonce(number, i), enc.EncodeAll(b, nil), nil)
		binary.LittleEndian.PutUint32(out, uint32(len(out)-4))
		return out, nil
	}, func(b []byte) error {
		_, err := dst.Write(b)
		return err
	})
	if err == nil {
		err = dst.Sync()
	}

	return errors.Join(err, dst.Close())
}

func pipelineNonce(number int, i int64) []byte {
	n := binary.LittleEndian.AppendUint32(nil, uint32(number))
	return binary.LittleEndian.AppendUint64(n, uint64(i))
}

// openFiles decrypts and decompresses pieces into one file.
func openFiles(ctx context.Context, pieces []string, key [32]byte, to string) (err error) {
	seal, err := pipelineSeal(key)
	if err != nil {
		return err
	}

	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0)))
	if err != nil {
		return err
	}

	defer dec.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}

	defer func() { err = errors.Join(err, dst.Close()) }()
	for number, path := range pieces {
		if err := openPiece(ctx, path, number, seal, dec, dst); err != nil {
			return err
		}
	}

	return nil
}

func openPiece(ctx context.Context, path string, number int, seal cipher.AEAD, dec *zstd.Decoder, dst io.Writer) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}

	defer f.Close()

	var chunks []struct {
		offset int64
		length int
	}

	// Where they are: their lengths stand before them.
	for offset := int64(0); ; {
		var head [4]byte
		if _, err := f.ReadAt(head[:], offset); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		n := int(binary.LittleEndian.Uint32(head[:]))
		chunks = append(chunks, struct {
			offset int64
			length int
		}{offset + 4, n})
		offset += 4 + int64(n)
	}

	w := bufio.NewWriterSize(dst, 1<<20)
	if err := inOrder(ctx, int64(len(chunks)), func(i int64) ([]byte, error) {
		b := make([]byte, chunks[i].length)
		if _, err := f.ReadAt(b, chunks[i].offset); err != nil {
			return nil, err
		}
		b, err := seal.Open(b[:0], pipelineNonce(number, i), b, nil)
		if err != nil {
			return nil, err
		}
		return dec.DecodeAll(b, make([]byte, 0, pipelineChunk))
	}, func(b []byte) error {
		_, err := w.Write(b)
		return err
	}); err != nil {
		return err
	}

	return w.Flush()
}
