// Package errs defines the one error type of Pando.
//
// Every error that reaches a user says what kind it is (which fixes the exit
// code), which operation failed, on what, why, and what to do next. Code below
// front ends returns errors, and prints nothing. What it logs goes where a front
// end says (see package logs).
package errs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
)

// Kind classifies an error. Its string form is stable: it is the "kind" field
// of JSON errors.
type Kind string

// The kinds. The table in kinds maps each to its exit, HTTP and gRPC code.
const (
	Internal    Kind = "internal"    // a bug, or an error that no other kind describes
	Invalid     Kind = "invalid"     // bad input; nothing was changed
	NotFound    Kind = "not_found"   // no such pool, volume, golden, file
	Exists      Kind = "exists"      // the name is taken
	InUse       Kind = "in_use"      // a process, a mount or another pando uses it
	NoSpace     Kind = "no_space"    // the pool, or the volume, is full
	Permission  Kind = "permission"  // root or a file permission is needed
	Unsupported Kind = "unsupported" // this host, kernel, filesystem or driver cannot do it
	Conflict    Kind = "conflict"    // another process or host changed it first
	Damaged     Kind = "damaged"     // stored data cannot be read back as it was written
	TooNew      Kind = "too_new"     // written by a newer Pando
	IO          Kind = "io"          // the operating system reported an input/output error
	// CommandFailed is the kind of an error of a command that the user gave to Pando.
	CommandFailed Kind = "command_failed"
	Canceled      Kind = "canceled" // interrupted by the user or a deadline
)

// Codes are the numbers that a kind maps to in each front end.
type Codes struct {
	Exit int // process exit code
	HTTP int // status code of the HTTP interface
	GRPC int // google.golang.org/grpc/codes value
}

var kinds = map[Kind]Codes{
	Internal:    {1, 500, 13},
	Invalid:     {2, 400, 3},
	NotFound:    {3, 404, 5},
	Exists:      {4, 409, 6},
	InUse:       {5, 409, 9},
	NoSpace:     {6, 507, 8},
	Permission:  {7, 403, 7},
	Unsupported: {8, 501, 12},
	Conflict:    {9, 409, 10},
	Damaged:     {10, 500, 15},
	TooNew:      {11, 501, 9},
	IO:          {12, 500, 14},

	CommandFailed: {13, 422, 9},
	Canceled:      {130, 499, 1},
}

// Kinds returns every kind, in order of exit code.
func Kinds() []Kind {
	return []Kind{Internal, Invalid, NotFound, Exists, InUse, NoSpace, Permission, Unsupported, Conflict, Damaged, TooNew,
		IO, CommandFailed, Canceled}
}

// Codes returns the numbers of k; an unknown kind has those of Internal.
func (k Kind) Codes() Codes {
	if c, ok := kinds[k]; ok {
		return c
	}
	return kinds[Internal]
}

// Error is the error type of Pando. The zero value of each field means
// "unknown"; only Kind is always set.
type Error struct {
	Kind Kind
	Op   string  // the operation, as a user would say it: "clone", "mount"
	Ref  string  // its object: a reference or a path
	Hint Message // what the user can do next
	Err  error   // the cause
}

// Error returns "op ref: cause"; the hint is not part of it.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	if e.Ref != "" {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(e.Ref)
	}

	if e.Err != nil {
		if b.Len() > 0 {
			b.WriteString(": ")
		}
		b.WriteString(e.Err.Error())
	}

	if b.Len() == 0 {
		return string(e.Kind)
	}

	return MaskURLs(b.String())
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// New returns an error of a kind with a formatted message as its cause.
func New(kind Kind, op, ref, format string, args ...any) *Error {
	return &Error{Kind: kind, Op: op, Ref: ref, Err: fmt.Errorf(format, args...)}
}

// WithHint sets the hint, formatted by [Messagef], and returns e.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = Messagef(format, args...)
	return e
}

// Wrap adds an operation and a reference to err. The kind is KindOf(err), and a hint
// in err is kept. Wrap returns nil for nil, and returns an *Error that already names
// an operation unchanged: the innermost operation is the one to report.
func Wrap(op, ref string, err error) error {
	if err == nil {
		return nil
	}

	var e *Error
	if errors.As(err, &e) && e.Op != "" {
		return err
	}

	out := &Error{Kind: KindOf(err), Op: op, Ref: ref, Err: err}
	if e != nil {
		out.Hint = e.Hint
		if e.Ref != "" && ref == "" {
			out.Ref = e.Ref
		}
	}

	if out.Hint == "" {
		out.Hint = defaultHint(err, out.Kind)
	}

	return out
}

func defaultHint(err error, k Kind) Message {
	switch {
	case errors.Is(err, syscall.EROFS):
		return "the filesystem is mounted read-only"
	case errors.Is(err, syscall.EFBIG):
		return "the filesystem cannot hold a file of this size"
	case errors.Is(err, syscall.EDQUOT):
		return "a disk quota is used up"
	case k == NoSpace:
		return Messagef("free space with %s and %s, or use a larger pool", Run("destroy"), Run("gc"))
	case k == Permission && os.Geteuid() != 0:
		return "run it as root"
	}

	return ""
}

// KindOf returns the kind of err: that of the outermost *Error in it or, without one,
// the kind that the system's error number maps to. The kind of nil is "".
func KindOf(err error) Kind {
	if err == nil {
		return ""
	}

	var e *Error
	if errors.As(err, &e) && e.Kind != "" {
		return e.Kind
	}

	var n syscall.Errno
	if errors.As(err, &n) {
		switch n {
		case syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG:
			return NoSpace
		case syscall.EPERM, syscall.EACCES, syscall.EROFS:
			return Permission
		case syscall.ENOENT, syscall.ENOTDIR, syscall.ENXIO, syscall.ENODEV:
			return NotFound
		case syscall.EEXIST:
			return Exists
		case syscall.EBUSY, syscall.ETXTBSY:
			return InUse
		case syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.ENOTTY, syscall.EXDEV, syscall.EMLINK:
			return Unsupported
		case syscall.EIO:
			return IO
		case syscall.EINVAL, syscall.ENAMETOOLONG, syscall.ELOOP, syscall.EISDIR, syscall.ENOTBLK:
			return Invalid
		case syscall.EUCLEAN, syscall.EBADMSG:
			return Damaged
		case syscall.EINTR:
			return Canceled
		}
	}

	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return Canceled
	case errors.Is(err, fs.ErrNotExist):
		return NotFound
	case errors.Is(err, fs.ErrExist):
		return Exists
	case errors.Is(err, fs.ErrPermission):
		return Permission
	}

	return Internal
}

// Is reports whether err is of one of the kinds.
func Is(err error, kinds ...Kind) bool { return err != nil && slices.Contains(kinds, KindOf(err)) }

// IsAny reports whether err is one of the targets, as errors.Is does.
func IsAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}

// HintOf returns the innermost hint of err in neutral words, or "". Front ends use their
// own words, and render [HintIn].
func HintOf(err error) string { return HintIn(err).String() }

// HintIn returns the innermost hint of err, or the zero Message.
func HintIn(err error) Message {
	var hint Message
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			break
		}
		if e.Hint != "" {
			hint = e.Hint
		}
		err = e.Err
	}

	return hint
}

// Reason returns the message of an error without operation and reference.
func Reason(err error) string {
	var e *Error
	if errors.As(err, &e) && e.Err != nil {
		err = e.Err
	}
	return MaskURLs(err.Error())
}
