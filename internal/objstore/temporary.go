package objstore

import (
	"context"
	"errors"

	"pando/internal/errs"
)

// transient marks an error as worth another try. It is no kind of its own: to
// people a time-out is an error of input and output.
type transient struct{ err *errs.Error }

func (t *transient) Error() string { return t.err.Error() }
func (t *transient) Unwrap() error { return t.err }

// Transient marks err as one that may be gone at the next try: 5xx, 429, a
// time-out, a broken connection, 409 "an operation on this object is under way".
// A Store marks with it what it returns; [Temporary] asks for it.
func Transient(err *errs.Error) error { return &transient{err} }

// Temporary reports whether another try of the same operation may succeed. Of a
// Put it also says that nobody knows whether it had its effect.
func Temporary(err error) bool {
	var t *transient
	return errors.As(err, &t)
}

// Ended is the error of an operation whose context has ended, nil if it has not.
func Ended(ctx context.Context, op, ref string) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	return &errs.Error{Kind: errs.Canceled, Op: op, Ref: ref, Err: err}
}
