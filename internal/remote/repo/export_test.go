package repo

import "bytes"

// For tests that read the frozen repository from outside.
const (
	FrozenIdentity   = testIdentity
	FrozenPassphrase = goldenPassphrase
)

// Documented are types that are written, and that only this package knows.
var Documented = []any{sealedConfig{}, pagedPoints{}}

// Volume is the content of a frozen volume and stream.
type Volume struct {
	Size   int64
	Pieces map[int64][]byte
	Stream []byte
}

// FrozenVolume is what the frozen repository holds.
func FrozenVolume() Volume {
	a, b := noise(1, BlockBytes), noise(2, BlockBytes+100)
	text := bytes.Repeat([]byte("all that glitters is not gold\n"), 1000)[:4*BlockBytes]
	return Volume{
		Size: gib + 101*BlockBytes + 100,
		Pieces: map[int64][]byte{
			gib:                  a,
			gib + 2*BlockBytes:   text[3*BlockBytes:],
			gib + 3*BlockBytes:   text[:2*BlockBytes],
			gib + 100*BlockBytes: b,
		},
		Stream: bytes.Join([][]byte{b, a, text, text}, nil),
	}
}

// FrozenMap is the frozen block image and stream with a map, and what they hold.
func FrozenMap() (block, stream string, v Volume) {
	a, b := noise(1, BlockBytes), noise(2, BlockBytes+100)
	v = Volume{Size: mapSize, Pieces: map[int64][]byte{}, Stream: bytes.Join([][]byte{b, a, b}, nil)}
	for i := range int64(LeafPieces) {
		v.Pieces[i*BlockBytes] = a
	}
	v.Pieces[CellBytes+BlockBytes] = a
	v.Pieces[LevelBytes(1)] = b[:BlockBytes]
	v.Pieces[mapSize-BlockBytes-100] = b
	return mapBlock, mapStream, v
}

// FrozenPartial are the frames of which the frozen packs have the even blocks only, by index.
func FrozenPartial() map[uint32][]byte {
	return map[uint32][]byte{1: noise(2, 8*BlockBytes-100)}
}

// FrozenPartialSegment is the segment that they are of.
func FrozenPartialSegment() (session []byte, n uint32) {
	id, err := ParseID(goldenPartial)
	if err != nil {
		panic(err)
	}
	return id[:], 7
}
