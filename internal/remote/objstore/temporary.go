package objstore

import (
	"context"
	"errors"
	"fmt"

	"pando/internal/base/errs"
)

// Answer is what a store did instead of what was asked of it.
type Answer struct {
	Words string // in a few words for people: "server answers 503"; "" if there are none

	// Unreached: no connection was made at all, so nothing can have had an effect.
	Unreached bool
}

// Status is the Answer of a server that refused with a status of HTTP.
func Status(code int) Answer {
	if code == 0 {
		return Answer{}
	}
	return Answer{Words: fmt.Sprintf("server answers %d", code)}
}

// transient marks an error as worth another try. It is no kind of its own: to
// people a time-out is an error of input and output.
type transient struct {
	err    *errs.Error
	answer Answer
}

func (t *transient) Error() string { return t.err.Error() }
func (t *transient) Unwrap() error { return t.err }

// Transient marks err as one that may be gone at the next try: 5xx, 429, a
// time-out, a broken connection, 409 "an operation on this object is under way".
// A Store marks with it what it returns; [Temporary] asks for it.
func Transient(err *errs.Error) error { return &transient{err: err} }

// TransientAnswer is Transient of an error whose Answer is known.
func TransientAnswer(err *errs.Error, a Answer) error { return &transient{err, a} }

// Temporary reports whether another try of the same operation may succeed. Of a
// Put it also says that nobody knows whether it had its effect.
func Temporary(err error) bool {
	var t *transient
	return errors.As(err, &t)
}

// AnswerOf returns the Answer behind a [Temporary] error. Its Words are never empty.
func AnswerOf(err error) Answer {
	a := Answer{}
	var t *transient
	if errors.As(err, &t) {
		a = t.answer
	}
	if a.Words == "" {
		a.Words = "storage gives an unexpected answer"
	}
	return a
}

// Ended is the error of an operation whose context has ended, nil if it has not.
func Ended(ctx context.Context, op, ref string) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	return &errs.Error{Kind: errs.Canceled, Op: op, Ref: ref, Err: err}
}
