package btrfsstream

import (
	"encoding/binary"
	"errors"
)

var errLZO = errors.New("lzo: it does not follow the format")

// decodeLZO decompresses what btrfs has compressed with LZO, sector by sector: the
// length of all, then for each its length and its data. No length crosses the end
// of a sector.
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
		if err := lzo1x(out[:m], in[pos:pos+n]); err != nil {
			return err
		}

		out = out[m:]
		pos += n
	}

	return nil
}

// lzo1x decompresses one block of LZO1X into out, which may be longer than what
// comes out. The format is described in the kernel's
// Documentation/staging/lzo.rst.
func lzo1x(out, in []byte) error {
	var ip, op int
	next := func() (int, bool) { // the next byte
		if ip >= len(in) {
			return 0, false
		}
		ip++
		return int(in[ip-1]), true
	}

	literals := func(n int) bool {
		if n > len(in)-ip || n > len(out)-op {
			return false
		}
		copy(out[op:], in[ip:ip+n])
		ip, op = ip+n, op+n
		return true
	}

	// long is a length that goes on in the bytes that follow.
	long := func(n int) (int, bool) {
		for {
			b, ok := next()
			switch {
			case !ok || n > maxUnencoded:
				return 0, false
			case b != 0:
				return n + b, true
			}
			n += 255
		}
	}

	// state is how many literals came with the last instruction: 4 for a run of
	// them.
	state := 0
	if len(in) > 0 && in[0] > 17 {
		n := int(in[0]) - 17
		ip++
		if !literals(n) {
			return errLZO
		}
		state = min(n, 4)
	}

	for {
		t, ok := next()
		if !ok {
			return errLZO
		}

		var distance, length, trailing int
		switch {
		case t < 16 && state == 0:
			if t == 0 {
				if t, ok = long(15); !ok {
					return errLZO
				}
			}
			if !literals(t + 3) {
				return errLZO
			}
			state = 4
			continue
		case t < 16:
			b, ok := next()
			if !ok {
				return errLZO
			}
			trailing = t & 3
			distance, length = 1+t>>2+b<<2, 2
			if state == 4 {
				distance, length = distance+0x800, 3
			}
		case t >= 64:
			b, ok := next()
			if !ok {
				return errLZO
			}
			trailing = t & 3
			distance, length = 1+t>>2&7+b<<3, t>>5+1
		default:
			bits := 31
			if t < 32 {
				bits = 7
			}

			if length = t & bits; length == 0 {
				if length, ok = long(bits); !ok {
					return errLZO
				}
			}

			length += 2
			if len(in)-ip < 2 {
				return errLZO
			}

			d := int(binary.LittleEndian.Uint16(in[ip:]))
			ip += 2
			trailing = d & 3
			distance = d >> 2
			if t >= 32 {
				distance++
			} else {
				distance += t & 8 << 11
				if distance == 0 { // the end
					if length != 3 || ip != len(in) {
						return errLZO
					}
					return nil
				}
				distance += 0x4000
			}
		}

		if distance > op || length > len(out)-op {
			return errLZO
		}

		for range length { // they may overlap
			out[op] = out[op-distance]
			op++
		}

		if !literals(trailing) {
			return errLZO
		}

		state = trailing
	}
}
