package objstore

import (
	"context"
	"errors"
	"fmt"

	"pando/internal/base/errs"
)

// Answer describes how a store failed to do what was requested.
type Answer struct {
	Words string // in a few words for people: "server answers 503"; "" if there are none

	// Unreached: no connection was made at all, so the request had no effect.
	Unreached bool
}

// Status returns the Answer of a server that refused with an HTTP status.
func Status(code int) Answer {
	if code == 0 {
		return Answer{}
	}
	return Answer{Words: fmt.Sprintf("server answers %d", code)}
}

// transient marks an error as worth another attempt. It is not a kind of its own: for
// people a timeout is an I/O error.
type transient struct {
	err    *errs.Error
	answer Answer
}

func (t *transient) Error() string { return t.err.Error() }
func (t *transient) Unwrap() error { return t.err }

// Transient marks err as one that may not recur at the next attempt: 5xx, 429, a
// timeout, a broken connection, 409 "an operation on this object is under way".
// Stores mark the errors they return; [Temporary] tests for the mark.
func Transient(err *errs.Error) error { return &transient{err: err} }

// TransientAnswer is Transient for an error whose Answer is known.
func TransientAnswer(err *errs.Error, a Answer) error { return &transient{err, a} }

// Temporary reports whether another attempt at the same operation may succeed. For a
// Put it also means that it is not known whether the write had its effect.
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

// Ended returns the error of an operation whose context has ended, and nil if it has not.
func Ended(ctx context.Context, op, ref string) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	return &errs.Error{Kind: errs.Canceled, Op: op, Ref: ref, Err: err}
}
