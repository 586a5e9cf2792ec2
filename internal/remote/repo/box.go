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

// objectVersion is the version of every object: its byte 5. A decoder refuses newer ones (TooNew), so the layout of an
// object may change only together with its version.
const objectVersion = 1

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
	magic        = "PNDR"
	oldMagic     = "PNDO" // magic of repositories that development versions made
	preambleSize = 8      // magic, type, version, two zeros
	versionAt    = 5
	saltSize     = 32
	tagSize      = 16
	keySize      = 32
	headerSize   = preambleSize + 16 + saltSize // of everything but config
	metaSize     = 5                            // codec and length, before the content of a sealed object
)

// Purposes that keys are derived for. Each purpose has its own key, so a key of one
// can never decrypt data that another sealed.
const (
	infoMetadata = "pando metadata v1"
	infoSegment  = "pando segment v1"
	infoPack     = "pando pack v1"
	infoConfig   = "pando config v1"
	infoNames    = "pando names v1"
	infoSums     = "pando sums v1"
	infoRepoID   = "pando repository id v1"
	infoKeyID    = "pando key id v1"
)

func putPreamble(b []byte, t objectType) []byte {
	b = append(b, magic...)
	return append(b, byte(t), objectVersion, 0, 0)
}

// checkPreamble reports an error unless b is an object of type t in a version that this package reads. TooNew;
// Unsupported for the config of a repository from before version 0.1.0.
func checkPreamble(b []byte, t objectType) error {
	switch {
	case len(b) < preambleSize:
		return damaged("only %d bytes long, too short for a header", len(b))
	case string(b[:4]) == oldMagic && t == typeConfig:
		return errs.New(errs.Unsupported, "", "", "the repository was made by a development version of pando, from before "+
			"version 0.1.0").
			WithHint("with that version, pull what you need and write it to files with %s; import these, and push them to "+
				"another remote", errs.Run("export"))
	case string(b[:4]) != magic:
		return damaged("not an object of a repository: wrong magic number")
	case objectType(b[4]) != t:
		return damaged("object type is %q, want %q", b[4], byte(t))
	case b[versionAt] == 0:
		return damaged("version number is 0")
	case b[versionAt] > objectVersion:
		return tooNew(b[versionAt], objectVersion)
	case b[6] != 0 || b[7] != 0:
		return damaged("reserved bytes are not zero")
	}

	return nil
}

// withKnownVersion returns a copy of an object with the version number that this package writes.
func withKnownVersion(object []byte) []byte {
	b := bytes.Clone(object)
	b[versionAt] = objectVersion
	return b
}

// changedVersion returns the error for an object whose version number was changed after it was written.
func changedVersion(object []byte) error {
	return damaged("the version number %d is not the one it was written with", object[versionAt])
}

// header begins every object except config, and identifies the key the object is sealed with.
type header struct {
	key  ID // of the master key
	salt [saltSize]byte
}

func (h header) appendTo(b []byte, t objectType) []byte {
	b = putPreamble(b, t)
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
	copy(h.key[:], b[preambleSize:])
	copy(h.salt[:], b[preambleSize+16:])
	return h, nil
}

// derive derives a key for one purpose. Without a salt, the key serves the whole repository.
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

// derivedID returns an ID that cannot be computed without the secret.
func derivedID(secret []byte, info string) ID { return ID(derive(secret, nil, info, len(ID{}))) }

// newAEAD returns AES-256-GCM under the key of one object, and wipes the key.
func newAEAD(key []byte) cipher.AEAD {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // only for key sizes that derive never returns
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	clear(key)
	return gcm
}

// zeroNonce is the nonce for keys that are derived from a fresh salt and seal a single message.
var zeroNonce = make([]byte, 12)

// metaAAD returns the associated data of a sealed object: its header, the repository,
// and the key it is stored under.
func metaAAD(head []byte, repository ID, objectKey string) []byte {
	aad := make([]byte, 0, len(head)+len(repository)+len(objectKey))
	aad = append(aad, head...)
	aad = append(aad, repository[:]...)
	return append(aad, objectKey...)
}

// sealMeta encodes a metadata object. aead must belong to h, and h must not have been used before.
func sealMeta(
	aead cipher.AEAD, h header, t objectType, repository ID, objectKey string, content []byte, compress compressor,
) []byte {
	packed, codec := compress(nil, content)
	plain := make([]byte, 0, metaSize+len(packed))
	plain = append(plain, byte(codec))
	plain = binary.LittleEndian.AppendUint32(plain, uint32(len(content)))
	plain = append(plain, packed...)

	out := h.appendTo(make([]byte, 0, headerSize+len(plain)+tagSize), t)
	return aead.Seal(out, zeroNonce, plain, metaAAD(out[:headerSize], repository, objectKey))
}

// openMeta decrypts a metadata object and returns its content, which may have at most limit bytes.
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

// openContent decodes the decrypted part of a metadata object: codec, length and compressed content.
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

// damaged returns a Damaged error without operation and reference; the caller adds them with errs.Wrap.
func damaged(format string, args ...any) *errs.Error {
	return errs.New(errs.Damaged, "", "", format, args...)
}

// tooNew returns the error for a version of the format that this program cannot read.
func tooNew(version, newest byte) *errs.Error {
	return errs.New(errs.TooNew, "", "", "format version %d is newer than this pando supports (up to %d)",
		version, newest).WithHint("upgrade pando")
}

// badInput returns an Invalid error about an argument of the caller.
func badInput(op, ref, format string, args ...any) error {
	return errs.New(errs.Invalid, op, ref, "%s", fmt.Sprintf(format, args...))
}
