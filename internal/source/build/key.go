package build

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"slices"
)

// keyPrefix begins keys that are computed here, so that no key that a user chooses is one by accident.
const keyPrefix = "sha256:"

// sum hashes a list of fields, each with its name and length before it, so that no two lists have the same form. Its
// form is documented in docs/builds.md: results are found by it, also on other hosts.
type sum struct{ h hash.Hash }

// newSum begins a sum of a kind.
func newSum(kind string) sum {
	s := sum{sha256.New()}
	s.add("pando", kind)
	return s
}

// add adds a field with any number of values.
func (s sum) add(name string, values ...string) {
	s.text(name)
	s.number(len(values))
	for _, v := range values {
		s.text(v)
	}
}

func (s sum) text(t string) {
	s.number(len(t))
	s.h.Write([]byte(t))
}

func (s sum) number(n int) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	s.h.Write(b[:])
}

func (s sum) hex() string { return hex.EncodeToString(s.h.Sum(nil)) }

// CommandKey returns the key of a single command without one: it depends on the command, the directory that it runs in,
// and its environment.
func CommandKey(command []string, dir string, env []string) string {
	s := newSum("command 1")
	s.add("command", command...)
	s.add("dir", dir)
	s.add("env", slices.Sorted(slices.Values(env))...)
	return keyPrefix + s.hex()
}
