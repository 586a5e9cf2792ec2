package api

import (
	"errors"

	"pando/internal/base/errs"
)

// Failure is what is printed instead of a result.
type Failure struct {
	Error Error `json:"error"` // why there is no result
}

// Error is an error.
type Error struct {
	Kind    errs.Kind `json:"kind"`           // kind of the error, which fixes the exit code
	Op      string    `json:"op,omitempty"`   // operation that failed
	Ref     string    `json:"ref,omitempty"`  // what it failed on
	Message string    `json:"message"`        // operation, reference and cause, for people
	Hint    string    `json:"hint,omitempty"` // what to do next
}

// ErrorOf describes err with a hint. Secrets in URLs are masked.
func ErrorOf(err error, hint string) Error {
	out := Error{Kind: errs.KindOf(err), Message: errs.MaskURLs(err.Error()), Hint: hint}
	var e *errs.Error
	if errors.As(err, &e) {
		out.Op, out.Ref = e.Op, errs.MaskURLs(e.Ref)
	}
	return out
}
