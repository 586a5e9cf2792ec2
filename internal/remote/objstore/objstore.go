// Package objstore is the contract between Pando and where a remote keeps its
// objects: a directory, an S3 or a Google Cloud Storage bucket.
//
// # Words
//
// A key names an object: words of [a-z0-9_.-] separated by single slashes, at most
// [MaxKeyBytes] long, a word at most [MaxWordBytes]; no word is empty or begins with
// a dot; no key is a directory of another ("a" and "a/b" do not both exist): see
// [CheckKey]. An object is written whole and read in ranges; it is at most
// [MaxObjectBytes] large, so that it fits into memory. Its Version is never the same
// for two different contents; writing the same bytes again may or may not change it
// (an ETag of S3 is a hash of the content). Who must know a write as its own puts
// something random into it.
//
// # What every store promises
//
// Reads and listings show every write that has returned before they began (S3
// since 2020, Google, and any POSIX filesystem do). An object appears whole or not
// at all. A Put that has returned without error is durable. The writes of one key
// with conditions are in one order, whoever makes them: of several that expect the
// same Version exactly one succeeds.
//
// Errors are *errs.Error. A store tries once: [Retry] tries again. What is worth
// another try is told by [Temporary]; a Put that failed with a temporary error may
// or may not have had its effect.
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

// Version is what a store calls one state of an object: an ETag, a generation, a
// hash. It is opaque; "" is none.
type Version string

// Info describes an object.
type Info struct {
	Key     string
	Bytes   int64
	Version Version
}

// Condition says under which a Put may write. The zero value is always.
type Condition struct {
	absent  bool
	version Version
}

// Always writes whatever is there.
var Always = Condition{}

// IfAbsent writes only what is not there.
var IfAbsent = Condition{absent: true}

// IfVersion writes only over the state v.
func IfVersion(v Version) Condition { return Condition{version: v} }

// Absent reports whether the condition is that nothing is there.
func (c Condition) Absent() bool { return c.absent }

// Version is the state that the condition wants, "" if none.
func (c Condition) Version() Version { return c.version }

// Store keeps objects. All methods may be called concurrently, also by several
// hosts. Kinds that every method may return: Permission (the store refuses this
// user), IO (no answer, an error of the server), Canceled.
type Store interface {
	// Put writes an object whole and returns its new state. Conflict if the
	// condition does not hold, also if nothing is there that could have the
	// wanted version; NoSpace; Invalid for a bad key or an object that is too
	// large. data is not changed or kept.
	Put(ctx context.Context, key string, data []byte, c Condition) (Version, error)

	// Get reads length bytes from offset; less, or none, if the object ends
	// before. length < 0: to the end. The Info is of the same state as the bytes,
	// with the size of the whole object. NotFound; Invalid for an offset < 0.
	Get(ctx context.Context, key string, offset, length int64) ([]byte, Info, error)

	// Stat describes an object. NotFound.
	Stat(ctx context.Context, key string) (Info, error)

	// List yields the objects whose keys begin with prefix, "" for all, in order
	// of key. An error ends it. Objects that are not of this program may be among
	// them.
	List(ctx context.Context, prefix string) iter.Seq2[Info, error]

	// Delete removes an object. Absent is success. Idempotent, durable on return.
	Delete(ctx context.Context, key string) error

	// String is the URL of the store, without secrets, for people.
	String() string
}

// Close releases what a store holds open, if it is an io.Closer: descriptors, connections. Nothing may be under way,
// and the store cannot be used afterwards. It may be repeated.
func Close(s Store) error {
	if c, ok := s.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
