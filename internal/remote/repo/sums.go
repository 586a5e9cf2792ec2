package repo

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
)

// sumKeys holds the keys that sums are computed with.
//
// A sum is the AES-256-GMAC of the content under a key with no other purpose, and a zero nonce. As a MAC that would
// be unsafe, because two tags under one nonce reveal the key. A sum is not a MAC: it only distinguishes contents, and
// is stored in sealed pages only, so anyone who can see two sums has the key anyway. Without the key, nobody can
// choose two contents of 512 KiB that have the same sum with a probability above 2^-112. It takes a fifth of the time
// of HMAC-SHA256, which version 1 repositories use, and which took a sixth of the processor time of a push.
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
		panic(err) // only for invalid key sizes
	}
	return k
}

// wipe clears the keys, except for the copy inside the cipher.
func (k *sumKeys) wipe() {
	clear(k.key)
	clear(k.old)
}

// sumNonce is the nonce of every sum.
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

// Sum returns a keyed hash of b: equal content has equal sums within one repository of one version, and a sum reveals
// nothing without the key. It does not change when keys are rotated. Zero if the repository is closed.
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

// HasSum reports whether s is the sum of b in any version: an upgraded repository has sums of both.
func (r *Repo) HasSum(b []byte, s Sum) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.ring == nil || s == (Sum{}) {
		return false // not known
	}
	matches := func(have Sum) bool { return subtle.ConstantTimeCompare(have[:], s[:]) == 1 }
	return r.ring.version >= 2 && matches(r.sums.sum(b)) || matches(r.sums.oldSum(b))
}
