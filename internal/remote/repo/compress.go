package repo

import (
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// compressor is [Compress], which tests of frozen bytes replace.
type compressor func(dst, src []byte) ([]byte, Codec)

// packWindow is the compression window: one frame. It bounds the memory of encoders and
// decoders.
const packWindow = FrameBytes

// The whole process shares the encoders and decoders: one per processor, of some MiB
// each.
var (
	encoder = sync.OnceValue(func() *zstd.Encoder {
		e, err := zstd.NewWriter(nil,
			zstd.WithEncoderLevel(zstd.SpeedDefault), // about zstd's 3
			zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)),
			zstd.WithWindowSize(packWindow),
			zstd.WithEncoderCRC(false)) // sealing authenticates the data
		if err != nil {
			panic(err) // only for invalid options
		}
		return e
	})
	decoder = sync.OnceValue(func() *zstd.Decoder {
		d, err := zstd.NewReader(nil,
			zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0)), // concurrent calls, of one thread each
			zstd.WithDecoderMaxMemory(maxManifestBytes),
			zstd.WithDecodeAllCapLimit(true), // never more than the capacity that the caller provides
			zstd.WithDecoderLowmem(true))
		if err != nil {
			panic(err)
		}
		return d
	})
)

// Compress compresses src with zstd into the capacity of dst, which it overwrites or
// grows. If that saves less than a sixteenth, it returns src itself and Raw. It may be
// called concurrently; one call uses one processor.
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

// unpack returns the size bytes of content that Compress compressed. It does not copy raw
// content. The caller must have checked that size is permitted.
func unpack(codec Codec, packed []byte, size uint32) ([]byte, error) {
	switch codec {
	case Raw:
		if uint64(len(packed)) != uint64(size) {
			return nil, damaged("the content has %d bytes, expected %d", len(packed), size)
		}
		return packed, nil
	case Zstd:
		// An attacker who can write objects chooses size. zstd compresses by a factor of
		// some 30,000 at most, so a few bytes cannot make us allocate much memory.
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

// maxRatio is the highest compression ratio: 128 KiB of the same byte take 4 bytes.
const maxRatio = 128 << 10 / 4

// Unpack returns the size bytes of content that [Compress] compressed.
func Unpack(codec Codec, packed []byte, size uint32) ([]byte, error) {
	return unpack(codec, packed, size)
}
