package repo

import (
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// compressor is [Compress]; tests of frozen bytes do without it.
type compressor func(dst, src []byte) ([]byte, Codec)

// storeRaw is the compressor that does not.
func storeRaw(_, src []byte) ([]byte, Codec) { return src, Raw }

// packWindow is how far back matches reach: a frame. It bounds what an encoder
// keeps, and what a decoder must.
const packWindow = FrameBytes

// Encoders and decoders are shared by all of the process: as many as there are
// processors, each of some MiB.
var (
	encoder = sync.OnceValue(func() *zstd.Encoder {
		e, err := zstd.NewWriter(nil,
			zstd.WithEncoderLevel(zstd.SpeedDefault), // about zstd's 3
			zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)),
			zstd.WithWindowSize(packWindow),
			zstd.WithEncoderCRC(false)) // what is sealed is authenticated
		if err != nil {
			panic(err) // only for options that do not exist
		}
		return e
	})
	decoder = sync.OnceValue(func() *zstd.Decoder {
		d, err := zstd.NewReader(nil,
			zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0)), // calls at once; each is one thread
			zstd.WithDecoderMaxMemory(maxManifestBytes),
			zstd.WithDecodeAllCapLimit(true), // never more than the caller made room for
			zstd.WithDecoderLowmem(true))
		if err != nil {
			panic(err)
		}
		return d
	})
)

// Compress packs src with zstd into dst's room, which it replaces or grows. If that
// saves less than a sixteenth it returns src itself and Raw. May be called
// concurrently; one call uses one processor.
func Compress(dst, src []byte) ([]byte, Codec) {
	if len(src) == 0 {
		return src, Raw
	}
	packed := encoder().EncodeAll(src, dst[:0])
	if len(packed) > len(src)-len(src)/16 || len(packed) >= len(src) {
		return src, Raw
	}
	return packed, Zstd
}

// unpack is the content, size bytes, of what Compress made. Raw content is not
// copied. The caller has checked that size is permitted.
func unpack(codec Codec, packed []byte, size uint32) ([]byte, error) {
	switch codec {
	case Raw:
		if uint64(len(packed)) != uint64(size) {
			return nil, damaged("the content has %d bytes, expected %d", len(packed), size)
		}
		return packed, nil
	case Zstd:
		// What says how large it is, is from who may write; zstd cannot pack by more
		// than some 30,000 times, so that few bytes do not ask for much memory.
		if uint64(size) > uint64(len(packed))*maxRatio {
			return nil, damaged("%d compressed bytes cannot expand to %d", len(packed), size)
		}
		plain, err := decoder().DecodeAll(packed, make([]byte, 0, size))
		if err != nil {
			return nil, damaged("cannot decompress the content: %v", err)
		}
		if len(plain) != int(size) {
			return nil, damaged("the content has %d bytes, expected %d", len(plain), size)
		}
		return plain, nil
	}

	return nil, damaged("the content uses unknown compression %d", codec)
}

// maxRatio: a block of 128 KiB of one byte takes 4 bytes.
const maxRatio = 128 << 10 / 4

// Unpack is the content, size bytes, of what [Compress] made.
func Unpack(codec Codec, packed []byte, size uint32) ([]byte, error) {
	return unpack(codec, packed, size)
}
