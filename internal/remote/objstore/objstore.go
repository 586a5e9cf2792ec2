// Package objstore is the contract between Pando and the stores for the objects of a
// remote: a directory, or a bucket of S3 or Google Cloud Storage.
//
// # Words
//
// A key names an object: words of [a-z0-9_.-] separated by single slashes, at most
// [MaxKeyBytes] long, a word at most [MaxWordBytes]; no word is empty or begins with
// a dot; no key is a directory of another ("a" and "a/b" do not both exist): see
// [CheckKey]. An object is written whole and read in ranges; it is at most
// [MaxObjectBytes] large, so that it fits into memory. Its Version is never the same
// for two different contents; writing the same bytes again may or may not change it
// (an ETag of S3 is a hash of the content). A writer that must recognize its own write
// puts something random into it.
//
// # What every store promises
//
// Reads and listings show every write that has returned before they began (S3
// since 2020, Google, and any POSIX filesystem do). An object appears whole or not
// at all. A Put that has returned without error is durable. The writes of one key
// with conditions are in one order, whoever makes them: of several that expect the
// same Version exactly one succeeds.
//
// Errors are *errs.Error. A store tries each operation once: [Retry] tries again.
// [Temporary] tells which errors are worth another attempt. A Put that failed with a
// temporary error may or may not have had its effect.
package objstore

import (
	"context"
	"io"
	"iter"
)

// Limits of keys and objects.
const (
	MaxKeyBytes    = 512
	MaxWordBytes   = 128
	MaxObjectBytes = 64 << 20
)

// Version identifies one state of an object in a store: an ETag, a generation, a hash.
// It is opaque; "" means no version.
type Version string

// Info describes an object.
type Info struct {
	Key     string
	Bytes   int64
	Version Version
}

// Condition says under which condition a Put may write. The zero value is Always.
type Condition struct {
	absent  bool
	version Version
}

// Always writes unconditionally.
var Always = Condition{}

// IfAbsent writes only if the object does not exist.
var IfAbsent = Condition{absent: true}

// IfVersion writes only if the object has the version v.
func IfVersion(v Version) Condition { return Condition{version: v} }

// Absent reports whether the condition is IfAbsent.
func (c Condition) Absent() bool { return c.absent }

// Version returns the version that the condition requires, or "".
func (c Condition) Version() Version { return c.version }

// Store keeps objects. All methods may be called concurrently, even from several
// hosts. Every method may return errors of these kinds: Permission (the store refuses
// this user), IO (no answer, or an error of the server), Canceled.
type Store interface {
	// Put writes a whole object and returns its new version. Conflict if the
	// condition does not hold, including a version that no object has; NoSpace;
	// Invalid for an invalid key or an object that is too large. It neither
	// changes nor keeps data.
	Put(ctx context.Context, key string, data []byte, c Condition) (Version, error)

	// Get reads length bytes from offset, or fewer if the object ends before.
	// length < 0: to the end. The Info describes the state that the bytes are
	// from, with the size of the whole object. NotFound; Invalid for an offset < 0.
	Get(ctx context.Context, key string, offset, length int64) ([]byte, Info, error)

	// Stat describes an object. NotFound.
	Stat(ctx context.Context, key string) (Info, error)

	// List yields the objects whose keys begin with prefix, "" for all, in order
	// of key. An error ends it. It may include objects of other programs.
	List(ctx context.Context, prefix string) iter.Seq2[Info, error]

	// Delete removes an object. It succeeds if there is none, may be repeated, and
	// is durable on return.
	Delete(ctx context.Context, key string) error

	// String returns the URL of the store, without secrets, for people.
	String() string
}

// Close closes a store that is an io.Closer, and releases its descriptors and connections. No operation may be under
// way, and the store cannot be used afterwards. It may be repeated.
func Close(s Store) error {
	if c, ok := s.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
