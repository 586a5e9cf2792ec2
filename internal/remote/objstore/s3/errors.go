package s3

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/web"

	"github.com/minio/minio-go/v7"
)

// conflictError returns the error of a Put whose condition does not hold.
func (s *Store) conflictError(op, key string) error {
	return errs.New(errs.Conflict, op, key, "another process or host changed it first")
}

func (s *Store) noETagError(op, key string) error {
	return errs.New(errs.Unsupported, op, key, "%s did not return its ETag", s.l.host).
		WithHint("use another store: conditional writes need ETags")
}

// wrapError turns an error of the library into that of an operation, with a hint. key is
// the object, or the prefix of a listing.
func (s *Store) wrapError(ctx context.Context, op, key string, err error) error {
	if ended := objstore.Ended(ctx, op, key); ended != nil {
		return ended
	}

	var known *errs.Error // of finding credentials, or of reading the answer
	if errors.As(err, &known) {
		if known.Op == "" {
			known.Op, known.Ref = op, key
		}
		return err
	}

	var a minio.ErrorResponse
	if !errors.As(err, &a) {
		return web.Error(ctx, op, key, s.l.host, err)
	}

	e := &errs.Error{Kind: errs.IO, Op: op, Ref: key, Err: errors.New(serverWords(a))}
	if coded := s.codeError(e, a); coded != nil {
		return coded
	}
	return s.statusError(e, a)
}

// codeError completes e according to the code in the server's answer. It returns nil if the code is unknown.
func (s *Store) codeError(e *errs.Error, a minio.ErrorResponse) error {
	switch a.Code {
	case minio.NoSuchBucket:
		e.Kind, e.Ref = errs.NotFound, s.l.bucket
		return e.WithHint("create the bucket on %s, or correct the remote's URL", s.l.host)
	case minio.NoSuchKey, "NotFound":
		e.Kind, e.Err = errs.NotFound, errors.New("no such object")
		return e
	case minio.PreconditionFailed:
		return s.conflictError(e.Op, e.Ref)
	case "ConditionalRequestConflict", "OperationAborted", minio.Conflict:
		// Another request for this object is under way, and either may win.
		return objstore.TransientAnswer(e, objstore.Status(a.StatusCode))
	case "RequestTimeTooSkewed", "RequestExpired":
		e.Kind = errs.Permission
		return e.WithHint("%s", s.web.ClockHint())
	case "InvalidAccessKeyId":
		e.Kind = errs.Permission
		return e.WithHint("check AWS_ACCESS_KEY_ID, or the profile in ~/.aws/credentials: %s does not know this access key",
			s.l.host)
	case "SignatureDoesNotMatch":
		e.Kind = errs.Permission
		return e.WithHint("check AWS_SECRET_ACCESS_KEY, or the profile in ~/.aws/credentials: the secret key does not " +
			"belong to the access key, or a proxy changes requests")
	case "ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired":
		e.Kind = errs.Permission
		return e.WithHint("get new credentials: the temporary ones have expired")
	case "AuthorizationHeaderMalformed", "InvalidRegion", "PermanentRedirect", "TemporaryRedirect":
		return regionError(e, a.Region)
	case "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "RequestTimeout",
		"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "RequestLimitExceeded",
		"RequestThrottled", "ServiceUnavailable", "InternalError", "TooManyRequests":
		return s.temporaryError(e, a)
	case "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageFull":
		return fullError(e)
	case "NotImplemented":
		e.Kind = errs.Unsupported
		return e.WithHint("use another store: %s does not support conditional writes (If-Match, If-None-Match)", s.l.host)
	case "InvalidBucketName", "EntityTooLarge", "KeyTooLongError":
		e.Kind = errs.Invalid
		return e
	}

	return nil
}

// statusError completes e according to the HTTP status of the server's answer.
func (s *Store) statusError(e *errs.Error, a minio.ErrorResponse) error {
	switch status := a.StatusCode; {
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		e.Kind = errs.Permission
		return e.WithHint("give these credentials s3:ListBucket on bucket %s, and s3:GetObject, s3:PutObject and "+
			"s3:DeleteObject on its objects", s.l.bucket)
	case status == http.StatusNotFound:
		e.Kind = errs.NotFound
		return e
	case status == http.StatusConflict:
		return objstore.TransientAnswer(e, objstore.Status(status))
	case status == http.StatusPreconditionFailed:
		return s.conflictError(e.Op, e.Ref)
	case status == http.StatusInsufficientStorage:
		return fullError(e)
	case status == http.StatusNotImplemented:
		e.Kind = errs.Unsupported
		return e
	case a.Region != "" && (status/100 == 3 || status == http.StatusBadRequest):
		return regionError(e, a.Region)
	case status/100 == 3:
		e.Kind = errs.Invalid
		return e.WithHint("check endpoint= and region= of the remote's URL: %s says that the bucket is elsewhere",
			s.l.host)
	case web.Temporary(status):
		return s.temporaryError(e, a)
	}

	return e
}

// regionError completes the error for a bucket in another region, "" if the server does not name it.
func regionError(e *errs.Error, region string) error {
	e.Kind = errs.Invalid
	if region == "" {
		return e.WithHint("add region=REGION to the remote's URL: the bucket is in another region")
	}
	return e.WithHint("add region=%s to the remote's URL: the bucket is in that region", region)
}

// fullError completes the error for a store without free space.
func fullError(e *errs.Error) error {
	e.Kind = errs.NoSpace
	return e.WithHint("free space there, or raise the quota; %s says how to thin out old points",
		errs.Run("remote prune", errs.Param("help")))
}

// temporaryError completes an error that a retry may avoid.
func (s *Store) temporaryError(e *errs.Error, a minio.ErrorResponse) error {
	e.WithHint("retry later: %s is failing or overloaded", s.l.host)
	return objstore.TransientAnswer(e, objstore.Status(a.StatusCode))
}

// serverWords returns the server's error in one line.
func serverWords(a minio.ErrorResponse) string {
	text := a.Error()
	switch {
	case a.Code == "" || a.Code == text:
	case text == "":
		text = a.Code
	default:
		text = fmt.Sprintf("%s: %s", a.Code, text)
	}

	if a.StatusCode != 0 {
		text = fmt.Sprintf("%s (HTTP %d)", text, a.StatusCode)
	}

	return text
}
