package repo

import (
	"crypto/rand"
	"encoding/base32"
	"strconv"
	"strings"

	"pando/internal/base/errs"
)

var idEncoding = base32.NewEncoding("0123456789abcdefghijklmnopqrstuv").WithPadding(base32.NoPadding)

const idLength = 26 // characters of an ID's text

// NewID returns a fresh random ID.
func NewID() ID {
	var id ID
	_, _ = rand.Read(id[:]) // never fails: crypto/rand documents that it crashes the program instead
	return id
}

// ParseID parses the text of an ID. It accepts only the text that String returns;
// anything else is Invalid.
func ParseID(text string) (ID, error) {
	var id ID
	if len(text) == idLength {
		// The last character carries only 3 of its 5 bits, so several texts would decode to one ID.
		if n, err := idEncoding.Decode(id[:], []byte(text)); err == nil && n == len(id) && id.String() == text {
			return id, nil
		}
	}
	return ID{}, errs.New(errs.Invalid, "read ID", text, "an ID has %d characters, 0-9 and a-v", idLength)
}

// String returns the text of the ID: 26 characters [0-9a-v].
func (id ID) String() string { return idEncoding.EncodeToString(id[:]) }

// IsZero reports whether the ID is the zero value, which identifies nothing.
func (id ID) IsZero() bool { return id == ID{} }

// MarshalText returns the ID's text.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText parses text as [ParseID] does.
func (id *ID) UnmarshalText(text []byte) error {
	parsed, err := ParseID(string(text))
	if err != nil {
		return err
	}
	*id = parsed
	return nil
}

// String returns "<session>/<n>".
func (s Segment) String() string {
	return s.Session.String() + "/" + strconv.FormatUint(uint64(s.N), 10)
}

// Keys of objects.
const (
	configKey      = "config"
	seenKey        = "prune/seen"
	headPrefix     = "heads/"
	manifestPrefix = "manifests/"
	segmentPrefix  = "segments/"
	packPrefix     = "packs/"
	movedPrefix    = "moved/"
	sessionPrefix  = "sessions/"
	pagePrefix     = "points/"
	probePrefix    = "probe/" // of objstore.Probe: not part of a repository
)

func (s Segment) key() string { return segmentPrefix + s.String() }

// parseSegment parses the output of Segment.String, and rejects any other spelling.
func parseSegment(text string) (Segment, bool) {
	session, number, _ := strings.Cut(text, "/")
	id, err := ParseID(session)
	if err != nil {
		return Segment{}, false
	}
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil {
		return Segment{}, false
	}
	s := Segment{Session: id, N: uint32(n)}
	return s, s.String() == text // no other spelling of the number
}
