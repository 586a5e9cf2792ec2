package driver

import (
	"crypto/rand"
	"encoding/base32"
)

var idEncoding = base32.NewEncoding("0123456789abcdefghijklmnopqrstuv").WithPadding(base32.NoPadding)

// IDLength is the number of characters of an ObjectID.
const IDLength = 26

// NewID returns a fresh random ID.
func NewID() ObjectID {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand documents that it crashes the program instead
	return ObjectID(idEncoding.EncodeToString(b[:]))
}

// ValidID reports whether s has the form of an ObjectID.
func ValidID(s string) bool {
	if len(s) != IDLength {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < '0' || c > '9') && (c < 'a' || c > 'v') {
			return false
		}
	}
	return true
}
