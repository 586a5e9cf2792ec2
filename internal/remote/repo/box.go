package repo

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"pando/internal/base/errs"
)

// Versions of objects: byte 5 of each. A decoder refuses what is newer (TooNew), so an object may change only
// together with it.
const (
	objectVersion   = 1 // of all objects but those below
	configVersion   = 2 // of config: the version of the repository, see [Repo.Upgrade]
	headVersion     = 2 // of heads that name pages of points, which older programs would take for ones with few points
	manifestVersion = 2 // of manifests: those of 1 are written as well
)

// newestVersion is the newest version of a type that this package reads and writes.
func newestVersion(t objectType) byte {
	switch t {
	case typeConfig:
		return configVersion
	case typeHead:
		return headVersion
	case typeManifest:
		return manifestVersion
	}
	return objectVersion
}

// objectType is the fifth byte of every object.
type objectType byte

const (
	typeConfig   objectType = 'C'
	typeHead     objectType = 'H'
	typeManifest objectType = 'M'
	typeSession  objectType = 'S'
	typeSeen     objectType = 'P'
	typeSegment  objectType = 'G'
	typePoints   objectType = 'L'
	typePack     objectType = 'K'
	typeMoved    objectType = 'R'
)

const (
	magic        = "PNDO"
	preambleSize = 8 // magic, type, version, two zeros
	versionAt    = 5
	saltSize     = 32
	tagSize      = 16
	keySize      = 32
	headerSize   = preambleSize + 16 + saltSize // of everything but config
	metaSize     = 5                            // codec and length, before the content of a sealed object
)

// What keys are derived for. Each use has its own, so that a key of one can never
// open what another has sealed.
const (
	infoMetadata = "pando metadata v1"
	infoSegment  = "pando segment v1"
	infoPack     = "pando pack v1"
	infoConfig   = "pando config v1"
	infoNames    = "pando names v1"
	infoOldSums  = "pando sums v1" // in repositories of version 1
	infoSums     = "pando sums v2"
	infoRepoID   = "pando repository id v1"
	infoKeyID    = "pando key id v1"
)

func putPreamble(b []byte, t objectType, version byte) []byte {
	b = append(b, magic...)
	return append(b, byte(t), version, 0, 0)
}

// checkPreamble says whether b is an object of type t, of a version that this package reads.
func checkPreamble(b []byte, t objectType) error {
	switch {
	case len(b) < preambleSize:
		return damaged("only %d bytes long, too short for a header", len(b))
	case string(b[:4]) != magic:
		return damaged("not an object of a repository: wrong magic number")
	case objectType(b[4]) != t:
		return damaged("object type is %q, want %q", b[4], byte(t))
	case b[5] == 0:
		return damaged("version number is 0")
	case b[5] > newestVersion(t):
		return errs.New(errs.TooNew, "", "", "format version %d is newer than this pando supports (up to %d)", b[5], newestVersion(t)).
			WithHint("upgrade pando")
	case b[6] != 0 || b[7] != 0:
		return damaged("reserved bytes are not zero")
	}

	return nil
}

// withVersion is a copy of an object that says another version.
func withVersion(object []byte, version byte) []byte {
	b := bytes.Clone(object)
	b[versionAt] = version
	return b
}

// changedVersion is of an object that was not written with the version that it says.
func changedVersion(object []byte) error {
	return damaged("the version number %d is not the one it was written with", object[versionAt])
}

// header begins every object but config: with which key it is sealed.
type header struct {
	version byte // of the object
	key     ID   // of the master key
	salt    [saltSize]byte
}

func (h header) appendTo(b []byte, t objectType) []byte {
	b = putPreamble(b, t, h.version)
	b = append(b, h.key[:]...)
	return append(b, h.salt[:]...)
}

func parseHeader(b []byte, t objectType) (header, error) {
	var h header
	if err := checkPreamble(b, t); err != nil {
		return h, err
	}
	if len(b) < headerSize {
		return h, damaged("only %d bytes long, too short for a header", len(b))
	}
	h.version = b[versionAt]
	copy(h.key[:], b[preambleSize:])
	copy(h.salt[:], b[preambleSize+16:])
	return h, nil
}

// derive makes a key for one use. Without a salt it is for all of a repository.
func derive(secret, salt []byte, info string, size int) []byte {
	var key []byte
	var err error
	if salt == nil {
		key, err = hkdf.Expand(sha256.New, secret, info, size)
	} else {
		key, err = hkdf.Key(sha256.New, secret, salt, info, size)
	}
	if err != nil {
		panic(err) // only for sizes that no caller asks for
	}
	return key
}

// derivedID is an ID that only who knows the secret can have made.
func derivedID(secret []byte, info string) ID { return ID(derive(secret, nil, info, len(ID{}))) }

// newAEAD is AES-256-GCM under a key of one object. The key is wiped.
func newAEAD(key []byte) cipher.AEAD {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // only for sizes of keys that derive does not make
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	clear(key)
	return gcm
}

// zeroNonce seals the one message of a key that is derived from a fresh salt.
var zeroNonce = make([]byte, 12)

// metaAAD is what a sealed object is bound to besides its content: the repository,
// and the key that it was stored under.
func metaAAD(head []byte, repository ID, objectKey string) []byte {
	aad := make([]byte, 0, len(head)+len(repository)+len(objectKey))
	aad = append(aad, head...)
	aad = append(aad, repository[:]...)
	return append(aad, objectKey...)
}

// sealMeta makes a metadata object. aead must be of h, which must be fresh.
func sealMeta(
	aead cipher.AEAD, h header, t objectType, repository ID, objectKey string, content []byte, pack compressor,
) []byte {
	packed, codec := pack(nil, content)
	plain := make([]byte, 0, metaSize+len(packed))
	plain = append(plain, byte(codec))
	plain = binary.LittleEndian.AppendUint32(plain, uint32(len(content)))
	plain = append(plain, packed...)
	out := h.appendTo(make([]byte, 0, headerSize+len(plain)+tagSize), t)
	return aead.Seal(out, zeroNonce, plain, metaAAD(out[:headerSize], repository, objectKey))
}

// openMeta is the content of a metadata object of at most limit bytes.
func openMeta(aead cipher.AEAD, object []byte, repository ID, objectKey string, limit int) ([]byte, error) {
	if len(object) < headerSize+metaSize+tagSize {
		return nil, damaged("only %d bytes long, too short for its header", len(object))
	}
	plain, err := aead.Open(nil, zeroNonce, object[headerSize:], metaAAD(object[:headerSize], repository, objectKey))
	if err != nil {
		return nil, damaged("authentication failed: the content is not what was written")
	}
	return openContent(plain, limit)
}

// openContent undoes what sealMeta did before it sealed.
func openContent(plain []byte, limit int) ([]byte, error) {
	if len(plain) < metaSize {
		return nil, damaged("the content is only %d bytes long", len(plain))
	}
	size := binary.LittleEndian.Uint32(plain[1:])
	if uint64(size) > uint64(limit) {
		return nil, damaged("the declared content size of %d bytes exceeds the limit of %d", size, limit)
	}
	return unpack(Codec(plain[0]), plain[metaSize:], size)
}

// damaged is an error that get() and its like complete with the object's name.
func damaged(format string, args ...any) *errs.Error {
	return errs.New(errs.Damaged, "", "", format, args...)
}

// badInput is about what a caller has passed in.
func badInput(op, ref, format string, args ...any) error {
	return errs.New(errs.Invalid, op, ref, "%s", fmt.Sprintf(format, args...))
}
