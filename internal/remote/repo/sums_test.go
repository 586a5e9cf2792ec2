package repo

import (
	"crypto/aes"
	"encoding/binary"
	"testing"
)

// ghash is that of NIST SP 800-38D, bit by bit.
func ghash(h [16]byte, data []byte) (y [16]byte) {
	for len(data) > 0 {
		for i := range min(16, len(data)) {
			y[i] ^= data[i]
		}
		data = data[min(16, len(data)):]

		var z [16]byte
		v := h
		for i := range 128 {
			if y[i/8]>>(7-i%8)&1 == 1 {
				for j := range z {
					z[j] ^= v[j]
				}
			}
			carry := v[15] & 1
			for j := 15; j > 0; j-- {
				v[j] = v[j]>>1 | v[j-1]<<7
			}
			v[0] >>= 1
			if carry == 1 {
				v[0] ^= 0xe1
			}
		}
		y = z
	}
	return y
}

// TestSums: a sum is what FORMAT.md says, computed here by other code, and a sum of other content is none.
func TestSums(t *testing.T) {
	r, _ := made(t)
	contents := [][]byte{{}, {1}, noise(1, 15), noise(2, 16), noise(3, BlockBytes), noise(4, 5*BlockBytes+7)}
	block, err := aes.NewCipher(derive(r.ring.keys[0].secret, nil, "pando sums v1", 32))
	must(t, err)
	var h, mask [16]byte
	block.Encrypt(h[:], h[:])
	mask[15] = 1 // nonce zero, counter 1
	block.Encrypt(mask[:], mask[:])
	for _, c := range contents {
		padded := append([]byte{}, c...)
		for len(padded)%16 != 0 {
			padded = append(padded, 0)
		}
		padded = binary.BigEndian.AppendUint64(padded, uint64(len(c))*8)
		want := Sum(ghash(h, binary.BigEndian.AppendUint64(padded, 0)))
		for i := range want {
			want[i] ^= mask[i]
		}
		if got := r.Sum(c); got != want || !r.HasSum(c, got) {
			t.Errorf("the sum of %d bytes is %x, should be %x", len(c), got, want)
		}
	}

	now := r.Sum(contents[4])
	for _, s := range []Sum{now, {}} {
		if r.HasSum(contents[5], s) || r.HasSum(nil, s) {
			t.Errorf("%x is the sum of other content", s)
		}
	}
	r.Close()
	if r.HasSum(contents[4], now) || r.HasSum(contents[4], Sum{}) {
		t.Error("a sum without a key")
	}
}
