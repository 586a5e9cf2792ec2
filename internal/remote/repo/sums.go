package repo

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
)

// sumKeys are what sums are made with.
//
// A sum is the AES-256-GMAC of the content under a key that is used for nothing else, with the nonce zero. As a MAC
// that would be wrong, as two tags under one nonce give the key away. A sum is no MAC: it only tells contents apart,
// and lies in sealed pages only, so who could see two of them has the key anyway. Without knowing the key nobody can
// choose two contents of 512 KiB that have the same sum with a probability above 2^-112. It takes a fifth of the time
// of HMAC-SHA256, which repositories of version 1 have, and which was a sixth of what a push needs of the processors.
type sumKeys struct {
	gcm cipher.AEAD
	key []byte // of gcm
	old []byte // of HMAC-SHA256
}

func newSumKeys(master []byte) *sumKeys {
	k := &sumKeys{key: derive(master, nil, infoSums, keySize), old: derive(master, nil, infoOldSums, keySize)}
	block, err := aes.NewCipher(k.key)
	if err == nil {
		k.gcm, err = cipher.NewGCM(block)
	}
	if err != nil {
		panic(err) // a key of this size is one
	}
	return k
}

// wipe clears the keys, but for what the cipher keeps of its own.
func (k *sumKeys) wipe() {
	clear(k.key)
	clear(k.old)
}

// sumNonce is that of all sums.
var sumNonce [12]byte

func (k *sumKeys) sum(b []byte) (s Sum) {
	k.gcm.Seal(s[:0], sumNonce[:], nil, b)
	return s
}

func (k *sumKeys) oldSum(b []byte) (s Sum) {
	h := hmac.New(sha256.New, k.old)
	h.Write(b)
	copy(s[:], h.Sum(nil))
	return s
}

// Sum is a keyed hash of content: equal for equal content in one repository of one version, and of no use to who has no
// key. It does not change when keys are rotated. Zero if the repository is closed.
func (r *Repo) Sum(b []byte) Sum {
	r.mu.RLock()
	defer r.mu.RUnlock()
	switch {
	case r.ring == nil:
		return Sum{} // not known
	case r.ring.version < 2:
		return r.sums.oldSum(b)
	}
	return r.sums.sum(b)
}

// HasSum reports whether a sum is that of content, of whichever version: a repository that was upgraded has both.
func (r *Repo) HasSum(b []byte, s Sum) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil || s == (Sum{}) {
		return false // not known
	}
	is := func(have Sum) bool { return subtle.ConstantTimeCompare(have[:], s[:]) == 1 }
	return r.ring.version >= 2 && is(r.sums.sum(b)) || is(r.sums.oldSum(b))
}
