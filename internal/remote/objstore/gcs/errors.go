package gcs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/web"

	"golang.org/x/oauth2"
)

// refusal is an answer of the server that is not a success.
type refusal struct {
	status int
	reason string // Google's word for it, "" if it gave none
	text   string
}

func (r *refusal) Error() string {
	if r.text == "" {
		return fmt.Sprintf("HTTP %d %s", r.status, http.StatusText(r.status))
	}
	return fmt.Sprintf("%s (HTTP %d)", r.text, r.status)
}

// ofBucket reports whether the refusal is about the bucket, not the object.
func (r *refusal) ofBucket() bool { return strings.Contains(strings.ToLower(r.text), "bucket") }

// readRefusal reads an answer that is not a success. Downloads are refused in plain text.
func readRefusal(answer *http.Response) error {
	r := &refusal{status: answer.StatusCode}
	text, err := io.ReadAll(io.LimitReader(answer.Body, 64<<10))
	if err != nil {
		return r // the status alone says enough
	}

	var j struct {
		Error struct {
			Message string `json:"message"`
			Errors  []struct {
				Reason string `json:"reason"`
			} `json:"errors"`
		} `json:"error"`
	}
	if json.Unmarshal(text, &j) == nil && j.Error.Message != "" {
		r.text = j.Error.Message
		if len(j.Error.Errors) > 0 {
			r.reason = j.Error.Errors[0].Reason
		}
		return r
	}

	if line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n"); len(line) < 300 && !strings.HasPrefix(line, "<") {
		r.text = line
	}

	return r
}

// wrapError returns the error of an operation, with a hint. ofBucket says that the answer
// "not found" cannot be about an object.
func (s *Store) wrapError(ctx context.Context, op, key string, ofBucket bool, err error) error {
	if ended := objstore.Ended(ctx, op, key); ended != nil {
		return ended
	}

	// Errors of this package, of credentials and of the connection have no answer to look at.
	var known *errs.Error
	if errors.As(err, &known) {
		if known.Op == "" {
			known.Op, known.Ref = op, key
		}
		return err
	}

	var token *oauth2.RetrieveError
	if errors.As(err, &token) {
		return s.tokenError(op, key, token)
	}

	var r *refusal
	if !errors.As(err, &r) {
		return web.Error(ctx, op, key, s.l.server(), err)
	}

	// Choose the kind and the hint by the answer.
	e := &errs.Error{Kind: errs.IO, Op: op, Ref: key, Err: r}
	switch {
	case r.status == http.StatusNotFound && (ofBucket || r.ofBucket()):
		e.Kind, e.Ref = errs.NotFound, s.l.bucket
		return e.WithHint("create the bucket, or correct the remote's URL")
	case r.status == http.StatusNotFound:
		e.Kind, e.Err = errs.NotFound, errors.New("no such object")
		return e
	case r.status == http.StatusPreconditionFailed:
		e.Kind, e.Err = errs.Conflict, errors.New("another process or host changed it first")
		return e
	case r.status == http.StatusConflict:
		return objstore.TransientAnswer(e, objstore.Status(r.status))
	case r.status == http.StatusTooManyRequests, r.reason == "rateLimitExceeded", r.reason == "userRateLimitExceeded":
		e.WithHint("retry later: the bucket gets too many requests, or more than one write of an object per second")
		return objstore.TransientAnswer(e, objstore.Status(r.status))
	case r.status == http.StatusUnauthorized:
		e.Kind = errs.Permission
		return e.WithHint("check GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`: " +
			"Google does not accept these credentials")
	case r.status == http.StatusForbidden:
		e.Kind = errs.Permission
		return e.WithHint("give these credentials the role Storage Object User (roles/storage.objectUser) on bucket %s",
			s.l.bucket)
	case r.status/100 == 3:
		return e.WithHint("check endpoint= of the remote's URL: %s redirects to another server", s.l.server())
	case r.status == http.StatusNotImplemented:
		e.Kind = errs.Unsupported
		return e
	case r.status == http.StatusInsufficientStorage:
		e.Kind = errs.NoSpace
		return e
	case r.status == http.StatusBadRequest && (strings.Contains(r.text, "CRC32C") || strings.Contains(r.text, "crc32c")):
		return objstore.TransientAnswer(e, objstore.Status(r.status)) // the data was damaged on its way
	case web.Temporary(r.status):
		e.WithHint("retry later: %s is failing or overloaded", s.l.server())
		return objstore.TransientAnswer(e, objstore.Status(r.status))
	}

	return e
}

// tokenError returns the error of credentials for which no token was issued.
func (s *Store) tokenError(op, key string, token *oauth2.RetrieveError) error {
	e := &errs.Error{Kind: errs.Permission, Op: op, Ref: key, Err: token}
	if status := token.Response.StatusCode; web.Temporary(status) {
		e.Kind = errs.IO
		e.WithHint("retry later: the server that issues tokens is failing")
		return objstore.TransientAnswer(e, objstore.Status(status))
	}
	if text := string(token.Body); strings.Contains(text, "iat") || strings.Contains(text, "reasonable timeframe") {
		return e.WithHint("%s", s.web.ClockHint())
	}
	return e.WithHint("check GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`: " +
		"the key is wrong or was revoked")
}
