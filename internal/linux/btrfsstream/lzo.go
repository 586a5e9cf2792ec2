package btrfsstream

import (
	"encoding/binary"
	"errors"

	"github.com/anchore/go-lzo"
)

var errLZO = errors.New("lzo: invalid compressed data")

// decodeLZO decompresses data in btrfs's LZO format: the total length, then for each sector its compressed
// length and its data. No length field crosses the end of a sector.
func decodeLZO(out, in []byte, sector int) error {
	if len(in) < 4 {
		return errLZO
	}

	total := int(binary.LittleEndian.Uint32(in))
	if total < 4 || total > len(in) {
		return errLZO
	}

	in = in[:total]
	for pos := 4; pos < len(in) && len(out) > 0; {
		if left := sector - pos%sector; left < 4 {
			pos += left
		}

		if len(in)-pos < 4 {
			return errLZO
		}

		n := int(binary.LittleEndian.Uint32(in[pos:]))
		pos += 4
		if n > len(in)-pos {
			return errLZO
		}

		m := min(len(out), sector)
		if _, err := lzo.Decompress(in[pos:pos+n], out[:m]); err != nil {
			return err
		}

		out = out[m:]
		pos += n
	}

	return nil
}
